package bucket

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/cmd/clusterd/autosnapshot/bucket/s3test"
	"github.com/clusterd/clusterd/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const (
	name   = "c-20261127T030000Z.backup"
	prefix = "site/a/"
	own    = prefix + ".clusterd-snapshot-c_n1_"
)

// keyFile is a file of keys.
func keyFile(t *testing.T, text string, mode os.FileMode) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "credentials")
	if err := errors.Join(os.WriteFile(path, []byte(text), mode), os.Chmod(path, mode)); err != nil {
		t.Fatal(err)
	}
	return path
}

const someKeys = "[default]\naws_access_key_id = ID\naws_secret_access_key = SECRET\n"

// bucketAt is one of node n1.
func bucketAt(t *testing.T, url string, change ...func(*Config)) *Bucket {
	t.Helper()
	l, err := Parse(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{
		Location: l, Node: "n1", Flag: "--snapshot-store", Log: slog.New(slog.DiscardHandler),
		Access: Access{Credentials: keyFile(t, someKeys, 0o600), Timeout: 50 * time.Second},
	}
	for _, c := range change {
		c(&cfg)
	}
	return New(cfg)
}

func of(t *testing.T, s *s3test.Server, change ...func(*Config)) *Bucket {
	return bucketAt(t, s.URL+"/site/a", append([]func(*Config){func(c *Config) { c.CA = s.CA }}, change...)...)
}

// random is what takes several parts.
func random() []byte {
	r := rand.NewChaCha8([32]byte{1})
	b := make([]byte, 2*partSize+1000)
	_, _ = r.Read(b)
	return b
}

// put puts data, which is compared when it is read again.
func put(ctx context.Context, b *Bucket, data []byte) error {
	return b.Put(ctx, name, func(_ context.Context, w io.Writer) error {
		_, err := io.Copy(w, bytes.NewReader(data))
		return err
	}, func(_ context.Context, r io.Reader) error {
		got, err := io.ReadAll(r)
		if err == nil && !bytes.Equal(got, data) {
			err = errors.New("it reads otherwise")
		}
		return err
	})
}

// TestPut: in parts, verified, whole, and nothing beside it is left.
func TestPut(t *testing.T) {
	s := s3test.New(t)
	b, data := of(t, s), random()
	if f, err := b.Find(t.Context(), name); f != nil || err != nil {
		t.Fatalf("%v, %v", f, err)
	}
	if err := put(t.Context(), b, data); err != nil {
		t.Fatal(err)
	}
	if got := s.Names(); !slices.Equal(got, []string{prefix + name}) || len(s.Uploads()) > 0 || !bytes.Equal(s.Object(prefix+name), data) {
		t.Errorf("objects %q, uploads %q", got, s.Uploads())
	}
	f, err := b.Find(t.Context(), name)
	if err != nil || f == nil || f.Bytes != int64(len(data)) || time.Since(f.Modified) > time.Minute {
		t.Errorf("%+v, %v", f, err)
	}
	if got, want := b.Path(name), s.URL+"/"+prefix+name; got != want {
		t.Errorf("path %s, want %s", got, want)
	}
	s.Put(prefix+"c-sub/c-20200101T030000Z.backup", nil, 0)
	if names, err := b.Names(t.Context(), "c-"); err != nil || !slices.Equal(names, []string{name}) {
		t.Errorf("%q, %v", names, err)
	}
	if err := b.Remove(t.Context(), name); err != nil || len(s.Names()) != 1 {
		t.Errorf("%q, %v", s.Names(), err)
	}
}

// TestStoresThatFail: an error says what is wrong and what to do, within its time, and
// nothing has the snapshot's name, nor is anything left of it where it can be removed.
func TestStoresThatFail(t *testing.T) {
	data := []byte(strings.Repeat("snapshot", 1000))
	part := func(r *http.Request) bool { return r.Method == http.MethodPut && r.URL.Query().Has("partNumber") }
	read := func(r *http.Request) bool {
		return r.Method == http.MethodGet && strings.Contains(r.URL.Path, "snapshot-")
	}
	body := func(w http.ResponseWriter, b []byte) {
		w.Header().Set("Last-Modified", time.Now().UTC().Format(http.TimeFormat))
		_, _ = w.Write(b)
	}
	for what, c := range map[string]struct {
		hook   func(s *s3test.Server, w http.ResponseWriter, r *http.Request) bool
		access func(*Config)
		want   []string
		left   bool // what the store does not let go
	}{
		"refuses": {want: []string{"403", "AccessDenied", "s3:PutObject", "/credentials"}, left: true, hook: func(_ *s3test.Server, w http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodPut || r.Method == http.MethodDelete {
				s3test.Refuse(w, http.StatusForbidden, "AccessDenied", "no")
			}
			return r.Method == http.MethodPut || r.Method == http.MethodDelete
		}},
		"knows no key": {want: []string{"InvalidAccessKeyId", "check the key and the secret of --snapshot-store-credentials /"}, hook: func(_ *s3test.Server, w http.ResponseWriter, _ *http.Request) bool {
			s3test.Refuse(w, http.StatusForbidden, "InvalidAccessKeyId", "no")
			return true
		}},
		"is full": {want: []string{"507", "make room"}, hook: func(_ *s3test.Server, w http.ResponseWriter, r *http.Request) bool {
			if part(r) {
				s3test.Refuse(w, http.StatusInsufficientStorage, "XMinioStorageFull", "Storage backend has reached its minimum free drive threshold.")
			}
			return part(r)
		}},
		"stalls": {want: []string{"no byte moved for 2s"}, access: func(c *Config) { c.Stall = 2 * time.Second }, hook: func(_ *s3test.Server, _ http.ResponseWriter, r *http.Request) bool {
			if read(r) {
				<-r.Context().Done()
			}
			return read(r)
		}},
		"trickles": {want: []string{"not done after 5s", "--snapshot-store-timeout"}, access: func(c *Config) { c.Timeout = 5 * time.Second }, hook: func(_ *s3test.Server, w http.ResponseWriter, r *http.Request) bool {
			if !read(r) {
				return false
			}
			w.Header().Set("Content-Length", "8000")
			for i := 0; i < 8000 && r.Context().Err() == nil; i++ {
				body(w, data[i:i+1])
				_ = http.NewResponseController(w).Flush()
				select {
				case <-r.Context().Done():
				case <-time.After(20 * time.Millisecond):
				}
			}
			return true
		}},
		"cuts off": {want: []string{"unexpected EOF"}, hook: func(_ *s3test.Server, w http.ResponseWriter, r *http.Request) bool {
			if read(r) {
				w.Header().Set("Content-Length", "8000")
				body(w, data[:4000])
				_ = http.NewResponseController(w).Flush()
				panic(http.ErrAbortHandler)
			}
			return false
		}},
		"ends early": {want: []string{"it reads otherwise"}, hook: func(_ *s3test.Server, w http.ResponseWriter, r *http.Request) bool {
			if read(r) {
				body(w, data[:4000])
			}
			return read(r)
		}},
		"changes a byte": {want: []string{"it reads otherwise"}, hook: func(_ *s3test.Server, w http.ResponseWriter, r *http.Request) bool {
			if read(r) {
				other := bytes.Clone(data)
				other[5000] ^= 1
				body(w, other)
			}
			return read(r)
		}},
		"receives something else": {want: []string{"BadDigest"}, hook: func(_ *s3test.Server, _ http.ResponseWriter, r *http.Request) bool {
			if part(r) {
				r.Body = io.NopCloser(io.LimitReader(r.Body, 100))
			}
			return false
		}},
		"copies a part": {want: []string{"has 7 bytes, and not 8000"}, hook: func(s *s3test.Server, w http.ResponseWriter, r *http.Request) bool {
			if r.Header.Get("X-Amz-Copy-Source") == "" {
				return false
			}
			s.Put(prefix+name, []byte("a part."), 0)
			_, _ = io.WriteString(w, "<CopyObjectResult><ETag>x</ETag></CopyObjectResult>")
			return true
		}},
		"is no store": {want: []string{"speaks no S3"}, left: true, hook: func(_ *s3test.Server, w http.ResponseWriter, _ *http.Request) bool {
			_, _ = io.WriteString(w, "<html><body>It works!<br></body></html>")
			return true
		}},
		"has no such bucket": {want: []string{"NoSuchBucket", "create the bucket elsewhere"}, access: func(c *Config) { c.Bucket = "elsewhere" }},
		"answers with a long error": {want: []string{"HTTP status 418", "tea  tea"}, hook: func(_ *s3test.Server, w http.ResponseWriter, _ *http.Request) bool {
			s3test.Refuse(w, http.StatusTeapot, "Teapot", "tea \n"+strings.Repeat("tea ", 10_000))
			return true
		}},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := s3test.New(t)
			if c.hook != nil {
				s.Hook = func(w http.ResponseWriter, r *http.Request) bool { return c.hook(s, w, r) }
			}
			var change []func(*Config)
			if c.access != nil {
				change = append(change, c.access)
			}
			begun := time.Now()
			err := put(t.Context(), of(t, s, change...), data)
			if err == nil || !strings.HasPrefix(err.Error(), "--snapshot-store https://127.0.0.1:") || len(err.Error()) > 1000 || strings.ContainsAny(err.Error(), "\n\x1b") {
				t.Fatalf("%v", err)
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%v: no %q", err, w)
				}
			}
			if took := time.Since(begun); took > time.Minute {
				t.Errorf("it took %s", took)
			}
			if got := append(s.Names(), s.Uploads()...); len(got) > 0 && !c.left || slices.Contains(got, prefix+name) {
				t.Errorf("left: %q", got)
			}
		})
	}
}

