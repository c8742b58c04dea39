#!/bin/bash
# The classic fork bomb, which never ends by itself: the deadline does it, whatever the guest's kernel is busy with.
# deadline: 240

run 10 bomb --backend firecracker --image "$shell" --pids 64 --timeout 8s --run 'f() { f | f & f; }; f; while :; do :; done'
holds bomb 'report["verdict"] == "failed" and step["dispatched"] == "yes" and result["limit_hit"] in ("time", "pids")'
