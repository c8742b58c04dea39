//! The one module of the runner with `unsafe` in it: system calls that no crate wraps safely.
//!
//! Each function says what makes it sound. Most of them are for a process that has one thread and is about to jail
//! itself (see [`super::jail`]); the rest is for starting children and for reporting from signal handlers.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::UnshareFlags;
use tokio::io::unix::AsyncFd;

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Moves the calling thread into new namespaces. The kernel refuses a user namespace if there is a second thread.
///
/// # Errors
/// As unshare(2).
pub fn unshare(flags: UnshareFlags) -> io::Result<()> {
    // SAFETY: rustix marks this unsafe because of CLONE_FILES, under which other threads' descriptors could be closed
    // behind safe code's back. The flag is masked out.
    unsafe { rustix::thread::unshare_unsafe(flags.difference(UnshareFlags::FILES))? };
    Ok(())
}

/// Which side of [`fork`] this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forked {
    /// The parent, with the child's pid.
    Parent(Pid),
    /// The child.
    Child,
}

/// Forks a process that has one thread.
///
/// # Errors
/// As fork(2), or if there is more than one thread.
pub fn fork() -> io::Result<Forked> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("fork in a process with several threads"));
    }
    // SAFETY: with one thread no lock can be held by a thread that the child lacks, so the child may go on like any
    // process.
    let pid = check(unsafe { libc::fork() })?;
    Ok(Pid::from_raw(pid).map_or(Forked::Child, Forked::Parent))
}

/// Closes every descriptor from `first` on. For a process whose remaining code opens its own.
///
/// # Errors
/// As close_range(2).
pub fn close_from(first: u32) -> io::Result<()> {
    // SAFETY: called right after exec or fork in a single-threaded process that holds no owned descriptor from `first`
    // on that it will use or close later.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0u32) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Takes ownership of a descriptor that was handed over at exec.
///
/// # Errors
/// If it is not open.
pub fn take_descriptor(number: u32) -> io::Result<OwnedFd> {
    let number = RawFd::try_from(number).map_err(io::Error::other)?;
    // SAFETY: F_GETFD takes any number; what is open at this one came by exec, so nothing else in the process owns it.
    // Called once for each number.
    unsafe {
        check(libc::fcntl(number, libc::F_GETFD))?;
        Ok(OwnedFd::from_raw_fd(number))
    }
}

/// Has the runtime watch a descriptor.
///
/// # Errors
/// If there is no runtime or the descriptor cannot be polled.
pub fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd always gives the same descriptor, and keeps it open until the AsyncFd drops it.
    Ok(unsafe { AsyncFd::register(fd)? })
}

/// The version of KVM's interface behind an open device; fails for a device that is something else.
///
/// # Errors
/// As ioctl(2).
pub fn kvm_version(device: impl AsFd) -> io::Result<c_int> {
    /// `_IO(KVMIO, 0x00)`, from the kernel's `include/uapi/linux/kvm.h`.
    const KVM_GET_API_VERSION: libc::c_ulong = 0xae00;
    // SAFETY: the request takes no argument and writes nothing.
    check(unsafe { libc::ioctl(device.as_fd().as_raw_fd(), KVM_GET_API_VERSION, 0) })
}

/// Version of Landlock's interface that this kernel has; `None` without Landlock (the kernel's `userspace-api/landlock`
/// document).
#[must_use]
pub fn landlock_version() -> Option<u32> {
    const LANDLOCK_CREATE_RULESET_VERSION: libc::c_ulong = 1;
    let null = std::ptr::null::<libc::c_void>();
    // SAFETY: with this flag there are no attributes to read, and nothing is made.
    let version =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, null, 0usize, LANDLOCK_CREATE_RULESET_VERSION) };
    u32::try_from(version).ok().filter(|&version| version > 0)
}

/// User and group of the process on the other end of a Unix socket, as they were when it connected or began to listen
/// (`SO_PEERCRED`, unix(7)). rustix has this too, but with a pid that can't be zero, and zero is what a process in
/// another pid namespace has.
///
/// # Errors
/// As getsockopt(2).
pub fn peer_ids(socket: impl AsFd) -> io::Result<(u32, u32)> {
    let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = libc::socklen_t::try_from(size_of::<libc::ucred>()).unwrap_or(0);
    // SAFETY: the kernel writes at most `length` bytes, which is what the structure has; any content is valid.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    check(result)?;
    Ok((peer.uid, peer.gid))
}

/// The supplementary groups that the process on the other end of a Unix socket had when it connected (`SO_PEERGROUPS`,
/// unix(7), new in Linux 4.13).
///
/// # Errors
/// As getsockopt(2).
pub fn peer_groups(socket: impl AsFd) -> io::Result<Vec<u32>> {
    // As many as a process can have (NGROUPS_MAX, since Linux 2.6.4).
    let mut groups = vec![0u32; 65_536];
    let mut length = libc::socklen_t::try_from(size_of_val(groups.as_slice())).unwrap_or(libc::socklen_t::MAX);
    // SAFETY: the kernel writes at most `length` bytes into the vector, which has that many, and says how many it wrote.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERGROUPS,
            groups.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    check(result)?;
    groups.truncate(length as usize / size_of::<u32>());
    Ok(groups)
}

