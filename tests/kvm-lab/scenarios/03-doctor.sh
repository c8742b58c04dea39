#!/bin/bash
# `doctor` proves the vm tier here, and says what of the host weakens it.
# deadline: 60

as_user plimsoll doctor --backend firecracker --json > "$out/doctor.json" || fail "firecracker is not usable: $(cat "$out/doctor.json")"
grep -q '"vm"' "$out/doctor.json" || fail "no tier vm"
as_user plimsoll doctor --backend firecracker > "$out/doctor.txt"
grep -q 'proves vm' "$out/doctor.txt" || fail "$(head -n 3 "$out/doctor.txt")"
