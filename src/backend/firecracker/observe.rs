//! Looking at a microVM from the host.
//!
//! The VMM is the process that listens on the vsock device's socket, which our channel is a connection to; that it is
//! ours is shown by its being a descendant of our launcher. That a guest runs in it is shown by KVM: by the
//! descriptors of a VM and its vCPUs, by time spent in the guest, and by the nonce that came back.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use crate::backend::cgroup::Group;
use crate::backend::executable::Executable;
use crate::backend::family::Family;
use crate::evidence::fact::{EngineKind, Identity};
use crate::evidence::identity::identify;
use crate::evidence::observe::{Boundary, Expectation, Snapshot};
use crate::evidence::proc::ProcDir;
use crate::evidence::{ControlId, Fact, Observation, advisory, host};

use super::config::{IMAGES, MIB, Machine};

/// An anonymous mapping of the VMM's that is at least this long is the guest's memory: its own are stacks and small heaps.
const GUEST_MAPPING: u64 = 32 * MIB;

/// What the first observation saw, for the second.
#[derive(Debug)]
pub struct First {
    /// The VMM.
    pub snapshot: Snapshot,
    /// Limits read back.
    pub limits: Vec<Fact>,
    /// KVM's descriptors: VMs and vCPUs.
    pub kvm: (u32, u32),
}

/// What an observation needs to know of the plan.
#[derive(Debug)]
pub struct Known<'a> {
    /// Who listens on the socket that our channel is connected to.
    pub pid: u32,
    /// The VMM's executable, as it was opened, and its digest.
    pub vmm: (&'a Executable, &'a str),
    /// The jailer's, if it was used.
    pub jailer: Option<(&'a Executable, &'a str)>,
    /// Version of the VMM: a label.
    pub version: &'a str,
    /// Digests that the operator trusts.
    pub trusted: &'a BTreeSet<String>,
    /// The operator refuses vulnerable versions.
    pub refuse_vulnerable: bool,
    /// The control group.
    pub group: &'a Group,
    /// The machine as it was planned, and as the VMM said it had built it.
    pub machine: &'a Machine,
    /// Limits of the step: memory and disk, bytes.
    pub memory_bytes: u64,
    /// Bytes that the program may write.
    pub disk_bytes: u64,
}

/// The VMM, if it came from our launcher.
///
/// # Errors
/// If it ended, or somebody else answers on its socket.
pub fn find(known: &Known<'_>, family: &Family) -> io::Result<Boundary> {
    let boundary = Boundary::of(known.pid)?;
    if !family.holds(boundary.snapshot.pid, boundary.snapshot.start_time) {
        return Err(io::Error::other(format!(
            "pid {} listens on the VMM's socket, but the launcher did not start it",
            boundary.snapshot.pid
        )));
    }
    Ok(boundary)
}

/// Everything about the boundary before dispatch.
///
/// # Errors
/// If the VMM ended meanwhile.
pub fn before(known: &Known<'_>, boundary: &Boundary, answered: Option<Duration>) -> io::Result<Vec<Observation>> {
    let expected = Expectation {
        planned_mounts: vec![IMAGES.to_owned(), "/dev/kvm".to_owned(), "/dev/null".to_owned()],
        devices: ["/dev/kvm", "anon_inode:kvm-vm", "anon_inode:kvm-vcpu:"].map(str::to_owned).to_vec(),
        ..Expectation::default()
    };
    let mut seen = boundary.snapshot.observations(&expected);
    seen.push(boundary.challenge(answered));
    let (vms, vcpus) = kvm(&boundary.process)?;
    let mut facts = vec![Fact::Kvm { vms, vcpus, guest_time: boundary.process.guest_ticks()? }];
    facts.push(executable(known, &boundary.snapshot));
    facts.extend(known.jailer.map(|(jailer, sha256)| Fact::Executable {
        engine: EngineKind::Jailer,
        path: jailer.path().display().to_string(),
        sha256: sha256.to_owned(),
        identity: identify(EngineKind::Jailer, jailer.path(), sha256, known.trusted),
    }));
    facts.extend(advisory::known(EngineKind::Firecracker, known.version, known.refuse_vulnerable));
    facts.extend(limits(known, boundary));
    facts.extend(configured(known));
    facts.extend(
        host::posture().into_iter().map(|found| Fact::Remark { control: ControlId::Hypervisor, what: found.fact }),
    );
    seen.extend(facts.into_iter().map(Observation::host));
    Ok(seen)
}

/// What was set up and read back from the VMM itself, or is for the inside to enforce.
fn configured(known: &Known<'_>) -> Vec<Fact> {
    let machine = known.machine;
    let what = format!(
        "the VMM's configuration, read back from it, is the planned one: {} vCPU, {} MiB, read-only drives {}, one vsock \
         device, no network device",
        machine.vcpus,
        machine.memory_mib,
        machine.drives.join(", ")
    );
    vec![
        Fact::Remark { control: ControlId::Hypervisor, what },
        Fact::Remark {
            control: ControlId::GuestKernel,
            what: "graded from hypervisor: the microVM boots a kernel of its own".to_owned(),
        },
        Fact::Entropy {
            source: "a fresh boot, never a restored one; 32 bytes of the host's randomness go with the dispatch"
                .to_owned(),
            fresh: true,
        },
        Fact::Configured {
            control: ControlId::PidsLimit,
            what: "a control group in the guest; a guest's process is no task of the host's".to_owned(),
        },
        Fact::Configured {
            control: ControlId::DiskLimit,
            what: format!(
                "a tmpfs of {} bytes, and at most three quarters of the machine's memory, takes all that is written",
                known.disk_bytes
            ),
        },
    ]
}

