package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"
)

func configPath(data string) string { return filepath.Join(data, "config.yaml") }

// file is the file of settings: the one that was named, else the data directory's.
func (c *Config) file() string {
	if c.File != "" {
		return c.File
	}
	return configPath(c.Data)
}

// files are those that hold settings, each overlaid onto those before it: the data directory's
// has what init and join fixed for the cluster.
func (c *Config) files() []string {
	files := []string{configPath(c.Data)}
	if c.File != "" && c.File != files[0] {
		files = append(files, c.File)
	}
	return files
}

// load overlays the files of settings onto the defaults, and the flags that were
// given onto all. That the data directory has no file is no error.
func (c *Config) load(flags *pflag.FlagSet) error {
	return c.loadWith(flags, func(b []byte) error { return yaml.UnmarshalStrict(b, c) })
}

// loadForReset is load for a command that removes the node: a file that is not
// valid does not prevent that. What can be read of it
// counts, as it says where cgroups and the like are; warn is called with the rest.
func (c *Config) loadForReset(flags *pflag.FlagSet, warn func(error)) error {
	return c.loadWith(flags, func(b []byte) error {
		whole := *c
		err := yaml.UnmarshalStrict(b, &whole)
		if checked := whole; err == nil {
			err = checked.complete()
		}
		if err == nil {
			*c = whole
			return nil
		}
		warn(err)
		salvage(b, c)
		return nil
	})
}

// salvage takes from a broken file what reset needs to know, line by line:
// each key alone, if its value is one that the configuration accepts.
func salvage(b []byte, c *Config) {
	for line := range strings.Lines(string(b)) {
		one := *c
		if yaml.UnmarshalStrict([]byte(line), &one) != nil {
			continue
		}
		if checked := one; checked.complete() == nil {
			*c = one
		}
	}
}

func (c *Config) loadWith(flags *pflag.FlagSet, parse func([]byte) error) error {
	if err := c.fromEnvironment(flags); err != nil {
		return err
	}
	given := map[string]string{}
	flags.Visit(func(f *pflag.Flag) {
		if _, list := f.Value.(pflag.SliceValue); !list { // lists are no part of the file
			given[f.Name] = f.Value.String()
		}
	})
	data, err := realData(c.Data)
	if err != nil {
		return err
	}
	c.Data = data
	for _, file := range c.files() {
		b, err := os.ReadFile(file)
		switch {
		case errors.Is(err, fs.ErrNotExist) && file != c.File:
		case err != nil && file == c.File:
			return fmt.Errorf("--config %s: %w", file, err)
		case err != nil:
			return fmt.Errorf("read the configuration: %w", err)
		default:
			if err := parse(b); err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
		}
	}
	for name, value := range given {
		if name == "data" || name == "config" || name == "peer" { // they are not in the file
			continue
		}
		if err := flags.Set(name, value); err != nil {
			return fmt.Errorf("--%s %s: %w", name, value, err)
		}
	}
	return c.complete()
}

// realData is the path of a data directory as the kernel tells of mounts: the real one.
func realData(data string) (string, error) {
	data, err := filepath.Abs(data)
	if err != nil {
		return "", err
	}
	if real, err := filepath.EvalSymlinks(data); err == nil {
		data = real
	}
	return data, nil
}

// fromEnvironment sets the flags of the configuration that were not given from
// their variables, where there are some.
func (c *Config) fromEnvironment(flags *pflag.FlagSet) error {
	known, own := *c, pflag.NewFlagSet("", pflag.ContinueOnError)
	known.addFlags(own)
	known.addClusterFlags(own)
	var err error
	own.VisitAll(func(f *pflag.Flag) {
		variable := envName(f.Name)
		value, set := os.LookupEnv(variable)
		if !set || err != nil || flags.Lookup(f.Name) == nil || flags.Changed(f.Name) {
			return
		}
		if e := flags.Set(f.Name, value); e != nil {
			err = fmt.Errorf("environment variable %s=%q, for --%s: %w", variable, value, f.Name, e)
		}
	})
	return err
}

// envName is the environment variable that stands for a flag: CLUSTERD_MAX_PODS
// for --max-pods.
func envName(flag string) string {
	return "CLUSTERD_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}
