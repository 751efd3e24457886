package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Tables reads and changes whole tables, in the network namespace in which it
// was opened. Each table belongs to one caller. Safe for concurrent use.
type Tables struct {
	mu   sync.Mutex // guards both: conn gathers a transaction
	conn *nftables.Conn
	ask  *netlink.Conn // for what the library has no call for
}

// sendBuffer holds a transaction: some 100 bytes an element, and the kernel
// takes it whole.
const sendBuffer = 256 << 20

// OpenTables binds Tables to the calling thread's network namespace.
func OpenTables() (*Tables, error) {
	conn, err := nftables.New(nftables.AsLasting(), nftables.WithSockOptions(func(c *netlink.Conn) error {
		return errors.Join(c.SetWriteBuffer(sendBuffer), c.SetReadBuffer(8<<20))
	}))
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	ask, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open netlink: %w", err), conn.CloseLasting())
	}
	return &Tables{conn: conn, ask: ask}, nil
}

// Close gives the sockets back; the rules stay.
func (t *Tables) Close() error { return errors.Join(t.conn.CloseLasting(), t.ask.Close()) }

// marker is a chain of ours that nothing leads to: its one rule's comment is the
// fingerprint of the table's definitions.
const marker = "definitions"

// Replace deletes and creates the table in one transaction. What dynamic sets held is
// lost.
func (t *Tables) Replace(want Table) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	table := kernelTable(want)
	t.conn.AddTable(table) // makes the deletion pass whether it was there or not
	t.conn.DelTable(table)
	t.conn.AddTable(table)
	sets := map[string]*nftables.Set{}
	for _, s := range want.Sets {
		ks := s.kernel(table)
		if err := t.conn.AddSet(ks, nil); err != nil {
			return fmt.Errorf("table %s, set %s: %w", want.Name, s.Name, err)
		}
		sets[s.Name] = ks
	}
	for _, c := range want.Chains {
		t.conn.AddChain(c.kernel(table))
	}
	m := t.conn.AddChain(&nftables.Chain{Name: marker, Table: table})
	t.conn.AddRule(&nftables.Rule{Table: table, Chain: m, Exprs: Return.exprs, UserData: text(want.fingerprint())})
	for _, c := range want.Chains {
		t.addRules(table, c)
	}
	for _, s := range want.Sets {
		if err := t.elements(t.conn.SetAddElements, s, sets[s.Name], s.Elements); err != nil {
			return err
		}
	}
	return t.flush(want.Name)
}

// Commit makes a change in one transaction. def gives the definitions of the
// sets; their elements are not looked at.
func (t *Tables) Commit(def Table, c Change) error {
	if c.Empty() {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	table := kernelTable(def)
	for _, chain := range c.Chains {
		k := t.conn.AddChain(chain.kernel(table))
		t.conn.FlushChain(k)
	}
	for _, chain := range c.Chains {
		t.addRules(table, chain)
	}
	for _, work := range []struct {
		do   func(*nftables.Set, []nftables.SetElement) error
		sets map[string]Elements
	}{{t.conn.SetDeleteElements, c.Remove}, {t.conn.SetAddElements, c.Add}} {
		for _, s := range def.Sets {
			if err := t.elements(work.do, s, s.kernel(table), work.sets[s.Name]); err != nil {
				return err
			}
		}
	}
	for _, name := range c.Drop {
		k := &nftables.Chain{Name: name, Table: table}
		t.conn.FlushChain(k)
		t.conn.DelChain(k)
	}
	return t.flush(def.Name)
}

// Delete removes the table of that family and name; none is no error.
func (t *Tables) Delete(which Table) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	table := kernelTable(which)
	t.conn.AddTable(table)
	t.conn.DelTable(table)
	return t.flush(which.Name)
}

