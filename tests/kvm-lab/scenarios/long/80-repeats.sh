#!/bin/bash
# Twenty runs, by turns as root and as a plain user: each passes, none leaves anything, and nothing grows: no cgroup that the
# kernel still holds on to beyond a few, no more in the caches after the first.
# deadline: 900
# alone

cached() { du -sk /root/.cache/plimsoll /home/ci/.cache/plimsoll 2> /dev/null | awk '{ sum += $1 } END { print sum + 0 }'; }
/lab/machine/leftovers save "$work/before"
for number in $(seq 1 20); do
  user=root
  if [ $((number % 2)) = 0 ]; then user=ci; fi
  run 0 "run-$number" --backend firecracker --image "$shell" --run "echo $number"
  holds "run-$number" "out == '$number\n' and isolation['tier'] == 'vm'"
  /lab/machine/leftovers compare "$work/before" || fail "left after run $number"
  if [ "$number" = 2 ]; then first=$(cached); fi
done
[ "$(cached)" -le "$((first + 64))" ] || fail "the caches grew from $first to $(cached) KiB"
dying=$(awk '/nr_dying_descendants/ { print $2 }' /sys/fs/cgroup/cgroup.stat)
[ "$dying" -lt 60 ] || fail "$dying cgroups are still held by the kernel"
