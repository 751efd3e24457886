package main

import (
	"errors"
	"fmt"
	"os/exec"
	"strings"
)

// machines are network namespaces with one line each to a switch, in which the
// members of a side run whose lines are to be cut. Making them takes root.
type machines struct{ prefix string }

// machineAddr is the address of the i-th.
func machineAddr(i int) string { return fmt.Sprintf("10.90.0.%d", i+1) }

func (m machines) name(i int) string { return fmt.Sprint(m.prefix, i) }
func (m machines) hub() string       { return m.prefix + "hub" }

// newMachines makes them; undo with remove.
func newMachines(prefix string) (machines, error) {
	m := machines{prefix}
	err := run1("ip", "netns", "add", m.hub())
	err = errors.Join(err, m.inHub("ip", "link", "add", "br0", "type", "bridge"), m.inHub("ip", "link", "set", "br0", "up"))
	for i := range nodes {
		ns, line := m.name(i), port(i)
		err = errors.Join(err, run1("ip", "netns", "add", ns),
			run1("ip", "link", "add", "eth0", "netns", ns, "type", "veth", "peer", "name", line, "netns", m.hub()),
			run1("ip", "-n", ns, "addr", "add", machineAddr(i)+"/24", "dev", "eth0"),
			run1("ip", "-n", ns, "link", "set", "lo", "up"),
			run1("ip", "-n", ns, "link", "set", "eth0", "up"),
			m.inHub("ip", "link", "set", line, "master", "br0"), m.inHub("ip", "link", "set", line, "up"))
	}
	if err != nil {
		m.remove()
	}
	return m, err
}

// port is the switch's end of the i-th line.
func port(i int) string { return fmt.Sprint("p", i) }

func (m machines) inHub(tool string, args ...string) error {
	return run1(tool, append([]string{"-n", m.hub()}, args...)...)
}

// link pulls the cable of a machine, or plugs it in.
func (m machines) link(i int, up bool) error {
	state := "down"
	if up {
		state = "up"
	}
	return m.inHub("ip", "link", "set", port(i), state)
}

// drop makes the switch drop all that a machine sends or is sent: its own end of
// the line shows nothing.
func (m machines) drop(i int, on bool) error {
	state := "3" // forwarding
	if on {
		state = "0" // disabled
	}
	return m.inHub("bridge", "link", "set", "dev", port(i), "state", state)
}

func (m machines) remove() {
	for i := range nodes {
		_ = run1("ip", "netns", "del", m.name(i))
	}
	_ = run1("ip", "netns", "del", m.hub())
}

func run1(tool string, args ...string) error {
	out, err := exec.Command(tool, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", tool, strings.Join(args, " "), err, out)
	}
	return nil
}
