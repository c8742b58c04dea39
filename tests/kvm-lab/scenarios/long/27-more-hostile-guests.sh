#!/bin/bash
# More guests that keep to no rule; see ../27-hostile-guests.sh.
# deadline: 600

more_before='wrong-protocol huge-length-before-dispatch end-before-dispatch'
more_after='half-a-frame answer-again'
# shellcheck source=/dev/null
. /lab/scenarios/27-hostile-guests.sh
hostile endless-notices 10 'result["timed_out"] and len(step["notices"]) < 200'
hostile two-results 0 'result["exit_code"] == 0'
