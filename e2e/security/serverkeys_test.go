package security

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"time"

	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/raftstore/peer"
)

// role is what clusterctl members calls a member.
func (s *suite) role(node string) (role string, voter bool) {
	var list struct {
		Members []struct{ Name, Role string }
	}
	if err := json.Unmarshal([]byte(s.ctl("members", "-o", "json")), &list); err != nil {
		s.t.Fatal(err)
	}
	for _, m := range list.Members {
		if m.Name == node {
			return m.Role, m.Role == "voter"
		}
	}
	return "", false
}

// nonVoterKey is a server's key that has no vote: agent a2, after its promotion, is the
// fourth server of three voters.
func nonVoterKey(s *suite) []attack {
	s.ctl("members", "promote", "a2")
	s.eventually("a2 is a server without a vote", func(ctx context.Context) error {
		role, voter := s.role("a2")
		if voter || role == "agent" || role == "joining" {
			return fmt.Errorf("it is %s", role)
		}
		return s.answered("a2", "n1")
	})
	id, voter := s.stolen("a2"), s.stolen("n2")
	out := raftAttacks("n1", "n2", id, voter)
	return append(out, raftAttacks("n3", "n2", id, voter)...)
}

// answered asks a member's store by another's key.
func (s *suite) answered(key, to string) error {
	n, err := s.memberCalls(s.stolen(key), to, peer.Frame{Kind: peer.KindProgress, Call: 1})
	if n > 0 {
		return nil
	}
	if err == nil {
		err = errors.New("the store refuses the call")
	}
	return err
}

// removedKeys are the keys of a server without a vote and of a voter, from the moment
// when they are removed.
func removedKeys(s *suite) []attack {
	var out []attack
	for _, victim := range []string{"a2", "n3"} {
		leader, _ := s.leads()
		if leader == victim {
			// The leader can be removed, too; who leads then is not what is looked at here.
			s.t.Logf("%s leads", victim)
		}
		id, config := s.stolen(victim), s.asNode(victim, "n1")
		keep := s.t.TempDir()
		for _, name := range []string{"ca.crt", "node.crt", "node.key"} {
			b, err := os.ReadFile(s.node(victim).Data + "/pki/" + name)
			if err != nil {
				s.t.Fatal(err)
			}
			if err := os.WriteFile(keep+"/"+name, b, 0o600); err != nil {
				s.t.Fatal(err)
			}
		}
		config.CertFile, config.KeyFile, config.CAFile = keep+"/node.crt", keep+"/node.key", keep+"/ca.crt"
		watch := s.watches(config)
		if err := s.answered(victim, "n1"); err != nil {
			s.t.Errorf("before its removal %s is not answered: %v", victim, err)
		}
		began := time.Now()
		s.ctl("members", "rm", "--yes", victim)
		removed := time.Since(began)
		out = append(out, attack{name: victim + ": its watch goes on", try: func(s *suite) verdict {
			select {
			case err := <-watch:
				return shut("%v", err)
			case <-time.After(waitLimit):
				return open("it is open after %s", waitLimit)
			}
		}})
		// The others' servers are asked one after the other; each has a second, and what a
		// busy machine needs.
		closed := func(what string, try func() verdict) {
			var v verdict
			since := time.Now()
			err := s.within(waitLimit, func(context.Context) error {
				if v = try(); v.open {
					return errors.New(v.said)
				}
				return nil
			})
			took := time.Since(since)
			out = append(out, attack{name: victim + ": " + what, try: func(*suite) verdict {
				if err != nil {
					return open("%v", err)
				}
				v.said = fmt.Sprintf("%s after its removal, which took %s: %s", took.Round(time.Millisecond), removed.Round(time.Millisecond), v.said)
				return v
			}})
		}
		for _, to := range []string{"n1", "n2"} {
			closed("raft at "+to, func() verdict { return s.refusedStream(id, to, peer.RaftStream) })
			closed("calls of the store at "+to, func() verdict { return s.refusedStream(id, to, peer.CallStream) })
			closed("gossip at "+to, func() verdict { return s.closes(id, to, transport.Gossip) })
			closed("node calls at "+to, func() verdict {
				code, body, err := s.httpOver(id, to, transport.Node, adminCaller, http.MethodGet, "/pods")
				if err != nil {
					return shut("%v", err)
				}
				return open("%d %.100s", code, body)
			})
			closed("the cluster's keys at "+to, func() verdict {
				_, err := join.FetchKeys(s.t.Context(), s.dials(id, to, transport.Member))
				if err != nil {
					return shut("%v", err)
				}
				return open("it has them")
			})
			closed("the API at "+to, func() verdict {
				c := rest.CopyConfig(config)
				c.Host = "https://" + s.addr(to).String()
				code, body, err := s.send(c, call{method: http.MethodGet, path: "/api/v1/nodes"}, false)
				if err != nil || code == http.StatusUnauthorized || code == http.StatusForbidden {
					return shut("%d %s %v", code, message(body), err)
				}
				return open("%d", code)
			})
			closed("a renewal at "+to, func() verdict {
				_, err := s.renewed(s.stolen("n2"), victim, victim)
				if err != nil {
					return shut("%v", err)
				}
				return open("it has another certificate")
			})
		}
		closed("node calls at the agent a1", func() verdict {
			code, body, err := s.httpOver(id, "a1", transport.Node, adminCaller, http.MethodGet, "/pods")
			if err != nil {
				return shut("%v", err)
			}
			return open("%d %.100s", code, body)
		})
		for _, a := range raftAttacks("n1", "n2", id, s.stolen("n2")) {
			a.name = victim + ": " + a.name
			a.control = nil // of the two servers that are left one alone has a vote
			out = append(out, a)
		}
	}
	return append(out, attack{name: "the cluster is not healthy without them", try: func(s *suite) verdict {
		if err := s.healthy("a1", "after-removal"); err != nil {
			return open("%v", err)
		}
		return shut("pods start")
	}, control: func(s *suite) error { return s.answered("n2", "n1") }})
}

// refusedStream opens a stream of the store.
func (s *suite) refusedStream(id transport.Identity, to string, kind byte) verdict {
	ctx, cancel := context.WithTimeout(s.t.Context(), opens)
	defer cancel()
	c, err := s.stream(ctx, id, to, kind, s.epoch())
	if err != nil {
		return shut("%v", err)
	}
	_ = c.Close()
	return open("it is taken")
}

// closes is door for a protocol that says nothing first.
func (s *suite) closes(id transport.Identity, to, protocol string) verdict {
	return s.door(id, to, protocol, nil)
}

// watches opens a watch and returns what ends it.
func (s *suite) watches(config *rest.Config) <-chan error {
	s.t.Helper()
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		s.t.Fatal(err)
	}
	res, err := client.Get(config.Host + "/api/v1/namespaces?watch=true")
	if err != nil {
		s.t.Fatal(err)
	}
	if res.StatusCode != http.StatusOK {
		s.t.Fatalf("a watch: %s", res.Status)
	}
	ended := make(chan error, 1)
	go func() {
		defer res.Body.Close()
		b := make([]byte, 4096)
		for {
			if _, err := res.Body.Read(b); err != nil {
				ended <- err
				return
			}
		}
	}()
	return ended
}
