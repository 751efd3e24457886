// Command etcdpod is a member of an etcd of its own in a pod of a StatefulSet: etcd's
// server module as it comes, with the few settings that the pod knows, and the
// questions that a test asks it.
//
//	etcdpod serve       run the member POD_NAME of REPLICAS ones of the Service SERVICE
//	etcdpod put FROM TO write the keys from FROM on, before TO
//	etcdpod check N     read that the keys before N are there, agreed on by a majority
//	etcdpod local N     the same of what this member has itself
package main

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
)

const (
	clientPort = "2379"
	peerPort   = "2380"
	// answer is how long one question may take while a leader is elected.
	answer = 30 * time.Second
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "etcdpod:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 1 && args[0] == "serve" {
		return serve(ctx)
	}
	if len(args) < 2 {
		return fmt.Errorf("serve, put FROM TO, check N or local N is required, not %q", args)
	}
	var numbers []int
	for _, word := range args[1:] {
		n, err := strconv.Atoi(word)
		if err != nil {
			return fmt.Errorf("%q is no number", word)
		}
		numbers = append(numbers, n)
	}
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{"127.0.0.1:" + clientPort}, DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	switch {
	case args[0] == "put" && len(numbers) == 2:
		return put(ctx, c, numbers[0], numbers[1])
	case args[0] == "check" && len(numbers) == 1:
		return check(ctx, c, numbers[0])
	case args[0] == "local" && len(numbers) == 1:
		return check(ctx, c, numbers[0], clientv3.WithSerializable())
	}
	return fmt.Errorf("serve, put FROM TO, check N or local N is required, not %q", args)
}

// serve runs the member until ctx ends.
func serve(ctx context.Context) error {
	name, service := os.Getenv("POD_NAME"), os.Getenv("SERVICE")
	replicas, err := strconv.Atoi(os.Getenv("REPLICAS"))
	set, _, ok := cutLast(name)
	if err != nil || !ok || service == "" {
		return fmt.Errorf("POD_NAME (%q), SERVICE (%q) and REPLICAS (%q): a pod's name with its number, a Service and a number are required", name, service, os.Getenv("REPLICAS"))
	}
	peer := func(name string) url.URL {
		return url.URL{Scheme: "http", Host: name + "." + service + ":" + peerPort}
	}
	c := embed.NewConfig()
	c.Name, c.Dir = name, cmp.Or(os.Getenv("DATA"), "/data")+"/etcd"
	c.ListenPeerUrls = []url.URL{{Scheme: "http", Host: "0.0.0.0:" + peerPort}}
	c.AdvertisePeerUrls = []url.URL{peer(name)}
	c.ListenClientUrls = []url.URL{{Scheme: "http", Host: "0.0.0.0:" + clientPort}}
	c.AdvertiseClientUrls = []url.URL{{Scheme: "http", Host: name + "." + service + ":" + clientPort}}
	var cluster []string
	for i := range replicas {
		member := fmt.Sprintf("%s-%d", set, i)
		p := peer(member)
		cluster = append(cluster, member+"="+p.String())
	}
	c.InitialCluster, c.InitialClusterToken = strings.Join(cluster, ","), service
	c.LogLevel, c.LogOutputs = "warn", []string{"stderr"}
	e, err := embed.StartEtcd(c)
	if err != nil {
		return err
	}
	defer e.Close()
	select {
	case <-ctx.Done():
		return nil
	case err := <-e.Err():
		return err
	}
}

func cutLast(name string) (set, number string, ok bool) {
	i := strings.LastIndex(name, "-")
	if i < 1 {
		return "", "", false
	}
	return name[:i], name[i+1:], true
}

func key(i int) string   { return fmt.Sprintf("key/%06d", i) }
func value(i int) string { return fmt.Sprintf("value of %d", i) }

// put writes keys one after the other; each is acknowledged before the next.
func put(ctx context.Context, c *clientv3.Client, from, to int) error {
	for i := from; i < to; i++ {
		ask, cancel := context.WithTimeout(ctx, answer)
		_, err := c.Put(ask, key(i), value(i))
		cancel()
		if err != nil {
			return fmt.Errorf("put %s: %w", key(i), err)
		}
	}
	return nil
}

// check reads the keys and compares their values.
func check(ctx context.Context, c *clientv3.Client, n int, options ...clientv3.OpOption) error {
	ask, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	got, err := c.Get(ask, "key/", append(options, clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByKey, clientv3.SortAscend))...)
	if err != nil {
		return err
	}
	if len(got.Kvs) != n {
		return fmt.Errorf("%d keys are there, %d were written", len(got.Kvs), n)
	}
	for i, kv := range got.Kvs {
		if string(kv.Key) != key(i) || string(kv.Value) != value(i) {
			return fmt.Errorf("%s is %q, not %s with %q", kv.Key, kv.Value, key(i), value(i))
		}
	}
	return nil
}
