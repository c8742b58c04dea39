#!/bin/bash
# The gvisor backend as a plain user whose cgroup was delegated (version 2): the same limits, in the user's own subtree.
# deadline: 180
user=ci

run 0 hello --backend gvisor --memory 300MiB --pids 50 --cpus 1 --run 'echo "$(id -u)"'
holds hello \
  'report["verdict"] == "passed" and isolation["tier"] == "kernel"' \
  'all(status(id) == "enforced" for id in ["memory-limit", "cpu-limit", "pids-limit", "network", "teardown"])' \
  '"user.slice/ci.service" in words("memory-limit")'
# Without a delegated group a limit that is written cannot be enforced: nothing runs.
user=stranger
run 11 limited --backend gvisor --memory 300MiB --run 'echo ran'
holds limited 'step["dispatched"] == "no" and refusal["stage"] == "judge"'
run 0 unlimited --backend gvisor --run 'echo ran'
holds unlimited 'status("memory-limit") == "not-enforced"'
