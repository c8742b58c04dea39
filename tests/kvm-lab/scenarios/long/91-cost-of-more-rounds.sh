#!/bin/bash
# The same as `cost`, over more rounds.
# deadline: 900
# alone

rounds=12
# shellcheck source=/dev/null
. /lab/scenarios/90-cost.sh
