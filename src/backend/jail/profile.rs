//! What each profile may do: seccomp filters and resource limits.

use std::collections::BTreeMap;
use std::io;

use rustix::process::{Resource, Rlimit, setrlimit};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};

use super::{Limits, Profile};

/// What computing over a channel takes, measured with wasmtime compiling and running (signal-based traps, one thread).
const COMPUTE: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_futex,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_sigaltstack,
    libc::SYS_setitimer,
    libc::SYS_getrandom,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_restart_syscall,
    libc::SYS_sched_yield,
    libc::SYS_close,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_tgkill,
];

/// What reading and writing files below a directory takes on top.
const FILES: &[i64] = &[
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_readlinkat,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fstatfs,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_lseek,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_getdents64,
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_renameat,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fadvise64,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_utimensat,
    libc::SYS_fcntl,
    libc::SYS_dup,
    libc::SYS_dup3,
];

/// What unpacking with threads takes on top.
const UNPACK: &[i64] = &[
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_copy_file_range,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_getaffinity,
    libc::SYS_ppoll,
    // A socket that was handed over; there is no way to make another.
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
];

/// What waiting for one child takes.
const WAIT: &[i64] = &[libc::SYS_wait4, libc::SYS_exit_group, libc::SYS_rt_sigreturn, libc::SYS_restart_syscall];

fn other(e: impl std::fmt::Display) -> io::Error {
    io::Error::other(e.to_string())
}

fn when(argument: u8, operation: Op, value: u64) -> io::Result<SeccompRule> {
    let condition = SeccompCondition::new(argument, Len::Qword, operation, value).map_err(other)?;
    SeccompRule::new(vec![condition]).map_err(other)
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Allows what `rules` say; anything else ends the process, so that an attempt is seen and not survived.
fn install(rules: Rules) -> io::Result<()> {
    install_with(rules, SeccompAction::KillProcess, SeccompAction::Allow)
}

fn install_with(rules: Rules, otherwise: SeccompAction, matching: SeccompAction) -> io::Result<()> {
    let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(other)?;
    let filter = SeccompFilter::new(rules, otherwise, matching, arch).map_err(other)?;
    let program: BpfProgram = filter.try_into().map_err(other)?;
    apply_filter(&program).map_err(other)
}

/// A limit of the process's own `RLIMIT_DATA`.
fn lower_data() -> io::Result<SeccompRule> {
    let equals = |argument, value| SeccompCondition::new(argument, Len::Qword, Op::Eq, value).map_err(other);
    SeccompRule::new(vec![equals(0, 0)?, equals(1, u64::from(libc::RLIMIT_DATA))?]).map_err(other)
}

/// Has a call fail as if this kernel did not know it. It takes a filter of its own; where two disagree, the kernel does
/// what is worse for the caller, so the other one has to let it through.
fn deny(rules: &mut Rules, call: i64) -> io::Result<()> {
    rules.insert(call, Vec::new());
    let errno = u32::try_from(libc::ENOSYS).unwrap_or_default();
    install_with(Rules::from([(call, Vec::new())]), SeccompAction::Allow, SeccompAction::Errno(errno))
}

/// Installs the filter of a profile. Needs `NoNewPrivs`.
pub(super) fn confine(profile: Profile) -> io::Result<()> {
    let lists: &[&[i64]] = match profile {
        Profile::Compute => &[COMPUTE],
        Profile::Files => &[COMPUTE, FILES],
        Profile::Unpack => &[COMPUTE, FILES, UNPACK],
    };
    let mut rules: Rules = lists.iter().copied().flatten().map(|&call| (call, Vec::new())).collect();
    // `isatty`, which programs ask before they choose how to buffer.
    rules.insert(libc::SYS_ioctl, vec![when(1, Op::Eq, libc::TCGETS)?]);
    // Read limits, set none.
    rules.insert(libc::SYS_prlimit64, vec![when(2, Op::Eq, 0)?]);
    if profile == Profile::Compute {
        // Ask for the size of an open file, and copy its descriptor: the memory file with compiled code. A build with
        // checks also asks whether a descriptor is open before it closes it.
        let by_descriptor = u64::try_from(libc::AT_EMPTY_PATH).unwrap_or_default();
        rules.insert(libc::SYS_statx, vec![when(2, Op::Eq, by_descriptor)?]);
        let [copy, ask] =
            [libc::F_DUPFD_CLOEXEC, libc::F_GETFD].map(|command| u64::try_from(command).unwrap_or_default());
        rules.insert(libc::SYS_fcntl, vec![when(1, Op::Eq, copy)?, when(1, Op::Eq, ask)?]);
    }
    match profile {
        Profile::Compute | Profile::Files => {
            rules.insert(libc::SYS_mmap, Vec::new());
            rules.insert(libc::SYS_mprotect, Vec::new());
            // Lower the limit of one's own memory, once compiling is over; it cannot be raised again.
            rules.entry(libc::SYS_prlimit64).or_default().push(lower_data()?);
            // wasmtime would keep a memory's first content in a memory file, and does without where there are none.
            deny(&mut rules, libc::SYS_memfd_create)?;
        }
        Profile::Unpack => {
            let exec = u64::try_from(libc::PROT_EXEC).unwrap_or_default();
            rules.insert(libc::SYS_mmap, vec![when(2, Op::MaskedEq(exec), 0)?]);
            rules.insert(libc::SYS_mprotect, vec![when(2, Op::MaskedEq(exec), 0)?]);
            // Threads, not processes. clone3 hides its flags from a filter: libraries fall back to clone when it is
            // said not to exist.
            let thread = u64::try_from(libc::CLONE_THREAD | libc::CLONE_VM).unwrap_or_default();
            rules.insert(libc::SYS_clone, vec![when(0, Op::MaskedEq(thread), thread)?]);
            deny(&mut rules, libc::SYS_clone3)?;
        }
    }
    install(rules)
}

/// The filter of the process between the runner and the jailed one: it only waits.
pub(super) fn confine_waiter() -> io::Result<()> {
    install(WAIT.iter().map(|&call| (call, Vec::new())).collect())
}

/// Sets the resource limits of a profile.
pub(super) fn limit(profile: Profile, limits: &Limits) -> io::Result<()> {
    let descriptors = match profile {
        Profile::Compute => 16,
        Profile::Files => 256,
        // An image has up to 127 layers, a tree 64 levels.
        Profile::Unpack => 256,
    };
    let file = if profile == Profile::Compute { 0 } else { limits.file_bytes };
    for (resource, value) in [
        (Resource::Data, limits.data_bytes),
        (Resource::Core, 0),
        (Resource::Fsize, file),
        (Resource::Nofile, descriptors),
        (Resource::Nproc, limits.threads),
        (Resource::Memlock, 0),
        (Resource::Msgqueue, 0),
    ] {
        setrlimit(resource, Rlimit { current: Some(value), maximum: Some(value) })?;
    }
    Ok(())
}
