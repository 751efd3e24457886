package e2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"filippo.io/age"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/cmd/clusterd/autosnapshot/bucket/s3test"
	"github.com/clusterd/clusterd/e2e/cluster"
)

// objectStore is one at the bridge's address, which the machines reach: that of s3test,
// or a real server behind it.
type objectStore struct {
	*s3test.Server
	keys    string // file
	refuses atomic.Bool
	dir     string // of a real server; empty: there is none
}

func newObjectStore(t *testing.T, addr string) *objectStore {
	// The bridge has its address when the cluster starts, which is given the store's.
	free := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		return errors.Join(c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1) }), err)
	}}
	l, err := free.Listen(t.Context(), "tcp", net.JoinHostPort(addr, "0"))
	if err != nil {
		t.Fatal(err)
	}
	s := &objectStore{Server: s3test.NewOn(t, l, addr), keys: filepath.Join(t.TempDir(), "credentials")}
	if err := os.WriteFile(s.keys, []byte("[default]\naws_access_key_id = ID\naws_secret_access_key = SECRET\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.Hook = func(w http.ResponseWriter, r *http.Request) bool {
		refused := s.refuses.Load()
		if refused {
			s3test.Refuse(w, http.StatusForbidden, "AccessDenied", "Access Denied.")
		}
		return refused
	}
	if program := os.Getenv(s3test.Program); program != "" {
		behind, dir := s3test.Real(t, program, "ID", "SECRET", "", "")
		proxy := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "http", Host: behind})
			r.Out.Host = r.In.Host // it is signed
		}}
		s.Behind, s.dir = proxy, filepath.Join(dir, s3test.Bucket)
	}
	return s
}

