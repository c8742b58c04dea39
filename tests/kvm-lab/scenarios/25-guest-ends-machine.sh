#!/bin/bash
# Guest code that wants to end or crash its machine: reboot, poweroff, halt, sysrq. It has no right to; the step goes on and
# passes, and what was tried has no effect on the host.
# deadline: 200

run 0 ends --backend firecracker --image "$shell" --run '
attempt() { what=$1; shift; if "$@" 2> /dev/null; then echo "$what worked"; else echo "$what denied"; fi; }
attempt reboot reboot -f
attempt poweroff poweroff -f
attempt halt halt -f
for key in c o b u i; do attempt "sysrq $key" sh -c "echo $key > /proc/sysrq-trigger"; done
attempt panic sh -c "echo 1 > /proc/sys/kernel/panic"
attempt module insmod /nothing.ko
attempt kcore sh -c "head -c 1 /proc/kcore"
attempt kmem sh -c "head -c 1 /dev/mem"
attempt port sh -c "head -c 1 /dev/port"
attempt disk sh -c "head -c 1 /dev/vda"
attempt write-disk sh -c "echo > /dev/vda"
attempt mount mount -t tmpfs none /tmp
attempt console sh -c "echo > /dev/ttyS0"
echo still here'
holds ends 'out.endswith("still here\n") and out.count("denied") == 17 and "worked" not in out' 'result["exit_code"] == 0'
