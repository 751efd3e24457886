// Package admissionregistration describes the kinds by which users register
// what judges and changes objects before they are stored: webhooks, and
// policies made of CEL expressions. Whether an expression is CEL at all needs a
// compiler and is looked at by apis/server.
package admissionregistration
