package raftside

import (
	"reflect"

	"github.com/hashicorp/raft"
)

// ErrorOf waits for raft's answer to a future and returns it: raft.ErrRaftShutdown
// if raft has ended without one: ended is closed when nothing of raft runs any more.
//
// raft does forget futures when it shuts down: what waits in the channel to its
// FSM, or in the one for transfers of leadership, is not looked at again, and
// Error would never return (hashicorp/raft 1.7.3: runFSM, raft.fsmMutateCh). A
// future has a field for just this, ShutdownCh, exported in a type that is not,
// and raft sets it on two kinds only; so it is set here, by reflection. Only
// Error reads it. TestFuturesEnd holds every kind that is used to having it.
//
// f must be new: its Error has not been called before.
func ErrorOf(f raft.Future, ended chan struct{}) error {
	if field, ok := shutdownField(f); ok {
		field.Set(reflect.ValueOf(ended))
	}
	return f.Error()
}

// shutdownField is the field of a future that ends its Error. A future that was
// answered at once has none.
func shutdownField(f raft.Future) (reflect.Value, bool) {
	v := reflect.ValueOf(f)
	if v.Kind() != reflect.Pointer || v.Elem().Kind() != reflect.Struct {
		return reflect.Value{}, false
	}
	field := v.Elem().FieldByName("ShutdownCh")
	return field, field.IsValid() && field.CanSet() && field.Type() == reflect.TypeFor[chan struct{}]()
}
