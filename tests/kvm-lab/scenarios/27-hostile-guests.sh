#!/bin/bash
# Guests that keep to no rule before anything is dispatched to them: refused, nothing ran.
# deadline: 300

# shellcheck source=/dev/null
. /lab/machine/hostile.sh
for mode in silence wrong-nonce result-before-dispatch; do
  before_dispatch $mode
done
hostile calls-the-host 0 'out == "reached []\n"'
