#!/bin/bash
# `auto` takes the strongest: firecracker, where the step has an image for it; and says which it was.
# deadline: 250

run 0 image --image "$shell" --run 'echo auto'
holds image 'step["backend"]["name"] == "firecracker" and isolation["tier"] == "vm" and out == "auto\n"'
# Without an image there is nothing for a microVM to show, so it is gvisor, at the floor of `auto`.
run 0 host --run 'echo auto'
holds host 'step["backend"]["name"] == "gvisor" and isolation == {"floor": "kernel", "tier": "kernel", "proven": True}'
