#!/bin/bash
# The service under a real systemd: set up by `plimsoll setup service`, started by its socket, confined as its unit says. A step of a
# user without any privilege runs in a microVM, and its report is signed; a restart amid a run leaves nothing; a rotation keeps old reports good.
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
printf '[Service]\nEnvironment=PLIMSOLL_BOOT_TIMEOUT=%s\n' "$boot_timeout" > /etc/systemd/system/plimsoll.service.d/lab.conf
systemd-analyze verify --man=no plimsoll.service plimsoll.socket || fail 'systemd finds a fault in the units'
systemctl is-active --quiet plimsoll.socket && fail 'it was started without being asked'
systemctl daemon-reload
systemctl start plimsoll.socket
[ "$(stat -c '%U %a %F' /run/plimsoll/plimsoll.sock)" = 'root 666 socket' ] || fail "the socket: $(ls -l /run/plimsoll)"
systemctl is-active --quiet plimsoll.service && fail 'the service runs before anybody asked'

as_user cat /etc/plimsoll/service.key 2> /dev/null && fail 'the job can read the key'
for backend in firecracker gvisor; do
  image=()
  if [ $backend = firecracker ]; then image=(--image "$shell"); fi
  run 0 $backend --service require --backend $backend "${image[@]}" --memory 200MiB --run 'echo "hello, uid $(id -u)"'
  holds $backend \
    'report["origin"] == "service" and report["verdict"] == "passed" and out.startswith("hello, uid ")' \
    'isolation["proven"] and all(status(id) == "enforced" for id in ["seccomp", "no-new-privs", "memory-limit", "network", "teardown"])'
  plimsoll verify "$out/$backend" --key $key | grep -q 'signed by the service of kvm-lab' || fail "$backend is not proven"
done
holds firecracker 'isolation["tier"] == "vm"'
[ "$(stat -c %U "$work/firecracker/report/report.json")" = stranger ] || fail 'the report is not its owner'"'"'s'
# What the service gives its children is nothing that evidence is made of.
pid=$(systemctl show --property=MainPID --value plimsoll.service)
grep -q '^Seccomp:[[:space:]]*0$' "/proc/$pid/status" && grep -q '^NoNewPrivs:[[:space:]]*0$' "/proc/$pid/status" \
  || fail 'the service has a filter that engines inherit'

cp -r "$out/firecracker" "$work/forged"
sed -i 's/hello/hallo/' "$work"/forged/steps/*/stdout.log
code=0
plimsoll verify "$work/forged" --key $key > /dev/null || code=$?
[ $code = 15 ] || fail "a forged log: exit code $code"

# A restart amid a run: the client says so, and nothing is left.
start restarted --service require --backend firecracker --image "$shell" --run 'echo begun; sleep 600'
await 90 printed restarted begun
systemctl restart plimsoll.service
code=0
wait "$started" || code=$?
keep restarted
[ $code != 0 ] || fail 'a run that was cut off has passed'
await 20 no_vmms

# After a rotation the old report is as good as it was, and new ones are signed with the new key.
plimsoll setup service --rotate-key | grep -q 'the old private key is destroyed' || fail 'no rotation'
run 0 rotated --service require --backend gvisor --run 'echo again'
for report in firecracker rotated; do plimsoll verify "$out/$report" --key $key > /dev/null || fail "$report after the rotation"; done
signer() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["signatures"][0]["keyid"])' "$out/$1/report.dsse.json"; }
[ "$(signer firecracker)" != "$(signer rotated)" ] || fail 'the key was not rotated'

# The journal has the runs, and nothing that a guest printed.
journalctl --no-pager -u plimsoll.service > "$work/journal"
[ "$(wc -l < "$work/journal")" -ge 4 ] || fail "the journal: $(cat "$work/journal")"
grep -q 'hello, uid' "$work/journal" && fail 'guest bytes in the journal'
systemctl stop plimsoll.socket plimsoll.service
[ "$(systemctl show --property=Result --value plimsoll.service)" = success ] || fail 'the service did not end well'
