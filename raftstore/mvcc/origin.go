package mvcc

import "strings"

// An origin is what the member that took a request says: words. Behind them stands, of a command that
// another member handed to the leader, which one that was: the leader writes it, from the key
// that the member has proved. It is part of the words, so that versions which do not know of it show it, too:
//
//	alice via kubectl [from gw5fd…]

const (
	fromMark = "[from "
	fromEnd  = "]"
)

// SplitOrigin is who asked for a change, and the id of the member that handed it to the leader;
// "": the leader took it itself, or was of a version that did not say.
func SplitOrigin(origin string) (who, from string) {
	at := strings.LastIndex(origin, fromMark)
	if at < 0 || !strings.HasSuffix(origin, fromEnd) || at > 0 && origin[at-1] != ' ' {
		return origin, ""
	}
	from = origin[at+len(fromMark) : len(origin)-len(fromEnd)]
	if from == "" || strings.ContainsAny(from, " []") {
		return origin, ""
	}
	return origin[:max(at-1, 0)], from
}

// OriginFrom is an origin of a command that the member from has handed to the leader; "": the leader
// itself. Members that who names already are taken out of it: they are words of somebody else.
func OriginFrom(who, from string) string {
	for {
		before, named := SplitOrigin(who)
		if named == "" {
			break
		}
		who = before
	}
	if from == "" {
		return who
	}
	if who != "" {
		who += " "
	}
	return who + fromMark + from + fromEnd
}

// PlainOrigin is who in words that name no member, and are not those of anybody else: users
// may be called as they like.
func PlainOrigin(who string) string {
	for {
		before, named := SplitOrigin(who)
		if named == "" {
			return who
		}
		who = strings.TrimPrefix(before+" "+strings.TrimSuffix(fromMark, " ")+": "+named+fromEnd, " ")
	}
}