// objects are its snapshots, by name.
func (s *objectStore) objects(t *testing.T) (names []string) {
	if s.dir == "" {
		names = s.Names()
	} else if err := filepath.WalkDir(s.dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			names = append(names, strings.TrimPrefix(path, s.dir+"/"))
		}
		if errors.Is(err, fs.ErrNotExist) {
			err = nil // it has gone meanwhile
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(names, func(n string) bool {
		return !strings.HasSuffix(n, ".backup") || strings.Contains(n, ".clusterd-snapshot-") || strings.HasPrefix(n, ".")
	})
}

// TestE2ESnapshotStore: three servers take snapshots into a bucket, each time of the
// schedule once, over the loss of the leader; as many stay as are to; a cluster begins
// from the URL of one; and a store that refuses them is seen.
func TestE2ESnapshotStore(t *testing.T) {
	need(t)
	seg := segment()
	s := newObjectStore(t, seg.Addr().Next().String())
	identity := filepath.Join(t.TempDir(), "key")
	key, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(identity, []byte(key.String()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	access := []string{"--snapshot-store-credentials", s.keys, "--snapshot-store-ca", s.CA}
	e := startBare(t, 3, func(c *cluster.Config) {
		c.Args = append(c.Args, "--snapshot-schedule", "@every 1m", "--snapshot-store", s.URL+"/site", "--snapshot-keep", "2", "--snapshot-recipients", key.Recipient().String())
		c.Args = append(c.Args, access...)
	})
	const limit = 5 * time.Minute // a minute, and a machine that has much else to do
	seen := map[string]bool{}     // names of all snapshots, ever
	more := func(what string) {
		t.Helper()
		before := len(seen)
		e.within(limit, what, func(context.Context) error {
			for _, n := range s.objects(t) {
				seen[n] = true
			}
			if len(seen) == before {
				return fmt.Errorf("objects %q", s.objects(t))
			}
			return nil
		})
	}
	row := func(name string) string {
		for line := range strings.Lines(e.ctl("store", "status")) {
			if value, ok := strings.CutPrefix(line, "Snapshots "+name+":"); ok {
				return strings.TrimSpace(value)
			}
		}
		return ""
	}
	more("there is a snapshot")
	leader := ""
	e.eventually("the leader took it", func(context.Context) error {
		leader = e.leader()
		if got, file := row("last node"), row("last file"); got != leader || !strings.HasPrefix(file, s.URL+"/site/") {
			return fmt.Errorf("clusterctl store status names %q and %q, and %s leads", got, file, leader)
		}
		return nil
	})

	// A cluster begins from it.
	url, n1 := row("last file"), e.Nodes()[0]
	restore := func(url string, more ...string) (string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
		defer cancel()
		args := append([]string{"init", "--prepare", "--from-snapshot", url, "--identity", identity, "--data", filepath.Join(t.TempDir(), "restored"), "--name", "phoenix", "--advertise", n1.Addr.String(), "--port", "7443"}, more...)
		out, err := e.Exec(ctx, "n1", e.Bin("clusterd"), args...).CombinedOutput()
		return string(out), err
	}
	if out, err := restore(url, access...); err != nil || !strings.Contains(out, "phoenix begins with the state of cluster") {
		t.Errorf("restore: %v: %s", err, out)
	}
	if out, err := restore(url); err == nil || !strings.Contains(out, "--snapshot-store-credentials: name a file") {
		t.Errorf("restore without keys: %v: %s", err, out)
	}
	other := filepath.Join(t.TempDir(), "other")
	if k, err := age.GenerateX25519Identity(); err != nil || os.WriteFile(other, []byte(k.String()+"\n"), 0o600) != nil {
		t.Fatal(err)
	}
	if out, err := restore(url, append(access, "--identity", other)...); err == nil || !strings.Contains(out, "--from-snapshot "+url+": it does not open with this passphrase or key") {
		t.Errorf("restore with another key: %v: %s", err, out)
	}
	if out, err := restore(s.URL+"/site/none.backup", access...); err == nil || !strings.Contains(out, "the last by name is ") {
		t.Errorf("restore of what is not there: %v: %s", err, out)
	}

	if err := e.Kill(leader); err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"n1", "n2", "n3"} {
		if n != leader {
			if e.api, e.config, err = e.Client(n); err != nil {
				t.Fatal(err)
			}
		}
	}
	more("another leader takes the next")
	e.eventually("clusterctl says so", func(context.Context) error {
		if got := row("last node"); got == "" || got == leader {
			return fmt.Errorf("clusterctl store status names %q, and %s is dead", got, leader)
		}
		return nil
	})
	more("and one more after it")
	e.eventually("two stay", func(context.Context) error {
		if got := s.objects(t); len(got) != 2 {
			return fmt.Errorf("objects %q", got)
		}
		return nil
	})
	var slots []time.Time
	for n := range seen {
		name := strings.TrimSuffix(n, "Z.backup")
		at, err := time.Parse("20060102T150405", name[strings.LastIndex(name, "-")+1:])
		if err != nil {
			t.Fatal(err)
		}
		slots = append(slots, at)
	}
	slices.SortFunc(slots, time.Time.Compare)
	for i := 1; i < len(slots); i++ {
		if apart := slots[i].Sub(slots[i-1]); apart < time.Minute || apart%time.Minute != 0 {
			t.Errorf("snapshots of %v: %s apart", slots, apart)
		}
	}

	s.refuses.Store(true)
	e.within(limit, "that it fails is seen", func(ctx context.Context) error {
		out := e.ctl("store", "status")
		if !strings.Contains(out, "HTTP status 403") || !strings.Contains(out, "was not taken by") || !strings.Contains(out, "s3:PutObject") {
			return fmt.Errorf("clusterctl store status: %s", out)
		}
		events, err := e.api.CoreV1().Events("default").List(ctx, metav1.ListOptions{FieldSelector: "reason=SnapshotFailed"})
		if err == nil && !slices.ContainsFunc(events.Items, func(ev corev1.Event) bool { return strings.Contains(ev.Message, s.URL) }) {
			err = fmt.Errorf("no event of it among %d", len(events.Items))
		}
		return err
	})
	s.refuses.Store(false)
	more("it is taken when the store permits it again")
}
