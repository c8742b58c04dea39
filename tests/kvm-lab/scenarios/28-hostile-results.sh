#!/bin/bash
# Guests that keep to no rule once they are dispatched to: a clear verdict, no hang, nothing written where it should not be.
# deadline: 300

# shellcheck source=/dev/null
. /lab/machine/hostile.sh
for mode in huge-length end-after-dispatch; do
  after_dispatch $mode
done
hostile endless-stream 10 'result["timed_out"] and result["stdout"]["kept"] == 64 << 10 and result["stdout"]["truncated"]'
hostile names 0 '[o["path"] for o in step["outputs"]] == ["fine"]'
