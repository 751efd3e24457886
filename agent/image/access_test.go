package image

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// TestAccess: who pulled an image with which credentials is on record, by repository,
// and outlives a restart.
func TestAccess(t *testing.T) {
	img := build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"}))
	closed, open1 := guard(t, "me", "secret"), guard(t, "", "")
	closed.push(t, "team/app:1", img)
	open1.push(t, "team/app:1", img)
	ref, public := closed.host+"/team/app:1", open1.host+"/team/app:1"
	mine := Credential{Auth: Auth{Username: "me", Password: "secret"}, Secret: SecretID{"ns", "pull", "1"}}
	changed := Credential{Auth: Auth{Username: "me", Password: "new"}, Secret: mine.Secret}
	same := Credential{Auth: mine.Auth, Secret: SecretID{"other", "pull", "2"}}
	remade := Credential{Auth: Auth{Username: "me", Password: "guess"}, Secret: SecretID{"ns", "pull", "3"}}
	anonymous := Credential{Secret: SecretID{"ns", "pull", ""}}
	dir := t.TempDir()
	s := open(t, dir)
	if _, err := s.Access("sha256:"+strings.Repeat("0", 64), ref, nil); err == nil {
		t.Error("of an image that is not here")
	}
	got, err := s.PullAs(t.Context(), ref, mine)
	if err != nil {
		t.Fatal(err)
	}
	check := func(what, ref string, want Access, shown ...Credential) {
		t.Helper()
		if got, err := s.Access(got.ID, ref, shown); err != nil || got != want {
			t.Errorf("%s: %+v %v, want %+v", what, got, err, want)
		}
	}
	digest := got.RepoDigests[0]
	look := func() {
		t.Helper()
		for _, name := range []string{ref, digest, got.ID} {
			check("nothing shown", name, Access{})
			check("who pulled it", name, Access{Proven: true}, mine)
			check("the Secret with other content", name, Access{Proven: true}, changed)
			check("the same credentials elsewhere", name, Access{Proven: true}, same)
			check("a Secret that was made anew with others", name, Access{}, remade)
			check("a Secret that says nothing", name, Access{}, anonymous)
			check("one of several", name, Access{Proven: true}, remade, mine)
		}
	}
	look()
	b, err := os.ReadFile(s.path(indexFile))
	if err != nil || bytes.Contains(b, []byte("secret\"")) {
		t.Errorf("the password is in the index: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir)
	look()
	// Another Secret with the same credentials asks for the same: it has a name, too.
	if _, err := s.PullAs(t.Context(), ref, same); err != nil {
		t.Fatal(err)
	}
	check("the other Secret, changed since", ref, Access{Proven: true}, Credential{Auth: changed.Auth, Secret: same.Secret})
	// What opens to all there says nothing of the repository that does not.
	if _, err := s.PullAs(t.Context(), public, Credential{}); err != nil {
		t.Fatal(err)
	}
	check("nothing shown for a public one", public, Access{Proven: true})
	check("nothing shown for the other name", ref, Access{})
	check("nothing shown for the ID", got.ID, Access{Proven: true})
	// A pull that is refused changes nothing.
	if _, err := s.PullAs(t.Context(), ref, remade); err == nil {
		t.Error("it was pulled with a wrong password")
	}
	check("a guess", ref, Access{}, remade)
}

func idOf(t *testing.T, s *Store, ref string) string {
	t.Helper()
	img, ok, err := s.Get(ref)
	if err != nil || !ok {
		t.Fatalf("%s is not here: %v", ref, err)
	}
	return img.ID
}

// TestAccessOfMovedTag: what a record says of the image that has a tag now is not for the
// one that had it.
func TestAccessOfMovedTag(t *testing.T) {
	closed := guard(t, "me", "secret")
	password := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(password, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := with(t, fmt.Sprintf("registries: {%q: {plainHTTP: true, username: me, passwordFile: %s}}", closed.host, password))
	ref := closed.host + "/a:1"
	closed.push(t, "a:1", build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"})))
	before, err := s.PullAs(t.Context(), ref, Credential{Auth: Auth{Username: "me", Password: "secret"}, Secret: SecretID{"ns", "pull", "1"}})
	if err != nil {
		t.Fatal(err)
	}
	closed.push(t, "a:1", build(t, v1.Config{}, archive(t, entry{name: "f", body: "y"})))
	now, err := s.Pull(t.Context(), ref, Auth{}) // with the node's
	if err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]bool{before.ID: false, now.ID: true} {
		if got, err := s.Access(id, ref, nil); err != nil || got.Proven != want {
			t.Errorf("%s: %+v %v", id, got, err)
		}
	}
}

// TestAccessOfSharedPulls: two Secrets with the same credentials wait for one pull.
func TestAccessOfSharedPulls(t *testing.T) {
	closed := guard(t, "me", "secret")
	closed.push(t, "a:1", build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"})))
	s := open(t, t.TempDir())
	auth := Auth{Username: "me", Password: "secret"}
	ids := []SecretID{{"a", "pull", "1"}, {"b", "pull", "2"}, {"c", "pull", "3"}}
	var wg sync.WaitGroup
	for _, id := range ids {
		wg.Go(func() {
			if _, err := s.PullAs(t.Context(), closed.host+"/a:1", Credential{Auth: auth, Secret: id}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, id := range ids {
		if got, err := s.Access(idOf(t, s, closed.host+"/a:1"), closed.host+"/a:1", []Credential{{Secret: id}}); err != nil || !got.Proven {
			t.Errorf("%v: %+v %v", id, got, err)
		}
	}
}

// TestAccessIsBounded: the credentials on record for an image do not grow for ever.
func TestAccessIsBounded(t *testing.T) {
	ix, rec := index{}, imageRecord{}
	cred := func(n int) Credential {
		return Credential{Auth: Auth{Username: strings.Repeat("x", n+1)}, Secret: SecretID{"ns", "n", strings.Repeat("u", n+1)}}
	}
	for n := range maxPulledWith + 5 {
		ix.record(&rec, access{repository: "x.io/a", with: cred(n)})
		ix.record(&rec, access{repository: "x.io/a", with: cred(n)})
	}
	if n := len(rec.Pulled["x.io/a"].With); n != maxPulledWith {
		t.Errorf("%d credentials are on record", n)
	}
	if p := rec.Pulled["x.io/a"]; ix.proven(p, []Credential{cred(0)}) || !ix.proven(p, []Credential{cred(maxPulledWith)}) {
		t.Error("it was not the oldest that went")
	}
}

// TestAccessPreloaded: images of files are preloaded and stay so; those of an index
// without records are until they are pulled.
func TestAccessPreloaded(t *testing.T) {
	img := build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"}))
	closed := guard(t, "me", "secret")
	closed.push(t, "a:1", img)
	ref := closed.host + "/a:1"
	mine := Credential{Auth: Auth{Username: "me", Password: "secret"}, Secret: SecretID{"ns", "pull", "1"}}
	s := open(t, t.TempDir())
	if _, err := s.Load(t.Context(), bytes.NewReader(dockerSave(t, map[string]v1.Image{ref: img}))); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if got, err := s.Access(idOf(t, s, ref), ref, nil); err != nil || got != (Access{Preloaded: true}) {
			t.Errorf("loaded: %+v %v", got, err)
		}
		if _, err := s.PullAs(t.Context(), ref, mine); err != nil {
			t.Fatal(err)
		}
	}
	// An index as versions before wrote it.
	old := open(t, t.TempDir())
	if _, err := old.PullAs(t.Context(), ref, mine); err != nil {
		t.Fatal(err)
	}
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(old.cfg.Dir, indexFile)
	ix, err := readIndex(file)
	if err != nil {
		t.Fatal(err)
	}
	ix.Salt = ""
	for id, rec := range ix.Images {
		rec.Pulled = nil
		ix.Images[id] = rec
	}
	if err := old.saveIndex(ix); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(file); err != nil || bytes.Contains(b, []byte("pulled")) || bytes.Contains(b, []byte("salt")) {
		t.Fatalf("that is no index of before: %s %v", b, err)
	}
	s = open(t, old.cfg.Dir)
	got, err := s.Access(idOf(t, s, ref), ref, nil)
	if d := cmp.Diff(Access{Preloaded: true}, got); err != nil || d != "" {
		t.Errorf("of before: %v %s", err, d)
	}
	if _, err := s.PullAs(t.Context(), ref, mine); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Access(idOf(t, s, ref), ref, nil); err != nil || got != (Access{}) {
		t.Errorf("pulled since: %+v %v", got, err)
	}
}

// TestAccessLoadedBefore: what a version without records loaded from a file stays
// preloaded when a pod pulls it; what was pinned by hand since is not taken for that.
func TestAccessLoadedBefore(t *testing.T) {
	img := build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"}))
	closed := guard(t, "me", "secret")
	closed.push(t, "a:1", img)
	ref := closed.host + "/a:1"
	for salt, want := range map[string]bool{"": true, "there are records": false} {
		s := open(t, t.TempDir())
		if _, err := s.Load(t.Context(), bytes.NewReader(dockerSave(t, map[string]v1.Image{ref: img}))); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		ix, err := readIndex(s.path(indexFile))
		if err != nil {
			t.Fatal(err)
		}
		ix.Salt = salt
		for id, rec := range ix.Images {
			rec.Preloaded = false
			ix.Images[id] = rec
		}
		if err := s.saveIndex(ix); err != nil {
			t.Fatal(err)
		}
		s = open(t, s.cfg.Dir)
		for range 2 {
			if _, err := s.PullAs(t.Context(), ref, Credential{Auth: Auth{Username: "me", Password: "secret"}}); err != nil {
				t.Fatal(err)
			}
			if got, err := s.Access(idOf(t, s, ref), ref, nil); err != nil || got.Preloaded != want {
				t.Errorf("salt %q: %+v %v", salt, got, err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = open(t, s.cfg.Dir)
		}
	}
}
