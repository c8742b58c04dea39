#!/bin/bash
# Four microVMs at once, twelve in all, some of which fail: each result is its own step's.
# deadline: 600

mkdir -p "$work/four"
{
  echo 'version: 1'
  echo "defaults: { sandbox: { backend: firecracker, image: \"$shell\", memory: 128MiB } }"
  echo 'steps:'
  for number in $(seq 1 12); do echo "  - { name: step $number, run: \"echo $number; exit \$(( $number % 3 ))\" }"; done
} > "$work/four/four.yml"
run 10 four --jobs 4 four.yml
holds four \
  'len(steps) == 12 and all(s["isolation"]["tier"] == "vm" for s in steps)' \
  '[s["result"]["exit_code"] for s in steps] == [n % 3 for n in range(1, 13)]'
