#!/bin/bash
# The same as `cost`, on a machine whose clock counts instructions. Once is enough there.
# deadline: 480
# alone

rounds=1
/lab/machine/cost "$work" "$out" "$rounds"
