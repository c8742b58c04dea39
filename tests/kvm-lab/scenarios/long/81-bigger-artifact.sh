#!/bin/bash
# An artifact of 1,000 files and 100 MB arrives whole, as a directory and as an archive; 24 MB of output come back whole.
# deadline: 600

mkdir -p "$work/source/many"
for number in $(seq 1 1000); do head -c 20480 /dev/urandom > "$work/source/many/$number"; done
head -c 80000000 /dev/urandom > "$work/source/one"
sums=$(cd "$work/source" && find . -type f | sort | xargs cat | sha256sum | cut -c1-64)
for kind in directory archive; do
  mkdir -p "$work/$kind"
  if [ $kind = directory ]; then cp -r "$work/source" "$work/$kind/artifact"; else tar -czf "$work/$kind/artifact" -C "$work/source" .; fi
  run 0 $kind --backend firecracker --image "$shell" --memory 512MiB --disk 256MiB --timeout 4m --outputs back \
    --run 'find . -type f | sort | xargs cat | sha256sum; head -c 24000000 one > back'
  holds $kind "out.startswith('$sums')" 'step["outputs"][0]["bytes"] == 24000000'
  back=$(find "$work/$kind/outputs" -name back)
  cmp "$back" <(head -c 24000000 "$work/source/one") || fail "what came back is not what was sent"
  rm -rf "${work:?}/$kind"
done
