package main

import (
	"context"
	"errors"
	"strings"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// services are etcd's KV and Watch over a raftstore, so that one driver can
// measure both behind the same gRPC. They do what the loads ask for, all of it in
// earnest: puts, gets and lists of a prefix, transactions that compare revisions,
// watches. The rest is refused.
type services struct {
	pb.UnimplementedKVServer
	pb.UnimplementedWatchServer
	s *raftstore.Store
}

func register(g *grpc.Server, s *raftstore.Store) {
	sv := &services{s: s}
	pb.RegisterKVServer(g, sv)
	pb.RegisterWatchServer(g, sv)
}

func notServed(what string) error { return status.Error(codes.Unimplemented, what+" is not served") }

// wireError is a store's error as etcd's clients expect it.
func wireError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return status.FromContextError(err).Err()
	case errors.Is(err, raftstore.ErrNoLeader):
		return status.Error(codes.Unavailable, err.Error())
	case errors.Is(err, mvcc.ErrCompacted):
		return status.Error(codes.OutOfRange, err.Error())
	default:
		return status.Error(codes.Unknown, err.Error())
	}
}

func header(revision int64) *pb.ResponseHeader { return &pb.ResponseHeader{Revision: revision} }

func wireKV(kv *mvcc.KeyValue) *mvccpb.KeyValue {
	return &mvccpb.KeyValue{
		Key: []byte(kv.Key), Value: kv.Value, CreateRevision: kv.CreateRevision, ModRevision: kv.ModRevision, Version: kv.Version,
	}
}

// isPrefix reports whether a range is all keys that begin with key.
func isPrefix(key, end []byte) bool { return string(end) == clientv3.GetPrefixRangeEnd(string(key)) }

// Range gets one key, or lists a prefix.
func (sv *services) Range(ctx context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	o := raftstore.ReadOptions{Revision: r.Revision, Stale: r.Serializable}
	if len(r.RangeEnd) == 0 {
		kv, revision, err := sv.s.Get(ctx, string(r.Key), o)
		if err != nil {
			return nil, wireError(err)
		}
		res := &pb.RangeResponse{Header: header(revision)}
		if kv != nil {
			res.Count = 1
			if !r.CountOnly {
				res.Kvs = []*mvccpb.KeyValue{wireKV(kv)}
			}
		}
		return res, nil
	}
	if !isPrefix(r.Key, r.RangeEnd) || r.SortOrder != pb.RangeRequest_NONE || r.KeysOnly || r.MinModRevision|r.MaxModRevision|r.MinCreateRevision|r.MaxCreateRevision != 0 {
		return nil, notServed("a range that is not all of a prefix, in order")
	}
	l, err := sv.s.List(ctx, string(r.Key), raftstore.ListOptions{ReadOptions: o, Limit: int(r.Limit), CountOnly: r.CountOnly})
	if err != nil {
		return nil, wireError(err)
	}
	res := &pb.RangeResponse{Header: header(l.Revision), Count: l.Count, More: l.More}
	for i := range l.KVs {
		res.Kvs = append(res.Kvs, wireKV(&l.KVs[i]))
	}
	return res, nil
}

// Put writes one key.
func (sv *services) Put(ctx context.Context, r *pb.PutRequest) (*pb.PutResponse, error) {
	op, err := putOp(r)
	if err != nil {
		return nil, err
	}
	res, err := sv.s.Txn(ctx, mvcc.Txn{Ops: []mvcc.Op{op}})
	if err != nil {
		return nil, wireError(err)
	}
	return &pb.PutResponse{Header: header(res.Revision)}, nil
}

func putOp(r *pb.PutRequest) (mvcc.Op, error) {
	if r.Lease != 0 || r.PrevKv || r.IgnoreValue || r.IgnoreLease {
		return mvcc.Op{}, notServed("a put with options")
	}
	return mvcc.Op{Type: mvcc.OpPut, Key: string(r.Key), Value: r.Value}, nil
}

