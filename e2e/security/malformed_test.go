package security

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/raftstore/peer"
)

// messages is how many malformed ones each door gets.
const messages = 1000

// listens is how long an answer to one of them is waited for.
const listens = 500 * time.Millisecond

// target is a door for malformed messages.
type target struct {
	name string
	// open makes a connection, of which each may carry several messages; a write or
	// read that fails opens the next.
	open func(s *suite) (net.Conn, error)
	// message is one of them. It must not be one that the protocol knows.
	message func(r *rand.Rand) []byte
	// packets: there are no connections to be closed.
	packets bool
}

// noise is random bytes.
func noise(r *rand.Rand, limit int) []byte {
	b := make([]byte, 1+r.IntN(limit))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// oneOf picks one of some generators.
func oneOf(list ...func(*rand.Rand) []byte) func(*rand.Rand) []byte {
	return func(r *rand.Rand) []byte { return list[r.IntN(len(list))](r) }
}

func fixed(b string) func(*rand.Rand) []byte { return func(*rand.Rand) []byte { return []byte(b) } }

// frame is a frame of the store's calls whose length may be untrue, of a kind that is
// none.
func frame(r *rand.Rand) []byte {
	body := noise(r, 200)
	n := uint32(9 + len(body))
	if r.IntN(3) == 0 {
		n = r.Uint32()
	}
	b := binary.LittleEndian.AppendUint32(nil, n)
	b = append(b, 100+byte(r.IntN(100)))
	return append(binary.LittleEndian.AppendUint64(b, r.Uint64()), body...)
}

// shortFrame is a frame of a kind that there is, with a body that it cannot have.
func shortFrame(r *rand.Rand) []byte {
	kinds := []byte{peer.KindSubmit, peer.KindHash, peer.KindDiffers, peer.KindLeaderless, peer.KindMember}
	body := noise(r, 6)
	b := binary.LittleEndian.AppendUint32(nil, uint32(9+len(body)))
	b = append(b, kinds[r.IntN(len(kinds))])
	b = binary.LittleEndian.AppendUint64(b, r.Uint64())
	body[0] = 0xff // no operation on members has this number
	return append(b, body...)
}

// h2 is a frame of HTTP/2.
func h2(r *rand.Rand) []byte {
	body := noise(r, 100)
	n := len(body)
	if r.IntN(3) == 0 {
		n = r.IntN(1 << 24)
	}
	b := []byte{byte(n >> 16), byte(n >> 8), byte(n), byte(r.IntN(12)), byte(r.Uint32())}
	return append(binary.BigEndian.AppendUint32(b, r.Uint32()), body...)
}

const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"

// question is a message of DNS that is nearly one.
func question(r *rand.Rand) []byte {
	b := noise(r, 64)
	head := binary.BigEndian.AppendUint16(nil, uint16(r.Uint32()))
	for range 5 {
		head = binary.BigEndian.AppendUint16(head, uint16(r.IntN(4)*r.IntN(70000)))
	}
	pointer := []byte{0xc0, byte(12 + r.IntN(8))} // a name that points at itself
	return append(append(head, pointer...), b...)
}

// request is a request of HTTP that is none.
var request = oneOf(
	fixed("GET / HTTP/9.9\r\n\r\n"), fixed("GET  / HTTP/1.1\r\n\r\n"), fixed("POST /v1/join HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n"),
	fixed("POST /v1/join HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n\r\n"),
	fixed("POST /v1/join HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n"),
	fixed("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"), fixed("GET / HTTP/1.1\r\n"+strings.Repeat("X", 100)+"\r\n\r\n"),
	func(r *rand.Rand) []byte {
		return []byte("GET /" + strings.Repeat("a", r.IntN(70_000)) + " HTTP/1.1\r\nHost: x\r\n\r\n")
	},
	func(r *rand.Rand) []byte { return noise(r, 300) },
)

// body is a request to join whose JSON is none, or makes no sense.
func body(r *rand.Rand) []byte {
	texts := []string{"", "{", "null", "[]", `{"name":`, `{"name":1}`, `{"addr":"x"}`, `{"csr":"!"}`, strings.Repeat("[", 10_000), `{"name":"` + strings.Repeat("n", r.IntN(100_000)) + `"}`,
		string(noise(r, 500)), `{"tokenID":"` + strings.Repeat("../", 20) + `","name":"x","addr":"10.85.0.1:1","csr":"AA=="}`}
	b := texts[r.IntN(len(texts))]
	return fmt.Appendf(nil, "POST /v1/join HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(b), b)
}

// dialTLS is who shows nothing.
func dialTLS(node, port string, protocols ...string) func(*suite) (net.Conn, error) {
	return func(s *suite) (net.Conn, error) {
		d := tls.Dialer{NetDialer: &net.Dialer{Timeout: opens}, Config: &tls.Config{InsecureSkipVerify: true, NextProtos: protocols}}
		return d.DialContext(s.t.Context(), "tcp", net.JoinHostPort(s.node(node).Addr.String(), port))
	}
}

// dialAs is who has stolen a key that may use a protocol.
func dialAs(key, to, protocol string, greeting ...byte) func(*suite) (net.Conn, error) {
	return func(s *suite) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(s.t.Context(), opens)
		defer cancel()
		id := s.stolen(key)
		if len(greeting) > 0 {
			return s.stream(ctx, id, to, greeting[0], s.epoch())
		}
		return id.Dial(ctx, s.addr(to), "", protocol)
	}
}

func dialIn(node, network string, addr func(*suite) string) func(*suite) (net.Conn, error) {
	return func(s *suite) (c net.Conn, err error) {
		err = s.Do(node, func() error {
			c, err = (&net.Dialer{Timeout: opens}).DialContext(s.t.Context(), network, addr(s))
			return err
		})
		return c, err
	}
}

func plain(network string, addr func(*suite) string) func(*suite) (net.Conn, error) {
	return func(s *suite) (net.Conn, error) {
		return (&net.Dialer{Timeout: opens}).DialContext(s.t.Context(), network, addr(s))
	}
}

func at(node string) func(*suite) string {
	return func(s *suite) string { return s.addr(node).String() }
}

// dnsServer is where names are answered, on each node.
func dnsServer(*suite) string { return "10.96.0.10:53" }

func someNoise(r *rand.Rand) []byte { return noise(r, 2000) }

// targets are all doors of servers and agents.
var targets = []target{
	{name: "bytes in place of TLS", open: plain("tcp", at("n1")), message: someNoise},
	{name: "a hello of TLS that is wrong", open: plain("tcp", at("n2")), message: func(r *rand.Rand) []byte {
		b := noise(r, 600)
		return append([]byte{22, 3, 1, byte(len(b) >> 8), byte(len(b)), 1, 0, byte(len(b) >> 8), byte(len(b)), 3, 3}, b...)
	}},
	{name: "bytes in place of TLS at an agent", open: plain("tcp", at("a1")), message: someNoise},
	{name: "the API's HTTP/1.1", open: dialTLS("n1", "6443", "http/1.1"), message: request},
	{name: "the API's HTTP/2", open: dialTLS("n2", "6443", "h2"), message: oneOf(func(r *rand.Rand) []byte { return append([]byte(preface), h2(r)...) }, someNoise)},
	{name: "HTTP/2 that takes back what it asks", open: dialTLS("n3", "6443", "h2"), message: resets},
	{name: "HTTP/2 with headers without end", open: dialTLS("n1", "6443", "h2"), message: continuations},
	{name: "joining", open: dialTLS("n2", "6443", transport.Join), message: oneOf(body, request)},
	{name: "the store's streams, by a voter's key", open: dialAs("n2", "n1", transport.Raft), message: func(r *rand.Rand) []byte { return append([]byte{0xff}, noise(r, 200)...) }},
	{name: "raft's messages, by a voter's key", open: dialAs("n2", "n1", transport.Raft, peer.RaftStream), message: func(r *rand.Rand) []byte { return append([]byte{100 + byte(r.IntN(100))}, noise(r, 300)...) }},
	{name: "the store's calls, by a voter's key", open: dialAs("n2", "n3", transport.Raft, peer.CallStream), message: oneOf(frame, shortFrame)},
	{name: "gossip's streams, by a server's key", open: dialAs("n2", "n1", transport.Gossip), message: someNoise},
	{name: "gossip's packets", open: plain("udp", at("n1")), message: oneOf(someNoise, func(r *rand.Rand) []byte { return append([]byte{byte(r.IntN(14))}, noise(r, 400)...) }), packets: true},
	{name: "node calls, by a server's key", open: dialAs("n1", "a1", transport.Node), message: request},
	{name: "members' questions, by an agent's key", open: dialAs("a1", "n1", transport.Member), message: request},
	{name: "tunnels, by an agent's key", open: dialAs("a1", "n2", transport.Tunnel), message: someNoise},
	{name: "the kubelet's port", open: dialTLS("a1", "10250"), message: request},
	{name: "the cluster's DNS by UDP", open: dialIn("n1", "udp", dnsServer), message: oneOf(question, someNoise), packets: true},
	{name: "the cluster's DNS by TCP", open: dialIn("n1", "tcp", dnsServer), message: func(r *rand.Rand) []byte {
		b := question(r)
		return append(binary.BigEndian.AppendUint16(nil, uint16(len(b)+r.IntN(2)*1000)), b...)
	}},
}

// resets opens streams and takes them back (CVE-2023-44487).
func resets(*rand.Rand) []byte {
	b := bytes.NewBufferString(preface)
	for id := uint32(1); id < 200; id += 2 {
		block := []byte{0x82, 0x84, 0x87, 0x41, 1, 'x'}
		b.Write([]byte{0, 0, byte(len(block)), 1, 5})
		_ = binary.Write(b, binary.BigEndian, id)
		b.Write(block)
		b.Write([]byte{0, 0, 4, 3, 0})
		_ = binary.Write(b, binary.BigEndian, id)
		b.Write([]byte{0, 0, 0, 8})
	}
	return b.Bytes()
}

// continuations are headers that do not end.
func continuations(*rand.Rand) []byte {
	b := bytes.NewBufferString(preface)
	b.Write([]byte{0, 0, 1, 1, 0, 0, 0, 0, 1, 0x82})
	for range 64 {
		field := append([]byte{0, 1, 'a', 0x7f, 0x80, 0x01}, bytes.Repeat([]byte{'v'}, 255)...)
		b.Write([]byte{0, byte(len(field) >> 8), byte(len(field)), 9, 0, 0, 0, 0, 1})
		b.Write(field)
	}
	return b.Bytes()
}

// flood sends the messages, several connections at a time.
func (d target) flood(s *suite) (sent, connections int64, err error) {
	var next, opened, failed atomic.Int64
	var wg sync.WaitGroup
	var last atomic.Value
	for worker := range 16 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(worker)))
			for next.Add(1) <= messages {
				c, err := d.open(s)
				if err != nil {
					last.Store(err)
					if failed.Add(1) > messages/2 {
						return
					}
					continue
				}
				opened.Add(1)
				_ = c.SetDeadline(time.Now().Add(opens))
				_, _ = c.Write(d.message(r))
				if !d.packets {
					// What it says is not looked at, and some wait for more to come.
					_ = c.SetReadDeadline(time.Now().Add(listens))
					if w, ok := c.(interface{ CloseWrite() error }); ok {
						_ = w.CloseWrite()
					}
					_, _ = io.Copy(io.Discard, io.LimitReader(c, 1<<20))
				}
				_ = c.Close()
			}
		})
	}
	wg.Wait()
	if failed.Load() > messages/2 {
		err = fmt.Errorf("most connections were refused: %v", last.Load())
	}
	return min(next.Load(), messages), opened.Load(), err
}

