#!/bin/bash
# More guests that keep to no rule.
# deadline: 600

# shellcheck source=/dev/null
. /lab/machine/hostile.sh
for mode in wrong-protocol huge-length-before-dispatch end-before-dispatch; do
  before_dispatch $mode
done
for mode in half-a-frame answer-again; do
  after_dispatch $mode
done
hostile endless-notices 10 'result["timed_out"] and len(step["notices"]) < 200'
hostile two-results 0 'result["exit_code"] == 0'
