#!/bin/bash
# gVisor's limits on cgroup v2, as root and as a plain user: a memory bomb, a busy loop, and what is left of them.
# deadline: 150

for user in root ci; do
  mkdir -p "$work/memory-$user/artifact"
  echo 'x = bytearray(1 << 30)
for i in range(0, len(x), 4096): x[i] = 1
print("survived")' > "$work/memory-$user/artifact/bomb.py"
  run 10 "memory-$user" --backend gvisor --memory 160MiB --run 'python3 bomb.py'
  holds "memory-$user" 'result["limit_hit"] == "memory" and "survived" not in out' 'resources["peak_memory_bytes"] <= 160 << 20'
  run 10 "time-$user" --backend gvisor --timeout 3s --run 'echo begun; while :; do :; done'
  holds "time-$user" 'result["timed_out"] and result["limit_hit"] == "time" and out == "begun\n"' 'resources["cpu_ms"] > 500'
done
