// Command scale fills one member of the store with many objects, overwrites
// all of them, deletes some, and starts it again and again. It prints one JSON
// line a case: how long that took, and what the member takes of memory and
// disk for each object.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// figure is one line of output; keys as in HOUSE.md, section 7.
type figure struct {
	Bench   string  `json:"bench"`
	Case    string  `json:"case"`
	Nodes   int     `json:"nodes"`
	Clients int     `json:"clients,omitempty"`
	Size    int     `json:"size"`
	Objects int     `json:"objects"`
	Values  string  `json:"values"`
	PerS    float64 `json:"per_s,omitempty"`
	Seconds float64 `json:"seconds,omitempty"`
	// CPU is the processor time that went by in Seconds, of all threads.
	CPU float64 `json:"cpu_seconds,omitempty"`
	// Open is the part of Seconds that opening the data directory took.
	Open float64 `json:"open_seconds,omitempty"`
	// RSS is the process's resident memory when it has nothing more to do, and
	// Peak the most it ever was.
	RSS  float64 `json:"rss_mib,omitempty"`
	Peak float64 `json:"peak_rss_mib,omitempty"`
	// PerObject is resident memory by the number of objects.
	PerObject float64 `json:"rss_kib_per_object,omitempty"`
	Disk      float64 `json:"disk_mib,omitempty"`
	Snapshots float64 `json:"snapshots_mib,omitempty"`
	// DiskRatio is the data directory's size by the live keys and values'.
	DiskRatio float64 `json:"disk_ratio,omitempty"`
}

// goal compares a value with what was set as its goal.
type goal struct {
	Bench string  `json:"bench"`
	Goal  string  `json:"goal"`
	Value float64 `json:"value"`
	Met   bool    `json:"met"`
}

type options struct {
	dir     string
	objects int
	size    int
	clients int
	values  string
	profile string
}

func main() {
	var o options
	phase := flag.String("phase", "", "what this process does with the folder; internal")
	flag.StringVar(&o.dir, "dir", "", "folder for the data; default: a new one in the temporary folder, removed afterwards")
	flag.IntVar(&o.objects, "objects", 300_000, "number of objects")
	flag.IntVar(&o.size, "size", 1024, "bytes of each")
	flag.IntVar(&o.clients, "clients", 256, "writers at a time")
	flag.StringVar(&o.values, "values", "object", "what they hold: object (the text of a ConfigMap) or random (bytes that nothing compresses)")
	flag.StringVar(&o.profile, "profile", "", "folder for processor and heap profiles of each phase")
	flag.Parse()
	err := run(o, *phase)
	if err != nil {
		fmt.Fprintln(os.Stderr, "scale:", err)
		os.Exit(1)
	}
}

func run(o options, phase string) error {
	if o.values != "object" && o.values != "random" {
		return fmt.Errorf("-values=%s: choose object or random", o.values)
	}
	if o.objects < 1 || o.size < 64 || o.clients < 1 {
		return errors.New("-objects and -clients must be at least 1, -size at least 64")
	}
	if phase != "" {
		return work(o, phase)
	}
	if o.dir == "" {
		dir, err := os.MkdirTemp("", "clusterd-scale-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		o.dir = dir
	}
	out := json.NewEncoder(os.Stdout)
	for _, phase := range []string{"load", "restart", "overwrite", "restart", "delete", "restart"} {
		got, err := spawn(o, phase)
		if err != nil {
			return fmt.Errorf("%s: %w", phase, err)
		}
		for _, f := range got {
			if err := out.Encode(f); err != nil {
				return err
			}
			for _, g := range goals(f) {
				if err := out.Encode(g); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// goals judges a figure, where it is of the size that goals were set for.
func goals(f figure) []goal {
	if f.Objects < 300_000 || f.Size != 1024 {
		return nil
	}
	var all []goal
	atMost := func(what string, want, value float64) {
		all = append(all, goal{"store-scale", what, value, value <= want})
	}
	if f.Case == "restart" {
		atMost("restart with 300 000 objects of 1 KiB <= 2 s", 2, f.Seconds)
	}
	if f.PerObject > 0 && f.Case != "delete" {
		atMost(f.Case+": resident memory per object of 1 KiB <= 2.2 KiB", 2.2, f.PerObject)
	}
	if f.Case == "overwrite" {
		atMost("disk after an overwrite <= 2 times the live data", 2, f.DiskRatio)
	}
	if f.Case == "delete" {
		atMost("10 000 deletes <= 1 s", 1, f.Seconds)
	}
	return all
}

// spawn runs a phase in a process of its own, whose memory is the store's
// alone. It ends without closing the store, as a crash would.
func spawn(o options, phase string) ([]figure, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, "-phase", phase, "-dir", o.dir, "-objects", fmt.Sprint(o.objects), "-size", fmt.Sprint(o.size),
		"-clients", fmt.Sprint(o.clients), "-values", o.values, "-profile", o.profile)
	log, err := os.Create(filepath.Join(o.dir, phase+".log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd.Stderr = log
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	timer := time.AfterFunc(15*time.Minute, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	var got []figure
	var bad error
	for lines := bufio.NewScanner(pipe); lines.Scan(); {
		var f figure
		if bad = json.Unmarshal(lines.Bytes(), &f); bad != nil {
			break
		}
		got = append(got, f)
	}
	if err := errors.Join(bad, cmd.Wait()); err != nil {
		text, _ := os.ReadFile(log.Name())
		return nil, fmt.Errorf("%w\n%s", err, text[max(0, len(text)-2000):])
	}
	return got, nil
}
