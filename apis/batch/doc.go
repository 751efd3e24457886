// Package batch holds the kinds of group batch: Job and CronJob.
package batch
