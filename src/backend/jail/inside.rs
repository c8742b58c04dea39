//! The child's side: it jails itself, step by step, and reports each failure by the step's name.
//!
//! The order matters. The parent-death signal comes again after `setresuid`, which clears it; mounts come before the
//! capabilities that they need are dropped; seccomp comes last, since every step before it needs system calls that the
//! filter forbids.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus, Scope,
};
use plimsoll_guest::wire::{read_message, write_message};
use rustix::fs::{FileType, Mode, fstat};
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, Gid, Signal, Uid, getppid, set_dumpable_behavior, umask};
use rustix::process::{WaitOptions, set_parent_process_death_signal, waitpid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, UnshareFlags, clear_ambient_capability_set, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};

use super::{
    Access, FIRST_INHERITED, FromJail, INSIDE_ID, Limits, MAX_HANDSHAKE, Mapped, Profile, Setup, profile, root,
};
use crate::backend::sys::{self, Forked};

/// A host directory or file as the jail sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Visible {
    /// Absolute path.
    pub path: String,
    /// It can be written.
    pub writable: bool,
    /// It is a directory.
    pub directory: bool,
}

/// Handed to an entry point: it is jailed now, and what it may use.
///
/// The channel is descriptors 0 (from the runner) and 1 (to it).
#[derive(Debug)]
pub struct Inside {
    /// The profile in force.
    pub profile: Profile,
    /// The limits in force.
    pub limits: Limits,
    /// Host files that are visible.
    pub visible: Vec<Visible>,
    /// What [`super::Spec::inherit`] held, in order.
    pub inherited: Vec<OwnedFd>,
    /// `uname -r`, read before the filter forbade asking.
    pub kernel: String,
}

/// The channel inside: descriptor 0 from the runner, descriptor 1 to it, unbuffered.
#[derive(Debug)]
pub struct Wire;

impl Read for Wire {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(rustix::stdio::stdin(), buffer)?)
    }
}

impl Write for Wire {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(rustix::stdio::stdout(), bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A step that failed.
#[derive(Debug)]
pub(super) struct Failed {
    step: &'static str,
    error: io::Error,
}

/// `map_err` for a step.
fn at<E: Into<io::Error>>(step: &'static str) -> impl FnOnce(E) -> Failed {
    move |error| Failed { step, error: error.into() }
}

fn said(e: plimsoll_guest::FrameError) -> io::Error {
    match e {
        plimsoll_guest::FrameError::Io(e) => e,
        e => io::Error::other(e.to_string()),
    }
}

/// Jails this process as the runner says on descriptor 0. Returns in the jailed child; the process between stays in here
/// until the child has ended. A failure has been reported on descriptor 1.
pub(super) fn enter() -> Result<Inside, Failed> {
    let result = build(&mut Wire);
    if let Err(failed) = &result {
        let errno = failed.error.raw_os_error().unwrap_or(0);
        let message = FromJail::Failed { step: failed.step.to_owned(), errno, why: failed.error.to_string() };
        let _ = write_message(&mut Wire, &message);
    }
    result
}

fn build(wire: &mut Wire) -> Result<Inside, Failed> {
    // The first look at a clock asks for the auxiliary vector, to find the vDSO: by a call that the filter forbids or,
    // before Linux 6.4, in a file that the jail does not have. So it is taken while both are allowed, and kept.
    let _ = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    die_with_parent().map_err(at("set the parent-death signal"))?;
    let setup: Setup = read_message(wire, MAX_HANDSHAKE).map_err(said).map_err(at("read the setup"))?;
    // The runner may have ended before the signal was set; then somebody else is our parent by now.
    if getppid().map(|p| p.as_raw_nonzero().get().unsigned_abs()) != Some(setup.runner) {
        return Err(Failed { step: "find the runner", error: io::Error::from_raw_os_error(libc::ESRCH) });
    }
    sys::close_from(FIRST_INHERITED.saturating_add(setup.inherited)).map_err(at("close unplanned descriptors"))?;
    umask(Mode::empty());

    let clone_binds = || setup.binds.iter().map(root::clone).collect::<io::Result<Vec<_>>>();
    let early = if setup.root { Some(clone_binds().map_err(at("clone the planned mounts"))?) } else { None };
    let namespaces = UnshareFlags::NEWUSER
        | UnshareFlags::NEWNS
        | UnshareFlags::NEWPID
        | UnshareFlags::NEWNET
        | UnshareFlags::NEWIPC
        | UnshareFlags::NEWUTS;
    sys::unshare(namespaces).map_err(at("unshare"))?;
    let cloned = match early {
        Some(cloned) => cloned,
        None => clone_binds().map_err(at("clone the planned mounts"))?,
    };
    write_message(wire, &FromJail::Unshared).map_err(said).map_err(at("talk to the runner"))?;
    let Mapped = read_message(wire, MAX_HANDSHAKE).map_err(said).map_err(at("hear of the id maps"))?;

    take_ids(setup.root).map_err(at("take the jail's ids"))?;
    // Changing ids makes a process undumpable, and then even the runner may not look at it in /proc.
    set_dumpable_behavior(DumpableBehavior::Dumpable).map_err(at("stay dumpable"))?;
    die_with_parent().map_err(at("set the parent-death signal again"))?;
    let (mut between, held) = io::pipe().map_err(at("make a pipe"))?;
    match sys::fork().map_err(at("fork"))? {
        Forked::Parent(worker) => wait_confined(worker),
        Forked::Child => drop(held),
    }
    die_with_parent().map_err(at("set the worker's parent-death signal"))?;
    // Ends when the process between has closed everything: from then on only this one holds the channel.
    between.read(&mut [0]).map_err(at("wait for the process between"))?;
    drop(between);

    let how = root::build(&setup.binds, cloned).map_err(at("build the private root"))?;
    let visible: Vec<Visible> = setup
        .binds
        .iter()
        .map(|b| Visible {
            path: b.target.clone(),
            writable: !matches!(b.access, Access::ReadOnly),
            directory: root::is_directory(&b.target),
        })
        .collect();
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    let inherited = inherited(setup.inherited).map_err(at("take the inherited descriptors"))?;
    let landlock = landlock(&visible, &inherited).map_err(at("apply Landlock"))?;
    profile::limit(setup.profile, &setup.limits).map_err(at("set the resource limits"))?;
    drop_privilege().map_err(at("drop capabilities"))?;
    // Files in the workspace are for a guest with an ordinary mask; an unpacker sets modes itself.
    if setup.profile == Profile::Files {
        umask(Mode::WGRP | Mode::WOTH);
    }
    profile::confine(setup.profile).map_err(at("install the seccomp filter"))?;
    let binds = setup.binds.iter().zip(how).map(|(b, how)| format!("{}: {how}", b.target)).collect();
    write_message(wire, &FromJail::Jailed { landlock, binds }).map_err(said).map_err(at("talk to the runner"))?;
    Ok(Inside { profile: setup.profile, limits: setup.limits, visible, inherited, kernel })
}

/// Takes what the runner handed over, at the numbers where it is expected.
fn inherited(count: u32) -> io::Result<Vec<OwnedFd>> {
    (FIRST_INHERITED..FIRST_INHERITED + count).map(sys::take_descriptor).collect()
}

fn die_with_parent() -> rustix::io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))
}

