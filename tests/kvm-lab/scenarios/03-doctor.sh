#!/bin/bash
# `doctor` proves the vm tier here, and says so for people and for programs.
# deadline: 250

as_user plimsoll doctor --backend firecracker > "$out/doctor.txt" 2>&1 || fail "firecracker is not usable: $(head -n 3 "$out/doctor.txt")"
grep -q 'proves vm' "$out/doctor.txt" || fail "$(head -n 3 "$out/doctor.txt")"
user=ci
as_user plimsoll doctor --backend firecracker --json > "$out/doctor.json" || fail "firecracker is not usable: $(cat "$out/doctor.json")"
grep -q '"vm"' "$out/doctor.json" || fail "no tier vm: $(cat "$out/doctor.json")"
