#!/bin/bash
# A host without /dev/kvm: exit 12 within 15 s with the blocker and a fix, from `doctor`, `run` and `check`; nothing is left.
# deadline: 180
# alone

mv /dev/kvm /dev/kvm.hidden
trap 'mv /dev/kvm.hidden /dev/kvm' EXIT
SECONDS=0
run 12 missing --backend firecracker --image "$shell" --run 'echo ran'
[ $SECONDS -le 15 ] || fail "that took $SECONDS s"
holds missing 'step["dispatched"] == "no" and "/dev/kvm" in refusal["message"] and refusal["help"]'
code=0
SECONDS=0
as_user plimsoll doctor --backend firecracker > "$out/doctor.txt" 2>&1 || code=$?
if [ $code != 12 ] || ! grep -q /dev/kvm "$out/doctor.txt"; then fail "doctor: exit $code: $(head -n 2 "$out/doctor.txt")"; fi
[ $SECONDS -le 15 ] || fail "doctor took $SECONDS s"
# `auto` goes on to the next at or above its floor, and with a floor of vm to none.
run 0 auto --image "$shell" --run 'echo ran'
holds auto 'step["backend"]["name"] == "gvisor" and isolation["tier"] == "kernel"'
run 12 floor --image "$shell" --minimum-isolation vm --run 'echo ran'
holds floor 'step["dispatched"] == "no"'
