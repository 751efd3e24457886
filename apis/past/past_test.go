package past

import (
	"strings"
	"testing"
	"time"
)

func TestParseMoment(t *testing.T) {
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	for text, want := range map[string]Moment{
		"1234":                      {Revision: 1234},
		"-10m":                      {Back: 10 * time.Minute},
		"-1h30m":                    {Back: 90 * time.Minute},
		"2026-05-01T11:00:00Z":      {Time: now.Add(-time.Hour)},
		"2026-05-01T13:00:00+02:00": {Time: now.Add(-time.Hour)},
	} {
		got, err := ParseMoment(text)
		if err != nil || got.Revision != want.Revision || got.Back != want.Back || !got.Time.Equal(want.Time) {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
		if want.Revision == 0 && !got.At(now).Before(now) {
			t.Errorf("%s: at %v", text, got.At(now))
		}
	}
	for text, say := range map[string]string{
		"10m": "did you mean -10m?", "+10m": "did you mean -10m?", "0": "give a revision", "-5": "give a revision",
		"": "give a revision", "yesterday": "give a revision", "2026-05-01": "give a revision", "99999999999999999999": "give a revision",
	} {
		if _, err := ParseMoment(text); err == nil || !strings.Contains(err.Error(), say) {
			t.Errorf("%q: %v, want it to say %q", text, err, say)
		}
	}
}
