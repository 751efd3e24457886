package join

import (
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// GossipKeyWishKey is where the store notes that another gossip key is wanted: its
// last revision is that of the last wish. See member/gossipkey.
const GossipKeyWishKey = "/clusterd/gossip-key-wish"

// GossipKeyRotation asks for another gossip key, in the transaction of what makes it
// necessary: a former server knows the current one.
func GossipKeyRotation(why string) mvcc.Op {
	return put(GossipKeyWishKey, gossipKeyWish{why})
}

type gossipKeyWish struct {
	Why string `json:"why"`
}
