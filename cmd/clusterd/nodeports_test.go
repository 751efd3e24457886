package main

import (
	"strings"
	"testing"
)

func TestNodePortRange(t *testing.T) {
	for text, want := range map[string]string{
		"30000-32767": "", "20000-20100": "", "30000": "", "30000+100": "",
		"": "no range", "0-100": "no range", "2-1": "no range", "30000-70000": "no range", "a-b": "no range",
		"6000-7000": "--port 6443 is among them", "10000-11000": "--kubelet-port 10250 is among them",
	} {
		c := defaultConfig()
		c.ServiceNodePortRange = text
		err := c.checkNodePorts()
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "--service-node-port-range")) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	c := defaultConfig()
	if got := c.nodePorts(); got.Base != 30000 || got.Size != 2768 {
		t.Errorf("by default %v", got)
	}
}
