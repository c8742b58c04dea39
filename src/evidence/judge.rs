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
    let tier = tier(&grades, observations);
    // What an engine is follows from more than one fact, so these two are graded from the whole.
    grades.insert(ControlId::GuestKernel, engine_grade(EngineKind::Runsc, &grades, observations));
    if engine_grade(EngineKind::Firecracker, &grades, observations) < Status::Partial
        && grades[&ControlId::Hypervisor] > Status::NotEnforced
    {
        grades.insert(ControlId::Hypervisor, Status::NotEnforced);
    }
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
            ControlId::GuestKernel => engine_grade(EngineKind::Runsc, grades, observations) == Status::Enforced,
            ControlId::Hypervisor => {
                grades[&control] == Status::Enforced
                    && engine_grade(EngineKind::Firecracker, grades, observations) == Status::Enforced
            }
            control => satisfies(control, grades[&control]),
        })
    };
    Tier::ALL.into_iter().rev().find(|&tier| holds(tier)).unwrap_or(Tier::Process)
}