// Generation is a number that every change of any table in this namespace
// raises, by whichever program.
func (t *Tables) Generation() (uint32, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	replies, err := t.ask.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN, Flags: netlink.Request},
		Data:   []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0},
	})
	if err != nil {
		return 0, fmt.Errorf("ask for the generation of the packet filter's rules: %w", err)
	}
	for _, r := range replies {
		if len(r.Data) < 4 {
			continue
		}
		ad, err := netlink.NewAttributeDecoder(r.Data[4:])
		if err != nil {
			continue
		}
		ad.ByteOrder = binary.BigEndian
		for ad.Next() {
			if ad.Type() == unix.NFTA_GEN_ID {
				return ad.Uint32(), nil
			}
		}
	}
	return 0, errors.New("ask for the generation of the packet filter's rules: no answer")
}

// ErrChanging: rules were changed whenever a table was read, so what was read may lack
// some that are there.
var ErrChanging = errors.New("the packet filter's rules change all the time")

// Read tells what the kernel holds of a table with these definitions; without
// elements it leaves those out. The error can be ErrChanging.
func (t *Tables) Read(def Table, elements bool) (State, error) {
	table := kernelTable(def)
	s, err := steady(t.Generation, func() (State, error) {
		t.mu.Lock()
		defer t.mu.Unlock()
		return t.read(table, def, elements)
	})
	if err != nil {
		return State{}, fmt.Errorf("read table %s: %w", def.Name, err)
	}
	return s, nil
}

// readTries is how often a table is read of which rules change meanwhile.
const readTries = 20

// steady reads until no rule of any table changed meanwhile: the kernel tells a table
// piece by piece, and a change between two of them leaves out what is there.
func steady(generation func() (uint32, error), read func() (State, error)) (State, error) {
	before, err := generation()
	if err != nil {
		return State{}, err
	}
	for range readTries {
		s, rerr := read() // which may fail by such a change, too
		after, err := generation()
		if err != nil {
			return State{}, err
		}
		if before == after {
			return s, rerr
		}
		before = after
	}
	return State{}, ErrChanging
}

func (t *Tables) read(table *nftables.Table, def Table, withElements bool) (State, error) {
	s := State{Chains: map[string][]string{}, Sets: map[string]Elements{}}
	chains, err := t.conn.ListChainsOfTableFamily(table.Family)
	if err != nil {
		return State{}, err
	}
	whole := false
	for _, c := range chains {
		if c.Table.Name != table.Name {
			continue
		}
		rules, err := t.conn.GetRules(table, c)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return State{}, err
		}
		texts := make([]string, len(rules))
		for i, r := range rules {
			texts[i], _ = userdata.GetString(r.UserData, userdata.TypeComment)
		}
		s.Chains[c.Name] = texts
		if c.Name == marker {
			whole = len(texts) == 1 && texts[0] == def.fingerprint()
		}
	}
	if !whole {
		return State{}, nil
	}
	for _, c := range def.Chains { // a base chain that is gone was deleted with the table or by hand
		if _, ok := s.Chains[c.Name]; !ok && c.Hook != "" {
			return State{}, nil
		}
	}
	for _, d := range def.Sets {
		if d.Dynamic || !withElements {
			continue
		}
		elements, err := t.conn.GetSetElements(d.kernel(table))
		if errors.Is(err, unix.ENOENT) {
			return State{}, nil
		}
		if err != nil {
			return State{}, fmt.Errorf("set %s: %w", d.Name, err)
		}
		s.Sets[d.Name] = d.fromKernel(elements)
	}
	s.Whole = true
	return s, nil
}

// Elements reads the elements of one set of an inet table, dynamic ones too.
func (t *Tables) Elements(table string, s Set) (Elements, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	elements, err := t.conn.GetSetElements(s.kernel(kernelTable(Table{Name: table})))
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("read set %s of table %s: %w", s.Name, table, err)
	}
	return s.fromKernel(elements), nil
}

func (s Set) fromKernel(elements []nftables.SetElement) Elements {
	out := make(Elements, len(elements))
	for _, e := range elements {
		data := string(e.Val)
		if len(s.Data) > 0 && s.Data[0] == Verdict {
			data = verdictOf(e.Val)
		}
		out[string(e.Key)+string(e.KeyEnd)] = data
	}
	return out
}

