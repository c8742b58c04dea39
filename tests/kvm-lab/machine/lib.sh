# shellcheck shell=bash
# What scenarios are written with. Each runs in a directory of its own ($work) with a result directory ($out), as root.
#
# A scenario says what must hold; it asks for the exit code and the report of each run:
#
#   run 0 hello --backend firecracker --image "$shell" --run 'echo hi'
#   holds hello 'step["isolation"]["tier"] == "vm"'
#
# What is left on the machine is looked for after every scenario, by the session.

# Images for guests: a tree with Python and a shell; the small one as a tree, as an archive and as an OCI layout.
python=dir:/lab/images/python
shell=dir:/lab/images/shell
shell_tar=tar:/lab/images/shell.tar
shell_oci=oci-layout:/lab/images/shell-oci

# Who runs plimsoll: root, ci (a plain user in group kvm, with a delegated cgroup), stranger (a plain user without).
user=root
# More of the runner's environment, as NAME=VALUE.
environment=()
# A processor that is emulated twice takes its time to boot.
boot_timeout=60

fail() {
  printf 'FAIL: %s\n' "$*"
  exit 1
}
say() { printf '%s  %s\n' "$(cut -d' ' -f1 /proc/uptime)" "$*"; }

# Becomes a command that runs as $user, with a login's environment, in the group that the user's jobs run in.
become() {
  local id=0 home=/root group=runner.slice/root.service
  case $user in
    ci) id=1000 home=/home/ci group=user.slice/ci.service/job ;;
    stranger) id=1001 home=/home/stranger group=user.slice/stranger.service ;;
  esac
  echo $BASHPID > "/sys/fs/cgroup/$group/cgroup.procs"
  exec env -i PATH=/usr/local/bin:/usr/bin:/bin HOME="$home" USER="$user" LC_ALL=C.UTF-8 NO_COLOR=1 \
    PLIMSOLL_BOOT_TIMEOUT="$boot_timeout" "${environment[@]}" \
    setpriv --reuid="$id" --regid="$id" --init-groups -- "$@"
}
as_user() { (become "$@"); }

# Starts `plimsoll run` with the given arguments; its report will be $out/NAME. For what happens meanwhile.
start() {
  local name=$1
  shift
  mkdir -p "$work/$name/artifact" "$out"
  chmod 777 "$work/$name"
  # A directory that the user may write: the report is swapped in by a rename.
  cd "$work/$name"
  become plimsoll run --artifact artifact --report-dir report --outputs-dir outputs "$@" > log 2>&1 &
  # Nothing stands between: this is plimsoll's own pid.
  started=$!
  cd "$work"
}

# Waits for what `start` began and keeps what it wrote; its exit code must be the given one.
finish() {
  local code=0 expected=$1 name=$2
  wait "$started" || code=$?
  keep "$name"
  say "$name: exit code $code"
  if [ "$code" != "$expected" ]; then
    sed 's/^/    /' "$out/$name.log"
    fail "$name: exit code $code, not $expected: $(grep -a -E '^ *(because|result|error) ' "$out/$name.log" | head -n 2 | tr -s '\n ' ' ')"
  fi
}

keep() {
  local name=$1
  cp "$work/$name/log" "$out/$name.log"
  if [ -e "$work/$name/report" ]; then cp -r "$work/$name/report" "$out/$name"; fi
  if [ -e "$work/$name/outputs" ]; then cp -r "$work/$name/outputs" "$out/$name-outputs"; fi
}

# run CODE NAME ARG…: `plimsoll run ARG…`, which must end with CODE.
run() {
  local code=$1 name=$2
  shift 2
  start "$name" "$@"
  finish "$code" "$name"
}

# holds NAME EXPRESSION…: each Python expression is true of the report of NAME; machine/holds says what it can use.
holds() { /lab/machine/holds "$out/$1" "${@:2}" || exit 1; }

# Waits until a command succeeds; SECONDS at most.
await() {
  local tries=$(($1 * 10))
  shift
  until "$@" > /dev/null 2>&1; do
    tries=$((tries - 1))
    if [ $tries -lt 0 ]; then fail "not within the time: $*"; fi
    sleep 0.1
  done
}

# Pids of running VMMs, and whether there are none.
vmms() { pgrep -x firecracker || true; }
no_vmms() { ! pgrep -x firecracker; }

# Whether the guest printed a line by now, in a run that goes on. (The step's own name is its command.)
printed() { grep -a -q "│ $2\$" "$work/$1/log"; }
