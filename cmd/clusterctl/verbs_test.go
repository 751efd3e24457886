package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/cli-runtime/pkg/genericiooptions"
)

// server is a clusterd API server that answers what the test lays down.
type server struct {
	*httptest.Server
	mux *http.ServeMux

	mu   sync.Mutex
	seen []string // "METHOD path body"
}

func newServer(t *testing.T) *server {
	s := &server{mux: http.NewServeMux()}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasSuffix(r.URL.Path, "/load") {
			b, _ := io.ReadAll(r.Body)
			s.mu.Lock()
			s.seen = append(s.seen, strings.TrimSpace(fmt.Sprintf("%s %s %s", r.Method, r.URL.EscapedPath(), b)))
			s.mu.Unlock()
		}
		s.mux.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	return s
}

// answers lays down one JSON answer for a method and path.
func (s *server) answers(pattern string, code int, body string) {
	s.mux.HandleFunc(pattern, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		io.WriteString(w, body)
	})
}

// run runs clusterctl against the server.
func (s *server) run(t *testing.T, stdin io.Reader, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, errOut bytes.Buffer
	home := t.TempDir()
	root := newRoot(genericiooptions.IOStreams{In: stdin, Out: &out, ErrOut: &errOut}, kubeconfigSearch{home: filepath.Join(home, "none")})
	root.SetArgs(append(args, "--server", s.URL, "--cache-dir", home))
	err = execute(root)
	return out.String(), errOut.String(), err
}

const threeNodes = `{"kind":"NodeList","apiVersion":"v1","items":[
	{"metadata":{"name":"n2"},"status":{"conditions":[{"type":"Ready","status":"True"}]}},
	{"metadata":{"name":"n1"},"status":{"conditions":[{"type":"Ready","status":"True"}]}},
	{"metadata":{"name":"n3"},"status":{"conditions":[{"type":"Ready","status":"Unknown"}]}}]}`

const twoMembers = `{"members":[
	{"name":"n2","id":"id2","address":"10.0.0.2:6443","role":"nonvoter","leader":false,"gossip":"suspect"},
	{"name":"n1","id":"id1","address":"10.0.0.1:6443","role":"voter","leader":true,"gossip":"alive","applied":120,"lag":0}],
	"term":3,"leader":"n1"}`

const status404 = `{"kind":"Status","apiVersion":"v1","status":"Failure","message":"nodes \"n9\" not found","reason":"NotFound","code":404}`

