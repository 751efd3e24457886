// Package peer carries what members of a store say to each other: streams that
// begin with a greeting, raft's messages on some of them, and our own calls in
// frames on the others. It decides nothing about who may say what (StreamConfig.May
// does), and knows no Store.
package peer
