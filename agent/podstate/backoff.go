package podstate

import "time"

// Back-off of restarts and image pulls: 10 s doubling to 5 min. An instance
// that ran for resetAfter resets it. The first restart is at once.
const (
	backOffFirst = 10 * time.Second
	BackOffMax   = 5 * time.Minute
	ResetAfter   = 10 * time.Minute
)

// NextBackOff is the delay that follows cur.
func NextBackOff(cur time.Duration) time.Duration {
	if cur < backOffFirst {
		return backOffFirst
	}
	return min(2*cur, BackOffMax)
}

// QuickBackOff is for faults of our own making or that an event may heal
// sooner: 1 s doubling to 30 s.
func QuickBackOff(cur time.Duration) time.Duration {
	if cur < time.Second {
		return time.Second
	}
	return min(2*cur, 30*time.Second)
}

// RestartAt is when the exited instance may be followed by another.
func RestartAt(c *Container) time.Time {
	i := c.Now
	if i == nil || i.StopCause == StopChanged {
		return time.Time{}
	}
	if !i.StartedAt.IsZero() && i.FinishedAt.Sub(i.StartedAt) >= ResetAfter {
		return time.Time{}
	}
	if i.EndSeen.IsZero() {
		return i.FinishedAt.Add(c.BackOff)
	}
	return i.EndSeen.Add(c.BackOff)
}