// resident is the memory of a node's clusterd.
func (s *suite) resident(node string) (int64, error) {
	pid, err := s.Pid(node)
	if err != nil {
		return 0, err
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		var n int64
		if _, err := fmt.Sscanf(line, "VmRSS: %d kB", &n); err == nil {
			return n << 10, nil
		}
	}
	return 0, errors.New("no VmRSS")
}

// grows is how much more memory a node may hold after a flood than before it.
const grows = 256 << 20

// malformed floods each door, while an administrator asks every server all the time.
func malformed(*suite) []attack {
	var out []attack
	for _, d := range targets {
		out = append(out, attack{name: d.name, try: func(s *suite) verdict {
			leader, term := s.leads()
			before, pids := map[string]int64{}, map[string]int{}
			for _, n := range s.Nodes() {
				var err error
				if before[n.Name], err = s.resident(n.Name); err != nil {
					return broken(err)
				}
				if pids[n.Name], err = s.Pid(n.Name); err != nil {
					return broken(err)
				}
			}
			stop := s.asksMeanwhile()
			sent, opened, err := d.flood(s)
			fine, ferr := stop()
			if err != nil {
				return broken(err)
			}
			if ferr != nil || fine == 0 {
				return open("others are not served meanwhile: %d answers, %v", fine, ferr)
			}
			if l, now := s.leads(); l != leader || now != term {
				return open("%s led in term %d, now %s leads in term %d", leader, term, l, now)
			}
			most := int64(0)
			if err := s.within(waitLimit, func(context.Context) error {
				most = 0
				for _, n := range s.Nodes() {
					now, err := s.resident(n.Name)
					if err != nil {
						return err
					}
					if pid, _ := s.Pid(n.Name); pid != pids[n.Name] {
						return fmt.Errorf("clusterd of %s was started anew", n.Name)
					}
					most = max(most, now-before[n.Name])
					if now-before[n.Name] > grows {
						return fmt.Errorf("%s has %d MiB more", n.Name, (now-before[n.Name])>>20)
					}
				}
				return nil
			}); err != nil {
				return open("%v", err)
			}
			return shut("%d messages over %d connections; %d answers to others meanwhile; at most %d MiB more", sent, opened, fine, most>>20)
		}})
	}
	out[0].control = func(s *suite) error {
		code, _, err := s.send(s.admin, call{method: http.MethodGet, path: "/readyz"}, false)
		if err == nil && code != http.StatusOK {
			err = fmt.Errorf("%d", code)
		}
		return err
	}
	return out
}

// asksMeanwhile asks every server without a pause until stop, which says how many
// answers there were, and the first error.
func (s *suite) asksMeanwhile() (stop func() (int64, error)) {
	ctx, cancel := context.WithCancel(s.t.Context())
	var answers atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, 16)
	for _, n := range s.Nodes() {
		if n.Agent {
			continue
		}
		api, _, err := s.Client(n.Name)
		if err != nil {
			s.t.Fatal(err)
		}
		wg.Go(func() {
			for ctx.Err() == nil {
				ask, done := context.WithTimeout(ctx, opens)
				_, err := api.CoreV1().Namespaces().Get(ask, ns, metav1.GetOptions{})
				done()
				switch {
				case err == nil:
					answers.Add(1)
				case ctx.Err() == nil:
					select {
					case errs <- fmt.Errorf("%s: %w", n.Name, err):
					default:
					}
					return
				}
			}
		})
	}
	return func() (int64, error) {
		cancel()
		wg.Wait()
		close(errs)
		return answers.Load(), <-errs
	}
}
