//! The judge: pure, and the only maker of an [`Admission`].

use std::collections::{BTreeMap, BTreeSet};

use super::control::{ControlId, Status};
use super::fact::{EngineKind, Fact, Identity, Namespace, Observation, Origin};
use super::tier::Tier;

/// What the observations add up to.
#[derive(Debug, Clone, PartialEq)]
pub struct Judgement {
    /// The strongest tier that host-side facts prove.
    pub tier: Tier,
    /// A grade for every control, also for those nobody saw.
    pub grades: BTreeMap<ControlId, Status>,
}

/// Leave to dispatch. Only [`judge`] makes one; a backend's dispatch takes it by value, so one admission starts one run.
#[derive(Debug)]
pub struct Admission {
    judgement: Judgement,
}

impl Admission {
    /// What was judged.
    #[must_use]
    pub const fn judgement(&self) -> &Judgement {
        &self.judgement
    }
}

/// Why nothing may run.
#[derive(Debug, Clone, PartialEq)]
pub struct Refusal {
    /// What was judged.
    pub judgement: Judgement,
    /// The floor that is not proven, if it is not.
    pub floor: Option<Tier>,
    /// Required controls that are not satisfied, with their grades.
    pub unmet: Vec<(ControlId, Status)>,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(floor) = self.floor {
            write!(f, "the floor is `{floor}`, but only `{}` is proven", self.judgement.tier)?;
        }
        if !self.unmet.is_empty() {
            let unmet = self.unmet.iter().map(|(c, s)| format!("{c} is {s}")).collect::<Vec<_>>().join(", ");
            let join = if self.floor.is_some() { "; " } else { "" };
            write!(f, "{join}required but not satisfied: {unmet}")?;
        }
        Ok(())
    }
}

/// Controls that every run requires, whatever its step says. The facts of the floor's own row come on top.
pub const ALWAYS_REQUIRED: [ControlId; 4] =
    [ControlId::Network, ControlId::Secrets, ControlId::TimeLimit, ControlId::OutputLimit];

/// The controls that stand for a tier's row of facts, for display and for the report's `required` marks.
#[must_use]
pub fn row(tier: Tier) -> &'static [ControlId] {
    use ControlId::{
        BinaryIdentity, Capabilities, Challenge, Filesystem, GuestKernel, Hypervisor, Namespaces, NoNewPrivs, NonRoot,
        RootIsolated, Seccomp,
    };
    match tier {
        Tier::Process => &[],
        Tier::Container => {
            &[Seccomp, Namespaces, NoNewPrivs, Capabilities, NonRoot, RootIsolated, Filesystem, Challenge]
        }
        Tier::Kernel => &[
            GuestKernel,
            Seccomp,
            Namespaces,
            NoNewPrivs,
            Capabilities,
            NonRoot,
            RootIsolated,
            Filesystem,
            Challenge,
            BinaryIdentity,
        ],
        Tier::Vm => &[Hypervisor, Seccomp, NoNewPrivs, Capabilities, NonRoot, Challenge, BinaryIdentity],
    }
}

/// Admits a boundary whose observations prove `floor` and satisfy `required`, or says what is missing.
///
/// `Enforced` satisfies a required control. `Partial` satisfies only `binary-identity` and `filesystem`; `Unknown`
/// satisfies nothing. (A tier's row may still allow a shared namespace: that is part of deriving the tier.)
///
/// # Errors
/// A [`Refusal`] that names the floor and every unmet control.
pub fn judge(
    floor: Tier,
    required: &BTreeSet<ControlId>,
    observations: &[Observation],
) -> Result<Admission, Box<Refusal>> {
    let judgement = weigh(observations);
    let floor_missed = (judgement.tier < floor).then_some(floor);
    let unmet: Vec<_> = required
        .iter()
        .chain(ALWAYS_REQUIRED.iter())
        .collect::<BTreeSet<_>>()
        .into_iter()
        .map(|&control| (control, judgement.grades[&control]))
        .filter(|&(control, status)| !satisfies(control, status))
        .collect();
    if floor_missed.is_none() && unmet.is_empty() {
        Ok(Admission { judgement })
    } else {
        Err(Box::new(Refusal { judgement, floor: floor_missed, unmet }))
    }
}

