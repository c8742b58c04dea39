//! The jail itself, without a guest: what is left behind, and that it can be used for other helpers.

use plimsoll::backend::jail::{Jail, Limits, Profile, Spec, userns_probe};
use plimsoll::backend::wasm::ENTRY;

pub const TESTS: &[(&str, fn())] = &[
    ("the_probe_agrees_with_the_jail", the_probe_agrees_with_the_jail),
    ("a_dropped_jail_leaves_no_process", a_dropped_jail_leaves_no_process),
    ("two_jails_never_share_a_host_uid", two_jails_never_share_a_host_uid),
    ("a_jail_outlives_the_thread_that_asked_for_it", a_jail_outlives_the_thread_that_asked_for_it),
    ("a_host_without_user_namespaces_is_told_from_one_that_filters_them", each_blocker_is_found_by_trying),
    ("what_is_no_runner_is_told_so", what_is_no_runner_is_told_so),
];

fn spec() -> Spec {
    Spec {
        entry: ENTRY,
        profile: Profile::Compute,
        limits: Limits { data_bytes: 64 << 20, file_bytes: 0, threads: 1 },
        binds: Vec::new(),
        inherit: Vec::new(),
        give: Vec::new(),
    }
}

fn the_probe_agrees_with_the_jail() {
    assert_eq!(userns_probe(ENTRY), Ok(()));
}

fn a_dropped_jail_leaves_no_process() {
    let jailed = Jail::spawn(spec()).unwrap();
    let pid = jailed.child.pid();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    let worker: u32 = children.trim().parse().unwrap();
    drop(jailed);
    for pid in [pid, worker] {
        let gone = (0..200).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.is_empty() || stat.contains(") Z ")
        });
        assert!(gone, "{pid} still runs");
    }
}

fn two_jails_never_share_a_host_uid() {
    let jails: Vec<_> = (0..4).map(|_| Jail::spawn(spec()).unwrap()).collect();
    let uids: std::collections::BTreeSet<u32> = jails.iter().map(|j| j.uid).collect();
    assert!(!uids.contains(&0));
    if rustix::process::geteuid().is_root() {
        assert_eq!(uids.len(), jails.len());
    }
}

/// A parent-death signal is tied to the thread that forked; that thread must not be the caller's.
fn a_jail_outlives_the_thread_that_asked_for_it() {
    let mut jailed = std::thread::spawn(|| Jail::spawn(spec()).unwrap()).join().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert!(jailed.child.try_wait().unwrap().is_none());
}

fn what_is_no_runner_is_told_so() {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.arg(ENTRY).stdin(std::process::Stdio::null());
    let ran = command.output().unwrap();
    assert_eq!(ran.status.code(), Some(2));
}

/// First argument of a copy of this program that only probes, as it is or under a filter like that of a container.
pub const PROBE: &str = "--probe";
const FILTERED: &str = "--probe-filtered";

pub fn probe(mode: &str) -> std::process::ExitCode {
    if mode == FILTERED {
        use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};
        let denied = SeccompAction::Errno(libc::EPERM.unsigned_abs());
        let rules = [(libc::SYS_unshare, Vec::new())].into_iter().collect();
        let arch = std::env::consts::ARCH.try_into().unwrap();
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, denied, arch).unwrap();
        apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
    }
    match userns_probe(ENTRY) {
        Ok(()) => println!("a jail works here"),
        Err(blocker) => println!("{blocker} -> {}", blocker.help),
    }
    std::process::ExitCode::SUCCESS
}

fn each_blocker_is_found_by_trying() {
    let program = std::env::current_exe().unwrap();
    let said = |command: &mut std::process::Command| String::from_utf8(command.output().unwrap().stdout).unwrap();
    assert_eq!(said(std::process::Command::new(&program).arg(PROBE)), "a jail works here\n");
    let filtered = said(std::process::Command::new(&program).arg(FILTERED));
    assert!(filtered.contains("seccomp filter") && filtered.contains("--security-opt seccomp="), "{filtered}");
    if rustix::process::geteuid().is_root() {
        // Root alone in a namespace of its own could give the jail no other id than root.
        let lone = said(std::process::Command::new("unshare").args(["-U", "-r"]).arg(&program).arg(PROBE));
        assert!(lone.contains("knows no other user"), "{lone}");
        return;
    }
    let script = format!("echo 0 > /proc/sys/user/max_user_namespaces && exec {} {PROBE}", program.display());
    let off = said(std::process::Command::new("unshare").args(["-U", "-c", "--keep-caps", "sh", "-c", &script]));
    assert!(off.contains("user.max_user_namespaces is 0") && off.contains("sysctl -w"), "{off}");
    let nested = said(std::process::Command::new("unshare").args(["-U", "-c"]).arg(&program).arg(PROBE));
    assert_eq!(nested, "a jail works here\n");
}
