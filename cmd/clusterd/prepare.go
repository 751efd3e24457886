package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/gossipkey"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/servers"
	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/raftstore"
)

// prepareInit writes the data directory of a cluster's first node. On error
// nothing of it stays.
func prepareInit(cfg Config) error {
	if err := errors.Join(checkClockBefore("begin a cluster"), cfg.checkFirstFamily(), cfg.checkAccess()); err != nil {
		return err
	}
	return prepare(cfg, func(dir nodedir.KeyDir) error {
		now := time.Now()
		ca, err := pki.NewCA("cluster", now)
		if err != nil {
			return err
		}
		trust := pki.NewTrust(0, ca)
		if os.Getenv(oneAuthorityEnv) == "" {
			if trust, err = trust.Separate(now); err != nil {
				return err
			}
		}
		id := &nodedir.Identity{Trust: trust, Ring: gossipkey.Ring{Keys: [][]byte{gossipkey.New()}}}
		if id.Key, err = pki.NewKey(); err != nil {
			return err
		}
		if id.Cert, err = ca.Shorter(debugCertLife()).IssueServer(id.Key.Public(), cfg.Name, certAddrs(cfg), now, certNames(cfg)...); err != nil {
			return err
		}
		if err := dir.WriteBootstrap(join.Cluster{
			Name:        "clusterd",
			ClusterCIDR: cfg.podRanges(),
			ServiceCIDR: cfg.serviceRanges(),
			Created:     now.UTC(),

			PodEncryption: cfg.PodEncryption,
		}); err != nil {
			return err
		}
		if err := raftstore.SetEpoch(dir.Path("store"), raftstore.NewEpoch(0)); err != nil {
			return err
		}
		if err := writeConfig(dir.Dir, cfg); err != nil {
			return err
		}
		return dir.WriteIdentity(id)
	})
}

// prepareJoin asks a member for admission and writes the data directory. Without a
// token it waits for a person's approval before. On error nothing of it stays. cfg
// has the cluster's settings afterwards.
func prepareJoin(ctx context.Context, cfg *Config, server string, token *pki.Token, progress io.Writer) error {
	return prepare(*cfg, func(dir nodedir.KeyDir) error {
		key, err := pki.NewKey()
		if err != nil {
			return err
		}
		wish := join.Options{Server: server, Name: cfg.Name, Addr: cfg.addr(), Key: key, Version: version()}
		if token != nil {
			wish.Token = *token
		} else if wish.Token, err = approval(ctx, wish, progress); err != nil {
			return err
		}
		res, err := retryUntil(ctx, progress, func(ctx context.Context) (*join.Response, error) { return join.Join(ctx, wish) })
		if err != nil {
			return err
		}
		id := &nodedir.Identity{Key: key}
		if id.Trust, err = res.Trusts(); err != nil {
			return err
		}
		if id.Cert, err = pki.ParseCert(res.NodeCert); err != nil {
			return err
		}
		cfg.ClusterCIDR = res.Cluster.ClusterCIDR.String()
		cfg.ServiceCIDR = res.Cluster.ServiceCIDR.String()
		cfg.PodEncryption = res.Cluster.PodEncryption
		if err := errors.Join(cfg.checkFamily(), cfg.EncryptionConfig.check()); err != nil {
			return err
		}
		if res.Role == pki.Server {
			if _, _, err := cfg.tlsSANs(); err != nil { // against the cluster's ranges
				return err
			}
			err = prepareServer(ctx, dir, id, server, res, progress)
		} else {
			var list []byte
			if list, err = servers.Encode(res.Servers); err == nil {
				err = dir.WriteServers(list)
			}
		}
		if err != nil {
			return err
		}
		if err := writeConfig(dir.Dir, *cfg); err != nil {
			return err
		}
		return dir.WriteIdentity(id)
	})
}

// approval asks to join without a token, shows the code, and waits until a person has
// repeated it to the cluster.
func approval(ctx context.Context, wish join.Options, progress io.Writer) (pki.Token, error) {
	var code string
	token, err := retryUntil(ctx, progress, func(ctx context.Context) (token pki.Token, err error) {
		token, code, err = join.AskToJoin(ctx, wish)
		return token, err
	})
	if err != nil {
		return token, err
	}
	fmt.Fprintf(progress, `%s asks to join the cluster of %s. Approve it there, with the code that stands here:

  clusterctl members approve %s --role agent      (or: --role server)

Waiting …
`, wish.Name, wish.Server, code)
	return token, join.AwaitApproval(ctx, wish.Server, token)
}