/// Whether a grade satisfies a requirement.
#[must_use]
pub const fn satisfies(control: ControlId, status: Status) -> bool {
    match status {
        Status::Enforced => true,
        Status::Partial => matches!(control, ControlId::BinaryIdentity | ControlId::Filesystem),
        Status::NotEnforced | Status::Unknown => false,
    }
}

/// Grades every control and derives the tier; decides nothing.
#[must_use]
pub fn weigh(observations: &[Observation]) -> Judgement {
    let mut grades: BTreeMap<ControlId, Status> = ControlId::ALL.iter().map(|&c| (c, grade(c, observations))).collect();
    // What an engine is follows from more than one fact, so these two are graded from the whole. A machine boots a kernel
    // of its own.
    let vmm = engine_grade(EngineKind::Firecracker, &grades, observations);
    if vmm < Status::Partial && grades[&ControlId::Hypervisor] > Status::NotEnforced {
        grades.insert(ControlId::Hypervisor, Status::NotEnforced);
    }
    let machine = if grades[&ControlId::Hypervisor] == Status::Enforced { vmm } else { Status::NotEnforced };
    let sentry = engine_grade(EngineKind::Runsc, &grades, observations);
    let said = grades[&ControlId::GuestKernel];
    let kernel = if said == Status::NotEnforced { said } else { machine.max(sentry) };
    grades.insert(ControlId::GuestKernel, kernel);
    let tier = tier(&grades, observations);
    Judgement { tier, grades }
}

/// The weakest of what the host saw; lowered further by what the guest said.
fn grade(control: ControlId, observations: &[Observation]) -> Status {
    let of = |origin: Origin| {
        observations
            .iter()
            .filter(move |o| o.origin == origin && o.fact.control() == control)
            .filter_map(|o| o.fact.grade())
            .min_by_key(|s| severity(*s))
    };
    let host = of(Origin::Host).unwrap_or(Status::Unknown);
    match of(Origin::Guest) {
        Some(guest) if severity(guest) < severity(host) => guest,
        _ => host,
    }
}

/// Order in which several facts about one control are combined: seen not to be in force outweighs not seen.
const fn severity(status: Status) -> u8 {
    match status {
        Status::NotEnforced => 0,
        Status::Unknown => 1,
        Status::Partial => 2,
        Status::Enforced => 3,
    }
}

fn engine_grade(kind: EngineKind, grades: &BTreeMap<ControlId, Status>, observations: &[Observation]) -> Status {
    let seen = observations.iter().filter(|o| o.origin == Origin::Host).any(
        |o| matches!(&o.fact, Fact::Executable { engine, identity, .. } if *engine == kind && !matches!(identity, Identity::Unidentified { .. })),
    );
    if !seen || !satisfies(ControlId::BinaryIdentity, grades[&ControlId::BinaryIdentity]) {
        return Status::NotEnforced;
    }
    if grades[&ControlId::Challenge] == Status::Enforced { Status::Enforced } else { Status::NotEnforced }
}

/// Whether something that the tier's row wants of namespaces is missing.
fn row_asks_namespaces(tier: Tier, observations: &[Observation]) -> bool {
    let needed: &[Namespace] = match tier {
        Tier::Process | Tier::Vm => &[],
        Tier::Container => &Namespace::ALL,
        Tier::Kernel => &[Namespace::User, Namespace::Mnt, Namespace::Net, Namespace::Ipc, Namespace::Uts],
    };
    let mut seen = observations.iter().filter(|o| o.origin == Origin::Host).filter_map(|o| match &o.fact {
        Fact::Namespaces { own, shared } => Some((own, shared)),
        _ => None,
    });
    let all_own = |(own, shared): (&BTreeSet<Namespace>, &BTreeSet<Namespace>)| {
        needed.iter().all(|n| own.contains(n) && !shared.contains(n))
    };
    match seen.next() {
        None => !needed.is_empty(),
        Some(first) => !(all_own(first) && seen.all(all_own)),
    }
}

