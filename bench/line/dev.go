package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// benchDev measures `clusterd dev` on a fresh directory: until its API is ready,
// and until a pod made at that moment runs, the load of its image included.
func benchDev(ctx context.Context, bin, image string, rounds int) error {
	var ready, first []time.Duration
	for range rounds {
		r, f, err := devOnce(ctx, bin, image)
		if err != nil {
			return err
		}
		ready, first = append(ready, r), append(first, f)
	}
	f := figure{Case: "dev_api_ready", Nodes: 1, Rounds: rounds}
	f.setTimes(ready)
	f.print()
	f = figure{Case: "dev_first_pod_running", Nodes: 1, Pods: 1, Rounds: rounds}
	f.setTimes(first)
	f.print()
	return nil
}

func devOnce(ctx context.Context, bin, image string) (ready, first time.Duration, err error) {
	dir, err := os.MkdirTemp("", "clusterd-bench-")
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = firstError(err, os.RemoveAll(dir)) }()
	data := filepath.Join(dir, "dev")
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return 0, 0, err
	}
	defer log.Close()
	began := time.Now()
	cmd := exec.Command(filepath.Join(bin, "clusterd"), "dev", "--data", data, "--port", "16443", "--cgroup-root", "/clusterd-bench")
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		return 0, 0, err
	}
	defer func() {
		cmd.Process.Signal(syscall.SIGTERM)
		cmd.Wait()
		out, rerr := exec.Command(filepath.Join(bin, "clusterd"), "reset", "--data", data).CombinedOutput()
		if rerr != nil {
			err = firstError(err, fmt.Errorf("reset: %w: %s", rerr, out))
		}
	}()
	kubeconfig := filepath.Join(data, "admin.kubeconfig")
	w, err := devReady(ctx, kubeconfig)
	if err != nil {
		b, _ := os.ReadFile(log.Name())
		return 0, 0, fmt.Errorf("%w\n%s", err, b)
	}
	ready = time.Since(began)
	if err := w.waitNodes(ctx, 1); err != nil {
		return 0, 0, err
	}
	if out, err := exec.CommandContext(ctx, filepath.Join(bin, "clusterctl"), "--kubeconfig", kubeconfig, "image", "load", image).CombinedOutput(); err != nil {
		return 0, 0, fmt.Errorf("load the image: %w: %s", err, out)
	}
	if _, err := w.apply(ctx, "first", 1); err != nil {
		return 0, 0, err
	}
	return ready, time.Since(began), nil
}

// devReady waits for the kubeconfig to appear and its API to be ready.
func devReady(ctx context.Context, kubeconfig string) (*workload, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		if config, err := clientcmd.BuildConfigFromFlags("", kubeconfig); err == nil {
			config.QPS = -1
			client, err := kubernetes.NewForConfig(config)
			if err != nil {
				return nil, err
			}
			if client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error() == nil {
				return &workload{client}, nil
			}
		}
		if err := sleep(ctx, 5*time.Millisecond); err != nil {
			return nil, fmt.Errorf("wait for the API: %w", err)
		}
	}
}
