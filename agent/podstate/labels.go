package podstate

// Labels on sandboxes and containers: what the agent has to find again after
// its own restart. They are stored by podmon, so a name's meaning never
// changes.
const (
	LabelHash    = "hash"    // container: Hash of its spec
	LabelImage   = "image"   // container: the reference in the spec
	LabelImageID = "imageID" // container
	LabelBackOff = "backoff" // container: delay before the next start, a Go duration
	LabelSignal  = "signal"  // container: what stops it, "SIGTERM"
	LabelType    = "type"    // container: its Kind
	LabelMessage = "message" // container: host path of the termination message
	LabelIPs     = "ips"     // sandbox: comma-separated addresses
	LabelGrace   = "grace"   // sandbox: terminationGracePeriodSeconds
)
