#!/bin/bash
# Guest code attacks the agent, which is PID 1 beside it: signals, ptrace, its descriptors and memory, its channel over vsock,
# the clock. Nothing works; the agent tells the result.
# deadline: 270

mkdir -p "$work/attack/artifact"
cat > "$work/attack/artifact/attack.py" <<'END'
import ctypes, os, signal, socket, time

libc = ctypes.CDLL(None, use_errno=True)

def attempt(what, f):
    try:
        worked = f() is not False
    except OSError:
        worked = False
    print(what, "worked" if worked else "denied", flush=True)

def call(*arguments):
    return libc.syscall(*arguments) >= 0

for number in [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV]:
    attempt(f"kill {number}", lambda: os.kill(1, number))
attempt("ptrace", lambda: libc.ptrace(16, 1, None, None) == 0)
for place in ["mem", "environ", "maps", "fd/0", "root", "cwd", "ns/net"]:
    attempt(f"/proc/1/{place}", lambda: (os.readlink if place in ("root", "cwd", "ns/net") else open)(f"/proc/1/{place}"))
attempt("list descriptors", lambda: os.listdir("/proc/1/fd"))
attempt("pidfd", lambda: call(438, os.pidfd_open(1), 3, 0))

def connect(cid, port):
    with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as s:
        s.settimeout(3)
        s.connect((cid, port))

# The host (2), this machine (3), the loopback (1); the agent's port, and others.
for cid in [0, 1, 2, 3]:
    for port in [52, 1, 22, 1024]:
        attempt(f"vsock {cid}:{port}", lambda: connect(cid, port))

def listen():
    with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as s:
        s.bind((socket.VMADDR_CID_ANY, 52))

attempt("vsock bind 52", listen)
attempt("clock_settime", lambda: time.clock_settime(time.CLOCK_REALTIME, 0))
attempt("adjtimex", lambda: call(159, ctypes.create_string_buffer(b"\x01\x00\x00\x00" + bytes(300))))
attempt("setuid 0", lambda: os.setuid(0))
attempt("unshare user", lambda: call(272, 0x10000000))
attempt("seccomp listener", lambda: call(317, 1, 8, 0))
attempt("random", lambda: open("/dev/random", "wb").fileno() < 0)
print("age", int(time.time()))
END
run 0 attack --backend firecracker --image "$python" --run 'python3 attack.py'
holds attack \
  '"worked" not in out and out.count("denied") > 30' \
  'step["dispatched"] == "yes" and result["exit_code"] == 0' \
  'abs(int(out.split()[-1]) - __import__("time").time()) < 600'
# Killing all it can reaches its own processes only.
run 0 everything --backend firecracker --image "$shell" --run 'sleep 1000 & sleep 1000 & trap "" TERM; kill -9 -1; wait; echo ended'
holds everything 'out == "ended\n" or result["signal"] == 9'
