# shellcheck shell=bash
# Guests that keep to no rule from their first instruction on: their agent is a hostile one (guest/examples/hostile.rs), put
# where plimsoll keeps its initial RAM disk. For scenarios to include.

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

before_dispatch() {
  hostile "$1" 11 'step["dispatched"] == "no" and report["verdict"] == "refused" and refusal["message"]'
}

after_dispatch() {
  hostile "$1" 10 'report["verdict"] == "failed" and step["dispatched"] == "yes" and result["exit_code"] is None'
}
