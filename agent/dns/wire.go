package dns

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// Most questions are plain: they are read, and mostly answered, on the wire itself.
// miekg/dns unpacks and packs all others, and each plain one whose answer is of more
// than addresses; what is the answer is decided in one place for both. That they say
// the same is tested (FuzzPlain).

// plain is a question with nothing unusual about it: one, by a name of letters,
// digits, dashes and underscores, with at most an OPT record without options.
type plain struct {
	name      string // canonical
	kind      uint16
	end       int // of the question in its message
	edns, do  bool
	size      int // of the answer, at most
	recursion bool
}

const (
	headerSize = 12
	optSize    = 11
)

// flags of the third and fourth byte of a message.
const (
	flagResponse      = 0x80
	flagAuthoritative = 0x04
	flagTruncated     = 0x02
	flagRecursion     = 0x01 // desired
	flagAvailable     = 0x80
	flagAuthentic     = 0x20
)

// readPlain reads a question; false: it is not plain, or not well-formed.
func readPlain(b []byte) (q plain, ok bool) {
	if len(b) < headerSize+5 || b[2]&^flagRecursion != 0 || b[3]&^flagAuthentic != 0 {
		return q, false
	}
	extra := b[11]
	if b[4] != 0 || b[5] != 1 || b[6]|b[7]|b[8]|b[9]|b[10] != 0 || extra > 1 {
		return q, false
	}
	var text [254]byte
	n, at := 0, headerSize
	for b[at] != 0 {
		l := int(b[at])
		at++
		if l > 63 || n+l+1 > len(text) || at+l >= len(b) {
			return q, false
		}
		for _, c := range b[at : at+l] {
			switch {
			case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-', c == '_':
			case 'A' <= c && c <= 'Z':
				c += 'a' - 'A'
			default:
				return q, false
			}
			text[n] = c
			n++
		}
		text[n] = '.'
		n++
		at += l
	}
	at++
	if n == 0 || at+4 > len(b) {
		return q, false
	}
	q.kind = binary.BigEndian.Uint16(b[at:])
	switch q.kind {
	case dns.TypeA, dns.TypeAAAA, dns.TypeCNAME, dns.TypeHTTPS, dns.TypeMX, dns.TypePTR, dns.TypeSRV, dns.TypeTXT:
	default:
		return q, false
	}
	if binary.BigEndian.Uint16(b[at+2:]) != dns.ClassINET {
		return q, false
	}
	q.end, q.size, q.recursion = at+4, dns.MinMsgSize, b[2]&flagRecursion != 0
	switch rest := b[q.end:]; {
	case extra == 0 && len(rest) == 0:
	case extra == 1 && len(rest) == optSize && rest[0] == 0 && binary.BigEndian.Uint16(rest[1:]) == dns.TypeOPT &&
		rest[5] == 0 && rest[6] == 0 && rest[9] == 0 && rest[10] == 0: // no code, version 0, no options
		q.edns, q.do = true, rest[7]&0x80 != 0
		q.size = answerSize(binary.BigEndian.Uint16(rest[3:]))
	default:
		return q, false
	}
	q.name = string(text[:n])
	return q, true
}

// answerSize is how long a datagram may be to who takes that many bytes.
func answerSize(takes uint16) int { return int(max(dns.MinMsgSize, min(takes, udpPayload))) }

// plainAnswer appends the answer to the question b to out, which is empty. False: it
// takes more than that, and nothing was done.
func (s *Server) plainAnswer(out, b []byte, client netip.Addr, began time.Time) (reply []byte, done bool) {
	defer func() {
		if p := recover(); p != nil {
			s.panicked(p)
			reply, done = nil, false
		}
	}()
	q, ok := readPlain(b)
	// A reverse name may be the cluster's: that is for zone.answer to say.
	if !ok || strings.HasSuffix(q.name, loopDomain) || strings.HasSuffix(q.name, ".arpa.") || !s.mayAsk(client) {
		return nil, false
	}
	ours := s.zone.holds(q.name)
	if ours {
		reply, done = s.plainOurs(out, b, q)
	} else {
		reply, done = s.forward.plainRemembered(out, b, q)
	}
	if done {
		s.metrics.answered(exchanged{
			zone: s.zoneLabel(ours), client: client, kind: q.kind, signed: q.do, rcode: int(reply[3] & 0xf), asked: len(b), reply: len(reply), began: began,
		})
	}
	return reply, done
}

