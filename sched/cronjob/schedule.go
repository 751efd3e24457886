package cronjob

import (
	"fmt"
	"time"

	"github.com/robfig/cron/v3"
	batchv1 "k8s.io/api/batch/v1"

	"github.com/clusterd/clusterd/apis/batch"
)

// timetable is a CronJob's schedule in its zone.
type timetable struct {
	cron.Schedule
	zone *time.Location
}

// read returns the CronJob's timetable. Validation lets only readable ones
// pass, unless the zone files differ between servers.
func read(cj *batchv1.CronJob) (timetable, error) {
	zone := time.UTC
	if cj.Spec.TimeZone != nil {
		var err error
		if zone, err = time.LoadLocation(*cj.Spec.TimeZone); err != nil {
			return timetable{}, fmt.Errorf("spec.timeZone %q: %w", *cj.Spec.TimeZone, err)
		}
	}
	schedule, err := batch.ParseSchedule(cj.Spec.Schedule)
	if err != nil {
		return timetable{}, fmt.Errorf("spec.schedule %q: %w", cj.Spec.Schedule, err)
	}
	return timetable{schedule, zone}, nil
}

// windows are how far back to look for the last time; each is tried only if the
// one before holds none, so that a long pause costs few steps.
var windows = []time.Duration{time.Minute, time.Hour, 24 * time.Hour, 32 * 24 * time.Hour, 367 * 24 * time.Hour, 5 * 366 * 24 * time.Hour}

// last returns the latest time after since and not after now, the zero time if
// there is none. Times of "@every" are counted from the anchor, the last one that was
// met: their latest is returned also if it is before since.
func (t timetable) last(anchor, since, now time.Time) time.Time {
	if every, ok := t.Schedule.(cron.ConstantDelaySchedule); ok {
		if steps := now.Sub(anchor) / every.Delay; steps > 0 {
			return anchor.Add(steps * every.Delay)
		}
		return time.Time{}
	}
	for _, window := range windows {
		from := now.Add(-window)
		whole := !from.After(since)
		if whole {
			from = since
		}
		var found time.Time
		for at := t.Next(from.In(t.zone)); !at.IsZero() && !at.After(now); at = t.Next(at) {
			found = at
		}
		if !found.IsZero() || whole {
			return found
		}
	}
	return time.Time{}
}

// missed counts the times after since and not after now, up to limit.
func (t timetable) missed(since, now time.Time, limit int) int {
	n := 0
	for at := t.Next(since.In(t.zone)); !at.IsZero() && !at.After(now) && n < limit; at = t.Next(at) {
		n++
	}
	return n
}

// next returns the first time after now, the zero time if there is none.
func (t timetable) next(since, now time.Time) time.Time {
	if every, ok := t.Schedule.(cron.ConstantDelaySchedule); ok {
		return since.Add((max(0, now.Sub(since)/every.Delay) + 1) * every.Delay)
	}
	return t.Next(now.In(t.zone))
}

// Last is the latest time of a schedule after the anchor and not after now, the zero
// time if there is none. The anchor is the last time that was met; those of "@every"
// are counted from it. Others are in UTC, unless the schedule names a zone.
func Last(s cron.Schedule, anchor, now time.Time) time.Time {
	return timetable{s, time.UTC}.last(anchor, anchor, now)
}

// Next is the first time of a schedule after now, with the anchor of Last.
func Next(s cron.Schedule, anchor, now time.Time) time.Time {
	return timetable{s, time.UTC}.next(anchor, now)
}
