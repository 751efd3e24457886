package quota

import (
	"cmp"
	"slices"
	"strings"
	"sync"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// Load is what was written by one writer or into one place.
type Load struct {
	Writes int64 `json:"writes"` // since this member's log begins
	Bytes  int64 `json:"bytes"`  // of their keys and values
	// Per second, over the last minute and the last five.
	WritesPerSecond1m float64 `json:"writesPerSecond1m"`
	BytesPerSecond1m  float64 `json:"bytesPerSecond1m"`
	WritesPerSecond5m float64 `json:"writesPerSecond5m"`
	BytesPerSecond5m  float64 `json:"bytesPerSecond5m"`
}

// WriterUse is one writer's part.
type WriterUse struct {
	Origin string `json:"origin"` // mvcc.Txn.Origin; "" when it is not known
	Load
	HistoryBytes int64 `json:"historyBytes"` // of the changes that the history still has
}

// FolderUse is one folder's part: the keys directly in it.
type FolderUse struct {
	Folder string   `json:"folder"`
	Live   mvcc.Use `json:"live"`
	Quota  int64    `json:"quota,omitempty"` // of the folder and all below it; 0: none of its own
	Load
}

// Top tells who writes most, and where most is.
type Top struct {
	Time    int64       `json:"time"`    // store time, unix milliseconds
	Writers []WriterUse `json:"writers"` // the one who writes most often first
	Folders []FolderUse `json:"folders"` // the largest first
	Live    mvcc.Use    `json:"live"`    // everything
	Quota   int64       `json:"quotaBytes"`
	Reserve int64       `json:"reserveBytes"`
	History HistoryUse  `json:"history"`
}

// HistoryUse tells how full the history is, and how far back it reaches. Ages
// are in milliseconds.
type HistoryUse struct {
	Bytes    int64 `json:"bytes"`
	MaxBytes int64 `json:"maxBytes"`
	Age      int64 `json:"ageMillis"`
	MaxAge   int64 `json:"maxAgeMillis"`
}

// Others is the origin and the folder of what was too manifold to be counted
// one by one.
const Others = "(others)"

// Top tells what was counted of a keyspace, at a store time.
func (u *Usage) Top(ks *mvcc.Keyspace, l *Limits, millis int64) Top {
	d := ks.Digest()
	now := max(millis, d.Time)
	top := Top{
		Time: now, Live: mvcc.Use{Keys: d.Keys, Bytes: d.Bytes},
		Quota: l.Bytes, Reserve: l.Reserve,
		Writers: []WriterUse{}, Folders: []FolderUse{},
	}
	limits := ks.Limits()
	top.History = HistoryUse{Bytes: d.HistoryBytes, MaxBytes: limits.HistoryBytes, Age: now - ks.Extent().OldestTime, MaxAge: limits.HistoryAgeMillis}
	writers, folders := u.loads(now)
	history := make(map[string]int64, len(writers))
	for origin, bytes := range ks.HistoryByWriter() {
		if _, ok := writers[origin]; !ok && len(writers) >= maxMeters {
			origin = Others
		}
		if _, ok := writers[origin]; !ok {
			writers[origin] = Load{} // all of it is from before this member's log begins
		}
		history[origin] += bytes
	}
	for origin, load := range writers {
		top.Writers = append(top.Writers, WriterUse{origin, load, history[origin]})
	}
	live := direct(ks.Folders())
	for folder, use := range live {
		if _, ok := folders[folder]; !ok && use.Keys > 0 {
			folders[folder] = Load{}
		}
	}
	for folder, load := range folders {
		top.Folders = append(top.Folders, FolderUse{folder, live[folder], l.Folders[folder], load})
	}
	slices.SortFunc(top.Writers, func(a, b WriterUse) int {
		return cmp.Or(cmp.Compare(b.WritesPerSecond1m, a.WritesPerSecond1m), cmp.Compare(b.Writes, a.Writes), strings.Compare(a.Origin, b.Origin))
	})
	slices.SortFunc(top.Folders, func(a, b FolderUse) int {
		return cmp.Or(cmp.Compare(b.Live.Bytes, a.Live.Bytes), cmp.Compare(b.Writes, a.Writes), strings.Compare(a.Folder, b.Folder))
	})
	return top
}

// direct takes what is in deeper folders out of each folder's sum.
func direct(all map[string]mvcc.Use) map[string]mvcc.Use {
	own := make(map[string]mvcc.Use, len(all))
	for folder, u := range all {
		own[folder] = mvcc.Use{Keys: own[folder].Keys + u.Keys, Bytes: own[folder].Bytes + u.Bytes}
		if parent := folderOf(strings.TrimSuffix(folder, "/")); parent != "" {
			own[parent] = mvcc.Use{Keys: own[parent].Keys - u.Keys, Bytes: own[parent].Bytes - u.Bytes}
		}
	}
	return own
}

// folderOf is the part of key up to and with its last slash.
func folderOf(key string) string { return key[:strings.LastIndexByte(key, '/')+1] }

// Usage counts the transactions that were applied, by who made them and by
// where they wrote. Time is store time, so that replaying the log does not look
// like a burst.
type Usage struct {
	mu      sync.Mutex
	writers map[string]*meter
	folders map[string]*meter
}

// maxMeters bounds writers and folders each; what comes after counts as Others.
const maxMeters = 1000

// NewUsage has counted nothing yet.
func NewUsage() *Usage {
	return &Usage{writers: make(map[string]*meter), folders: make(map[string]*meter)}
}

// Note counts one command that was decided at a store time, succeeded or not:
// either has cost a place in the log. Each key that a deletion names is a write.
func (u *Usage) Note(millis int64, c *mvcc.Command) {
	u.mu.Lock()
	defer u.mu.Unlock()
	var bytes int64
	for i := range c.Txn.Ops {
		op := &c.Txn.Ops[i]
		n := int64(len(op.Key) + op.Size())
		bytes += n
		meterOf(u.folders, folderOf(op.Key)).add(millis, 1, n)
	}
	var folder string
	var m *meter
	for i := range c.Delete.Keys {
		key := c.Delete.Keys[i].Key
		if f := folderOf(key); m == nil || f != folder {
			folder, m = f, meterOf(u.folders, f)
		}
		m.add(millis, 1, int64(len(key)))
		bytes += int64(len(key))
	}
	meterOf(u.writers, c.Writer()).add(millis, int64(max(1, len(c.Delete.Keys))), bytes)
}

func meterOf(all map[string]*meter, name string) *meter {
	m := all[name]
	if m == nil && len(all) >= maxMeters {
		name = Others
		m = all[name]
	}
	if m == nil {
		m = new(meter)
		all[strings.Clone(name)] = m
	}
	return m
}

func (u *Usage) loads(millis int64) (writers, folders map[string]Load) {
	u.mu.Lock()
	defer u.mu.Unlock()
	writers, folders = make(map[string]Load, len(u.writers)), make(map[string]Load, len(u.folders))
	for name, m := range u.writers {
		writers[name] = m.load(millis)
	}
	for name, m := range u.folders {
		folders[name] = m.load(millis)
	}
	return writers, folders
}

const (
	slotMillis = 10_000
	slots      = 31 // five minutes and the slot that is being filled
)

// meter counts in slots of ten seconds.
type meter struct {
	writes, bytes int64
	newest        int64 // number of the newest slot: time / slotMillis
	slot          [slots]struct{ writes, bytes int64 }
}

// advance empties the slots between the newest one and the one of millis.
func (m *meter) advance(millis int64) {
	now := millis / slotMillis
	for n := max(m.newest+1, now-slots+1); n <= now; n++ {
		m.slot[n%slots] = struct{ writes, bytes int64 }{}
	}
	m.newest = max(m.newest, now)
}

func (m *meter) add(millis, writes, bytes int64) {
	m.advance(millis)
	m.writes += writes
	m.bytes += bytes
	s := &m.slot[m.newest%slots]
	s.writes += writes
	s.bytes += bytes
}

func (m *meter) load(millis int64) Load {
	m.advance(millis)
	l := Load{Writes: m.writes, Bytes: m.bytes}
	l.WritesPerSecond1m, l.BytesPerSecond1m = m.rate(millis, 6)
	l.WritesPerSecond5m, l.BytesPerSecond5m = m.rate(millis, 30)
	return l
}

// rate is over the last full slots and the one that is being filled.
func (m *meter) rate(millis, full int64) (writes, bytes float64) {
	for n := m.newest - full; n <= m.newest; n++ {
		if n >= 0 {
			writes += float64(m.slot[n%slots].writes)
			bytes += float64(m.slot[n%slots].bytes)
		}
	}
	seconds := float64(full*slotMillis+millis%slotMillis) / 1000
	return writes / seconds, bytes / seconds
}
