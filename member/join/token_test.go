package join

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/pki"
)

// TestBoundToken: one that is for a name and for addresses is good for no other machine,
// and a refused attempt uses nothing up.
func TestBoundToken(t *testing.T) {
	w := newWorld(t)
	here := []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("127.0.0.0/8")}
	elsewhere := here[:1]
	for _, tt := range []struct {
		wish TokenOptions
		name string
		want string
	}{
		{TokenOptions{Name: "n5"}, "n6", "is for the machine n5, and this one is n6"},
		{TokenOptions{From: elsewhere}, "n6", "is good from 192.0.2.0/24, and this machine asks from 127.0.0.1:"},
		{TokenOptions{Name: "n6", From: elsewhere}, "n6", "is good from 192.0.2.0/24"},
		{TokenOptions{Name: "n6", From: here}, "n6", ""},
		{TokenOptions{From: here}, "n7", ""},
	} {
		tt.wish.Role, tt.wish.Uses, tt.wish.TTL = pki.Agent, 1, time.Hour
		tok := w.tokenFor(t, tt.wish)
		_, _, err := w.join(t, tok, tt.name)
		used := 1
		if tt.want == "" {
			if err != nil {
				t.Errorf("%+v: %v", tt.wish, err)
			}
		} else {
			refusedFor(t, err, CodeToken, tt.want)
			used = 0
		}
		list, err := Tokens(t.Context(), w.store)
		if err != nil {
			t.Fatal(err)
		}
		for _, info := range list {
			if info.ID == tok.ID && (info.Used != used || info.For != tt.wish.Name || len(info.From) != len(tt.wish.From)) {
				t.Errorf("the record says %+v", info)
			}
		}
	}
	for wish, want := range map[*TokenOptions]string{
		{Name: "n_5", Uses: 1}: `name "n_5": no machine can have it`, {Name: "n5"}: "uses is 0", {Name: "n5", Uses: 2}: "uses is 2", {Name: "n5", Uses: 1}: "", {Uses: 9}: "",
	} {
		if err := wish.Validate(); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v", wish, err)
		}
	}
}
