#!/bin/bash
# A busy loop past its deadline: timed out, the boundary was observed a second time before it was killed, and the time is right.
# deadline: 180

run 10 loop --backend firecracker --image "$shell" --timeout 4s --run 'echo begun; while :; do :; done'
holds loop \
  'result["timed_out"] and result["limit_hit"] == "time" and result["exit_code"] is None' \
  'out == "begun\n" and step["dispatched"] == "yes" and report["verdict"] == "failed"' \
  'not any("second observation" in notice for notice in step["notices"])' \
  '4000 <= resources["run_ms"] < 9000'
