package main

import (
	"strings"
	"testing"
	"time"
)

func TestNewUser(t *testing.T) {
	for _, tt := range []struct {
		u    newUser
		want string // "": it is as it should be
	}{
		{newUser{name: "jane", out: "jane.kubeconfig", lifetime: time.Hour}, ""},
		{newUser{name: "jane@example.com", out: "jane@example.com.kubeconfig", lifetime: time.Hour, groups: []string{"dev"}}, ""},
		{newUser{name: "team/jane", out: "jane", lifetime: time.Hour}, ""},
		{newUser{name: "team/jane", out: "team/jane.kubeconfig", lifetime: time.Hour}, "no slash unless --out names the file"},
		{newUser{name: " jane", out: "x", lifetime: time.Hour}, "no space around it"},
		{newUser{name: "", out: "x", lifetime: time.Hour}, "needs a common name"},
		{newUser{name: "jane", out: "x", lifetime: time.Minute}, "--for 1m0s: must be from 10m0s to 8760h0m0s"},
		{newUser{name: "jane", out: "x", lifetime: 9000 * time.Hour}, "--for 9000h0m0s"},
		{newUser{name: "jane", out: "x", lifetime: time.Hour, groups: []string{"system:masters"}}, "system:masters group is not allowed"},
		{newUser{name: "system:node:n1", out: "x", lifetime: time.Hour}, "a node gets its certificate by joining"},
	} {
		err := tt.u.check()
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: %v, want %q", tt.u, err, tt.want)
		}
	}
}
