package backup

// CheapPassphrase is Passphrase with little work.
func CheapPassphrase(p string) (Lock, Key, error) { return passphrase(p, 10) }
