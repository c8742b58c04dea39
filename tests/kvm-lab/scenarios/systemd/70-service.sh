#!/bin/bash
# The service under a real systemd: set up by `plimsoll setup service`, started by its socket, confined as its unit says. Steps of a
# user without any privilege run in gVisor and in a microVM, and their reports are signed; a restart amid a run leaves nothing; a rotation keeps
# old reports good.
# deadline: 600
# alone
# shellcheck disable=SC2016 # guests expand it
user=stranger
key=/etc/plimsoll/service.pub
# Whatever comes, the next scenario finds no service.
trap 'journalctl --no-pager -u plimsoll.service -u plimsoll.socket > "$out/journal" 2>&1
      systemctl stop plimsoll.socket plimsoll.service 2> /dev/null
      systemctl disable --quiet plimsoll.socket 2> /dev/null
      rm -rf /etc/plimsoll /etc/systemd/system/plimsoll.*; systemctl daemon-reload' EXIT

plimsoll setup service > "$out/setup" || fail "setup: $(cat "$out/setup")"
plimsoll setup service | grep -q '^made\|^replaced' && fail 'setting up again changed something'
# An operator's change. A processor that is emulated twice takes its time.
mkdir -p /etc/systemd/system/plimsoll.service.d
printf '[Service]\nEnvironment=PLIMSOLL_BOOT_TIMEOUT=%s\n' $((3 * boot_timeout)) > /etc/systemd/system/plimsoll.service.d/lab.conf
systemd-analyze verify --man=no plimsoll.service plimsoll.socket || fail 'systemd finds a fault in the units'
systemctl is-active --quiet plimsoll.socket && fail 'it was started without being asked'
systemctl daemon-reload
systemctl start plimsoll.socket
[ "$(stat -c '%U %a %F' /run/plimsoll/plimsoll.sock)" = 'root 666 socket' ] || fail "the socket: $(ls -l /run/plimsoll)"
systemctl is-active --quiet plimsoll.service && fail 'the service runs before anybody asked'

as_user cat /etc/plimsoll/service.key 2> /dev/null && fail 'the job can read the key'
serves() {
  run 0 "$1" --service require --memory 200MiB --run 'echo "hello, uid $(id -u)"' "${@:2}"
  holds "$1" \
    'report["origin"] == "service" and report["verdict"] == "passed" and out.startswith("hello, uid ")' \
    'isolation["proven"] and all(status(id) == "enforced" for id in ["seccomp", "no-new-privs", "memory-limit", "network", "teardown"])'
  plimsoll verify "$out/$1" --key $key | grep -q 'signed by the service of kvm-lab' || fail "$1 is not proven"
  [ "$(stat -c %U "$work/$1/report/report.json")" = stranger ] || fail "the report of $1 is not its owner's"
}
serves gvisor --backend gvisor
# What the service gives its children is nothing that evidence is made of.
pid=$(systemctl show --property=MainPID --value plimsoll.service)
grep -q '^Seccomp:[[:space:]]*0$' "/proc/$pid/status" && grep -q '^NoNewPrivs:[[:space:]]*0$' "/proc/$pid/status" \
  || fail 'the service has a filter that engines inherit'

cp -r "$out/gvisor" "$work/forged"
sed -i 's/hello/hallo/' "$work"/forged/steps/*/stdout.log
code=0
plimsoll verify "$work/forged" --key $key > /dev/null || code=$?
[ $code = 15 ] || fail "a forged log: exit code $code"

# A restart amid a run: the client says so, and nothing is left.
start restarted --service require --backend gvisor --run 'echo begun; sleep 600'
await 90 printed restarted begun
systemctl restart plimsoll.service
code=0
wait "$started" || code=$?
keep restarted
[ $code != 0 ] || fail 'a run that was cut off has passed'
no_engines() { ! pgrep -f 'runsc|firecracker'; }
await 20 no_engines

# After a rotation the old report is as good as it was, and new ones are signed with the new key.
plimsoll setup service --rotate-key | grep -q 'the old private key is destroyed' || fail 'no rotation'
serves rotated --backend gvisor
plimsoll verify "$out/gvisor" --key $key > /dev/null || fail 'the rotation made the old report bad'
signer() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["signatures"][0]["keyid"])' "$out/$1/report.dsse.json"; }
[ "$(signer gvisor)" != "$(signer rotated)" ] || fail 'the key was not rotated'

# The same in a microVM, which needs the devices.
serves firecracker --backend firecracker --image "$shell"
holds firecracker 'isolation["tier"] == "vm"'

# The journal has the runs, and nothing that a guest printed.
journalctl --no-pager -u plimsoll.service > "$work/journal"
[ "$(wc -l < "$work/journal")" -ge 4 ] || fail "the journal: $(cat "$work/journal")"
grep -q 'hello, uid' "$work/journal" && fail 'guest bytes in the journal'
systemctl stop plimsoll.socket plimsoll.service
[ "$(systemctl show --property=Result --value plimsoll.service)" = success ] || fail 'the service did not end well'
