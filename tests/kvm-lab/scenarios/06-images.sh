#!/bin/bash
# The same image as a tree, an archive and an OCI layout. Of the layout: whiteouts, later layers, variables, and no root user.
# deadline: 270

for source in "$shell" "$shell_tar" "$shell_oci"; do
  name=${source%%:*}
  run 0 "$name" --backend firecracker --image "$source" --run 'echo "uid $(id -u)"; cat /etc/layer /etc/removed 2>&1 || true; echo "env $FROM_IMAGE"; touch /tmp/x x'
  holds "$name" 'isolation["tier"] == "vm" and "uid 0" not in out and out.startswith("uid ")' "step['image']['reference'].startswith('$name:')"
done
holds tar 'step["image"]["digest"]'
holds oci-layout 'step["image"]["digest"]' '"second\n" in out and "by the second layer" not in out' '"env yes" in out'
# The same layout for gvisor.
run 0 gvisor --backend gvisor --image "$shell_oci" --run 'cat /etc/layer; test ! -e /etc/removed; echo "env $FROM_IMAGE"'
holds gvisor 'out == "second\nenv yes\n"'
# A digest that the image doesn't have.
run 13 digest --backend firecracker --image "$shell_oci" --image-digest "sha256:$(printf '0%.0s' {1..64})" --run 'echo ran'
holds digest 'step["dispatched"] == "no" and refusal["stage"] == "image"'
