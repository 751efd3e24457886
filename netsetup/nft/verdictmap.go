package nft

import (
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// VerdictMap does what a map of verdicts says about the fields.
func VerdictMap(verdicts string, fields ...Field) Stmt {
	e, _ := load(0, fields)
	return Stmt{concat(fields) + " vmap @" + verdicts, append(e,
		&expr.Lookup{SourceRegister: register(0), DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true, SetName: verdicts})}
}

// Answers matches packets of a connection's second direction, Related what the
// network says of a connection, such as that a packet was too big.
var (
	Answers = Stmt{"ct direction reply", []expr.Any{
		&expr.Ct{Key: expr.CtKeyDIRECTION, Register: register(0)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: register(0), Data: []byte{1}}, // IP_CT_DIR_REPLY
	}}
	Related = Stmt{"ct state related", []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: register(0)},
		&expr.Bitwise{SourceRegister: register(0), DestRegister: register(0), Len: 4, Mask: binaryutil.NativeEndian.PutUint32(expr.CtStateBitRELATED), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: register(0), Data: make([]byte, 4)},
	}}
)

// Comments are the texts of the chain's rules as the kernel keeps them.
func (c Chain) Comments() []string { return ruleTexts(c) }
