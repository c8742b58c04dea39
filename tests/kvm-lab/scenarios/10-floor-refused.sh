#!/bin/bash
# A floor that the backend cannot reach: exit 11, nothing ran.
# deadline: 120

run 11 gvisor --backend gvisor --minimum-isolation vm --run 'echo ran'
holds gvisor 'report["verdict"] == "refused" and step["dispatched"] == "no" and out == ""' 'refusal["stage"] == "judge"'
# A control that a microVM under the official jailer does not satisfy whole: its namespaces.
run 11 control --backend firecracker --image "$shell" --require namespaces --run 'echo ran'
holds control 'step["dispatched"] == "no" and refusal["stage"] == "judge" and status("namespaces") == "partial"'