// Txn compares the revisions of keys and writes. What it reads when a comparison
// has failed are compared keys: their state comes with the refusal.
func (sv *services) Txn(ctx context.Context, r *pb.TxnRequest) (*pb.TxnResponse, error) {
	var t mvcc.Txn
	for _, c := range r.Compare {
		if c.Target != pb.Compare_MOD || c.Result != pb.Compare_EQUAL || len(c.RangeEnd) > 0 {
			return nil, notServed("a comparison other than of revisions")
		}
		t.Compares = append(t.Compares, mvcc.Compare{Key: string(c.Key), ModRevision: c.GetModRevision()})
	}
	out := &pb.TxnResponse{}
	for _, op := range r.Success {
		put := op.GetRequestPut()
		if put == nil {
			return nil, notServed("a transaction that does not put")
		}
		o, err := putOp(put)
		if err != nil {
			return nil, err
		}
		t.Ops = append(t.Ops, o)
	}
	res, err := sv.s.Txn(ctx, t)
	if err != nil {
		return nil, wireError(err)
	}
	out.Header, out.Succeeded = header(res.Revision), res.Succeeded
	if res.Succeeded {
		for range t.Ops {
			out.Responses = append(out.Responses, &pb.ResponseOp{Response: &pb.ResponseOp_ResponsePut{ResponsePut: &pb.PutResponse{Header: out.Header}}})
		}
		return out, nil
	}
	for _, op := range r.Failure {
		get := op.GetRequestRange()
		found := false
		for i := range t.Compares {
			if get == nil || len(get.RangeEnd) > 0 || t.Compares[i].Key != string(get.Key) {
				continue
			}
			got := &pb.RangeResponse{Header: out.Header}
			if kv := res.Current[i]; kv != nil {
				got.Kvs, got.Count = []*mvccpb.KeyValue{wireKV(kv)}, 1
			}
			out.Responses = append(out.Responses, &pb.ResponseOp{Response: &pb.ResponseOp_ResponseRange{ResponseRange: got}})
			found = true
			break
		}
		if !found {
			return nil, notServed("a transaction that reads other keys than it compares")
		}
	}
	return out, nil
}

// Watch serves the watches of one stream.
func (sv *services) Watch(stream pb.Watch_WatchServer) error {
	ctx, cancel := context.WithCancel(stream.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var mu sync.Mutex // of sending
	send := func(r *pb.WatchResponse) error {
		mu.Lock()
		defer mu.Unlock()
		return stream.Send(r)
	}
	watches := map[int64]*raftstore.Watcher{}
	for next := int64(0); ; {
		r, err := stream.Recv()
		if err != nil {
			return err
		}
		switch {
		case r.GetCreateRequest() != nil:
			c := r.GetCreateRequest()
			prefix := isPrefix(c.Key, c.RangeEnd)
			if !prefix && len(c.RangeEnd) > 0 || c.PrevKv || c.ProgressNotify || c.WatchId != 0 {
				return notServed("a watch of a range, or with options")
			}
			id := next
			next++
			w, err := sv.s.Watch(ctx, string(c.Key), raftstore.WatchOptions{Revision: c.StartRevision})
			if err != nil {
				return wireError(err)
			}
			watches[id] = w
			if err := send(&pb.WatchResponse{Header: header(sv.s.Revision()), WatchId: id, Created: true}); err != nil {
				return err
			}
			wg.Go(func() { deliver(w, id, string(c.Key), prefix, send) })
		case r.GetCancelRequest() != nil:
			id := r.GetCancelRequest().WatchId
			if w := watches[id]; w != nil {
				w.Stop()
				delete(watches, id)
			}
			if err := send(&pb.WatchResponse{Header: header(sv.s.Revision()), WatchId: id, Canceled: true}); err != nil {
				return err
			}
		}
	}
}

// deliver sends what a watcher gets until it ends.
func deliver(w *raftstore.Watcher, id int64, key string, prefix bool, send func(*pb.WatchResponse) error) {
	for b := range w.C() {
		r := &pb.WatchResponse{Header: header(b.Revision), WatchId: id}
		for i := range b.Events {
			e := &b.Events[i]
			if !prefix && e.KV.Key != key || prefix && !strings.HasPrefix(e.KV.Key, key) {
				continue
			}
			kind := mvccpb.Event_PUT
			if e.Type != mvcc.Put {
				kind = mvccpb.Event_DELETE
			}
			r.Events = append(r.Events, &mvccpb.Event{Type: kind, Kv: wireKV(&e.KV)})
		}
		if len(r.Events) > 0 && send(r) != nil {
			w.Stop()
		}
	}
}