/// Takes uid and gid in the new user namespace. Groups can be dropped only where the map was written by root: for a
/// plain user's namespace the kernel wants them kept.
fn take_ids(root: bool) -> rustix::io::Result<()> {
    if root {
        set_thread_groups(&[])?;
    }
    let (gid, uid) = (Gid::from_raw(INSIDE_ID), Uid::from_raw(INSIDE_ID));
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)
}

/// The process between the runner and the jailed one: it holds nothing, may do nothing but wait, and ends with it.
fn wait_confined(worker: rustix::process::Pid) -> ! {
    let confined = sys::close_from(0).and_then(|()| Ok(drop_privilege()?)).and_then(|()| profile::confine_waiter());
    if confined.is_err() {
        // The worker dies with us.
        sys::exit_now(3);
    }
    loop {
        match waitpid(Some(worker), WaitOptions::empty()) {
            Ok(Some((_, status))) => {
                let signal = status.terminating_signal().map(|s| 128 + s);
                sys::exit_now(status.exit_status().or(signal).unwrap_or(1));
            }
            Ok(None) | Err(Errno::INTR) => {}
            Err(_) => sys::exit_now(4),
        }
    }
}

/// No capability is left, and none can come back.
pub(in crate::backend) fn drop_privilege() -> rustix::io::Result<()> {
    for number in 0..64 {
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number)) {
            Ok(()) => {}
            // Past the last capability that this kernel knows.
            Err(Errno::INVAL) => break,
            Err(e) => return Err(e),
        }
    }
    clear_ambient_capability_set()?;
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    set_no_new_privs(true)
}

/// Denies everything but the visible files, as far as this kernel's Landlock can; says what came of it.
fn landlock(visible: &[Visible], inherited: &[OwnedFd]) -> io::Result<String> {
    let other = |e: landlock::RulesetError| io::Error::other(e.to_string());
    let abi = ABI::V6;
    let odd: BitFlags<AccessFs> =
        AccessFs::MakeChar | AccessFs::MakeBlock | AccessFs::MakeSock | AccessFs::MakeFifo | AccessFs::Execute;
    let mut ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(abi))
        .and_then(|r| r.handle_access(AccessNet::from_all(abi)))
        .and_then(|r| r.scope(Scope::from_all(abi)))
        .and_then(Ruleset::create)
        .map_err(other)?;
    for seen in visible {
        let mut access = if seen.writable { AccessFs::from_all(abi) } else { AccessFs::from_read(abi) };
        access.remove(odd);
        if !seen.directory {
            access &= AccessFs::from_file(abi);
        }
        let path = PathFd::new(&seen.path).map_err(|e| io::Error::other(e.to_string()))?;
        ruleset = ruleset.add_rule(PathBeneath::new(path, access)).map_err(other)?;
    }
    let mut planned = !visible.is_empty();
    for directory in inherited {
        if FileType::from_raw_mode(fstat(directory)?.st_mode).is_dir() {
            planned = true;
            let access = AccessFs::from_all(abi) & !odd;
            ruleset = ruleset.add_rule(PathBeneath::new(directory, access)).map_err(other)?;
        }
    }
    let status = ruleset.restrict_self().map_err(other)?;
    let scope = if planned { "only the planned files" } else { "no file at all" };
    Ok(match status.ruleset {
        RulesetStatus::FullyEnforced => format!("Landlock admits {scope}"),
        RulesetStatus::PartiallyEnforced => format!("Landlock admits {scope}, as far as this kernel's version goes"),
        RulesetStatus::NotEnforced => "this kernel has no Landlock".to_owned(),
    })
}
