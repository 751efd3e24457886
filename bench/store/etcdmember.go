package main

import (
	"context"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"
	"go.uber.org/zap"
)

// etcdMember is etcd's server module as it comes: fsync on, default timeouts.
type etcdMember struct {
	e *embed.Etcd
	c *clientv3.Client // in this process
}

func openEtcd(m *memberFlags, addrs map[string]string) (host, error) {
	peer, client := url.URL{Scheme: "https", Host: addrs[m.name]}, url.URL{Scheme: "http", Host: m.client}
	c := embed.NewConfig()
	c.Name, c.Dir = m.name, filepath.Join(m.dir, m.name)
	c.ListenPeerUrls, c.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	c.ListenClientUrls, c.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	c.PeerTLSInfo = transport.TLSInfo{
		CertFile: filepath.Join(m.dir, certFile(m.name)), KeyFile: filepath.Join(m.dir, keyFile(m.name)),
		TrustedCAFile: filepath.Join(m.dir, caFile), ClientCertAuth: true,
	}
	var cluster []string
	for name, addr := range addrs {
		cluster = append(cluster, fmt.Sprintf("%s=https://%s", name, addr))
	}
	c.InitialCluster, c.InitialClusterToken = strings.Join(cluster, ","), "bench"
	c.QuotaBackendBytes = 8 << 30
	c.LogLevel, c.LogOutputs = "error", []string{"stderr"}
	e, err := embed.StartEtcd(c)
	if err != nil {
		return nil, err
	}
	return &etcdMember{e: e, c: v3client.New(e.Server)}, nil
}

func (m *etcdMember) bootstrap() error { return nil } // all know each other from the start
func (m *etcdMember) add(string) error { return nil }

func (m *etcdMember) leads() bool {
	select {
	case <-m.e.Server.ReadyNotify():
		return m.e.Server.Leader() == m.e.Server.MemberID()
	default:
		return false
	}
}

func (m *etcdMember) call() client { return etcdClient{m.c} }

func (m *etcdMember) close() error {
	err := m.c.Close()
	m.e.Close()
	return err
}

// dialServices connects to a member's gRPC services.
func dialServices(addr string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{Endpoints: []string{addr}, DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
}

// etcdClient is clientv3: over gRPC, or in etcd's process.
type etcdClient struct{ c *clientv3.Client }

func (c etcdClient) put(ctx context.Context, key string, value []byte) error {
	_, err := c.c.Put(ctx, key, string(value))
	return err
}

func (c etcdClient) compareAndSet(ctx context.Context, key string, rev int64, value []byte) (int64, error) {
	res, err := c.c.Txn(ctx).
		If(clientv3.Compare(clientv3.ModRevision(key), "=", rev)).
		Then(clientv3.OpPut(key, string(value))).
		Else(clientv3.OpGet(key)).
		Commit()
	switch {
	case err != nil:
		return 0, err
	case res.Succeeded:
		return res.Header.Revision, nil
	}
	if kvs := res.Responses[0].GetResponseRange().GetKvs(); len(kvs) > 0 {
		return kvs[0].GetModRevision(), nil
	}
	return 0, nil
}

func (c etcdClient) get(ctx context.Context, key string) error {
	res, err := c.c.Get(ctx, key)
	if err == nil && len(res.Kvs) == 0 {
		err = fmt.Errorf("%s is not there", key)
	}
	return err
}

func (c etcdClient) count(ctx context.Context, prefix string) (int64, error) {
	res, err := c.c.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		return 0, err
	}
	return res.Count, nil
}

func (c etcdClient) watch(ctx context.Context, prefix string, got func([]byte)) error {
	ch := c.c.Watch(ctx, prefix, clientv3.WithPrefix(), clientv3.WithCreatedNotify())
	if r, ok := <-ch; !ok || r.Err() != nil {
		return fmt.Errorf("watch %s: %w", prefix, r.Err())
	}
	go func() {
		for r := range ch {
			for _, e := range r.Events {
				got(e.Kv.Value)
			}
		}
	}()
	return nil
}
