//! System calls that no crate wraps safely: fork and exec, signals to everybody, signal descriptors, usage.

use std::ffi::{CStr, CString, c_char, c_int};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Pid;

/// A program to start.
pub struct Spawn<'a> {
    /// Path of the executable.
    pub program: &'a CStr,
    /// Arguments, the program's name first.
    pub argv: &'a [CString],
    /// `KEY=value`, in order.
    pub env: &'a [CString],
    /// Directory to start in.
    pub directory: &'a CStr,
    /// Standard input, output, error; each above 2.
    pub stdio: [BorrowedFd<'a>; 3],
    /// Uid and gid.
    pub user: (u32, u32),
    /// `RLIMIT_NPROC`.
    pub processes: u64,
    /// `RLIMIT_NOFILE`.
    pub files: u64,
    /// The `cgroup.procs` of a control group to join.
    pub group: Option<&'a CStr>,
}

/// Where starting a program failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    Fork,
    Session,
    Streams,
    Limits,
    Privileges,
    User,
    Directory,
    Exec,
}

impl Stage {
    const ALL: [Self; 8] = [
        Self::Fork,
        Self::Session,
        Self::Streams,
        Self::Limits,
        Self::Privileges,
        Self::User,
        Self::Directory,
        Self::Exec,
    ];

    pub const fn words(self) -> &'static str {
        match self {
            Self::Fork => "making a process",
            Self::Session => "making a session",
            Self::Streams => "connecting its streams",
            Self::Limits => "setting its limits",
            Self::Privileges => "dropping privileges",
            Self::User => "changing the user",
            Self::Directory => "entering its directory",
            Self::Exec => "executing it",
        }
    }
}

#[derive(Debug)]
pub struct SpawnError {
    pub stage: Stage,
    pub why: io::Error,
}

/// Starts a program as the leader of a new session, with another user's ids, no groups, no capability in any set,
/// `NoNewPrivs`, its limits, and no descriptor but its streams (everything else here closes on exec).
pub fn spawn(spawn: &Spawn<'_>) -> Result<Pid, SpawnError> {
    let before = |why: io::Error| SpawnError { stage: Stage::Fork, why };
    let (mut report, report_end) =
        pipe_with(PipeFlags::CLOEXEC).map(|(r, w)| (File::from(r), w)).map_err(|e| before(e.into()))?;
    // Everything that allocates happens before the fork.
    let pointers =
        |list: &[CString]| -> Vec<*const c_char> { list.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect() };
    let (argv, env) = (pointers(spawn.argv), pointers(spawn.env));
    // SAFETY: the agent is single-threaded, so the child may do anything; what follows is only system calls on
    // memory that was prepared above, and it ends in exec or _exit.
    let pid = unsafe { libc::fork() };
    match pid {
        0 => {
            let (stage, errno) = child(spawn, &argv, &env);
            let message = [stage as u8, errno.to_le_bytes()[0], errno.to_le_bytes()[1]];
            // SAFETY: write and _exit take no memory but `message`; the child must not run the parent's cleanup.
            unsafe {
                libc::write(report_end.as_raw_fd(), message.as_ptr().cast(), message.len());
                libc::_exit(127)
            }
        }
        pid if pid > 0 => {
            drop(report_end);
            let mut message = [0u8; 3];
            let started = Pid::from_raw(pid).ok_or_else(|| before(io::ErrorKind::NotFound.into()))?;
            match report.read_exact(&mut message) {
                // Closed by a successful exec.
                Err(_) => Ok(started),
                Ok(()) => {
                    let _ = rustix::process::waitpid(Some(started), rustix::process::WaitOptions::empty());
                    let stage = Stage::ALL.get(usize::from(message[0])).copied().unwrap_or(Stage::Exec);
                    let errno = i32::from(u16::from_le_bytes([message[1], message[2]]));
                    Err(SpawnError { stage, why: io::Error::from_raw_os_error(errno) })
                }
            }
        }
        _ => Err(before(io::Error::last_os_error())),
    }
}

