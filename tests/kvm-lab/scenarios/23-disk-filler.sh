#!/bin/bash
# The workspace, /tmp and /dev/shm are full at `disk`; what fits fits; the host's disk doesn't grow.
# deadline: 150

run 0 fits --backend firecracker --image "$shell" --memory 256MiB --disk 48MiB --run 'dd if=/dev/zero of=big bs=1M count=32 && rm big'
holds fits 'result["limit_hit"] is None'
before=$(df --output=used / | tail -n 1)
run 10 full --backend firecracker --image "$shell" --memory 256MiB --disk 48MiB --run 'dd if=/dev/zero of=big bs=1M count=100'
holds full 'result["limit_hit"] == "disk" and "No space left" in err and status("disk-limit") != "unknown"'
after=$(df --output=used / | tail -n 1)
[ $((after - before)) -lt 20000 ] || fail "the host's disk grew by $((after - before)) KiB"
