package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// etcd is three members of the etcd binary on PATH, as it comes: fsync on,
// default timeouts.
type etcd struct {
	procs
	dir          string
	peer, client []string // addresses of each member
	conns        [nodes][]client
	clients      []*clientv3.Client
	got          *deliveries
}

// etcdConns is over how many connections the clients of one member go.
const etcdConns = 8

func newEtcd(dir string) (*etcd, error) {
	addrs, err := freeAddrs(2 * nodes)
	if err != nil {
		return nil, err
	}
	e := &etcd{dir: dir, peer: addrs[:nodes], client: addrs[nodes:]}
	for i := range nodes {
		for range etcdConns {
			c, err := clientv3.New(clientv3.Config{
				Endpoints: []string{e.client[i]}, DialTimeout: 5 * time.Second, Logger: zap.NewNop(),
			})
			if err != nil {
				return nil, err
			}
			e.clients = append(e.clients, c)
			e.conns[i] = append(e.conns[i], etcdClient{c})
		}
	}
	return e, nil
}

func (e *etcd) name() string { return "etcd" }

func (e *etcd) start(ctx context.Context) error {
	for i := range nodes {
		if err := e.startMember(i); err != nil {
			return err
		}
	}
	_, err := e.leader(ctx)
	return err
}

func (e *etcd) startMember(i int) error {
	var cluster []string
	for j, p := range e.peer {
		cluster = append(cluster, fmt.Sprintf("e%d=http://%s", j, p))
	}
	cmd := exec.Command("etcd",
		"--name", fmt.Sprint("e", i), "--data-dir", filepath.Join(e.dir, fmt.Sprint("e", i)),
		"--listen-peer-urls", "http://"+e.peer[i], "--initial-advertise-peer-urls", "http://"+e.peer[i],
		"--listen-client-urls", "http://"+e.client[i], "--advertise-client-urls", "http://"+e.client[i],
		"--initial-cluster", strings.Join(cluster, ","), "--initial-cluster-token", "bench",
		"--quota-backend-bytes", fmt.Sprint(8<<30), "--logger", "zap", "--log-level", "error")
	return e.procs.start(i, cmd, filepath.Join(e.dir, fmt.Sprintf("e%d.log", i)))
}

func (e *etcd) leader(ctx context.Context) (int, error) {
	return waitLeader(ctx, func() int {
		for i := range nodes {
			try, cancel := context.WithTimeout(ctx, time.Second)
			st, err := e.conns[i][0].(etcdClient).c.Status(try, e.client[i])
			cancel()
			if err == nil && st.Leader != 0 && st.Leader == st.Header.MemberId {
				return i
			}
		}
		return -1
	})
}

func (e *etcd) load(ctx context.Context, i int, l Load) (Times, error) {
	return run(ctx, e.conns[i], l)
}

func (e *etcd) stamp(ctx context.Context, i int, s Stamps) error { return stamp(ctx, e.conns[i], s) }

func (e *etcd) receive(ctx context.Context, i, watchers, prefixes int) (err error) {
	e.got, err = receive(ctx, e.conns[i], watchers, prefixes)
	return err
}

func (e *etcd) received(int) (Times, error) { return e.got.stop(), nil }

func (e *etcd) probe(ctx context.Context, i int, d time.Duration) ([]Success, error) {
	return probe(ctx, e.conns[i][0], d), nil
}

func (e *etcd) count(ctx context.Context, i int, prefix string) (int64, error) {
	for {
		try, cancel := context.WithTimeout(ctx, time.Second)
		res, err := e.conns[i][0].(etcdClient).c.Get(try, prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
		cancel()
		if err == nil {
			return res.Count, nil
		}
		if ctx.Err() != nil {
			return 0, err
		}
		time.Sleep(time.Millisecond)
	}
}

func (e *etcd) close() {
	for _, c := range e.clients {
		_ = c.Close()
	}
	e.procs.stop(os.Interrupt)
}

// etcdClient is etcd as an API server calls it.
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
