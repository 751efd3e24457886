package pod

// MountSetattr is whether this kernel makes mounts read-only as a tree.
var MountSetattr = mountSetattr

// Ended counts the pods that have ended here and are believed to be in the API.
func (m *Manager) Ended() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.ended)
}