/// Runs in the child; returns only when something failed.
fn child(spawn: &Spawn<'_>, argv: &[*const c_char], env: &[*const c_char]) -> (Stage, i32) {
    let errno = || io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
    let call = |stage: Stage, returned: i64| if returned < 0 { Err((stage, errno())) } else { Ok(()) };
    let attempt = || -> Result<(), (Stage, i32)> {
        let (uid, gid) = spawn.user;
        // SAFETY: system calls on plain numbers, on the prepared strings and on locals that outlive each call. The
        // raw forms of setgroups, setresgid and setresuid act on this one thread, which is all there is.
        unsafe {
            call(Stage::Session, libc::setsid().into())?;
            if let Some(group) = spawn.group {
                let entrance = libc::open(group.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
                call(Stage::Limits, entrance.into())?;
                call(Stage::Limits, libc::write(entrance, c"0".as_ptr().cast(), 1) as i64)?;
            }
            for (number, fd) in (0..).zip(spawn.stdio) {
                call(Stage::Streams, libc::dup2(fd.as_raw_fd(), number).into())?;
            }
            let mut none: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut none);
            call(Stage::Streams, libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut()).into())?;
            libc::signal(libc::SIGPIPE, libc::SIG_DFL);
            libc::umask(0o022);
            let limits =
                [(libc::RLIMIT_CORE, 0), (libc::RLIMIT_NOFILE, spawn.files), (libc::RLIMIT_NPROC, spawn.processes)];
            for (resource, value) in limits {
                let limit = libc::rlimit { rlim_cur: value, rlim_max: value };
                call(Stage::Limits, libc::setrlimit(resource, &raw const limit).into())?;
            }
            for capability in 0..64 {
                if libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) < 0 {
                    // The first one past the kernel's last.
                    let last = errno();
                    if last == libc::EINVAL && capability > 0 {
                        break;
                    }
                    return Err((Stage::Privileges, last));
                }
            }
            call(Stage::Privileges, libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into())?;
            call(Stage::User, libc::syscall(libc::SYS_setgroups, 0, ptr::null::<libc::gid_t>()))?;
            call(Stage::User, libc::syscall(libc::SYS_setresgid, gid, gid, gid))?;
            call(Stage::User, libc::syscall(libc::SYS_setresuid, uid, uid, uid))?;
            let header = [0x2008_0522u32, 0];
            let sets = [0u32; 6];
            call(Stage::Privileges, libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()))?;
            call(Stage::Directory, libc::chdir(spawn.directory.as_ptr()).into())?;
            let filter = no_namespaces();
            let program = libc::sock_fprog { len: FILTER_LENGTH as u16, filter: filter.as_ptr().cast_mut() };
            let set = libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program, 0, 0);
            call(Stage::Privileges, set.into())?;
            call(Stage::Exec, libc::execve(spawn.program.as_ptr(), argv.as_ptr(), env.as_ptr()).into())
        }
    };
    match attempt() {
        Ok(()) => (Stage::Exec, libc::EINVAL),
        Err(failure) => failure,
    }
}

/// Instructions of [`no_namespaces`].
const FILTER_LENGTH: usize = 14;

/// A seccomp filter (seccomp(2)) under which nobody makes or enters a user namespace: in one of its own a program has
/// every capability, may raise its limits and mount what it likes. `clone3` hides its flags behind a pointer and is not
/// there (C libraries then use `clone`); nor is another architecture's way in.
fn no_namespaces() -> [libc::sock_filter; FILTER_LENGTH] {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
    const HAS: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    #[cfg(target_arch = "x86_64")]
    const ARCHITECTURE: u32 = 0xc000_003e;
    #[cfg(target_arch = "aarch64")]
    const ARCHITECTURE: u32 = 0xc000_00b7;
    /// Numbers from here on are x32's, on x86-64.
    const OTHER_ABI: u32 = 0x4000_0000;
    // Offsets in struct seccomp_data: the number, the architecture, the first argument's low half.
    const NUMBER: u32 = 0;
    const ARCH: u32 = 4;
    const FIRST: u32 = 16;
    let step = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
    let error = |errno: c_int| libc::SECCOMP_RET_ERRNO | errno as u32;
    [
        step(LOAD, ARCH, 0, 0),
        step(EQUAL, ARCHITECTURE, 0, 11), // else: no such call
        step(LOAD, NUMBER, 0, 0),
        step(AT_LEAST, OTHER_ABI, 9, 0),
        step(EQUAL, libc::SYS_clone3 as u32, 8, 0),
        step(EQUAL, libc::SYS_setns as u32, 5, 0),
        step(EQUAL, libc::SYS_unshare as u32, 2, 0),
        step(EQUAL, libc::SYS_clone as u32, 1, 0),
        step(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0),
        step(LOAD, FIRST, 0, 0),
        step(HAS, libc::CLONE_NEWUSER as u32, 0, 1),
        step(RETURN, error(libc::EPERM), 0, 0),
        step(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0),
        step(RETURN, error(libc::ENOSYS), 0, 0),
    ]
}

