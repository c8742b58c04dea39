#!/bin/bash
# Firecracker is killed from outside while the code runs, as root and as a plain user: never passed, and cleaned up.
# deadline: 240
# alone

for user in root ci; do
  start "$user" --backend firecracker --image "$shell" --run 'echo begun; sleep 600'
  await 60 printed "$user" begun
  pids=$(vmms)
  [ -n "$pids" ] || fail "no VMM is running"
  # shellcheck disable=SC2086 # words are meant
  kill -9 $pids
  finish 10 "$user"
  holds "$user" 'report["verdict"] == "failed" and step["dispatched"] in ("yes", "unknown")' \
    'result["exit_code"] is None and "ended by itself" in result["message"]'
  [ -z "$(vmms)" ] || fail "a VMM is left"
done
