#!/bin/bash
# /dev/kvm is there and opens, and no guest can run: first a device that is no KVM at all, then a machine that doesn't get
# its guest up in time. Each is exit 12 within 15 s.
# deadline: 120

mv /dev/kvm /dev/kvm.hidden
trap 'rm -f /dev/kvm; mv /dev/kvm.hidden /dev/kvm' EXIT
mknod -m 666 /dev/kvm c 1 3
for user in root ci; do
  SECONDS=0
  run 12 "not-kvm-$user" --backend firecracker --image "$shell" --run 'echo ran'
  [ $SECONDS -le 15 ] || fail "that took $SECONDS s"
  holds "not-kvm-$user" 'step["dispatched"] == "no" and refusal["message"] and refusal["help"]'
done
trap - EXIT
rm /dev/kvm
mv /dev/kvm.hidden /dev/kvm
# Emulation is too slow to boot within a second.
boot_timeout=1
for user in root ci; do
  SECONDS=0
  run 12 "slow-$user" --backend firecracker --image "$shell" --run 'echo ran'
  [ $SECONDS -le 15 ] || fail "that took $SECONDS s"
  holds "slow-$user" 'step["dispatched"] == "no" and refusal["message"] and refusal["help"]'
done