// verdictOf decodes the attributes of a verdict.
func verdictOf(b []byte) string {
	ad, err := netlink.NewAttributeDecoder(b)
	if err != nil {
		return ""
	}
	for ad.Next() {
		if ad.Type() == unix.NFTA_VERDICT_CHAIN {
			return GotoChain(strings.TrimRight(ad.String(), "\x00"))
		}
	}
	return Drop
}

// perMessage is how many elements go into one message: its list of elements
// has at most 64 KiB.
const perMessage = 300

func (t *Tables) elements(do func(*nftables.Set, []nftables.SetElement) error, s Set, k *nftables.Set, all Elements) error {
	if len(all) == 0 {
		return nil
	}
	list := make([]nftables.SetElement, 0, len(all))
	for _, key := range slices.Sorted(maps.Keys(all)) {
		e, data := nftables.SetElement{Key: []byte(key)}, all[key]
		if n := words(s.Key) * 4; s.Interval {
			e.Key, e.KeyEnd = e.Key[:n], e.Key[n:]
		}
		switch {
		case len(s.Data) == 0:
		case s.Data[0] != Verdict:
			e.Val = []byte(data)
		case data == Drop:
			e.VerdictData = &expr.Verdict{Kind: expr.VerdictDrop}
		default:
			e.VerdictData = &expr.Verdict{Kind: expr.VerdictGoto, Chain: strings.TrimPrefix(data, "goto ")}
		}
		list = append(list, e)
	}
	for part := range slices.Chunk(list, perMessage) {
		if err := do(k, part); err != nil {
			return fmt.Errorf("set %s: %w", s.Name, err)
		}
	}
	return nil
}

func (t *Tables) addRules(table *nftables.Table, c Chain) {
	for _, r := range c.Rules {
		var e []expr.Any
		for _, s := range r {
			e = append(e, s.exprs...)
		}
		t.conn.AddRule(&nftables.Rule{Table: table, Chain: &nftables.Chain{Name: c.Name, Table: table}, Exprs: e, UserData: text(r.String())})
	}
}

func (t *Tables) flush(name string) error {
	if err := t.conn.Flush(); err != nil {
		return fmt.Errorf("change table %s: %w", name, err)
	}
	return nil
}

func text(s string) []byte { return userdata.AppendString(nil, userdata.TypeComment, comment(s)) }

func kernelTable(t Table) *nftables.Table {
	family := nftables.TableFamilyINet
	if t.Family == Bridge {
		family = nftables.TableFamilyBridge // its hooks have the same numbers
	}
	return &nftables.Table{Family: family, Name: t.Name}
}

func (c Chain) kernel(table *nftables.Table) *nftables.Chain {
	k := &nftables.Chain{Name: c.Name, Table: table}
	if c.Hook == "" {
		return k
	}
	accept, prio := nftables.ChainPolicyAccept, nftables.ChainPriority(c.Priority)
	k.Type, k.Policy, k.Priority = nftables.ChainType(c.Type), &accept, &prio
	switch c.Hook {
	case "prerouting":
		k.Hooknum = nftables.ChainHookPrerouting
	case "input":
		k.Hooknum = nftables.ChainHookInput
	case "forward":
		k.Hooknum = nftables.ChainHookForward
	case "output":
		k.Hooknum = nftables.ChainHookOutput
	case "postrouting":
		k.Hooknum = nftables.ChainHookPostrouting
	default:
		panic("nft: no such hook: " + c.Hook)
	}
	return k
}

func (s Set) kernel(table *nftables.Table) *nftables.Set {
	k := &nftables.Set{
		Table: table, Name: s.Name, KeyType: kernelType(s.Key), Size: s.Size,
		Interval: s.Interval, Concatenation: len(s.Key) > 1, Dynamic: s.Dynamic, HasTimeout: s.Dynamic,
	}
	if len(s.Data) > 0 {
		k.IsMap, k.DataType = true, kernelType(s.Data)
	}
	return k
}