// plainOurs answers with the addresses of a name of the cluster's, or says that there
// are none.
func (s *Server) plainOurs(out, b []byte, q plain) ([]byte, bool) {
	if q.kind != dns.TypeA && q.kind != dns.TypeAAAA {
		return nil, false
	}
	a, _ := s.zone.answer(q.name, askedBy(dns.Question{Name: q.name, Qtype: q.kind, Qclass: dns.ClassINET}, false))
	if a.answer != nil || a.extra != nil || a.target != "" || a.rcode == dns.RcodeServerFailure {
		return nil, false
	}
	out = append(out, b[:q.end]...)
	clear(out[2:headerSize])
	out[2], out[3], out[5] = flagResponse|flagAuthoritative, flagAvailable|byte(a.rcode), 1
	if q.recursion {
		out[2] |= flagRecursion
	}
	var addrs []netip.Addr
	for _, x := range a.addrs {
		if x.Is4() == (q.kind == dns.TypeA) {
			if addrs == nil {
				addrs = a.addrs[:0] // made for this answer
			}
			addrs = append(addrs, x)
		}
	}
	if len(addrs) == 0 {
		return q.option(appendSOA(out, headerSize+len(q.name)-len(s.zone.name))), true
	}
	size := 12 + 4
	if q.kind == dns.TypeAAAA {
		size = 12 + 16
	}
	room := q.size - len(out)
	if q.edns {
		room -= optSize
	}
	n := min(len(addrs), room/size)
	if n < len(addrs) {
		out[2] |= flagTruncated
	}
	binary.BigEndian.PutUint16(out[6:], uint16(n))
	for i := range n { // each time in another order: many clients take the first
		if j := i + rand.IntN(len(addrs)-i); i != j {
			addrs[i], addrs[j] = addrs[j], addrs[i]
		}
		out = append(out, 0xc0, headerSize) // the question's name
		out = binary.BigEndian.AppendUint16(out, q.kind)
		out = append(out, 0, dns.ClassINET, 0, 0, 0, ttl, 0, byte(size-12))
		if x := addrs[i]; x.Is4() {
			a4 := x.As4()
			out = append(out, a4[:]...)
		} else {
			a16 := x.As16()
			out = append(out, a16[:]...)
		}
	}
	return q.option(out), true
}

// appendSOA adds zone.soa in the authority section. zone is where the question names
// the zone.
func appendSOA(out []byte, zone int) []byte {
	out[9] = 1
	at := [2]byte{0xc0 | byte(zone>>8), byte(zone)}
	const ns, mailbox = "\x02ns\x03dns", "\x0ahostmaster"
	out = append(out, at[:]...)
	out = append(out, 0, byte(dns.TypeSOA), 0, dns.ClassINET, 0, 0, 0, ttl, 0, byte(len(ns)+2+len(mailbox)+2+5*4))
	out = append(append(out, ns...), at[:]...)
	out = append(append(out, mailbox...), at[:]...)
	for _, n := range [...]uint32{soaSerial, soaRefresh, soaRetry, soaExpire, ttl} {
		out = binary.BigEndian.AppendUint32(out, n)
	}
	return out
}

