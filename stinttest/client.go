package stinttest

import (
	"io"
	"net/http"
)

// A Client is a client under test, with its retries: an [http.Client], or
// anything with such a method.
type Client interface {
	Do(*http.Request) (*http.Response, error)
}

// do sends a request and reads the answer, which is how a retrying client and
// its connections are meant to be used. It returns 0 and an error if either
// failed.
func do(client Client, req *http.Request) (status int, err error) {
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return 0, err
	}
	return resp.StatusCode, nil
}