// prepareServer gets what only servers know, now that this machine is one by
// its record, and begins the store.
func prepareServer(ctx context.Context, dir nodedir.KeyDir, id *nodedir.Identity, server string, res *join.Response, progress io.Writer) error {
	tid := transport.Identity{Certificate: id.TLSCertificate, Roots: id.Trust.Roots}
	keys, err := retryUntil(ctx, progress, func(ctx context.Context) (*join.Keys, error) {
		return join.FetchKeys(ctx, func(ctx context.Context) (net.Conn, error) {
			c, err := tid.DialHost(ctx, server, "", transport.Member)
			if err != nil {
				return nil, err
			}
			return c, nil
		})
	})
	if err != nil {
		return err
	}
	if err := id.TakeKeys(keys); err != nil {
		return err
	}
	if err := raftstore.SetEpoch(dir.Path("store"), res.Epoch); err != nil {
		return err
	}
	if err := dir.AddSealKeys(keys.OwnSeals); err != nil {
		return err
	}
	return dir.WritePeers(nodedir.ServerPeers(res.Servers))
}

// prepare runs write under the directory's lock, and removes what it left when
// it fails. The identity is written last: only with it is the machine a node.
func prepare(cfg Config, write func(nodedir.KeyDir) error) (err error) {
	dir, err := cfg.keyDir()
	if err != nil {
		return err
	}
	_, statErr := os.Stat(cfg.Data)
	fresh := errors.Is(statErr, fs.ErrNotExist)
	lock, err := dir.Lock()
	if err != nil {
		return err
	}
	defer lock.Close()
	if dir.Member() {
		return fmt.Errorf("%s is a node already: start it with `clusterd run --data %s`, or remove it first with `clusterd reset --data %s`", cfg.Data, cfg.Data, cfg.Data)
	}
	// The keys that an administrator has put there stay, those of the cluster do not.
	seals, sealsErr := os.ReadFile(dir.Path(nodedir.SealKeysFile))
	if sealsErr != nil && !errors.Is(sealsErr, fs.ErrNotExist) {
		return sealsErr
	}
	defer func() {
		if err == nil {
			return
		}
		if fresh {
			os.RemoveAll(cfg.Data)
			return
		}
		for _, name := range []string{"config.yaml", "bootstrap.json", "peers.json", "servers.json", "store"} {
			os.RemoveAll(dir.Path(name))
		}
		if sealsErr != nil {
			os.Remove(dir.Path(nodedir.SealKeysFile))
		} else if now, readErr := os.ReadFile(dir.Path(nodedir.SealKeysFile)); readErr != nil || !bytes.Equal(now, seals) {
			err = errors.Join(err, nodedir.WriteFile(dir.Path(nodedir.SealKeysFile), seals, 0o600))
		}
	}()
	if err := portFree(cfg); err != nil {
		return err
	}
	return write(dir)
}

// portFree finds out before anything is promised whether the node could
// listen where it is going to say it does.
func portFree(cfg Config) error {
	ln, err := net.Listen("tcp", cfg.addr().String())
	if err != nil {
		return fmt.Errorf("--advertise %s --port %d: this machine cannot listen there (%w): choose another address or port", cfg.Advertise, cfg.Port, err)
	}
	ln.Close()
	return nil
}

// certAddrs are the addresses that a server's certificate names.
func certAddrs(cfg Config) []netip.Addr {
	addrs := []netip.Addr{netip.MustParseAddr(cfg.Advertise), netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()}
	// The first address of each Service range is the API's own.
	for _, r := range cfg.serviceRanges() {
		addrs = append(addrs, r.Addr().Next())
	}
	further, _, _ := cfg.tlsSANs() // checked before
	return append(addrs, further...)
}

// certNames are the names in it beside those that every server has.
func certNames(cfg Config) []string {
	_, further, _ := cfg.tlsSANs()
	return append([]string{"kubernetes.default.svc." + cfg.ClusterDomain}, further...)
}

// serverAddress completes HOST or HOST:PORT.
func serverAddress(s string) (string, error) {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		host, port = strings.TrimSuffix(strings.TrimPrefix(s, "["), "]"), strconv.Itoa(DefaultPort)
	}
	if host == "" {
		return "", fmt.Errorf("the address %q: give HOST or HOST:PORT of a member", s)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return "", fmt.Errorf("the address %q: the port must be between 1 and 65535", s)
	}
	return net.JoinHostPort(host, port), nil
}
