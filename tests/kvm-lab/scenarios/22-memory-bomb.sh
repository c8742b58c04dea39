#!/bin/bash
# More memory than there is: the guest's kernel ends the program, the machine lives on to say so, the host's memory is bounded.
# deadline: 240

mkdir -p "$work/bomb/artifact"
# Piece by piece: a single large one Linux refuses at once, and nothing is hit.
echo 'kept = [b"x" * (1 << 20) for _ in range(1 << 10)]
print("survived")' > "$work/bomb/artifact/bomb.py"
run 10 bomb --backend firecracker --image "$python" --memory 160MiB --run 'python3 bomb.py'
holds bomb \
  'result["limit_hit"] == "memory" and "survived" not in out and report["verdict"] == "failed"' \
  'resources["peak_memory_bytes"] < 400 << 20'
