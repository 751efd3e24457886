package main

import (
	"errors"
	"fmt"
	"strings"

	"k8s.io/cli-runtime/pkg/genericiooptions"
)

// confirm says what is about to happen and asks whether to go on. yes is the flag that
// answers before; without it, and without somebody who types, the answer is no.
func confirm(streams genericiooptions.IOStreams, yes bool, what string) error {
	if yes {
		return nil
	}
	fmt.Fprintf(streams.ErrOut, "%s\nGo on? [y/N] ", what)
	var answer string
	fmt.Fscanln(streams.In, &answer)
	if answer = strings.ToLower(answer); answer != "y" && answer != "yes" {
		return errors.New("nothing was changed (give --yes when not interactive)")
	}
	return nil
}
