#!/bin/bash
# More memory than there is: the guest's kernel ends the program, the machine lives on to say so, the host's memory is bounded.
# deadline: 120

mkdir -p "$work/bomb/artifact"
echo 'x = bytearray(1 << 30)
for i in range(0, len(x), 4096): x[i] = 1
print("survived")' > "$work/bomb/artifact/bomb.py"
run 10 bomb --backend firecracker --image "$python" --memory 160MiB --run 'python3 bomb.py'
holds bomb \
  'result["limit_hit"] == "memory" and "survived" not in out and report["verdict"] == "failed"' \
  'resources["peak_memory_bytes"] < 400 << 20'