func TestVerbs(t *testing.T) {
	for _, tt := range []struct {
		name   string
		lay    func(s *server)
		args   []string
		stdout string
		stderr string
		err    string // part of the error; "": none
		seen   []string
	}{
		{
			name: "members",
			lay:  func(s *server) { s.answers("GET /clusterd/v1/members", 200, twoMembers) },
			args: []string{"members"},
			stdout: `NAME   ROLE             ADDRESS         GOSSIP    APPLIED   LAG   VERSION
n1     voter (leader)   10.0.0.1:6443   alive     120       0     <none>
n2     nonvoter         10.0.0.2:6443   suspect   -         -     <none>
`,
			seen: []string{"GET /clusterd/v1/members"},
		},
		{
			name: "members without a leader",
			lay: func(s *server) {
				s.answers("GET /clusterd/v1/members", 200, `{"members":[{"name":"n1","role":"voter","gossip":"alive"},{"name":"n2","role":"voter","gossip":"dead"}],"term":3,"leader":""}`)
			},
			args: []string{"members"},
			stdout: `NAME   ROLE    ADDRESS   GOSSIP   APPLIED   LAG   VERSION
n1     voter   <none>    alive    -         -     <none>
n2     voter   <none>    dead     -         -     <none>
`,
			stderr: "No leader: 1 of 2 voters are alive and 2 are needed. Start clusterd on the others; nothing can be changed until then. If they are permanently lost: clusterctl recover.\n",
		},
		{
			name: "members as yaml",
			lay: func(s *server) {
				s.answers("GET /clusterd/v1/members", 200, `{"members":[{"name":"n1","id":"i","address":"a","role":"voter","leader":true,"gossip":"alive"}],"term":3,"leader":"n1"}`)
			},
			args: []string{"members", "-o", "yaml"},
			stdout: `leader: n1
members:
- address: a
  gossip: alive
  id: i
  leader: true
  name: n1
  role: voter
term: 3
`,
		},
		{
			name: "members of a server that is not clusterd",
			lay:  func(*server) {},
			args: []string{"members"},
			err:  "the server does not know /clusterd/v1/members: it is not a clusterd server",
		},
		{
			name:   "members rm",
			lay:    func(s *server) { s.answers("DELETE /clusterd/v1/members/{name}", 200, `{}`) },
			args:   []string{"members", "rm", "n3", "--yes"},
			stdout: "member \"n3\" removed\n",
			seen:   []string{"DELETE /clusterd/v1/members/n3"},
		},
		{
			name:   "members rm without an answer",
			lay:    func(s *server) { s.answers("DELETE /clusterd/v1/members/{name}", 200, `{}`) },
			args:   []string{"members", "rm", "n3"},
			stderr: "n3 is removed for good: its key is no longer accepted, and its Node object is deleted. To come back it must be reset and join again.\nGo on? [y/N] ",
			err:    "nothing was changed (give --yes when not interactive)",
		},
		{
			name: "members rm of an unknown one",
			lay: func(s *server) {
				s.answers("DELETE /clusterd/v1/members/{name}", 404, "{\"message\":\"no member is called \\\"x/y\\\"; `clusterctl members` lists them\"}")
			},
			args: []string{"members", "rm", "-y", "x/y"},
			err:  "remove member x/y: no member is called \"x/y\"; `clusterctl members` lists them",
			seen: []string{"DELETE /clusterd/v1/members/x%2Fy"},
		},
		{
			name: "token create",
			lay: func(s *server) {
				s.answers("POST /clusterd/v1/tokens", 201, `{"token":"abc.def","id":"abc","joinCommand":"clusterd join 10.0.0.1:6443 --token abc.def"}`)
			},
			args:   []string{"token", "create", "--ttl", "30m"},
			stdout: "clusterd join 10.0.0.1:6443 --token abc.def\n",
			stderr: "Valid for 30m and one machine; run this as root on the machine that is to become a server (as a service: with --prepare behind it, then systemctl enable --now clusterd):\n",
			seen:   []string{`POST /clusterd/v1/tokens {"ttl":"30m0s","role":"server","uses":1}`},
		},
		{
			name: "token create as json",
			lay: func(s *server) {
				s.answers("POST /clusterd/v1/tokens", 201, `{"token":"abc.def","joinCommand":"clusterd join x"}`)
			},
			args:   []string{"token", "create", "-o", "json"},
			stdout: "{\n    \"token\": \"abc.def\",\n    \"joinCommand\": \"clusterd join x\"\n}\n",
			seen:   []string{`POST /clusterd/v1/tokens {"ttl":"24h0m0s","role":"server","uses":1}`},
		},
		{
			name: "token create without a leader",
			lay: func(s *server) {
				s.answers("POST /clusterd/v1/tokens", 503, `{"message":"no leader"}`)
			},
			args: []string{"token", "create"},
			err:  "create a token: no leader",
		},
		{
			name:   "token ls of none",
			lay:    func(s *server) { s.answers("GET /clusterd/v1/tokens", 200, `{"tokens":[]}`) },
			args:   []string{"token", "ls"},
			stderr: "No tokens; create one with: clusterctl token create\n",
		},
		{
			name: "token ls",
			lay: func(s *server) {
				s.answers("GET /clusterd/v1/tokens", 200, `{"tokens":[{"id":"abc","role":"agent","uses":2,"used":1,"created":"2001-01-01T00:00:00Z","expires":"2001-01-02T00:00:00Z"}]}`)
			},
			args:   []string{"token", "ls", "-o", "json"},
			stdout: "{\n    \"tokens\": [\n        {\n            \"id\": \"abc\",\n            \"role\": \"agent\",\n            \"uses\": 2,\n            \"used\": 1,\n            \"created\": \"2001-01-01T00:00:00Z\",\n            \"expires\": \"2001-01-02T00:00:00Z\"\n        }\n    ]\n}\n",
		},
		{
			name:   "token rm",
			lay:    func(s *server) { s.answers("DELETE /clusterd/v1/tokens/{id}", 200, `{}`) },
			args:   []string{"token", "rm", "abc"},
			stdout: "token \"abc\" removed\n",
			seen:   []string{"DELETE /clusterd/v1/tokens/abc"},
		},
		{
			name: "store status",
			lay: func(s *server) {
				s.answers("GET /clusterd/v1/store", 200, `{"id":"id1","state":"Leader","term":3,"lastContactNanoseconds":1500000000,
					"keyspace":{"revision":42,"bytes":2048,"hash":18446744073709551615},"logFileBytes":5242880,
					"members":[{"id":"id1","voter":true},{"id":"id2","voter":false}]}`)
			},
			args: []string{"store", "status"},
			stdout: `Id:                  id1
State:               Leader
Term:                3
Last contact:        1.5s
Keyspace revision:   42
Keyspace size:       2.0 KiB
Keyspace hash:       18446744073709551615
Log file size:       5.0 MiB

Members:
ID    VOTER
id1   true
id2   false
`,
		},
		{
			name: "store top",
			lay: func(s *server) {
				s.answers("GET /clusterd/v1/store/top", 200, `{"time":1,"writers":[
					{"origin":"system:node:n1","writes":40,"bytes":4096,"writesPerSecond1m":1.5,"bytesPerSecond1m":2048,"writesPerSecond5m":0.25,"historyBytes":33554432,"heldBack":true},
					{"origin":"","writes":1,"bytes":10}, {"origin":"third","writes":1}],
					"folders":[{"folder":"/registry/core/pods/default/","live":{"keys":3,"bytes":3072},"quota":1048576,"writes":9,"bytes":100},
					{"folder":"/registry/apps/deployments/default/","live":{"keys":1,"bytes":100}},{"folder":"/clusterd/members/","live":{"keys":1,"bytes":1}}],
					"live":{"keys":5,"bytes":3173},"quotaBytes":8589934592,"reserveBytes":1,
					"history":{"bytes":67108000,"maxBytes":67108864,"ageMillis":240000,"maxAgeMillis":3600000}}`)
			},
			args: []string{"store", "top", "--limit", "2"},
			stdout: `WRITER           WRITES/S 1M   WRITES/S 5M   BYTES/S 1M   WRITES   WRITTEN   HISTORY   HELD BACK
system:node:n1   1.50          0.25          2.0 KiB      40       4.0 KiB   50 %      yes
<unknown>        0.00          0.00          0 B          1        10 B      0 %       no

KIND               NAMESPACE   OBJECTS   SIZE      QUOTA     WRITES/S 1M   WRITES/S 5M   BYTES/S 1M   WRITES   WRITTEN
pods               default     3         3.0 KiB   1.0 MiB   0.00          0.00          0 B          9        100 B
deployments.apps   default     1         100 B     -         0.00          0.00          0 B          0        0 B

In all 5 objects, 3.1 KiB of 8.0 GiB.
The history has 64.0 MiB of 64.0 MiB and reaches 4m back, of 60m: it is full; raise storeHistorySize or find who writes so much.
`,
		},
		{
			name: "image ls",
			lay: func(s *server) {
				s.answers("GET /api/v1/nodes", 200, threeNodes)
				s.answers("GET /api/v1/nodes/n1/proxy/images", 200, `{"images":[{"refs":["hello:1","hello:latest"],"id":"sha256:0123456789abcdef","size":5242880,"pinned":true}]}`)
				s.answers("GET /api/v1/nodes/n2/proxy/images", 200, `{"images":[{"refs":["hello:1"],"id":"sha256:0123456789abcdef","size":5242880},{"refs":[],"id":"sha256:fedcba9876543210","size":100}]}`)
			},
			args: []string{"image", "ls"},
			stdout: `IMAGE          ID             SIZE      PINNED   NODES
<none>         fedcba987654   100 B     -        n2
hello:1        0123456789ab   5.0 MiB   on 1     all 2
hello:latest   0123456789ab   5.0 MiB   yes      n1
`,
			stderr: "Left out because not Ready: n3 (use --all to try them too)\n",
		},
		{
			name:   "image ls of one node",
			lay:    func(s *server) { s.answers("GET /api/v1/nodes/n1/proxy/images", 200, `{"images":[]}`) },
			args:   []string{"image", "ls", "--node", "n1", "-o", "json"},
			stdout: "{\n    \"nodes\": [\n        {\n            \"node\": \"n1\",\n            \"images\": []\n        }\n    ]\n}\n",
			seen:   []string{"GET /api/v1/nodes/n1/proxy/images"},
		},
		{
			name: "image ls of an unknown node",
			lay:  func(s *server) { s.answers("GET /api/v1/nodes/n9/proxy/images", 404, status404) },
			args: []string{"image", "ls", "--node", "n9"},
			err:  `list images on node n9: nodes "n9" not found`,
		},
		{
			name: "image ls where no node is Ready",
			lay: func(s *server) {
				s.answers("GET /api/v1/nodes", 200, `{"kind":"NodeList","apiVersion":"v1","items":[]}`)
			},
			args: []string{"image", "ls"},
			err:  "no node is Ready (0 are known); see: clusterctl get nodes",
		},
		{
			name: "image rm",
			lay: func(s *server) {
				s.answers("GET /api/v1/nodes", 200, threeNodes)
				s.answers("DELETE /api/v1/nodes/n1/proxy/images", 200, `{}`)
				s.answers("DELETE /api/v1/nodes/n2/proxy/images", 409, `{"kind":"Status","apiVersion":"v1","status":"Failure","message":"remove image hello:1: image is in use: pod default/web names it","code":409}`)
			},
			args:   []string{"image", "rm", "hello:1"},
			stdout: "n1: image \"hello:1\" removed\n",
			stderr: "Left out because not Ready: n3 (use --all to try them too)\n",
			err:    "remove image hello:1 failed on 1 of 2 nodes:\n  n2: remove image hello:1: image is in use: pod default/web names it\nTry these again with: --node n2",
		},
		{
			name:   "image pin",
			lay:    func(s *server) { s.answers("PUT /api/v1/nodes/n1/proxy/images/pin", 200, `{}`) },
			args:   []string{"image", "pin", "hello:1", "--node", "n1"},
			stdout: "n1: image \"hello:1\" pinned\n",
			seen:   []string{"PUT /api/v1/nodes/n1/proxy/images/pin"},
		},
		{
			name: "image preload",
			lay: func(s *server) {
				s.answers("POST /api/v1/nodes/n1/proxy/images/preload", 200, `{}`)
				s.answers("POST /api/v1/nodes/n2/proxy/images/preload", 422, `{"kind":"Status","apiVersion":"v1","status":"Failure","message":"preload image: pull docker.io/library/hello:1: the registry says: UNAUTHORIZED","code":422}`)
			},
			args:   []string{"image", "preload", "hello:1", "--node", "n1,n2"},
			stdout: "n1: image \"hello:1\" preloaded\n",
			err:    "preload image hello:1 failed on 1 of 2 nodes:\n  n2: preload image: pull docker.io/library/hello:1: the registry says: UNAUTHORIZED\nTry these again with: --node n2",
		},
		{
			name: "image ls, while one is pulled",
			lay: func(s *server) {
				s.answers("GET /api/v1/nodes/n1/proxy/images", 200, `{"images":[],"pulling":[{"ref":"docker.io/library/big:1","done":1048576,"total":5242880}]}`)
			},
			args: []string{"image", "ls", "--node", "n1", "-o", "json"},
			stdout: `{
    "nodes": [
        {
            "node": "n1",
            "images": [],
            "pulling": [
                {
                    "ref": "docker.io/library/big:1",
                    "done": 1048576,
                    "total": 5242880
                }
            ]
        }
    ]
}
`,
			stderr: "n1: pulling docker.io/library/big:1, 1.0 MiB of 5.0 MiB\n",
		},
		{
			name: "image prune",
			lay: func(s *server) {
				s.answers("POST /api/v1/nodes/n1/proxy/images/prune", 200, `{"images":[{"refs":["a:1"],"id":"sha256:0123456789abcdef","size":5242880}]}`)
				s.answers("POST /api/v1/nodes/n2/proxy/images/prune", 200, `{"images":[]}`)
			},
			args:   []string{"image", "prune", "--node", "n1,n2"},
			stdout: "n1: 1 image removed, 5.0 MiB freed\nn2: nothing to remove\n",
		},
		{
			name:   "version",
			lay:    func(s *server) { s.answers("GET /version", 200, `{"gitVersion":"v1.37.2"}`) },
			args:   []string{"version"},
			stdout: fmt.Sprintf("Client Version: %s (Kubernetes %s)\nServer Version: v1.37.2\n", version(), kubernetesVersion()),
		},
		{name: "bad output", lay: func(*server) {}, args: []string{"members", "-o", "xml"}, err: `--output must be json or yaml, not "xml"`},
		{name: "bad ttl", lay: func(*server) {}, args: []string{"token", "create", "--ttl", "-1h"}, err: "--ttl must be a positive duration"},
		{name: "no id", lay: func(*server) {}, args: []string{"token", "rm"}, err: "clusterctl token rm needs the id of a token; see: clusterctl token ls"},
		{name: "unknown verb", lay: func(*server) {}, args: []string{"imag"}, err: `unknown command "imag" for "clusterctl"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newServer(t)
			tt.lay(s)
			stdout, stderr, err := s.run(t, strings.NewReader(""), tt.args...)
			switch {
			case err == nil && tt.err != "":
				t.Errorf("no error, want %q", tt.err)
			case err != nil && (tt.err == "" || !strings.Contains(err.Error(), tt.err)):
				t.Errorf("error %q, want %q", err, tt.err)
			}
			if diff := cmp.Diff(tt.stdout, stdout); diff != "" {
				t.Errorf("stdout (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.stderr, stderr); diff != "" {
				t.Errorf("stderr (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.seen, s.seen); tt.seen != nil && diff != "" {
				t.Errorf("requests (-want +got):\n%s", diff)
			}
		})
	}
}

// imageTar is an archive that looks like one of images.
func imageTar(t *testing.T, payload string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: "manifest.json", Mode: 0o644, Size: int64(len(payload))}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, payload); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func gzipped(t *testing.T, b []byte) []byte {
	t.Helper()
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return z.Bytes()
}

func TestImageLoad(t *testing.T) {
	archive := imageTar(t, strings.Repeat("layer ", 10000))
	for _, tt := range []struct {
		name  string
		file  []byte // nil: standard input has the archive
		args  []string
		nodes []string // that got it
		err   string
	}{
		{name: "ready nodes", file: archive, nodes: []string{"n1", "n2"}},
		{name: "compressed", file: gzipped(t, archive), nodes: []string{"n1", "n2"}},
		{name: "standard input", nodes: []string{"n1", "n2"}},
		{name: "one node", file: archive, args: []string{"--node", "n1"}, nodes: []string{"n1"}},
		{name: "all nodes", file: archive, args: []string{"--all"}, nodes: []string{"n1", "n2"},
			err: "load FILE failed on 1 of 3 nodes:\n  n3: the node is away\nTry these again with: --node n3"},
		{name: "not an archive", file: []byte(strings.Repeat("text", 1000)), err: "is not an image archive"},
		{name: "empty file", file: []byte{}, err: "is not an image archive"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newServer(t)
			s.answers("GET /api/v1/nodes", 200, threeNodes)
			s.answers("POST /api/v1/nodes/n3/proxy/images/load", 502, `{"message":"the node is away"}`)
			var mu sync.Mutex
			got := map[string][]byte{}
			s.mux.HandleFunc("POST /api/v1/nodes/{node}/proxy/images/load", func(w http.ResponseWriter, r *http.Request) {
				b, err := io.ReadAll(r.Body)
				if err != nil {
					t.Errorf("read the archive: %v", err)
				}
				mu.Lock()
				got[r.PathValue("node")] = b
				mu.Unlock()
				json.NewEncoder(w).Encode(loadedImages{Images: []loadedImage{{Ref: "hello:1", Digest: "sha256:0123456789abcdef", Size: 5 << 20}}})
			})
			file, stdin := "-", io.Reader(bytes.NewReader(archive))
			if tt.file != nil {
				file, stdin = filepath.Join(t.TempDir(), "FILE"), nil
				if err := os.WriteFile(file, tt.file, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			t.Setenv("TMPDIR", t.TempDir())
			stdout, _, err := s.run(t, stdin, append([]string{"image", "load", file}, tt.args...)...)
			switch {
			case err == nil && tt.err != "":
				t.Errorf("no error, want %q", tt.err)
			case err != nil && (tt.err == "" || !strings.Contains(err.Error(), tt.err)):
				t.Errorf("error %q, want %q", err, tt.err)
			}
			for _, node := range tt.nodes {
				if !bytes.Equal(got[node], archive) {
					t.Errorf("%s got %d bytes, want the archive of %d", node, len(got[node]), len(archive))
				}
				if want := node + ": loaded hello:1 (0123456789ab, 5.0 MiB) in "; !strings.Contains(stdout, want) {
					t.Errorf("output %q lacks %q", stdout, want)
				}
			}
			if len(got) != len(tt.nodes) {
				t.Errorf("%d nodes got the archive, want %v", len(got), tt.nodes)
			}
			if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "clusterctl-image-*")); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

func TestProgressLine(t *testing.T) {
	p := newProgress(io.Discard, "a.tar", 2048, []string{"n1", "n2", "n3", "n4"})
	p.sent("n1", 512)
	p.sent("n2", 2048)
	p.sent("n3", 2048)
	p.done("n3")
	if got, want := p.line(), "a.tar (2.0 KiB): n1 25%, n2 unpacking, 1 waiting"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	p.stop()
	p.stop()
}