/// Ends the process at once: no destructors, no exit handlers.
pub fn exit_now(code: c_int) -> ! {
    // SAFETY: _exit(2) has no preconditions.
    unsafe { libc::_exit(code) }
}

/// Sets the attributes of a mount and everything below it: read-only if asked, and always without set-uid programs and
/// device files.
///
/// # Errors
/// As mount_setattr(2), which is new in Linux 5.12.
pub fn restrict_mount(mount: impl AsFd, read_only: bool) -> io::Result<()> {
    let mut set = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
    if read_only {
        set |= libc::MOUNT_ATTR_RDONLY;
    }
    let attributes = libc::mount_attr { attr_set: set, attr_clr: 0, propagation: libc::MS_PRIVATE, userns_fd: 0 };
    let empty: &CStr = c"";
    // SAFETY: the path is a C string and the structure is as long as the length says; both outlive the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_fd().as_raw_fd(),
            empty.as_ptr(),
            libc::AT_EMPTY_PATH | libc::AT_RECURSIVE,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Lets a command's child have copies of `descriptors`, each under the given number below 64.
///
/// # Errors
/// If the runner has no descriptor left.
pub fn hand_over<'a>(command: &mut Command, descriptors: impl Iterator<Item = (u32, &'a OwnedFd)>) -> io::Result<()> {
    // Out of the way of the numbers that are given out.
    let descriptors = descriptors
        .map(|(to, fd)| Ok((rustix::io::fcntl_dupfd_cloexec(fd, 64)?, RawFd::try_from(to).unwrap_or(-1))))
        .collect::<io::Result<Vec<_>>>()?;
    // SAFETY: the closure runs between fork and exec and makes only dup2(2), which is async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            for (from, to) in &descriptors {
                check(libc::dup2(from.as_raw_fd(), *to))?;
            }
            Ok(())
        });
    }
    Ok(())
}

/// Has the kernel kill a command's child when the thread that starts it ends; see [`super::process::spawn`] for which
/// thread that is.
pub fn die_with_parent(command: &mut Command) {
    let parent = std::process::id();
    // SAFETY: the closure runs between fork and exec and makes only prctl(2) and getppid(2).
    unsafe {
        command.pre_exec(move || {
            check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
            // The parent may have ended before the line above.
            if u32::try_from(libc::getppid()) != Ok(parent) {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        });
    }
}

/// How a child ended and what it and its reaped children used.
#[derive(Debug, Clone, Copy)]
pub struct Exit {
    /// Exit status.
    pub status: ExitStatus,
    /// User and system time.
    pub cpu: Duration,
    /// Largest resident set of any one process among them, bytes.
    pub peak_memory_bytes: u64,
}

/// Reaps a child if it has ended.
///
/// # Errors
/// As wait4(2).
pub fn reap(pid: Pid) -> io::Result<Option<Exit>> {
    let mut status: c_int = 0;
    // SAFETY: all-zero is a valid rusage; both pointers outlive the call.
    let (got, usage) = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        let got = check(libc::wait4(pid.as_raw_nonzero().get(), &raw mut status, libc::WNOHANG, &raw mut usage))?;
        (got, usage)
    };
    if got == 0 {
        return Ok(None);
    }
    let time = |t: libc::timeval| {
        Duration::new(u64::try_from(t.tv_sec).unwrap_or(0), u32::try_from(t.tv_usec).unwrap_or(0) * 1000)
    };
    Ok(Some(Exit {
        status: ExitStatus::from_raw(status),
        cpu: time(usage.ru_utime) + time(usage.ru_stime),
        peak_memory_bytes: u64::try_from(usage.ru_maxrss).unwrap_or(0) * 1024,
    }))
}

/// Calls a loader of compiled code. Only for a jailed worker: such code runs with nothing checked.
///
/// `load` is a `deserialize` of wasmtime's, which this module does not know.
pub fn load_compiled<E, C, T>(load: unsafe fn(&E, C) -> T, engine: &E, code: C) -> T {
    // SAFETY: wasmtime asks that the bytes come from its own `serialize`, unchanged. The cache holds that as far as it
    // can: entries are written only from a worker's frames under the key of the module that the worker was given, belong
    // to the user alone, and carry a digest. What is left is a worker that was taken over while it compiled, or somebody
    // with the user's rights: their code runs as guest code does, inside the jail, where alone this is called.
    unsafe { load(engine, code) }
}

