package raftstore

// Absences is how often replication had to wait for a member.
func (s *Store) Absences() int {
	s.patient.mu.Lock()
	defer s.patient.mu.Unlock()
	return s.patient.absences
}
