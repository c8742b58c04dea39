#!/bin/bash
# The same as a plain user in group kvm: no jailer, but our own jail; limits in the delegated cgroup.
# deadline: 180
user=ci

run 0 hello --backend firecracker --image "$shell" --memory 256MiB --run 'echo hello'
holds hello \
  'report["verdict"] == "passed" and isolation == {"floor": "vm", "tier": "vm", "proven": True}' \
  'out == "hello\n" and set(controls) == set(all_controls)' \
  'all(status(id) == "enforced" for id in required if id not in ("binary-identity", "filesystem"))' \
  'status("memory-limit") == "enforced" and "user.slice/ci.service" in words("memory-limit")' \
  'status("network") == "enforced" and status("teardown") == "enforced"'
plimsoll verify "$out/hello" || fail "the report is not consistent"
[ "$(stat -c %U "$work/hello/report/report.json")" = ci ] || fail "the report is not the user's"