// option adds the OPT record, if the question had one.
func (q plain) option(out []byte) []byte {
	if !q.edns {
		return out
	}
	out[11]++ // of records that are not many: they fit a datagram
	var do byte
	if q.do {
		do = 0x80
	}
	return append(out, 0, 0, byte(dns.TypeOPT), udpPayload>>8, udpPayload&0xff, 0, 0, do, 0, 0, 0)
}

// packed is a remembered answer as it goes over the wire, to a question by its
// canonical name.
type packed struct {
	b    []byte
	ttls []uint16 // where times to live are
	// data are where the addresses are that change places, each of length bytes.
	data   []uint16
	length int
}

// pack prepares an answer for plainRemembered; nil: it is too large, or in some way
// strange.
func pack(k key, m *dns.Msg) *packed {
	if m.Rcode > 0xf || len(m.Extra) > 250 {
		return nil
	}
	r := *m // its records are only looked at
	r.Id, r.Response, r.RecursionDesired, r.RecursionAvailable, r.Authoritative, r.Compress = 0, true, false, true, false, true
	r.CheckingDisabled, r.Zero, r.Opcode = false, false, dns.OpcodeQuery
	r.Question = []dns.Question{{Name: k.name, Qtype: k.kind, Qclass: dns.ClassINET}}
	r.Extra = withoutOPT(r.Extra)
	b, err := r.Pack()
	if err != nil || len(b) > udpPayload-optSize {
		return nil
	}
	p := &packed{b: b}
	first := firstAddress(m.Answer)
	at := skipName(b, headerSize) + 4
	for i := range len(r.Answer) + len(r.Ns) + len(r.Extra) {
		at = skipName(b, at)
		if at < 0 || at+10 > len(b) {
			return nil
		}
		length := int(binary.BigEndian.Uint16(b[at+8:]))
		p.ttls = append(p.ttls, uint16(at+4))
		at += 10
		if i >= first && i < len(m.Answer) {
			if x, y := m.Answer[i].Header(), m.Answer[first].Header(); x.Name != y.Name || x.Ttl != y.Ttl {
				return nil
			}
			if length == 0 || p.length != 0 && p.length != length {
				return nil // they could not change places
			}
			p.data, p.length = append(p.data, uint16(at)), length
		}
		at += length
	}
	if at != len(b) {
		return nil
	}
	return p
}

// skipName is where the name at that place ends; -1: not in b.
func skipName(b []byte, at int) int {
	for at >= 0 && at < len(b) {
		switch l := int(b[at]); {
		case l == 0:
			return at + 1
		case l&0xc0 == 0xc0:
			return at + 2
		default:
			at += 1 + l
		}
	}
	return -1
}

// plainRemembered is remembered for a plain question.
func (f *forwarder) plainRemembered(out, b []byte, q plain) ([]byte, bool) {
	fresh, r := f.cache.get(key{name: q.name, kind: q.kind, do: q.do}, false)
	if !fresh || r.packed == nil {
		return nil, false
	}
	p := r.packed
	limit := q.size
	if q.edns {
		limit -= optSize
	}
	if len(p.b) > limit {
		return nil, false
	}
	out = append(out, p.b...)
	out[0], out[1] = b[0], b[1]
	copy(out[headerSize:q.end], b[headerSize:q.end]) // in the letters that were asked
	if q.recursion {
		out[2] |= flagRecursion
	}
	age := uint32(f.cache.now().Sub(r.since) / time.Second)
	for _, at := range p.ttls {
		was := binary.BigEndian.Uint32(out[at:])
		binary.BigEndian.PutUint32(out[at:], left(was, age))
	}
	for i := len(p.data) - 1; i > 0; i-- {
		if j := rand.IntN(i + 1); i != j {
			var keep [16]byte
			x, y := out[p.data[i]:][:p.length], out[p.data[j]:][:p.length]
			copy(keep[:], x)
			copy(x, y)
			copy(y, keep[:p.length])
		}
	}
	f.metrics.asked.Inc()
	f.metrics.hit(r.denied)
	return q.option(out), true
}
