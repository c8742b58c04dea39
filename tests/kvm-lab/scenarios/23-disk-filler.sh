#!/bin/bash
# All that a program can write is memory of its machine, at most `disk`: full is an error inside and a limit hit, what fits
# fits, and the host's disk doesn't grow.
# deadline: 300
# alone

run 0 fits --backend firecracker --image "$shell" --memory 256MiB --run 'dd if=/dev/zero of=big bs=1M count=100 && rm big'
holds fits 'result["limit_hit"] is None'
before=$(df --output=used / | tail -n 1)
run 10 full --backend firecracker --image "$shell" --memory 256MiB --disk 256MiB --run 'dd if=/dev/zero of=big bs=1M count=300'
holds full 'result["limit_hit"] == "disk" and "No space left" in err' 'status("disk-limit") == "enforced"'
after=$(df --output=used / | tail -n 1)
[ $((after - before)) -lt 20000 ] || fail "the host's disk grew by $((after - before)) KiB"
# Less than the memory cannot be shown from outside, so a step that asks for it is refused.
run 11 small --backend firecracker --image "$shell" --memory 256MiB --disk 64MiB --run 'echo ran'
holds small 'step["dispatched"] == "no" and refusal["stage"] == "judge"'
