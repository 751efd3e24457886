package server

import (
	"net/http"

	"k8s.io/apiserver/pkg/authentication/authenticator"
)

// Library is what answers behind the filters and behind what is put before the library.
func (s *Server) Library() http.Handler { return s.generic.Handler.Director }

// Behind is how many servers behind the front the library sees a handler of.
func (s *Server) Behind() (n int) {
	for d := s.generic.NextDelegate(); d != nil; d = d.NextDelegate() {
		if d.UnprotectedHandler() != nil {
			n++
		}
	}
	return n
}

// Authenticator says who asks, as every request is asked about.
func (s *Server) Authenticator() authenticator.Request { return s.authenticator }

// AccountTokens knows the tokens of service accounts, and keeps no answer.
func (s *Server) AccountTokens() authenticator.Token { return s.accounts.authenticator }

// WrongAuthentications is how many wrong files with an AuthenticationConfiguration it has seen.
func (s *Server) WrongAuthentications() int64 { return s.foreign.wrong.Load() }
