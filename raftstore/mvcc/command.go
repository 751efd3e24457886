package mvcc

import (
	"errors"
	"fmt"
)

// CommandType says what a Command does. Numbers never change: they are in
// logs on disk.
type CommandType uint8

const (
	// CmdTxn applies Command.Txn.
	CmdTxn CommandType = 1
	// CmdTick removes the keys whose time has come and trims the history. It
	// changes nothing but through the batch's time.
	CmdTick CommandType = 2
	// CmdLimits sets Command.Limits. Every new leader sends it first, so that
	// the limits that decide about compaction come from the log and not from
	// the configuration of each node.
	CmdLimits CommandType = 3
	// CmdDelete applies Command.Delete. (4 and 6 are how package wire writes a CmdTxn
	// with an origin, and one with patches.)
	CmdDelete CommandType = 5
)

// CommandID identifies one command, however often it reaches the log.
// Session is a random number of the process that made it, Seq counts up there.
type CommandID struct {
	Session uint64
	Seq     uint64
}

// Command is one change asked for.
type Command struct {
	Type CommandType
	ID   CommandID
	// Basis is the log index that the maker had applied before it sent the
	// command for the first time, so every occurrence of the command in the
	// log comes later. It tells whether the result window still covers all of
	// them: if not, the command is refused rather than applied twice.
	Basis  uint64
	Txn    Txn
	Limits Limits
	Delete Deletion
}

func (c *Command) validate() error {
	if c.Type == CmdDelete {
		return c.Delete.Validate()
	}
	return c.Txn.Validate()
}

// Origin says who asked for the command; "" when it is not known. See SplitOrigin.
func (c *Command) Origin() string {
	if c.Type == CmdDelete {
		return c.Delete.Origin
	}
	return c.Txn.Origin
}

// Writer is the part of the origin that names who asked, whichever member took the request.
func (c *Command) Writer() string {
	who, _ := SplitOrigin(c.Origin())
	return who
}

// HistoryBytes is what the command takes of Limits.HistoryBytes when it
// succeeds.
func (c *Command) HistoryBytes() int64 {
	if c.Type == CmdDelete {
		return c.Delete.HistoryBytes()
	}
	return c.Txn.HistoryBytes()
}

// Batch is what one log entry holds: commands that are applied in order, and
// the leader's clock.
type Batch struct {
	Time     int64 // store time, unix milliseconds
	Commands []Command
}

// Limits bound what the keyspace remembers beside its present state.
type Limits struct {
	HistoryBytes     int64 // of superseded and present versions in the ring
	HistoryAgeMillis int64 // in store time
	Window           int64 // number of transactions whose outcome is remembered
}

// DefaultLimits hold until the first leader says otherwise.
var DefaultLimits = Limits{HistoryBytes: 64 << 20, HistoryAgeMillis: 10 * 60 * 1000, Window: 32768}

// Outcome is what Apply says of one Command.
type Outcome struct {
	Result TxnResult
	// Err is ErrExpired, ErrForgotten, an ErrInvalid or an ErrPatch; nil: Result holds.
	Err error
	// Duplicate is set when an earlier occurrence of the same command had been
	// applied; Result is what came of that one.
	Duplicate bool
}

// Errors of Outcomes.
var (
	// ErrInvalid is returned for a Txn that breaks the rules of Txn.Validate.
	// Nothing was changed.
	ErrInvalid = errors.New("invalid transaction")
	// ErrExpired is returned for a command whose Basis is older than the
	// result window: it was not applied now, and never will be; whether an
	// earlier occurrence was is not known.
	ErrExpired = errors.New("command is older than the result window")
	// ErrForgotten is returned for a command that was applied before, when the
	// values it replaced have left the history.
	ErrForgotten = errors.New("command was applied but its result has been forgotten")
	// ErrPatch is returned for a Txn with a Patch that does not give the value that
	// its maker had. Nothing was changed, and no occurrence of the command changes
	// anything.
	ErrPatch = errors.New("patch does not give the value that it was made for")
)

// Validate reports the first rule that t breaks. The rules are part of the
// meaning of the log: they must never change for what is already in it.
func (t *Txn) Validate() error {
	for i := range t.Compares {
		if t.Compares[i].Key == "" {
			return fmt.Errorf("%w: comparison %d has an empty key", ErrInvalid, i)
		}
		if t.Compares[i].ModRevision < 0 {
			return fmt.Errorf("%w: comparison %d has a negative revision", ErrInvalid, i)
		}
	}
	for i := range t.Ops {
		op := &t.Ops[i]
		switch {
		case op.Key == "":
			return fmt.Errorf("%w: operation %d has an empty key", ErrInvalid, i)
		case op.Type != OpPut && op.Type != OpDelete:
			return fmt.Errorf("%w: operation %d has the unknown type %d", ErrInvalid, i, op.Type)
		case op.TTL < 0 || op.TTL > maxTTL:
			return fmt.Errorf("%w: operation %d has a TTL of %d s", ErrInvalid, i, op.TTL)
		case op.Patch != nil && (op.Type != OpPut || !t.compares(op.Key)):
			return fmt.Errorf("%w: operation %d has a patch of a value that no comparison names", ErrInvalid, i)
		}
	}
	if key, ok := repeatedKey(t.Ops); ok {
		return fmt.Errorf("%w: key %q occurs in two operations", ErrInvalid, key)
	}
	return nil
}

// maxTTL keeps seconds*1000+now inside an int64: a thousand years.
const maxTTL = 1000 * 366 * 24 * 3600

func repeatedKey(ops []Op) (string, bool) {
	if len(ops) < 2 {
		return "", false
	}
	if len(ops) <= 8 {
		for i := range ops {
			for j := range i {
				if ops[i].Key == ops[j].Key {
					return ops[i].Key, true
				}
			}
		}
		return "", false
	}
	seen := make(map[string]struct{}, len(ops))
	for i := range ops {
		if _, ok := seen[ops[i].Key]; ok {
			return ops[i].Key, true
		}
		seen[ops[i].Key] = struct{}{}
	}
	return "", false
}
