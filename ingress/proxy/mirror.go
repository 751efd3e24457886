package proxy

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"net/http"
	"sync"

	"github.com/clusterd/clusterd/ingress/route"
)

const (
	// mirroredBody is how long the body of a request may be that is mirrored: it is
	// kept until all of it has come.
	mirroredBody = 256 << 10
	// mirrors is how many copies may be under way. With mirroredBody it bounds the
	// memory that they take.
	mirrors = 128
)

// mirror sends copies of the request to the rule's mirrors. None of them delays the
// request: a copy leaves when all of the body has passed, and is dropped where it is
// too long, does not come to its end, or too many are under way.
func (p *Proxy) mirror(c *call, out *http.Request) {
	if out.Header.Get("Upgrade") != "" { // a conversation has no copy
		return
	}
	for i := range c.rule.Do.Mirrors {
		m := &c.rule.Do.Mirrors[i]
		if rand.IntN(m.In) >= m.Of {
			continue
		}
		select {
		case p.mirroring <- struct{}{}:
		default:
			p.metrics.mirrored.WithLabelValues("dropped").Inc()
			continue
		}
		d := &duplicate{p: p, to: m.Backend, req: out.Clone(context.Background()), from: c}
		if out.Body == nil || out.Body == http.NoBody {
			d.finish(true)
			continue
		}
		d.under, d.size = out.Body, out.ContentLength
		out.Body = d
		c.duplicates = append(c.duplicates, d)
	}
}

// duplicate is a copy of a request whose body is on its way.
type duplicate struct {
	p     *Proxy
	to    *route.Backend
	req   *http.Request
	from  *call
	under io.ReadCloser
	size  int64 // of the body; -1: not known

	mu   sync.Mutex // guards the rest
	done bool
	body bytes.Buffer
}

// Read implements io.Reader: what passes is kept.
func (d *duplicate) Read(b []byte) (int, error) {
	n, err := d.under.Read(b)
	d.mu.Lock()
	long := d.done || d.body.Len()+n > mirroredBody
	if !long {
		d.body.Write(b[:n])
	}
	whole := err == io.EOF || int64(d.body.Len()) == d.size
	d.mu.Unlock()
	if long || whole || err != nil {
		d.finish(whole && !long)
	}
	return n, err
}

// Close implements io.Closer.
func (d *duplicate) Close() error { return d.under.Close() }

// finish sends the copy or drops it, whatever comes first.
func (d *duplicate) finish(send bool) {
	d.mu.Lock()
	done := d.done
	d.done = true
	d.mu.Unlock()
	if done {
		return
	}
	if !send || d.p.mirrorCtx.Err() != nil {
		<-d.p.mirroring
		d.p.metrics.mirrored.WithLabelValues("dropped").Inc()
		return
	}
	d.p.mirrors.Go(func() {
		defer func() { <-d.p.mirroring }()
		result := "sent"
		if err := d.send(); err != nil {
			result = "failed"
			d.p.cfg.Logger.Debug("a mirror did not answer", "backend", d.to.Name, "err", err)
		}
		d.p.metrics.mirrored.WithLabelValues(result).Inc()
	})
}

// send has the copy answered, and drops the answer.
func (d *duplicate) send() error {
	c := &call{client: d.from.client, backend: d.to, rule: &route.Rule{Do: &route.Action{}}}
	defer c.release()
	ctx, cancel := context.WithTimeout(context.WithValue(d.p.mirrorCtx, callKey{}, c), d.p.cfg.ResponseTimeout)
	defer cancel()
	req := d.req.WithContext(ctx)
	req.Body, req.ContentLength = http.NoBody, 0
	if n := d.body.Len(); n > 0 {
		req.Body, req.ContentLength = io.NopCloser(bytes.NewReader(d.body.Bytes())), int64(n)
	}
	resp, err := d.p.balance.RoundTrip(req)
	if err != nil {
		return err
	}
	_, _ = io.CopyN(io.Discard, resp.Body, mirroredBody)
	return resp.Body.Close()
}
