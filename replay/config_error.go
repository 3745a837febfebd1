package replay

import (
	"errors"

	"github.com/stinthttp/stint"
)

// configErrors collects the bad fields of one configuration.
type configErrors []error

func (c *configErrors) check(ok bool, field string, value any, reason string) {
	if !ok {
		*c = append(*c, &stint.ConfigError{Field: "replay." + field, Value: value, Reason: reason})
	}
}

func (c configErrors) join() error { return errors.Join(c...) }
