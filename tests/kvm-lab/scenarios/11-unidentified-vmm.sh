#!/bin/bash
# A VMM that nobody knows, in a place that a user can write: it proves no more than a process, so exit 11 and nothing ran.
# The harmless control is the same build of Firecracker, elsewhere and unlisted no more: the pinned one.
# deadline: 120
user=ci

mkdir -p "$work/bin"
cp /usr/local/bin/firecracker "$work/bin/firecracker"
printf 'x' >> "$work/bin/firecracker"
chown -R ci:ci "$work/bin"
run 11 unidentified --backend firecracker --firecracker "$work/bin/firecracker" --image "$shell" --run 'echo ran'
holds unidentified \
  'step["dispatched"] == "no" and isolation["tier"] == "process" and not isolation["proven"]' \
  'status("binary-identity") == "not-enforced" and refusal["stage"] == "judge" and out == ""'
# The release itself, although its owner could replace it: the digest says what it is.
cp /usr/local/bin/firecracker "$work/bin/known"
chown ci:ci "$work/bin/known"
run 0 known --backend firecracker --firecracker "$work/bin/known" --image "$shell" --run 'echo ran'
holds known 'isolation["tier"] == "vm" and status("binary-identity") == "enforced"'
