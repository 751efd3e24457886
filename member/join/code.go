package join

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"strings"
)

// codeLetters are Crockford's: none of them is taken for another.
var codeLetters = base32.NewEncoding("0123456789ABCDEFGHJKMNPQRSTVWXYZ").WithPadding(base32.NoPadding)

// codeBytes make eight letters. An attacker between the machine and the server can
// try one code for each time that a person is asked: see Reveal.
const codeBytes = 5

// code is what the machine shows and a person repeats to the cluster: equal on
// both sides if they mean the same authority, the same machine and the same
// exchange. A short authentication string as in ZRTP (RFC 6189, section 4.4).
func (r Reveal) code(authority string, server []byte) string {
	sum := digest("clusterd join code", []byte(authority), r.commitment(), r.Nonce, server)
	text := codeLetters.EncodeToString(sum[:codeBytes])
	return text[:4] + "-" + text[4:]
}

// commitment binds the machine to what it will reveal.
func (r Reveal) commitment() []byte {
	return digest("clusterd join commitment", []byte(r.ID), r.Nonce, []byte(r.Name), []byte(r.Addr.String()), r.CSR, []byte(r.SecretHash))
}

// digest hashes parts so that no two lists of them are alike.
func digest(label string, parts ...[]byte) []byte {
	h := sha256.New()
	for _, p := range append([][]byte{[]byte(label)}, parts...) {
		h.Write(binary.BigEndian.AppendUint32(nil, uint32(len(p))))
		h.Write(p)
	}
	return h.Sum(nil)
}

// readCode takes a code as people type it.
func readCode(text string) string {
	text = strings.NewReplacer("-", "", " ", "", "O", "0", "I", "1", "L", "1").Replace(strings.ToUpper(text))
	if len(text) != 8 {
		return ""
	}
	return text[:4] + "-" + text[4:]
}
