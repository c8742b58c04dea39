#!/bin/bash
# /dev/kvm is there, and no guest can run. First nothing is behind it, then something is that is no KVM at all, then a machine
# doesn't get its guest up in time. Each is exit 12 within 15 s, with words about that and not about permissions.
# deadline: 300
# alone

useless() {
  SECONDS=0
  run 12 "$1" --backend firecracker --image "$shell" --run 'echo ran'
  [ $SECONDS -le 15 ] || fail "$1: that took $SECONDS s"
  holds "$1" 'step["dispatched"] == "no" and refusal["message"] and refusal["help"] and "usermod" not in refusal["help"]'
}
restore() {
  rm -f /dev/kvm
  modprobe kvm-amd
  await 5 test -c /dev/kvm
  chgrp kvm /dev/kvm && chmod 660 /dev/kvm
}
trap restore EXIT
modprobe -r kvm-amd
# A node without a driver, as a container image may have it.
mknod -m 666 /dev/kvm c 10 232
for user in root ci; do useless "nothing-$user"; done
# The jailer makes a node of its own, so for root this would be the one above again.
rm /dev/kvm
mknod -m 666 /dev/kvm c 1 3
user=ci
useless not-kvm
trap - EXIT
restore
# Emulation is too slow to boot within a second.
boot_timeout=1
for user in root ci; do useless "slow-$user"; done
# That is remembered, by each user, so that `auto` doesn't try again and again, until a guest boots.
[ -e /var/cache/plimsoll/kvm-unfit ] || fail "root does not remember that this host is unfit"
rm /var/cache/plimsoll/kvm-unfit
boot_timeout=60
user=ci
run 0 again --backend firecracker --image "$shell" --run 'echo again'
found=$(find /home/ci /tmp /var/cache -name '*unfit*')
[ -z "$found" ] || fail "it is still remembered that this host is unfit: $found"