/// A descriptor that is readable when a child ended; it does not block.
pub fn child_signals() -> io::Result<OwnedFd> {
    // SAFETY: the set is initialised by sigemptyset before use and outlives the calls; the descriptor that signalfd
    // returns is ours alone.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGCHLD);
        if libc::sigprocmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut()) < 0 {
            return Err(io::Error::last_os_error());
        }
        let fd: RawFd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd)) }
    }
}

/// Kills every process but the agent. Only for process 1 of a boundary.
pub fn kill_everyone() {
    let everyone: c_int = -1;
    // SAFETY: kill takes two numbers.
    unsafe { libc::kill(everyone, libc::SIGKILL) };
}

/// What all children that were waited for have used.
#[derive(Debug, Clone, Copy, Default)]
pub struct ChildrenUsage {
    pub cpu_ms: u64,
    pub peak_memory_bytes: u64,
}

pub fn children_usage() -> ChildrenUsage {
    // SAFETY: an all-zero rusage is valid, and getrusage only writes to it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        if libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage) < 0 {
            return ChildrenUsage::default();
        }
        usage
    };
    let milliseconds =
        |t: libc::timeval| u64::try_from(t.tv_sec).unwrap_or(0) * 1000 + u64::try_from(t.tv_usec).unwrap_or(0) / 1000;
    ChildrenUsage {
        cpu_ms: milliseconds(usage.ru_utime) + milliseconds(usage.ru_stime),
        peak_memory_bytes: u64::try_from(usage.ru_maxrss).unwrap_or(0) * 1024,
    }
}

/// Listens on a vsock port, for one connection at a time.
pub fn listen_vsock(port: u32) -> io::Result<OwnedFd> {
    // SAFETY: an all-zero sockaddr_vm is valid; the address outlives the calls and its length is given; the descriptor
    // that socket returns is ours alone.
    unsafe {
        let fd = libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let socket = OwnedFd::from_raw_fd(fd);
        let mut address: libc::sockaddr_vm = std::mem::zeroed();
        address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
        address.svm_port = port;
        address.svm_cid = libc::VMADDR_CID_ANY;
        let length = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
        if libc::bind(fd, (&raw const address).cast(), length) < 0 || libc::listen(fd, 1) < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(socket)
    }
}

/// Waits for a connection from the host; others are turned away.
pub fn accept_vsock(listener: &OwnedFd) -> io::Result<OwnedFd> {
    loop {
        // SAFETY: as above; accept4 writes at most `length` bytes of the peer's address.
        unsafe {
            let mut peer: libc::sockaddr_vm = std::mem::zeroed();
            let mut length = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
            let fd = libc::accept4(listener.as_raw_fd(), (&raw mut peer).cast(), &raw mut length, libc::SOCK_CLOEXEC);
            if fd < 0 {
                match io::Error::last_os_error() {
                    e if e.kind() == io::ErrorKind::Interrupted => continue,
                    e => return Err(e),
                }
            }
            let connection = OwnedFd::from_raw_fd(fd);
            if peer.svm_cid == libc::VMADDR_CID_HOST {
                return Ok(connection);
            }
        }
    }
}

/// Credits the kernel's pool with 32 bytes of the host's and has the generator take them up at once (random(4)).
pub fn reseed(urandom: BorrowedFd<'_>, entropy: &[u8; 32]) -> io::Result<()> {
    const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
    const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
    #[repr(C)]
    struct PoolInfo {
        bits: c_int,
        bytes: c_int,
        pool: [u8; 32],
    }
    let info = PoolInfo { bits: 256, bytes: 32, pool: *entropy };
    // SAFETY: the structure is laid out as rand_pool_info with 32 bytes after it, as `bytes` says, and outlives the call.
    // The second request takes nothing.
    unsafe {
        if libc::ioctl(urandom.as_raw_fd(), RNDADDENTROPY, &raw const info) < 0
            || libc::ioctl(urandom.as_raw_fd(), RNDRESEEDCRNG) < 0
        {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Takes the loopback interface up: programs under test talk to themselves (netdevice(7)).
pub fn loopback_up() -> io::Result<()> {
    // SAFETY: an all-zero ifreq is valid; it outlives the calls, and the name fits with its final zero.
    unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let socket = OwnedFd::from_raw_fd(fd);
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as c_char;
        request.ifr_name[1] = b'o' as c_char;
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        if libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Ends the machine: a VMM takes a restart as its end. Returns only if this process may not.
pub fn restart() {
    // SAFETY: reboot takes a number. Nothing that matters is left unwritten: the machine's files are all in memory.
    unsafe { libc::reboot(libc::RB_AUTOBOOT) };
}
