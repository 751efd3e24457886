package pod

// Ended counts the pods that have ended here and are believed to be in the API.
func (m *Manager) Ended() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.ended)
}
