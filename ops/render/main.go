// Render adapts the rules, the dashboard or the runbook, and prints the result.
//
//	go run ./render -namespace shop -edge 'edge|gateway' rules.yml > shop.yml
//	go run ./render -namespace shop dashboard.json > shop.json
package main

import (
	"flag"
	"fmt"
	"os"

	"github.com/stinthttp/stint/ops"
)

func main() {
	var o ops.Options
	flag.StringVar(&o.Namespace, "namespace", "", "MetricsConfig.Namespace of the services")
	flag.StringVar(&o.Edge, "edge", "", `regular expression for the services that users call (default "edge")`)
	flag.StringVar(&o.Runbook, "runbook", "", "address of the runbook (default "+ops.Runbook+")")
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "render: name one file: rules.yml, dashboard.json or runbook.md")
		os.Exit(2)
	}
	text, err := os.ReadFile(flag.Arg(0))
	if err != nil {
		fmt.Fprintln(os.Stderr, "render:", err)
		os.Exit(1)
	}
	fmt.Print(ops.Render(string(text), o))
}
