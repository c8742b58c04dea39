#!/bin/bash
# The runner is killed with SIGKILL: its VMM ends with it, and `clean`, or the next start, removes the rest.
# deadline: 300
# alone

for user in root ci; do
  start "$user" --backend firecracker --image "$shell" --run 'echo begun; sleep 600'
  await 60 printed "$user" begun
  kill -9 "$started"
  wait "$started" || true
  await 5 no_vmms
  as_user plimsoll clean > "$out/clean-$user.txt" 2>&1 || fail "clean: $(cat "$out/clean-$user.txt")"
  grep -q removed "$out/clean-$user.txt" || fail "clean found nothing: $(cat "$out/clean-$user.txt")"
  as_user plimsoll clean | grep -q 'nothing was left' || fail "clean left something"
done
# The next start does it too, and a run that lives is left alone.
user=root
start killed --backend firecracker --image "$shell" --run 'echo begun; sleep 600'
await 60 printed killed begun
kill -9 "$started"
wait "$started" || true
run 0 next --backend firecracker --image "$shell" --run 'echo next'
as_user plimsoll clean | grep -q 'nothing was left' || fail "the next start left something"
