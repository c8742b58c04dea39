#!/bin/bash
# A shell step in a microVM under the official jailer: tier vm is proven, every control is listed, the report is consistent.
# deadline: 180

run 0 hello --backend firecracker --image "$shell" --run 'echo "hello from $(uname -s), uid $(id -u)"; echo bad >&2'
holds hello \
  'report["verdict"] == "passed" and step["dispatched"] == "yes" and result["exit_code"] == 0' \
  'isolation == {"floor": "vm", "tier": "vm", "proven": True}' \
  'step["backend"]["name"] == "firecracker" and step["backend"]["engine_version"].startswith("1.12.1")' \
  'out.startswith("hello from Linux, uid ") and "uid 0" not in out and err == "bad\n"' \
  'set(controls) == set(all_controls)' \
  'all(status(id) == "enforced" for id in required if id not in ("binary-identity", "filesystem"))' \
  'all(status(id) == "enforced" for id in ("hypervisor", "guest-kernel", "seccomp", "no-new-privs", "non-root", "capabilities", "challenge"))' \
  'status("network") == "enforced" and status("teardown") == "enforced" and status("entropy") == "enforced"' \
  'status("memory-limit") == "enforced" and status("cpu-limit") == "enforced" and status("pids-limit") == "enforced"' \
  'resources["boundary_memory_bytes"] and resources["prepare_ms"] > 0 and resources["peak_memory_bytes"]' \
  '(directory / "junit.xml").stat().st_size and (directory / "report.html").stat().st_size'
plimsoll verify "$out/hello" || fail "the report is not consistent"
