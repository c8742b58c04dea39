#!/bin/bash
# The runner is killed at one moment after another, from its first steps to the running code, as root and as a plain user. What is
# left goes with the next `plimsoll clean`, whenever it was.
# deadline: 600
# alone

/lab/machine/leftovers save "$work/before"
for user in root ci; do
  for moment in 0.1 0.3 0.6 1 1.5 2.5 4 6; do
    start "$user-$moment" --backend firecracker --image "$shell" --run 'sleep 600'
    sleep $moment
    kill -9 "$started"
    wait "$started" 2> /dev/null || true
    as_user plimsoll clean > "$out/clean-$user-$moment.txt" 2>&1 || fail "clean: $(cat "$out/clean-$user-$moment.txt")"
    /lab/machine/leftovers compare "$work/before" || fail "left when $user was killed after $moment s"
  done
done
