package check

import "testing"

func TestNewFinalizers(t *testing.T) {
	for _, test := range []struct {
		name string
		had  []string
		ok   bool
	}{
		{"example.com/mine", nil, true}, {"kubernetes", nil, true}, {"orphan", nil, true}, {"foregroundDeletion", nil, true},
		{"mine", nil, false}, {"mine", []string{"mine"}, true}, {"mine", []string{"other"}, false},
	} {
		errs := NewFinalizers([]string{"example.com/first", test.name}, test.had)
		if (len(errs) == 0) != test.ok || !test.ok && errs[0].Field != "metadata.finalizers[1]" {
			t.Errorf("%s beside %v: %v", test.name, test.had, errs)
		}
	}
}
