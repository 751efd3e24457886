package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// requests is how many pages are fetched by each way.
const requests = 30

// addresses gives the cluster addresses of the nodes' network for what is reached
// from outside: from the 200th on, which no node has.
func (d *demo) addresses(ctx context.Context, say func(string)) error {
	net24 := d.first().Addr.As4()
	at := func(last byte) string { net24[3] = last; return netip.AddrFrom4(net24).String() }
	pool := at(200) + "-" + at(219)
	say(pool)
	_, err := d.client.CoreV1().ConfigMaps(metav1.NamespaceSystem).Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "clusterd-load-balancer"}, Data: map[string]string{"addresses": pool},
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) { // the demo is up already
		return nil
	}
	return err
}

// applyGateway applies the way in, as soon as its kinds are there, and waits until it
// answers from this machine.
func (d *demo) applyGateway(ctx context.Context, say func(string)) error {
	return poll(ctx, func() (bool, error) {
		if d.way == "" {
			if _, err := d.ctl(ctx, "apply", "-f", d.o.gateway); err != nil {
				return false, err
			}
			address, err := d.ctl(ctx, "-n", namespace, "get", "gateway", "hello", "-o", "jsonpath={.status.addresses[0].value}")
			if err != nil || address == "" {
				return false, errors.Join(errors.New("the Gateway has no address"), err)
			}
			d.way = "http://" + address + "/"
			say(d.way)
		}
		_, err := get(ctx, d.way, nil)
		return err == nil, err
	})
}

// answers prints which pods answer by the Service's name, asked from a pod, and by
// the Gateway, asked from this machine.
func (d *demo) answers(ctx context.Context) error {
	byName := "http://hello." + namespace + ".svc/"
	d.out.println("\n  " + d.out.dim(fmt.Sprintf("who answers %d requests, by the Service's name and by the Gateway's address", requests)))
	pages, err := d.ctl(ctx, "-n", namespace, "exec", "deploy/hello", "--", "/hello", "fetch", byName, fmt.Sprint(requests))
	if err != nil {
		return &hint{err, "look into " + d.o.dir + "/*.log"}
	}
	d.out.println(fmt.Sprintf("  %s a pod → %-26s %s", d.out.green("✓"), byName, counts(pages)))
	pages = ""
	for range requests {
		page, err := get(ctx, d.way, nil)
		if err != nil {
			return &hint{fmt.Errorf("by the Gateway: %w", err), "clusterctl -n kube-system logs daemonset/clusterd-ingress"}
		}
		pages += page
	}
	d.out.println(fmt.Sprintf("  %s here  → %-26s %s", d.out.green("✓"), d.way, counts(pages)))
	return nil
}

var answerer = regexp.MustCompile(`I am pod \S+ on node (\S+)`)

// counts says how many of the pages are of the pods on each node.
func counts(pages string) string {
	times := map[string]int{}
	for _, m := range answerer.FindAllStringSubmatch(pages, -1) {
		times[m[1]]++
	}
	var out []string
	for node, n := range times {
		out = append(out, fmt.Sprintf("%s's pod %d", node, n))
	}
	slices.Sort(out)
	return strings.Join(out, ", ")
}

// dialer opens a connection from where it is wanted.
type dialer func(ctx context.Context, network, addr string) (net.Conn, error)

// get fetches a page by a connection of its own; dial may be nil.
func get(ctx context.Context, url string, dial dialer) (page string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: dial}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = errors.New(resp.Status)
	}
	return string(b), err
}
