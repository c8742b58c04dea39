#!/bin/bash
# A CI runner's unit under a real systemd, of a plain user. `plimsoll doctor` names the drop-in that hands a control group on; once
# that is done, and nothing else, limits hold, though systemd starts the runner in that very group.
# deadline: 300
# alone
# shellcheck disable=SC2016 # guests expand it
unit=ci-runner.service group=/sys/fs/cgroup/system.slice/ci-runner.service
trap 'journalctl --no-pager -u $unit > "$out/journal" 2>&1; systemctl stop $unit 2> /dev/null
      rm -rf /etc/systemd/system/$unit /etc/systemd/system/$unit.d; systemctl daemon-reload' EXIT

mkdir "$work/ci"
chown 1000:1000 "$work/ci"
# As runners are: one process stays, others come and go beside the jobs.
cat > "$work/listener" <<'END'
#!/bin/bash
cd "$(dirname "$0")/ci" || exit
while true; do sleep 0.2; done &
while sleep 0.1; do
  if [ -e job.sh ]; then
    mv job.sh running.sh
    bash running.sh > log 2>&1
    echo $? > code
  fi
done
END
chmod 755 "$work/listener"
cat > /etc/systemd/system/$unit <<END
[Service]
User=ci
Environment=HOME=/home/ci PLIMSOLL_BOOT_TIMEOUT=$boot_timeout
ExecStart=$work/listener
END
systemctl daemon-reload
systemctl start $unit

# job NAME COMMAND: the runner runs the command, which must succeed.
job() {
  rm -f "$work/ci/code"
  printf '%s\n' "$2" > "$work/ci/new" && mv "$work/ci/new" "$work/ci/job.sh"
  await 120 test -s "$work/ci/code"
  cp "$work/ci/log" "$out/$1.log"
  if [ -e "$work/ci/$1" ]; then cp -r "$work/ci/$1" "$out/$1"; fi
  [ "$(cat "$work/ci/code")" = "${3:-0}" ] || fail "$1: exit code $(cat "$work/ci/code"): $(tail -n 3 "$work/ci/log")"
}
limited() {
  job "$1" "mkdir -p empty; plimsoll run --backend gvisor --artifact empty --memory 300MiB --pids 50 --cpus 1 \
    --report-dir $1 --run 'echo ran'" "${2:-0}"
}
enforced='report["verdict"] == "passed" and all(status(id) == "enforced" for id in ["memory-limit", "cpu-limit", "pids-limit"])'

limited without 11
holds without 'refusal["stage"] == "judge" and "Delegate=yes" in words("memory-limit")'
job doctor 'plimsoll doctor --backend wasm --json > doctor.json'
fix=$(python3 -c '
import json, sys
[finding] = [f for f in json.load(open(sys.argv[1]))["findings"] if f["id"] == "cgroups"]
print(finding["fix"].split(", or ")[0].removeprefix("sudo "))' "$work/ci/doctor.json")
say "the fix: $fix"
eval "$fix"
limited first
holds first "$enforced" '"ci-runner.service/plimsoll-" in words("memory-limit")'
# The next job starts where the runner was moved to.
limited second
holds second "$enforced"
job doctor 'plimsoll doctor --backend wasm --json > doctor.json'
grep -q 'limits of memory, CPU and tasks can be set' "$work/ci/doctor.json" || fail 'doctor still finds fault'
[ "$(ls -d "$group"/plimsoll-*)" = "$group/plimsoll-runner" ] || fail "left: $(ls -d "$group"/plimsoll-*)"

# Nothing of that is in systemd's way.
systemctl restart $unit
limited restarted
holds restarted "$enforced"
systemctl stop $unit
[ "$(systemctl show --property=Result --value $unit)" = success ] || fail "the unit ended with $(systemctl show --property=Result $unit)"
[ ! -e $group ] || fail 'the group of the unit is still there'
