#!/bin/bash
# Guests that keep to no rule from their first instruction on: their agent is a hostile one (guest/examples/hostile.rs), put
# where plimsoll keeps its initial RAM disk. Each ends in a clear verdict: nothing hangs, nothing is written where it should not be.
# deadline: 420
# alone

run 0 warm --backend firecracker --image "$shell" --run true
initramfs=$(find /var/cache/plimsoll -path '*init*' -name image -type f | head -n 1)
[ -n "$initramfs" ] || fail "no initial RAM disk in the cache: $(find /var/cache/plimsoll | head)"
cp "$initramfs" "$work/real"
trap 'cp "$work/real" "$initramfs.new"; chmod 444 "$initramfs.new"; mv "$initramfs.new" "$initramfs"' EXIT

# hostile MODE CODE EXPRESSION…
hostile() {
  local mode=$1 code=$2
  shift 2
  rm -rf "$work/cpio"
  mkdir "$work/cpio"
  cp /lab/hostile "$work/cpio/init"
  printf '%s' "$mode" > "$work/cpio/mode"
  # Archives one after the other are one: what comes later wins.
  { cat "$work/real"; (cd "$work/cpio" && printf 'init\nmode\n' | busybox cpio -o -H newc 2> /dev/null); } > "$initramfs.new"
  chmod 444 "$initramfs.new"
  mv "$initramfs.new" "$initramfs"
  SECONDS=0
  run "$code" "$mode" --backend firecracker --image "$shell" --timeout 6s --outputs '**' --output 64KiB --run true
  say "$mode took $SECONDS s"
  holds "$mode" "$@"
  [ -z "$(find / -xdev -name '*evil*' -not -path '/proc/*' 2> /dev/null)" ] || fail "$mode: something was written: $(find / -xdev -name '*evil*')"
}

for mode in silence wrong-nonce wrong-protocol result-before-dispatch huge-length-before-dispatch end-before-dispatch; do
  hostile $mode 11 'step["dispatched"] == "no" and report["verdict"] == "refused" and refusal["message"]'
done
for mode in huge-length half-a-frame answer-again end-after-dispatch; do
  hostile $mode 10 'report["verdict"] == "failed" and step["dispatched"] == "yes" and result["exit_code"] is None'
done
hostile endless-stream 10 'result["timed_out"] and result["stdout"]["kept"] == 64 << 10 and result["stdout"]["truncated"]'
hostile endless-notices 10 'result["timed_out"] and len(step["notices"]) < 200'
hostile names 0 '[o["path"] for o in step["outputs"]] == ["fine"]'
hostile calls-the-host 0 'out == "reached []\n"'
hostile two-results 0 'result["exit_code"] == 0'
