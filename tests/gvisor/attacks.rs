//! What hostile code tries from inside.

use std::net::TcpListener;

use plimsoll::gate::End;

use crate::support::{Step, skipped, step};

fn python(script: &str) -> Step {
    step(script).with(|s| s.shell = ["python3", "{0}"].map(str::to_owned).into())
}

#[test]
fn there_is_no_network() {
    if skipped() {
        return;
    }
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    let ran = python(&format!(
        "import socket
for host in ['127.0.0.1', '169.254.169.254', '10.0.0.1', '8.8.8.8']:
    s = socket.socket(); s.settimeout(2)
    try: s.connect((host, {port})); print('connected', host)
    except OSError as e: print('refused')
print(sorted(l.split(':')[0].strip() for l in open('/proc/net/dev') if ':' in l))"
    ))
    .run()
    .passed();
    assert_eq!(ran.stdout, "refused\nrefused\nrefused\nrefused\n['lo']\n");
    assert!(listener.accept().is_err());
}

#[test]
fn the_agent_can_be_neither_read_nor_written_nor_ended() {
    if skipped() {
        return;
    }
    let ran = python(
        "import os, signal, ctypes
libc = ctypes.CDLL(None, use_errno=True)
def attempt(what, f):
    try: print(what, f() or 'worked')
    except OSError as e: print(what, 'denied')
print('environ', open('/proc/1/environ').read())
def reach(fd):
    # /dev/null is anybody's; the channel must be nobody's.
    with open(f'/proc/1/fd/{fd}', 'wb', buffering=0) as f:
        return None if os.fstat(f.fileno()).st_rdev != os.makedev(1, 3) else 'denied'
for fd in os.listdir('/proc/1/fd'): attempt('write', lambda: reach(fd))
def read(fd):
    with open(f'/proc/1/fd/{fd}', 'rb', buffering=0) as f:
        return None if os.fstat(f.fileno()).st_rdev != os.makedev(1, 3) else 'denied'
for fd in os.listdir('/proc/1/fd'): attempt('read', lambda: read(fd))
attempt('mem', lambda: open('/proc/1/mem', 'rb').read(1))
attempt('root', lambda: os.listdir('/proc/1/root'))
for s in [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM]: attempt('kill', lambda: os.kill(1, s))
print('ptrace', 'denied' if libc.ptrace(16, 1, None, None) else 'worked')
class Iov(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('len', ctypes.c_size_t)]
buf = ctypes.create_string_buffer(8); here = Iov(ctypes.addressof(buf), 8); there = Iov(0x400000, 8)

print('vm', 'denied' if libc.process_vm_readv(1, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) < 0 else 'worked')",
    )
    .run()
    .passed();
    // runsc gives the agent a `HOME`, whatever its configuration says; there is nothing else.
    let (environ, attempts) = ran.stdout.split_once('\n').unwrap();
    assert_eq!(environ, "environ HOME=/\0");
    assert!(attempts.lines().count() > 15 && attempts.lines().all(|l| l.ends_with("denied")), "{}", ran.stdout);
}

#[test]
fn killing_everything_kills_only_the_program() {
    if skipped() {
        return;
    }
    // All that the signal reaches is the program's own; the agent is there to tell.
    let ran = step("sleep 1000 & sleep 1000 & kill -9 -1; wait; echo ended").run().passed();
    assert_eq!(ran.stdout, "ended\n");
}

