#!/bin/bash
# A gVisor run whose runner is killed, or cancelled, as root and as a plain user: nothing is left.
# deadline: 150
# alone

for user in root ci; do
  start "term-$user" --backend gvisor --run 'echo begun; sleep 600'
  await 60 printed "term-$user" begun
  SECONDS=0
  kill -TERM "$started"
  finish 143 "term-$user"
  [ $SECONDS -le 7 ] || fail "that took $SECONDS s"
  start "kill-$user" --backend gvisor --run 'echo begun; sleep 600'
  await 60 printed "kill-$user" begun
  kill -9 "$started"
  wait "$started" || true
  as_user plimsoll clean > "$out/clean-$user.txt" 2>&1 || fail "clean: $(cat "$out/clean-$user.txt")"
  grep -q removed "$out/clean-$user.txt" || fail "clean found nothing: $(cat "$out/clean-$user.txt")"
done
