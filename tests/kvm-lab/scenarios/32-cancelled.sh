#!/bin/bash
# SIGTERM to the runner: exit 143 within 7 s, a report that says cancelled, nothing left. While the code runs, and while the
# machine boots.
# deadline: 240
# alone

for user in root ci; do
  start "$user" --backend firecracker --image "$shell" --run 'echo begun; sleep 600'
  await 60 printed "$user" begun
  SECONDS=0
  kill -TERM "$started"
  finish 143 "$user"
  [ $SECONDS -le 7 ] || fail "that took $SECONDS s"
  holds "$user" 'report["verdict"] == "cancelled" and step["dispatched"] == "yes"'
  [ -z "$(vmms)" ] || fail "a VMM is left"
  start "$user-early" --backend firecracker --image "$shell" --run 'echo begun; sleep 600'
  await 30 pgrep -x firecracker
  SECONDS=0
  kill -TERM "$started"
  finish 143 "$user-early"
  [ $SECONDS -le 7 ] || fail "that took $SECONDS s"
  holds "$user-early" 'report["verdict"] == "cancelled" and step["dispatched"] == "no"'
done