// TestConnections: what is wrong before a request.
func TestConnections(t *testing.T) {
	s := s3test.New(t)
	down := s3test.New(t)
	host := strings.TrimSuffix(strings.TrimPrefix(s.URL, "https://"), "/"+s3test.Bucket)
	for _, c := range []struct {
		b    *Bucket
		want string
	}{
		{bucketAt(t, s.URL), "name the file of the CA with --snapshot-store-ca"},
		{bucketAt(t, "http://"+host+"/"+s3test.Bucket), "write https://"},
		{bucketAt(t, "https://127.0.0.1:1/"+s3test.Bucket), "check that the store runs at that address"},
		{of(t, s, func(c *Config) { c.CA = "/none" }), "--snapshot-store-ca: open /none"},
		{of(t, s, func(c *Config) { c.CA = c.Credentials }), "it holds no certificate in PEM"},
		{of(t, s, func(c *Config) { c.Credentials = "/none" }), "--snapshot-store-credentials: stat /none"},
		{of(t, s, func(c *Config) { c.Credentials = keyFile(t, someKeys, 0o644) }), "(mode 0644): chmod 600"},
		{of(t, s, func(c *Config) { c.Credentials = keyFile(t, "[default]\naws_access_key_id = ID\n", 0o600) }), "lacks aws_access_key_id or aws_secret_access_key"},
		{of(t, s, func(c *Config) { c.Credentials = keyFile(t, "SECRET\n", 0o600) }), "it is not of the form"},
		{of(t, down, func(c *Config) { c.Credentials = "" }), "or set the variables AWS_ACCESS_KEY_ID"},
	} {
		t.Setenv("AWS_ACCESS_KEY_ID", "")
		err := put(t.Context(), c.b, nil)
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "SECRET") && !strings.Contains(c.want, "ACCESS") {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
	t.Setenv("AWS_ACCESS_KEY_ID", "ID")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
	if err := put(t.Context(), of(t, s, func(c *Config) { c.Credentials = "" }), nil); err != nil {
		t.Errorf("keys of the environment: %v", err)
	}
}

// TestLeadershipIsLost: in the middle of an upload, of which nothing stays.
func TestLeadershipIsLost(t *testing.T) {
	s := s3test.New(t)
	ctx, cancel := context.WithCancel(t.Context())
	err := of(t, s).Put(ctx, name, func(ctx context.Context, w io.Writer) error {
		if _, err := w.Write(make([]byte, partSize+1)); err != nil {
			return err
		}
		cancel()
		_, err := w.Write(make([]byte, partSize))
		return err
	}, func(context.Context, io.Reader) error { return nil })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if got := append(s.Names(), s.Uploads()...); len(got) > 0 {
		t.Errorf("left: %q", got)
	}
}

// TestThatCannotBeWritten: an error of this node is not the store's.
func TestThatCannotBeWritten(t *testing.T) {
	s := s3test.New(t)
	own := errors.New("the state is damaged")
	err := of(t, s).Put(t.Context(), name, func(_ context.Context, w io.Writer) error {
		_, err := w.Write(make([]byte, 100))
		return errors.Join(err, own)
	}, func(context.Context, io.Reader) error { return nil })
	if err == nil || err.Error() != own.Error() {
		t.Errorf("%v", err)
	}
	if got := append(s.Names(), s.Uploads()...); len(got) > 0 {
		t.Errorf("left: %q", got)
	}
}

// TestCleanUp: only what this node left of the cluster's snapshots, or another a day ago.
func TestCleanUp(t *testing.T) {
	s := s3test.New(t)
	const other = prefix + ".clusterd-snapshot-c_n2_"
	stay := []string{
		"site/.clusterd-snapshot-c_n1_1", other + "1", prefix + ".clusterd-snapshot-c-n1_1", prefix + ".clusterd-snapshot-d_n1_1", prefix + name, prefix + "notes.txt",
	}
	for _, key := range stay {
		s.Put(key, nil, 0)
		s.Begin(key, 0)
	}
	for _, key := range []string{own + "1", own + "2"} {
		s.Put(key, nil, 0)
		s.Begin(key, 0)
	}
	s.Put(other+"2", nil, 25*time.Hour)
	s.Begin(other+"2", 25*time.Hour)
	if err := of(t, s).CleanUp(t.Context(), "c", time.Now()); err != nil {
		t.Fatal(err)
	}
	slices.Sort(stay)
	if got := s.Names(); !slices.Equal(got, stay) {
		t.Errorf("objects %q, want %q", got, stay)
	}
	if got := s.Uploads(); !slices.Equal(got, stay) {
		t.Errorf("uploads %q, want %q", got, stay)
	}
}

// TestListingsThatLie: names that were not asked for are not used.
func TestListingsThatLie(t *testing.T) {
	s := s3test.New(t)
	s.Hook = func(w http.ResponseWriter, r *http.Request) bool {
		if !r.URL.Query().Has("list-type") {
			return false
		}
		_, _ = io.WriteString(w, "<ListBucketResult><Contents><Key>elsewhere</Key></Contents><Contents><Key>site/a/../c-20200101T030000Z.backup</Key></Contents>"+
			"<Contents><Key>site/a/c-20200101T030000Z.backup</Key></Contents></ListBucketResult>")
		return true
	}
	if names, err := of(t, s).Names(t.Context(), "c-"); err != nil || !slices.Equal(names, []string{"c-20200101T030000Z.backup"}) {
		t.Errorf("%q, %v", names, err)
	}
}

// TestGet: of an object that is there, and what is said of one that is not.
func TestGet(t *testing.T) {
	s := s3test.New(t)
	s.Put(prefix+name, []byte("data"), 0)
	s.Put(prefix+"c-20261126T030000Z.backup", []byte("older"), 0)
	s.Put(prefix+"notes.txt", nil, 0)
	get := func(url string) (string, error) {
		l, name, err := Split(url)
		if err != nil {
			t.Fatal(err)
		}
		var got []byte
		err = bucketAt(t, l.String(), func(c *Config) { c.CA, c.Flag = s.CA, "--from-snapshot" }).Get(t.Context(), name, func(r io.Reader) (err error) {
			got, err = io.ReadAll(r)
			return err
		})
		return string(got), err
	}
	if got, err := get(s.URL + "/" + prefix + name); got != "data" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	for _, url := range []string{s.URL + "/" + prefix + "c-20261128T030000Z.backup", s.URL + "/" + prefix} {
		if _, err := get(url); err == nil || !strings.Contains(err.Error(), "of 2 snapshots there the last by name is "+name) {
			t.Errorf("%s: %v", url, err)
		}
	}
	if _, err := get(s.URL + "/nothing/here"); err == nil || !strings.Contains(err.Error(), "no other snapshot") {
		t.Errorf("%v", err)
	}
	s.Hook = func(w http.ResponseWriter, _ *http.Request) bool {
		s3test.Refuse(w, http.StatusForbidden, "AccessDenied", "no")
		return true
	}
	if _, err := get(s.URL + "/" + name); err == nil || !strings.HasPrefix(err.Error(), "--from-snapshot "+s.URL+"/: HTTP status 403") {
		t.Errorf("%v", err)
	}
}

// TestKeysWithSigns: secrets are taken as they are written.
func TestKeysWithSigns(t *testing.T) {
	for _, secret := range []string{"a#b", "a #b", "a;b", "a ;b", `ab\`, "a/b+c="} {
		keys, err := Access{Credentials: keyFile(t, "[default]\naws_access_key_id = ID\naws_secret_access_key = "+secret+"\naws_session_token = T\n", 0o600)}.keys()
		if err != nil {
			t.Errorf("%s: %v", secret, err)
			continue
		}
		if v, err := keys.GetWithContext(nil); err != nil || v.SecretAccessKey != secret || v.SessionToken != "T" {
			t.Errorf("%q is read as %q, token %q, %v", secret, v.SecretAccessKey, v.SessionToken, err)
		}
	}
}

func TestParse(t *testing.T) {
	for text, want := range map[string]Location{
		"https://s3.example:9000/backups":      {Endpoint: "s3.example:9000", Bucket: "backups"},
		"https://s3.example/backups/":          {Endpoint: "s3.example", Bucket: "backups"},
		"http://192.0.2.7/backups/site/a":      {Endpoint: "192.0.2.7", Bucket: "backups", Prefix: "site/a/", Plain: true},
		"s3://backups/site":                    {Endpoint: amazon, Bucket: "backups", Prefix: "site/"},
		"https://[2001:db8::7]:9000/backups/a": {Endpoint: "[2001:db8::7]:9000", Bucket: "backups", Prefix: "a/"},
	} {
		got, err := Parse(text)
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
		if again, err := Parse(got.String()); err != nil || again != want {
			t.Errorf("%s again: %+v, %v", got, again, err)
		}
	}
	for text, want := range map[string]string{
		"/var/backups":                         "it names no host",
		"backups":                              "it names no host",
		"ftp://s3.example/backups":             `the scheme "ftp"`,
		"https://s3.example":                   `bucket ""`,
		"https://s3.example/B":                 `bucket "B"`,
		"https://key:secret@s3.example/bucket": "--snapshot-store-credentials",
		"https://s3.example/bucket?x=1":        "nothing may follow the path",
		"https://s3.example/bucket/a/../b":     `prefix "a/../b"`,
		"https://s3.example/bucket/a//b":       `prefix "a//b"`,
		"https://key:secret@s3 example/":       "it is no URL",
		"https://storage.googleapis.com/b-b":   "use another store",
		"https://Storage.googleapis.com:443/b": "use another store",
	} {
		if _, err := Parse(text); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}