/// How much of `RLIMIT_DATA` this process uses, bytes, up to a page. Where there is no `/proc` nobody tells it, so it is
/// found by lowering the soft limit until a page more is refused. For a process with one thread.
///
/// # Errors
/// As setrlimit(2).
pub fn data_in_use() -> io::Result<u64> {
    let whole = getrlimit(Resource::Data);
    let page = rustix::param::page_size() as u64;
    let (mut refused, mut admitted) = (0, whole.maximum.unwrap_or(1 << 46) / page);
    while refused + 1 < admitted {
        let middle = refused + (admitted - refused) / 2;
        setrlimit(Resource::Data, Rlimit { current: Some(middle * page), maximum: whole.maximum })?;
        // SAFETY: a fresh mapping at an address of the kernel's choice, and the end of that mapping.
        let fits = unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let probe = libc::mmap(std::ptr::null_mut(), page as usize, protection, flags, -1, 0);
            probe != libc::MAP_FAILED && libc::munmap(probe, page as usize) == 0
        };
        if fits {
            admitted = middle;
        } else {
            refused = middle;
        }
    }
    setrlimit(Resource::Data, whole)?;
    Ok(refused * page)
}

static TICK: OnceLock<fn()> = OnceLock::new();

extern "C" fn on_alarm(_: c_int) {
    if let Some(tick) = TICK.get() {
        tick();
    }
}

/// Calls `tick` from SIGALRM every `period`, for ever. `tick` runs in a signal handler: atomics only.
///
/// # Errors
/// If it was called before, or as sigaction(2) and setitimer(2).
pub fn every(period: Duration, tick: fn()) -> io::Result<()> {
    TICK.set(tick).map_err(|_| io::Error::other("the timer runs already"))?;
    handle(libc::SIGALRM, on_alarm)?;
    let time = libc::timeval {
        tv_sec: libc::time_t::try_from(period.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_usec: libc::suseconds_t::from(period.subsec_micros()),
    };
    let timer = libc::itimerval { it_interval: time, it_value: time };
    // SAFETY: the structure outlives the call; the old value is not asked for.
    check(unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) })?;
    Ok(())
}

fn handle(signal: c_int, handler: extern "C" fn(c_int)) -> io::Result<()> {
    // SAFETY: all-zero is a valid sigaction (empty mask); the handlers of this module touch only atomics, initialised
    // statics and async-signal-safe system calls. SA_ONSTACK keeps them off a guest's nearly full stack.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
        check(libc::sigaction(signal, &raw const action, std::ptr::null_mut()))?;
    }
    Ok(())
}

/// Last words: what [`on_abort`] writes.
#[derive(Debug)]
struct LastWords {
    out_of_memory: Vec<u8>,
    otherwise: Vec<u8>,
}

static LAST_WORDS: OnceLock<LastWords> = OnceLock::new();

/// Writes a frame to the channel, waits until the runner has looked (it releases or kills us), and ends.
extern "C" fn on_abort(_: c_int) {
    if let Some(words) = LAST_WORDS.get() {
        // SAFETY: getrlimit(2), mmap of fresh anonymous memory, write(2), read(2) and _exit(2) are async-signal-safe; the buffers are
        // static or on this stack.
        unsafe {
            // Rust aborts when an allocation fails, and for little else. What was asked for is not known here; that a
            // quarter of the limit cannot be had any more is taken for the same.
            let mut limit: libc::rlimit = std::mem::zeroed();
            libc::getrlimit(libc::RLIMIT_DATA, &raw mut limit);
            let quarter = usize::try_from(limit.rlim_cur / 4).unwrap_or(usize::MAX).clamp(16 << 20, 1 << 30);
            let probe = libc::mmap(
                std::ptr::null_mut(),
                quarter,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            let mut rest: &[u8] = if probe == libc::MAP_FAILED { &words.out_of_memory } else { &words.otherwise };
            while !rest.is_empty() {
                match usize::try_from(libc::write(1, rest.as_ptr().cast(), rest.len())) {
                    Ok(n) => rest = rest.get(n..).unwrap_or_default(),
                    Err(_) => break,
                }
            }
            let mut byte = 0u8;
            libc::read(0, (&raw mut byte).cast(), 1);
        }
    }
    exit_now(134);
}

/// On SIGABRT (how Rust ends when memory runs out) writes the first frame if memory is short and else the second to
/// descriptor 1, then waits for one byte on descriptor 0. Without a handler SIGABRT does nothing to the first process of
/// a pid namespace.
///
/// # Errors
/// If it was called before, or as sigaction(2).
pub fn report_aborts(out_of_memory: Vec<u8>, otherwise: Vec<u8>) -> io::Result<()> {
    LAST_WORDS
        .set(LastWords { out_of_memory, otherwise })
        .map_err(|_| io::Error::other("aborts are reported already"))?;
    handle(libc::SIGABRT, on_abort)
}
