package quantity

// suspicious reports whether a body holds what may be a quantity out of bounds: all
// bodies are looked at, so it is quick, and most have none.
func suspicious(body []byte) bool {
	found := false
	scan(body, func(int) bool { found = true; return false })
	return found
}

// matches are the places at which something suspicious begins to be so.
func matches(body []byte) (at []int) {
	scan(body, func(i int) bool { at = append(at, i); return true })
	return at
}

// scan calls yield with the place of each exponent of three or more digits that follows
// on a digit or point, and of each run of more digits than a quantity may have, until
// yield returns false.
func scan(body []byte, yield func(int) bool) {
	run := 0 // digits before i
	for i, c := range body {
		switch {
		case digit(c):
			if run++; run == maxLength && !yield(i) {
				return
			}
			continue
		case (c == 'e' || c == 'E') && i > 0 && (digit(body[i-1]) || body[i-1] == '.'):
			j := i + 1
			if j < len(body) && (body[j] == '+' || body[j] == '-') {
				j++
			}
			if j+3 <= len(body) && digit(body[j]) && digit(body[j+1]) && digit(body[j+2]) && !yield(i) {
				return
			}
		}
		run = 0
	}
}

func digit(c byte) bool { return '0' <= c && c <= '9' }
