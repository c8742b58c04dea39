#!/bin/bash
# Output beyond the cap is counted and not kept, on both streams.
# deadline: 240

run 0 flood --backend firecracker --image "$shell" --output-limit 256KiB \
  --run 'dd if=/dev/zero bs=1M count=24 2> /dev/null; (dd if=/dev/zero bs=1M count=4 2> /dev/null) >&2'
holds flood \
  'result["stdout"]["bytes"] == 24 << 20 and result["stdout"]["kept"] == 256 << 10 and result["stdout"]["truncated"]' \
  'result["stderr"]["bytes"] == 4 << 20 and result["stderr"]["kept"] == 256 << 10'
[ "$(stat -c %s "$work"/flood/report/steps/*/stdout.log)" -le 262144 ] || fail "more was kept"
