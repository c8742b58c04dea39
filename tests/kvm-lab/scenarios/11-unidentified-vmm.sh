#!/bin/bash
# A VMM that nobody knows, in a place that a user can write: it proves no more than a process, so exit 11 and nothing ran.
# The harmless control is an executable in the same place that the operator's policy lists.
# deadline: 240
# alone
user=ci

mkdir -p "$work/bin"
cp /usr/local/bin/firecracker "$work/bin/firecracker"
printf 'x' >> "$work/bin/firecracker"
chown -R ci:ci "$work/bin"
run 11 unidentified --backend firecracker --firecracker "$work/bin/firecracker" --image "$shell" --run 'echo ran'
holds unidentified \
  'step["dispatched"] == "no" and isolation["tier"] == "process" and not isolation["proven"]' \
  'status("binary-identity") == "not-enforced" and refusal["stage"] == "judge" and out == ""'
# The same place, but the operator's policy lists what lies there.
cp /usr/local/bin/firecracker "$work/bin/known"
chown ci:ci "$work/bin/known"
mkdir -m 755 /etc/plimsoll
trap 'rm -r /etc/plimsoll' EXIT
printf 'version: 1\nengines: ["sha256:%s"]\n' "$(sha256sum < "$work/bin/known" | cut -d' ' -f1)" > /etc/plimsoll/policy.yml
run 0 known --backend firecracker --firecracker "$work/bin/known" --image "$shell" --run 'echo ran'
holds known 'isolation["tier"] == "vm" and status("binary-identity") == "enforced" and out == "ran\n"'