#[test]
fn privileges_are_gone_and_cannot_come_back() {
    if skipped() {
        return;
    }
    let ran = python(
        "import os, ctypes, subprocess, shutil
libc = ctypes.CDLL(None, use_errno=True)
status = dict(l.rstrip().split(':', 1) for l in open('/proc/self/status') if ':' in l)
for key in ['CapInh', 'CapPrm', 'CapEff', 'CapBnd']: print(key, int(status[key], 16))
print('groups', os.getgroups(), os.getresuid() == (47113,) * 3, os.getresgid() == (47113,) * 3)
print('no-new-privs', libc.prctl(39, 0, 0, 0, 0))
def attempt(what, f):
    try: print(what, f() or 'worked')
    except OSError: print(what, 'denied')
attempt('setuid', lambda: os.setuid(0))
attempt('setgroups', lambda: os.setgroups([0]))
attempt('chroot', lambda: os.chroot('/tmp'))
try: os.mknod('/tmp/n', 0o20666, os.makedev(1, 1))
except OSError: pass
attempt('device', lambda: open('/tmp/n', 'rb'))
print('mount', 'denied' if libc.mount(b'x', b'/tmp', b'tmpfs', 0, None) else 'worked')
print('reboot', 'denied' if libc.syscall(169, 0xfee1dead, 672274793, 0x4321fedc, None) else 'worked')
shutil.copy('/usr/bin/id', '/tmp/id'); os.chmod('/tmp/id', 0o4755)
print('set-uid', subprocess.check_output(['/tmp/id', '-u'], text=True).strip())",
    )
    .run()
    .passed();
    let expected = "CapInh 0\nCapPrm 0\nCapEff 0\nCapBnd 0\ngroups [] True True\nno-new-privs 1\nsetuid denied\nsetgroups denied\n\
                    chroot denied\ndevice denied\nmount denied\nreboot denied\nset-uid 47113\n";
    assert_eq!(ran.stdout, expected);
}

#[test]
fn nothing_of_the_runners_environment_or_files_is_in_sight() {
    if skipped() {
        return;
    }
    let ran = python(
        "import os, glob
print('pids', sorted(int(p) for p in os.listdir('/proc') if p.isdigit()) == [1, os.getpid()])
for f in glob.glob('/proc/*/environ') + glob.glob('/proc/*/cmdline'):
    try: data = open(f, 'rb').read()
    except OSError: continue
    if b'CARGO' in data or b'runsc' in data or b'target' in data: print('leak', f, data)
for line in open('/proc/self/mountinfo'):
    if 'scratch' in line.split()[3] or '/home' in line: print('mount', line)
print(open('/proc/1/cmdline').read().count('.plimsoll-'))",
    )
    .run()
    .passed();
    assert_eq!(ran.stdout, "pids True\n1\n");
}

#[test]
fn frames_printed_by_a_program_are_only_output() {
    if skipped() {
        return;
    }
    // A `Result` frame as the agent would send it, and an endless length.
    let ran = step(r"printf '\004\000\000\000\007\001\000\000'; printf '\377\377\377\377'; exit 3").run();
    assert_eq!(ran.result().exit_code, Some(3));
    assert_eq!(ran.stdout_bytes.0, 12);
}

#[test]
fn a_program_cannot_make_the_step_pass_by_ending_the_boundary() {
    if skipped() {
        return;
    }
    // Whatever it manages, there is no result that says 0.
    let ran =
        python("import os, ctypes\nlibc = ctypes.CDLL(None)\nfor s in range(1, 65): libc.kill(1, s)\nos._exit(5)")
            .run();
    assert!(!matches!(&ran.passage.end, End::Result(r) if r.exit_code == Some(0)), "{}", ran.story());
}

/// In a user namespace of its own a program could raise `RLIMIT_NPROC` and mount a tmpfs of any size.
#[test]
fn no_user_namespace_can_be_made() {
    if skipped() {
        return;
    }
    let ran = python(
        "import ctypes, os, resource, subprocess, threading
libc = ctypes.CDLL(None, use_errno=True)
NEWUSER, CLONE, CLONE3, SETNS = 0x10000000, 56, 435, 308
print('unshare', libc.unshare(NEWUSER), ctypes.get_errno())
print('clone', libc.syscall(CLONE, NEWUSER | 17, 0, 0, 0, 0), ctypes.get_errno())
print('clone3', libc.syscall(CLONE3, 0, 0), ctypes.get_errno())
print('setns', libc.syscall(SETNS, 0, 0), ctypes.get_errno())
try: resource.setrlimit(resource.RLIMIT_NPROC, (100000, 100000)); print('raised')
except (OSError, ValueError): print('kept')
# Ordinary processes and threads are none of the filter's business.
thread = threading.Thread(target=lambda: print('thread')); thread.start(); thread.join()
print(subprocess.run(['echo', 'process'], capture_output=True, text=True).stdout.strip())",
    )
    .run()
    .passed();
    assert_eq!(ran.stdout, "unshare -1 1\nclone -1 1\nclone3 -1 38\nsetns -1 1\nkept\nthread\nprocess\n");
}