fn tier(grades: &BTreeMap<ControlId, Status>, observations: &[Observation]) -> Tier {
    let holds = |tier: Tier| {
        row(tier).iter().all(|&control| match control {
            ControlId::Namespaces => !row_asks_namespaces(tier, observations),
            control => satisfies(control, grades[&control]),
        })
    };
    // A stranger's executable may imitate every other fact.
    let stranger = |o: &Observation| {
        matches!(&o.fact, Fact::Executable { identity: Identity::Unidentified { .. }, .. }) && o.origin == Origin::Host
    };
    if observations.iter().any(stranger) {
        return Tier::Process;
    }
    Tier::ALL.into_iter().rev().find(|&tier| holds(tier)).unwrap_or(Tier::Process)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identified(engine: EngineKind, identity: Identity) -> Fact {
        Fact::Executable { engine, path: "/usr/bin/engine".into(), sha256: "ab".repeat(32), identity }
    }

    fn release() -> Identity {
        Identity::Release { version: "1".into() }
    }

    /// Facts of a boundary in perfect order, but for the engine.
    fn confined() -> Vec<Fact> {
        vec![
            Fact::Namespaces { own: Namespace::ALL.into(), shared: BTreeSet::new() },
            Fact::Seccomp { threads: 3, filtered: 3 },
            Fact::NoNewPrivs { threads: 3, set: 3 },
            Fact::Capabilities { mask: "0000000000000000".into(), own_user_namespace: true },
            Fact::HostIds { uids: vec![7; 4], gids: vec![7; 4], groups: vec![] },
            Fact::Root { root: "9:2".into(), host_root: "8:2".into(), mounts: 2, foreign: vec![] },
            Fact::Descriptors { total: 4, planned: vec![], unplanned: vec![] },
            Fact::Interfaces { names: vec!["lo".into()], own_namespace: true },
            Fact::Environment { names: vec![], leaked: vec![] },
            Fact::Challenge { answered: true, micros: 9, pid: 2, start_time: 1, stubs: 0, strangers: vec![] },
            Fact::Limit { control: ControlId::TimeLimit, wanted: 5, read: Some(5), place: "timer".into() },
            Fact::Limit { control: ControlId::OutputLimit, wanted: 5, read: Some(5), place: "writer".into() },
        ]
    }

    fn with(extra: impl IntoIterator<Item = Fact>) -> Vec<Observation> {
        confined().into_iter().chain(extra).map(Observation::host).collect()
    }

    /// The same, with the one fact of that kind replaced.
    fn but(changed: Fact, extra: impl IntoIterator<Item = Fact>) -> Vec<Observation> {
        let same = |o: &Observation| std::mem::discriminant(&o.fact) == std::mem::discriminant(&changed);
        let mut all: Vec<_> = with(extra).into_iter().filter(|o| !same(o)).collect();
        all.push(Observation::host(changed));
        all
    }

    fn runsc() -> Fact {
        identified(EngineKind::Runsc, release())
    }

    fn vmm() -> [Fact; 2] {
        [identified(EngineKind::Firecracker, release()), Fact::Kvm { vms: 1, vcpus: 1, guest_time: 4 }]
    }

    #[test]
    fn each_tier_is_proven_by_its_own_row() {
        assert_eq!(weigh(&[]).tier, Tier::Process);
        assert_eq!(weigh(&with([])).tier, Tier::Container);
        assert_eq!(weigh(&with([runsc()])).tier, Tier::Kernel);
        assert_eq!(weigh(&with(vmm())).tier, Tier::Vm);
    }

    /// One broken fact at a time; what is left is proven by the facts, whatever the engine is called.
    #[test]
    fn one_missing_fact_lowers_the_tier() {
        let shared = |kind| Fact::Namespaces {
            own: Namespace::ALL.into_iter().filter(|&n| n != kind).collect(),
            shared: BTreeSet::from([kind]),
        };
        let fd = |planned: &[&str], unplanned: &[&str]| Fact::Descriptors {
            total: 5,
            planned: planned.iter().map(|&s| s.into()).collect(),
            unplanned: unplanned.iter().map(|&s| s.into()).collect(),
        };
        let ids = |uids: Vec<u32>, groups| Fact::HostIds { uids, gids: vec![7; 4], groups };
        let challenge =
            |answered, strangers| Fact::Challenge { answered, micros: 1, pid: 2, start_time: 1, stubs: 3, strangers };
        use Tier::{Container, Kernel, Process, Vm};
        let table: Vec<(&str, Fact, [Tier; 3])> = vec![
            // fact, and the tier for: worker, runsc, VMM
            ("shared pid", shared(Namespace::Pid), [Process, Kernel, Vm]),
            ("shared user", shared(Namespace::User), [Process, Process, Vm]),
            ("shared net", shared(Namespace::Net), [Process, Process, Vm]),
            ("a thread without filter", Fact::Seccomp { threads: 3, filtered: 2 }, [Process; 3]),
            ("no thread seen", Fact::Seccomp { threads: 0, filtered: 0 }, [Process; 3]),
            ("a thread without NoNewPrivs", Fact::NoNewPrivs { threads: 3, set: 2 }, [Process; 3]),
            (
                "a capability in the host's user namespace",
                Fact::Capabilities { mask: "0000000000000001".into(), own_user_namespace: false },
                [Process; 3],
            ),
            (
                "a capability in its own user namespace",
                Fact::Capabilities { mask: "0000000000000001".into(), own_user_namespace: true },
                [Container, Kernel, Vm],
            ),
            ("host uid 0", ids(vec![0; 4], vec![]), [Process; 3]),
            ("saved uid 0", ids(vec![7, 7, 0, 7], vec![]), [Process; 3]),
            ("no ids seen", ids(vec![], vec![]), [Process; 3]),
            (
                "the host's root",
                Fact::Root { root: "8:2".into(), host_root: "8:2".into(), mounts: 2, foreign: vec![] },
                [Process, Process, Vm],
            ),
            (
                "a foreign mount",
                Fact::Root { root: "9:2".into(), host_root: "8:2".into(), mounts: 2, foreign: vec!["/h".into()] },
                [Process, Process, Vm],
            ),
            ("a descriptor in a planned mount", fd(&["/usr"], &[]), [Container, Kernel, Vm]),
            ("an unplanned descriptor", fd(&["/usr"], &["/etc"]), [Process, Process, Vm]),
            ("no answer", challenge(false, vec![]), [Process; 3]),
            ("a stranger on the channel", challenge(true, vec!["9 (?)".into()]), [Process; 3]),
        ];
        for (what, fact, [worker, kernel, vm]) in table {
            assert_eq!(weigh(&but(fact.clone(), [])).tier, worker, "worker: {what}");
            assert_eq!(weigh(&but(fact.clone(), [runsc()])).tier, kernel, "runsc: {what}");
            assert_eq!(weigh(&but(fact, vmm())).tier, vm, "VMM: {what}");
        }
    }

    #[test]
    fn a_guest_kernel_is_a_sentrys_or_a_machines() {
        let kernel = |observations: &[Observation]| weigh(observations).grades[&ControlId::GuestKernel];
        assert_eq!(kernel(&with([])), Status::NotEnforced);
        assert_eq!(kernel(&with([runsc()])), Status::Enforced);
        assert_eq!(kernel(&with(vmm())), Status::Enforced);
        let idle = Fact::Kvm { vms: 1, vcpus: 1, guest_time: 0 };
        assert_eq!(kernel(&but(idle, vmm())), Status::NotEnforced);
        let mut denied = with([runsc()]);
        denied.push(Observation::guest(Fact::Denied { control: ControlId::GuestKernel, what: "boot id".into() }));
        assert_eq!(kernel(&denied), Status::NotEnforced);
    }

    #[test]
    fn a_version_that_the_operator_refuses_proves_nothing() {
        let known = |refused| Fact::Advisory {
            engine: EngineKind::Firecracker,
            version: "1.12.1".into(),
            id: "CVE-1".into(),
            what: "x".into(),
            applies: true,
            refused,
        };
        assert_eq!(weigh(&with(vmm().into_iter().chain([known(false)]))).tier, Tier::Vm);
        let refusal = judge(Tier::Vm, &BTreeSet::new(), &with(vmm().into_iter().chain([known(true)]))).unwrap_err();
        assert!(refusal.judgement.tier < Tier::Kernel);
    }

    #[test]
    fn an_engine_that_is_not_identified_proves_no_more_than_a_process() {
        for engine in [EngineKind::Worker, EngineKind::Runsc, EngineKind::Firecracker] {
            let unknown = identified(engine, Identity::Unidentified { reason: "writable by others".into() });
            let kvm = Fact::Kvm { vms: 1, vcpus: 1, guest_time: 4 };
            assert_eq!(weigh(&with([unknown, kvm])).tier, Tier::Process, "{engine:?}");
        }
    }

    #[test]
    fn only_the_right_engine_counts_for_a_tier() {
        let kvm = Fact::Kvm { vms: 1, vcpus: 1, guest_time: 4 };
        assert_eq!(weigh(&with([runsc(), kvm.clone()])).tier, Tier::Kernel);
        assert_eq!(weigh(&with([identified(EngineKind::Worker, release()), kvm])).tier, Tier::Container);
        assert_eq!(weigh(&with([identified(EngineKind::Firecracker, release())])).tier, Tier::Container);
        let idle = Fact::Kvm { vms: 1, vcpus: 1, guest_time: 0 };
        assert_eq!(weigh(&with([identified(EngineKind::Firecracker, release()), idle])).tier, Tier::Container);
    }

    #[test]
    fn a_root_owned_engine_is_partial_and_enough() {
        let seen = with([identified(EngineKind::Runsc, Identity::RootOwned)]);
        let judgement = weigh(&seen);
        assert_eq!(judgement.tier, Tier::Kernel);
        assert_eq!(judgement.grades[&ControlId::BinaryIdentity], Status::Partial);
        assert!(judge(Tier::Kernel, &BTreeSet::from([ControlId::BinaryIdentity]), &seen).is_ok());
    }

    #[test]
    fn the_guest_can_lower_a_grade_and_never_raise_one() {
        let mut seen = with([]);
        seen.push(Observation::guest(Fact::Denied { control: ControlId::Seccomp, what: "none".into() }));
        assert_eq!(weigh(&seen).tier, Tier::Process);

        let boast = confined().into_iter().map(Observation::guest).collect::<Vec<_>>();
        let judgement = weigh(&boast);
        assert_eq!(judgement.tier, Tier::Process);
        assert!(judgement.grades.values().all(|&s| s <= Status::NotEnforced), "{:?}", judgement.grades);
    }

    #[test]
    fn the_worst_of_several_facts_decides_and_not_seen_is_not_enough() {
        let mut seen = with([]);
        seen.push(Observation::host(Fact::Unreadable { control: ControlId::Network, what: "net/dev".into() }));
        let refusal = judge(Tier::Container, &BTreeSet::new(), &seen).unwrap_err();
        assert_eq!(refusal.unmet, [(ControlId::Network, Status::Unknown)]);
        assert_eq!(refusal.floor, None);
    }

    #[test]
    fn what_is_only_configured_proves_nothing() {
        let landlock = Fact::Configured { control: ControlId::MemoryLimit, what: "asked for".into() };
        let refusal = judge(Tier::Container, &BTreeSet::from([ControlId::MemoryLimit]), &with([landlock])).unwrap_err();
        assert_eq!(refusal.unmet, [(ControlId::MemoryLimit, Status::Unknown)]);
    }

    #[test]
    fn a_limit_counts_only_as_read_back() {
        let limit = |read| Fact::Limit { control: ControlId::MemoryLimit, wanted: 10, read, place: "cgroup".into() };
        let required = BTreeSet::from([ControlId::MemoryLimit]);
        assert!(judge(Tier::Container, &required, &with([limit(Some(10))])).is_ok());
        assert!(judge(Tier::Container, &required, &with([limit(Some(11))])).is_err());
        assert!(judge(Tier::Container, &required, &with([limit(None)])).is_err());
    }

    #[test]
    fn what_is_always_required_needs_no_asking() {
        let leak = Fact::Environment { names: vec!["TOKEN".into()], leaked: vec!["TOKEN".into()] };
        let refusal = judge(Tier::Process, &BTreeSet::new(), &but(leak, [])).unwrap_err();
        assert_eq!(refusal.unmet, [(ControlId::Secrets, Status::NotEnforced)]);
        let eth = Fact::Interfaces { names: vec!["eth0".into(), "lo".into()], own_namespace: true };
        assert!(judge(Tier::Process, &BTreeSet::new(), &but(eth, [])).is_err());
    }

    #[test]
    fn a_refusal_names_the_floor_and_every_unmet_control() {
        let required = BTreeSet::from([ControlId::MemoryLimit, ControlId::CpuLimit]);
        let refusal = judge(Tier::Vm, &required, &with([runsc()])).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "the floor is `vm`, but only `kernel` is proven; required but not satisfied: memory-limit is unknown, \
             cpu-limit is unknown"
        );
    }

    #[test]
    fn a_floor_is_met_by_a_stronger_tier() {
        assert!(judge(Tier::Container, &BTreeSet::new(), &with(vmm())).is_ok());
    }

    #[test]
    fn facts_survive_json_so_that_a_report_can_be_judged_again() {
        for observation in with(vmm()) {
            let json = serde_json::to_string(&observation.fact).unwrap();
            assert_eq!(serde_json::from_str::<Fact>(&json).unwrap(), observation.fact);
        }
    }
}
