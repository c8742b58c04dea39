#!/bin/bash
# What plimsoll costs: a cold `plimsoll run` of `true` against bare Firecracker that boots the same kernel and initial RAM disk
# to the same first answer, by turns. Prints the ratio of the medians; 1.10 is aimed at.
# deadline: 480
# alone

run 0 warm --backend firecracker --image "$shell" --run true
/lab/machine/cost "$work" "$out" "${rounds:-2}"
