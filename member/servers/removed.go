package servers

import (
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"weak"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
)

// removal is what a List knows about servers that were removed from the cluster.
// It is guarded by List.mu.
type removal struct {
	ids map[string]bool
	// open are the connections to each server, that its removal closes. Who uses
	// one keeps it; here it may be gone.
	open map[string][]weak.Pointer[tls.Conn]
}

func newRemoval(known []byte) (removal, error) {
	r := removal{ids: map[string]bool{}, open: map[string][]weak.Pointer[tls.Conn]{}}
	if len(known) == 0 {
		return r, nil
	}
	var ids []string
	if err := json.Unmarshal(known, &ids); err != nil {
		return r, fmt.Errorf("the list of removed servers: %w", err)
	}
	for _, id := range ids {
		r.ids[id] = true
	}
	return r, nil
}

// Removed reports whether the key with that id was a server's that the cluster
// removed, as far as this node has heard. It does not wait for the network.
func (l *List) Removed(id string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.removal.ids[id]
}

// remember notes a connection to the server with that id, to be closed with its
// removal. It reports false when that has come already. l.mu is held.
func (r *removal) remember(id string, c *tls.Conn) bool {
	if r.ids[id] {
		return false
	}
	r.open[id] = append(slices.DeleteFunc(r.open[id], func(p weak.Pointer[tls.Conn]) bool { return p.Value() == nil }), weak.Make(c))
	return true
}

// ErrOnlyCaller is returned by Remove for a list that would leave this node with no server but the
// one that says so.
var ErrOnlyCaller = errors.New("no server but the one that says so would be left: this node asks by itself")

// maxRemoved bounds what one server may have this node note.
const maxRemoved = 8192

// Remove takes the word of the server caller on removed servers. What it refuses is learned
// from the servers that this node asks, should it be true. An error says that not all of it is noted, or on disk.
func (l *List) Remove(caller string, ids []string) error {
	for _, id := range ids {
		if !pki.IsFingerprint(id) {
			return fmt.Errorf("removed servers: %q is no id of a server (26 letters and digits)", id)
		}
	}
	l.mu.Lock()
	before := len(l.removal.ids)
	added := l.unknownRemovals(ids)
	left := slices.ContainsFunc(l.servers, func(s join.ServerAddr) bool { return s.ID != caller && !slices.Contains(added, s.ID) })
	l.mu.Unlock()
	switch {
	case before+len(added) > maxRemoved:
		return fmt.Errorf("removed servers: %d are known and %d were named, and at most %d are noted: remove fewer", before, len(added), maxRemoved)
	case len(added) > 0 && !left:
		return fmt.Errorf("removed servers: %w", ErrOnlyCaller)
	}
	return l.remove(ids)
}

// unknownRemovals are those of ids that are not known as removed. l.mu is held.
func (l *List) unknownRemovals(ids []string) []string {
	return slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return id == "" || l.removal.ids[id] })
}

// remove takes note of removed servers: they are asked nothing any more, and what
// is open to them is closed. What was heard once stays true, whatever other
// servers say later: no key comes back.
func (l *List) remove(ids []string) error {
	var open []weak.Pointer[tls.Conn]
	l.mu.Lock()
	added := l.unknownRemovals(ids)
	for _, id := range added {
		l.removal.ids[id] = true
		open = append(open, l.removal.open[id]...)
		delete(l.removal.open, id)
	}
	l.servers = l.notRemoved(l.servers)
	l.mu.Unlock()
	for _, p := range open {
		if c := p.Value(); c != nil {
			// Not the TLS connection: its Close waits for a writer that waits.
			_ = c.NetConn().Close()
		}
	}
	if l.cfg.Cut != nil {
		for _, id := range added {
			l.cfg.Cut(id)
		}
	}
	err := l.saveRemoved(len(added) > 0)
	if err != nil && l.cfg.Warn != nil {
		l.cfg.Warn("the list of removed servers could not be written down", err)
	}
	return err
}

// saveRemoved writes down what is known now, if that is more than before or could not be written then. One at
// a time: a shorter list must not come after a longer one.
func (l *List) saveRemoved(more bool) error {
	l.savingRemoved.Lock()
	defer l.savingRemoved.Unlock()
	if !more && !l.unsavedRemoved || l.cfg.SaveRemoved == nil {
		return nil
	}
	l.mu.Lock()
	all := slices.Sorted(maps.Keys(l.removal.ids))
	l.mu.Unlock()
	b, err := json.Marshal(all)
	if err == nil {
		err = l.cfg.SaveRemoved(b)
	}
	l.unsavedRemoved = err != nil
	return err
}

// notRemoved are those of the servers that were not removed. l.mu is held.
func (l *List) notRemoved(all []join.ServerAddr) []join.ServerAddr {
	return slices.DeleteFunc(slices.Clone(all), func(s join.ServerAddr) bool { return l.removal.ids[s.ID] })
}

// idOf is the id of the server at the other end.
func idOf(c *tls.Conn) string {
	id, _ := transport.PeerOf(c)
	return id
}
