//! What stands in the way of a jail on this host, found by trying, and what to do about it.

use super::{JailError, Limits, Profile, Spec, spawn::Jail};
use crate::backend::fix;

/// Something about this host that forbids jails, and its fix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct Blocker {
    /// What stands in the way.
    pub what: String,
    /// What to do about it, one line.
    pub help: String,
}

impl Blocker {
    fn new(what: impl Into<String>, help: impl Into<String>) -> Self {
        Self { what: what.into(), help: help.into() }
    }

    pub(super) fn no_procfs() -> Self {
        Self::new(
            "/proc is not mounted, so the runner can neither start a copy of itself nor look at it",
            "mount it: `mount -t proc proc /proc`",
        )
    }

    pub(super) fn lone_root() -> Self {
        Self::new(
            "the runner is root in a user namespace that knows no other user, so a jail could only run as root too",
            "run plimsoll as a plain user, or in a user namespace with a range of ids (`newuidmap`, `--userns=auto`)",
        )
    }
}

/// The step names (of the child, and one of the runner) that need a working user namespace.
const NAMESPACE_STEPS: [&str; 6] = [
    "unshare",
    "clone the planned mounts",
    "write the id maps",
    "take the jail's ids",
    "build the private root",
    "drop capabilities",
];

/// The host's part in a failed step, if it has one.
pub(super) fn explain(step: &str, errno: i32) -> Option<Blocker> {
    let host = Host {
        max_user_namespaces: setting("/proc/sys/user/max_user_namespaces"),
        unprivileged_clone: setting("/proc/sys/kernel/unprivileged_userns_clone"),
        apparmor_restricts: setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns"),
        confinement: std::fs::read_to_string("/proc/self/attr/current")
            .unwrap_or_default()
            .trim_end_matches('\0')
            .trim()
            .to_owned(),
        filtered: std::fs::read_to_string("/proc/self/status")
            .is_ok_and(|s| s.lines().any(|l| l.strip_prefix("Seccomp:").is_some_and(|v| v.trim() == "2"))),
        root: rustix::process::geteuid().is_root(),
    };
    diagnose(step, errno, &host)
}

fn setting(path: &str) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// What is known about the host.
struct Host {
    max_user_namespaces: Option<u64>,
    unprivileged_clone: Option<u64>,
    apparmor_restricts: Option<u64>,
    /// AppArmor profile of the runner, such as `docker-default (enforce)`; empty if there is none.
    confinement: String,
    /// A seccomp filter is on the runner already.
    filtered: bool,
    root: bool,
}

fn diagnose(step: &str, errno: i32, host: &Host) -> Option<Blocker> {
    if !NAMESPACE_STEPS.contains(&step) {
        return None;
    }
    // A filter may say that there is no such call (Podman's does, of what it does not know).
    let denied = errno == libc::EPERM || errno == libc::EACCES || (errno == libc::ENOSYS && host.filtered);
    if host.max_user_namespaces == Some(0) {
        return Some(Blocker::new(
            "user namespaces are switched off (user.max_user_namespaces is 0)",
            fix::MAX_USER_NAMESPACES,
        ));
    }
    if step == "unshare" && (errno == libc::ENOSPC || errno == libc::EUSERS) {
        return Some(Blocker::new(
            "no further user namespace may be made here (too many, or nested too deep)",
            "raise user.max_user_namespaces, or run plimsoll outside of nested containers",
        ));
    }
    if step == "unshare" && !denied && (errno == libc::EINVAL || errno == libc::ENOSYS) {
        return Some(Blocker::new(
            "this kernel has no user namespaces",
            "use a kernel with CONFIG_USER_NS, or a host with `backend: firecracker`",
        ));
    }
    if !denied {
        return None;
    }
    if host.unprivileged_clone == Some(0) && !host.root {
        return Some(Blocker::new(
            "plain users may not make user namespaces (kernel.unprivileged_userns_clone is 0)",
            fix::USERNS_CLONE,
        ));
    }
    if host.apparmor_restricts == Some(1) && !host.root {
        return Some(Blocker::new(
            "AppArmor lets plain users make no user namespaces (kernel.apparmor_restrict_unprivileged_userns is 1)",
            fix::APPARMOR_USERNS,
        ));
    }
    if host.confinement.contains("(enforce)") {
        return Some(Blocker::new(
            format!("the AppArmor profile around the runner, {}, forbids to {step}", host.confinement),
            fix::APPARMOR,
        ));
    }
    if host.filtered {
        return Some(Blocker::new(
            format!("the seccomp filter of the container around the runner forbids to {step}"),
            fix::SECCOMP,
        ));
    }
    Some(Blocker::new(
        format!("the kernel does not allow to {step} here (a security module, or a chroot)"),
        "run plimsoll outside of the container or chroot, or as a user that may make user namespaces (try `unshare -Um true`)",
    ))
}

/// Whether a jail can be built on this host, found by building one and throwing it away. `entry` is any internal word of
/// the program.
///
/// # Errors
/// What stands in the way.
pub fn userns_probe(entry: &'static str) -> Result<(), Blocker> {
    let limits = Limits { data_bytes: 64 << 20, file_bytes: 0, threads: 1 };
    let spec =
        Spec { entry, profile: Profile::Compute, limits, binds: Vec::new(), inherit: Vec::new(), give: Vec::new() };
    match Jail::spawn(spec) {
        Ok(_) => Ok(()),
        Err(JailError::Blocked(blocker)) => Err(blocker),
        Err(e) => Err(Blocker::new(
            format!("a jail cannot be built: {}", crate::text::chain(&e)),
            "please report this with the output of `plimsoll doctor --json`",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Host = Host {
        max_user_namespaces: Some(1000),
        unprivileged_clone: None,
        apparmor_restricts: None,
        confinement: String::new(),
        filtered: false,
        root: false,
    };

    #[test]
    fn each_blocker_is_told_from_the_others() {
        let what = |errno, host: Host| diagnose("unshare", errno, &host).unwrap().what;
        assert!(what(libc::ENOSPC, Host { max_user_namespaces: Some(0), ..PLAIN }).contains("max_user_namespaces"));
        assert!(what(libc::EPERM, Host { unprivileged_clone: Some(0), ..PLAIN }).contains("unprivileged_userns_clone"));
        assert!(what(libc::EACCES, Host { apparmor_restricts: Some(1), ..PLAIN }).contains("AppArmor"));
        let docker = Host { confinement: "docker-default (enforce)".into(), root: true, ..PLAIN };
        assert!(what(libc::EACCES, docker).contains("docker-default"));
        assert!(what(libc::EPERM, Host { filtered: true, ..PLAIN }).contains("seccomp"));
        assert!(what(libc::ENOSYS, Host { filtered: true, ..PLAIN }).contains("seccomp"));
        assert!(what(libc::EINVAL, PLAIN).contains("no user namespaces"));
        assert!(what(libc::ENOSYS, PLAIN).contains("no user namespaces"));
    }

    #[test]
    fn on_ubuntu_the_mounts_fail_after_an_unshare_that_worked() {
        let host = Host { apparmor_restricts: Some(1), ..PLAIN };
        assert!(diagnose("build the private root", libc::EACCES, &host).unwrap().help.contains("setup userns"));
    }

    #[test]
    fn a_fault_of_ours_is_not_blamed_on_the_host() {
        assert_eq!(diagnose("install the seccomp filter", libc::EINVAL, &PLAIN), None);
        assert_eq!(diagnose("build the private root", libc::ENOSPC, &PLAIN), None);
    }
}
