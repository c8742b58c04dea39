#!/bin/bash
# Guests that keep to no rule from their first instruction on: their agent is a hostile one (guest/examples/hostile.rs), put
# where plimsoll keeps its initial RAM disk. Each ends in a clear verdict: nothing hangs, nothing is written where it should not be.
# deadline: 420

# The long scenario of the same name adds to these.
: "${more_before=}" "${more_after=}"
# A cache of its own, since others must not boot what is put there.
environment=("XDG_CACHE_HOME=$work/cache")
mkdir "$work/cache"
run 0 warm --backend firecracker --image "$shell" --run true
initramfs=$(find "$work/cache" -path '*init*' -name image -type f | head -n 1)
[ -n "$initramfs" ] || fail "no initial RAM disk in the cache: $(find "$work/cache" | head)"
cp "$initramfs" "$work/real"

# hostile MODE CODE EXPRESSION…
hostile() {
  local mode=$1 code=$2 evil
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
  run "$code" "$mode" --backend firecracker --image "$shell" --timeout 6s --outputs '**' --output-limit 64KiB --run true
  say "$mode took $SECONDS s"
  holds "$mode" "$@"
  evil=$(find /etc /home /root /run /tmp /var "$work" -xdev -name '*evil*')
  [ -z "$evil" ] || fail "$mode: something was written: $evil"
}

for mode in silence wrong-nonce result-before-dispatch $more_before; do
  hostile "$mode" 11 'step["dispatched"] == "no" and report["verdict"] == "refused" and refusal["message"]'
done
for mode in huge-length end-after-dispatch $more_after; do
  hostile "$mode" 10 'report["verdict"] == "failed" and step["dispatched"] == "yes" and result["exit_code"] is None'
done
hostile endless-stream 10 'result["timed_out"] and result["stdout"]["kept"] == 64 << 10 and result["stdout"]["truncated"]'
hostile names 0 '[o["path"] for o in step["outputs"]] == ["fine"]'
hostile calls-the-host 0 'out == "reached []\n"'
