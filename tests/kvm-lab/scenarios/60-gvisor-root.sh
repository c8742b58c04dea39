#!/bin/bash
# The gvisor backend as root on cgroup v2, which few other machines show: limits are set in the group, read back, and hold.
# deadline: 180

run 0 hello --backend gvisor --memory 300MiB --pids 50 --cpus 1 --run 'echo "$(uname -sr) as $(id -u)"'
holds hello \
  'report["verdict"] == "passed" and isolation["tier"] == "kernel" and isolation["proven"]' \
  'out.startswith("Linux 4.4.0 as 47113")' \
  'all(status(id) == "enforced" for id in ["memory-limit", "cpu-limit", "pids-limit", "network", "teardown"])' \
  '"memory.max" in words("memory-limit") and "cpu.max" in words("cpu-limit")'