/// Limits as they are now. What bounds the guest's memory is the machine's size; every drive is read-only, so memory
/// bounds what the guest writes as well.
#[must_use]
pub fn limits(known: &Known<'_>, boundary: &Boundary) -> Vec<Fact> {
    let size = known.machine.memory_mib * MIB;
    let place = "mem_size_mib, read back from the VMM";
    let mut facts = vec![Fact::Limit {
        control: ControlId::MemoryLimit,
        wanted: known.memory_bytes,
        read: Some(size),
        place: place.to_owned(),
    }];
    if size <= known.disk_bytes {
        facts.push(Fact::Limit {
            control: ControlId::DiskLimit,
            wanted: known.disk_bytes,
            read: Some(size),
            place: format!("{place}: nothing outside the guest's memory can be written"),
        });
    }
    for fact in known.group.facts(&boundary.process) {
        facts.push(match fact {
            // The group bounds the VMM around the guest, which the machine's size bounds already.
            fact @ (Fact::Limit { control: ControlId::MemoryLimit, .. }
            | Fact::Unlimited { control: ControlId::MemoryLimit, .. }) => {
                Fact::Remark { control: ControlId::MemoryLimit, what: format!("the VMM as a whole: {}", fact.words()) }
            }
            fact => fact,
        });
    }
    facts
}

/// What differs from the first observation.
///
/// # Errors
/// If the VMM ended meanwhile.
pub fn changes(first: &First, known: &Known<'_>, boundary: &Boundary) -> io::Result<Vec<Observation>> {
    let mut changes = first.snapshot.changes(&boundary.snapshot);
    let mut differs = |control: ControlId, what: &str, before: String, after: String| {
        if before != after {
            let what = what.to_owned();
            changes.push(Observation::host(Fact::Changed { control, what, before, after }));
        }
    };
    for (before, after) in first.limits.iter().zip(limits(known, boundary)) {
        differs(before.control(), "limit", before.words(), after.words());
    }
    let words = |(vms, vcpus): (u32, u32)| format!("{vms} KVM VM and {vcpus} vCPU descriptors");
    differs(ControlId::Hypervisor, "virtual machines", words(first.kvm), words(kvm(&boundary.process)?));
    Ok(changes)
}

/// Descriptors of KVM that a process holds: VMs and vCPUs.
///
/// # Errors
/// If its descriptors cannot be read.
pub fn kvm(process: &ProcDir) -> io::Result<(u32, u32)> {
    let descriptors = process.descriptors()?;
    let count = |is: &dyn Fn(&str) -> bool| {
        u32::try_from(descriptors.iter().filter(|d| is(&d.link)).count()).unwrap_or(u32::MAX)
    };
    Ok((count(&|link| link == "anon_inode:kvm-vm"), count(&|link| link.starts_with("anon_inode:kvm-vcpu:"))))
}

fn executable(known: &Known<'_>, vmm: &Snapshot) -> Fact {
    let (opened, digest) = known.vmm;
    match &vmm.exe_sha256 {
        Ok(sha256) => Fact::Executable {
            engine: EngineKind::Firecracker,
            path: opened.path().display().to_string(),
            sha256: sha256.clone(),
            identity: if sha256 == digest {
                identify(EngineKind::Firecracker, opened.path(), sha256, known.trusted)
            } else {
                Identity::Unidentified { reason: "the running executable is not the one that was opened".to_owned() }
            },
        },
        Err(e) => Fact::Unreadable { control: ControlId::BinaryIdentity, what: format!("exe: {e}") },
    }
}

/// Resident memory of the VMM that is not the guest's, bytes; `None` if the host does not show it.
#[must_use]
pub fn own_memory(process: &ProcDir) -> Option<u64> {
    own_memory_of(&process.text("smaps").ok()?)
}

fn own_memory_of(smaps: &str) -> Option<u64> {
    let (mut guests, mut total, mut seen) = (false, 0, false);
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let first = words.next()?;
        if let Some((from, to)) = first.split_once('-')
            && let (Ok(from), Ok(to)) = (u64::from_str_radix(from, 16), u64::from_str_radix(to, 16))
        {
            // Permissions, offset, device, inode, and a name if it has one.
            let name = words.nth(4).unwrap_or_default();
            let anonymous = name.is_empty() || name.starts_with("/memfd:") || name.starts_with("[anon");
            guests = anonymous && to.saturating_sub(from) >= GUEST_MAPPING;
        } else if first == "Rss:" && !guests {
            total += words.next()?.parse::<u64>().ok()? * 1024;
            seen = true;
        }
    }
    seen.then_some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guests_memory_is_not_the_vmms_own() {
        let smaps = "\
7f0000000000-7f0020000000 rw-p 00000000 00:00 0\nSize: 524288 kB\nRss: 90000 kB\n\
7f0020000000-7f0020100000 r-xp 00000000 00:21 7    /firecracker\nSize: 1024 kB\nRss: 1000 kB\n\
7f0030000000-7f0030020000 rw-p 00000000 00:00 0\nRss: 24 kB\n\
7f0040000000-7f0050000000 rw-s 00000000 00:01 9    /memfd:guest_mem (deleted)\nRss: 777 kB\n";
        assert_eq!(own_memory_of(smaps), Some(1024 * 1024));
        assert_eq!(own_memory_of(""), None);
        assert_eq!(own_memory_of("7f-80 rw-p\nRss: many kB\n"), None);
    }

    #[test]
    fn this_process_holds_no_virtual_machine() {
        let own = ProcDir::own().unwrap();
        assert_eq!(kvm(&own).unwrap(), (0, 0));
        assert!(own_memory(&own).unwrap() > 0);
    }
}
