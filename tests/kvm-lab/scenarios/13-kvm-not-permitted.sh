#!/bin/bash
# A plain user outside of group kvm: exit 12, and the fix names the group.
# deadline: 120
user=stranger

run 12 stranger --backend firecracker --image "$shell" --run 'echo ran'
holds stranger 'step["dispatched"] == "no" and "/dev/kvm" in refusal["message"] and "kvm" in refusal["help"]'
code=0
as_user plimsoll doctor --backend firecracker > "$out/doctor.txt" 2>&1 || code=$?
[ $code = 12 ] || fail "doctor: exit $code"
