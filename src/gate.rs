//! The gate: the one order in which a boundary is used.
//!
//! ```text
//! prepare -> observe -> judge -> dispatch -> collect -> observe again -> tear down
//! ```
//!
//! [`pass`] is the only caller of [`crate::backend`]. Nothing of the guest's runs before [`judge`] made an
//! [`Admission`](crate::evidence::Admission); there is no fallback to a weaker boundary. Whatever happens, the boundary
//! is torn down and the [`Passage`] says whether the guest's code was dispatched.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use plimsoll_guest::{Dispatch, GuestResult, LimitHit};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::backend::channel::{Cancel, CancelSignal, Ended, cancelled};
use crate::backend::{Answer, Backend, EngineRecord, Output, Phase, Plan, PrepareError, Sandbox, Standby, Usage};
use crate::evidence::{ControlId, Fact, Judgement, Observation, Refusal, Tier, judge};
use crate::time::millis;

/// How long an agent may take to answer the challenge once its boundary is up.
const CHALLENGE_PATIENCE: Duration = Duration::from_secs(10);
/// How long a boundary may take to come up.
const PREPARE_PATIENCE: Duration = Duration::from_secs(60);
/// How long tearing down may take before it is given up and reported.
const TEARDOWN_PATIENCE: Duration = Duration::from_secs(5);

/// Whether the guest's code was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Dispatched {
    /// Nothing of it ran.
    No,
    /// It was sent.
    Yes,
    /// The runner can't say: it stopped between the two.
    Unknown,
}

/// How the passage through the gate ended.
#[derive(Debug)]
pub enum End {
    /// The boundary could not be prepared.
    NotPrepared(PrepareError),
    /// The boundary came up, but did not answer or could not be observed; nothing ran.
    NotProven(String),
    /// The judge refused; nothing ran.
    Refused(Box<Refusal>),
    /// Cancelled before dispatch.
    CancelledBefore(CancelSignal),
    /// The guest told a result.
    Result(GuestResult),
    /// The deadline passed.
    TimedOut,
    /// Cancelled while running.
    Cancelled(CancelSignal),
    /// The boundary ended by itself, without a result.
    Gone,
    /// The guest broke the protocol.
    Protocol(String),
}

/// How long each part took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Times {
    /// From the start to the admission.
    pub prepare: Duration,
    /// From dispatch to the end of the run.
    pub run: Duration,
    /// All of it, teardown included.
    pub total: Duration,
}

/// Everything that is known about one step's way through the gate.
#[derive(Debug)]
pub struct Passage {
    /// Whether the guest's code was started.
    pub dispatched: Dispatched,
    /// How it ended.
    pub end: End,
    /// What was seen, in order: before dispatch, after the run, at teardown.
    pub observations: Vec<Observation>,
    /// What the observations before dispatch added up to, if they were made.
    pub judgement: Option<Judgement>,
    /// Differences between the two observations; not empty means exit 11.
    pub changed: Vec<Observation>,
    /// The second observation could not be made although the guest's code ran: what the boundary was at the end is
    /// not known.
    pub unobserved: Option<String>,
    /// What the engine is, if it came up.
    pub engine: Option<EngineRecord>,
    /// Times.
    pub times: Times,
    /// What the host measured.
    pub usage: Usage,
    /// A limit that the host saw being hit, other than time.
    pub host_limit: Option<LimitHit>,
}

/// What a step asks of the gate.
pub struct Request<'a> {
    /// Which backend.
    pub backend: Backend,
    /// What its boundary is built to.
    pub plan: &'a Plan,
    /// A launcher that was started ahead, for a backend that uses one.
    pub standby: Option<Standby>,
    /// The weakest tier that will do.
    pub floor: Tier,
    /// Controls that have to be enforced, on top of those always required.
    pub required: &'a BTreeSet<ControlId>,
    /// Called when the code is about to be started.
    pub on_dispatch: &'a (dyn Fn() + Sync),
}

impl Passage {
    fn new(end: End) -> Self {
        Self {
            dispatched: Dispatched::No,
            end,
            observations: Vec::new(),
            judgement: None,
            changed: Vec::new(),
            unobserved: None,
            engine: None,
            times: Times::default(),
            usage: Usage::default(),
            host_limit: None,
        }
    }

    /// A limit that ended the run: the host's own knowledge first, the guest's word where the host has none.
    #[must_use]
    pub fn limit_hit(&self) -> Option<LimitHit> {
        match &self.end {
            End::TimedOut => Some(LimitHit::Time),
            End::Result(result) => self.host_limit.or(result.limit_hit),
            _ => self.host_limit,
        }
    }
}

/// Takes one step through the gate.
pub async fn pass(mut request: Request<'_>, dispatch: Dispatch, output: &mut Output, cancel: &mut Cancel) -> Passage {
    let prepare = Sandbox::prepare(request.backend, request.plan, request.standby.take());
    pass_prepared(&request, prepare, dispatch, output, cancel).await
}

async fn pass_prepared(
    request: &Request<'_>,
    prepare: impl Future<Output = Result<Sandbox, PrepareError>>,
    dispatch: Dispatch,
    output: &mut Output,
    cancel: &mut Cancel,
) -> Passage {
    let began = Instant::now();
    // A machine may take longer to boot where the operator says so.
    let patience = PREPARE_PATIENCE + request.plan.engines.boot_patience.unwrap_or_default();
    let prepared = tokio::select! {
        prepared = tokio::time::timeout(patience, prepare) => prepared,
        // Dropping the half-built boundary kills what it started.
        signal = cancelled(cancel) => return Passage::new(End::CancelledBefore(signal)),
    };
    let mut sandbox = match prepared {
        Ok(Ok(sandbox)) => sandbox,
        Ok(Err(error)) => {
            let mut passage = Passage::new(End::NotPrepared(error));
            passage.times.total = began.elapsed();
            return passage;
        }
        Err(_) => {
            let mut passage =
                Passage::new(End::NotProven(format!("the boundary was not up after {} s", patience.as_secs())));
            passage.times.total = began.elapsed();
            return passage;
        }
    };
    let mut passage = Passage::new(End::NotProven(String::new()));
    passage.engine = Some(sandbox.engine());
    passage.end = cross(request, dispatch, &mut sandbox, output, cancel, &mut passage, began).await;
    passage.usage = sandbox.usage();
    passage.host_limit = sandbox.limit_hit();
    tracing::debug!("observed again");
    let left = match tokio::time::timeout(TEARDOWN_PATIENCE, sandbox.teardown()).await {
        Ok(left) => left,
        Err(_) => vec![Observation::host(Fact::Leftovers {
            looked_for: vec!["the end of the boundary's processes".to_owned()],
            found: vec![format!("teardown did not end within {} s", TEARDOWN_PATIENCE.as_secs())],
        })],
    };
    passage.observations.extend(left);
    passage.times.total = began.elapsed();
    passage
}

/// Everything between prepare and teardown.
async fn cross(
    request: &Request<'_>,
    dispatch: Dispatch,
    sandbox: &mut Sandbox,
    output: &mut Output,
    cancel: &mut Cancel,
    passage: &mut Passage,
    began: Instant,
) -> End {
    let answer = tokio::select! {
        answer = sandbox.channel().challenge(CHALLENGE_PATIENCE) => answer,
        signal = cancelled(cancel) => return End::CancelledBefore(signal),
    };
    let answer = match answer {
        Ok(answer) => answer,
        Err(e) => return End::NotProven(e.to_string()),
    };
    tracing::debug!("the challenge is answered");
    match sandbox.observe(Phase::Before, Some(answer.took)) {
        Ok(seen) => passage.observations.extend(seen),
        Err(e) => return End::NotProven(format!("the boundary could not be observed: {e}")),
    }
    passage.observations.extend(guest_observation(request.backend, &answer));
    passage.observations.extend(host_observations(request.plan));
    let judged = judge(request.floor, request.required, &passage.observations);
    passage.times.prepare = began.elapsed();
    let admission = match judged {
        Ok(admission) => admission,
        Err(refusal) => {
            passage.judgement = Some(refusal.judgement.clone());
            return End::Refused(refusal);
        }
    };
    passage.judgement = Some(admission.judgement().clone());
    if let Some(signal) = *cancel.borrow() {
        return End::CancelledBefore(signal);
    }

    tracing::debug!("admitted");
    // From here on the guest's code may run, whatever else happens.
    passage.dispatched = Dispatched::Yes;
    (request.on_dispatch)();
    let outcome = sandbox.dispatch(admission, dispatch, output, request.plan.bounds.deadline, cancel).await;
    passage.times.run = outcome.took;
    tracing::debug!("the run is over");
    // The agent still waits after its result, and still runs at a deadline: look before anything is killed.
    if !matches!(outcome.ended, Ended::Gone) {
        match sandbox.observe(Phase::After, None) {
            Ok(changes) => {
                passage.changed = changes.iter().filter(|o| matches!(o.fact, Fact::Changed { .. })).cloned().collect();
                passage.observations.extend(changes);
            }
            Err(e) => passage.unobserved = Some(e.to_string()),
        }
    }
    match outcome.ended {
        Ended::Result(result) => {
            sandbox.channel().release().await;
            End::Result(result)
        }
        Ended::Deadline => End::TimedOut,
        Ended::Cancelled(signal) => End::Cancelled(signal),
        Ended::Gone => End::Gone,
        Ended::Protocol(why) => End::Protocol(why),
    }
}

/// What the inside says of its kernel. A boot id that is the host's own contradicts a kernel of its own; another one proves
/// nothing, since anybody can make one up.
fn guest_observation(backend: Backend, answer: &Answer) -> Option<Observation> {
    let control = match backend {
        Backend::Gvisor => ControlId::GuestKernel,
        Backend::Firecracker => ControlId::Hypervisor,
        Backend::Wasm => return None,
    };
    let shown = |text: &str| text.chars().filter(|c| c.is_ascii_graphic() || *c == ' ').take(128).collect::<String>();
    let host = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    Some(Observation::guest(if !answer.boot_id.is_empty() && answer.boot_id == host.trim() {
        Fact::Denied { control, what: "its boot id is the host's".to_owned() }
    } else {
        Fact::Remark { control, what: format!("the inside sees kernel {}", shown(&answer.kernel)) }
    }))
}

/// What the runner itself enforces, for every backend alike: the deadline and the output cap.
fn host_observations(plan: &Plan) -> Vec<Observation> {
    let deadline = millis(plan.bounds.deadline);
    let limit = |control, value, place: &str| {
        Observation::host(Fact::Limit { control, wanted: value, read: Some(value), place: place.to_owned() })
    };
    vec![
        limit(ControlId::TimeLimit, deadline, "the runner's own timer, in milliseconds"),
        limit(ControlId::OutputLimit, plan.bounds.output_bytes, "the runner's own writer, in bytes per stream"),
    ]
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use plimsoll_guest::{FromGuest, GuestLimits, OutputBudget, Program, Stream, encode};
    use tokio::sync::watch;

    use super::*;
    use crate::backend::fake::{Calls, Fake, Script};
    use crate::backend::{Bounds, Engines};
    use crate::evidence::Status;

    fn plan(deadline: Duration) -> Plan {
        Plan {
            id: "test".into(),
            scratch: "/nonexistent".into(),
            bounds: Bounds { memory_bytes: 1, cpu_millis: 1, pids: 1, disk_bytes: 1, output_bytes: 100, deadline },
            workspace: None,
            rootfs: None,
            mounts: vec![],
            machine: None,
            module: None,
            filesystem: plimsoll_guest::Filesystem::None,
            deterministic: false,
            engines: Engines::default(),
        }
    }

    fn dispatch() -> Dispatch {
        Dispatch {
            program: Program::Script { argv: vec![], text: String::new() },
            env: vec![],
            working_directory: ".".into(),
            user: (1, 1),
            outputs: vec![],
            output_budget: OutputBudget { files: 0, bytes: 0 },
            limits: GuestLimits { pids: 1, memory_bytes: 1, disk_bytes: 1, deadline_ms: 1 },
            clock_ns: 0,
            entropy: [0; 32],
            drives: Vec::new(),
        }
    }

    /// What the gate always requires of a boundary, and nothing else.
    fn enough() -> Vec<Observation> {
        [Fact::Interfaces { names: vec![], own_namespace: true }, Fact::Environment { names: vec![], leaked: vec![] }]
            .map(Observation::host)
            .to_vec()
    }

    fn done(exit_code: i32) -> FromGuest {
        FromGuest::Result(GuestResult {
            exit_code: Some(exit_code),
            signal: None,
            limit_hit: None,
            refused: None,
            message: None,
            peak_memory_bytes: 0,
            cpu_ms: 0,
        })
    }

    fn good() -> Script {
        Script { says: vec![done(0)], lingers: true, before: enough(), after: Some(vec![]), ..Script::default() }
    }

    async fn go(script: Script, deadline: Duration, signal: Option<CancelSignal>) -> (Passage, Vec<&'static str>) {
        let logs = tempfile::tempdir().unwrap();
        let mut output = Output::create(logs.path(), None, 100, OutputBudget { files: 0, bytes: 0 }, None).unwrap();
        let calls: Calls = Arc::new(Mutex::new(vec![]));
        let (plan, required) = (plan(deadline), BTreeSet::new());
        let seen = Arc::clone(&calls);
        let on_dispatch = move || seen.lock().unwrap().push("told");
        let request = Request {
            backend: Backend::Wasm,
            plan: &plan,
            standby: None,
            floor: Tier::Process,
            required: &required,
            on_dispatch: &on_dispatch,
        };
        let (sender, mut cancel) = watch::channel(None);
        if let Some(signal) = signal {
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(50)).await;
                let _ = sender.send(Some(signal));
            });
        }
        let prepare = async { Fake::prepare(script, Arc::clone(&calls)).map(|f| Sandbox::Fake(Box::new(f))) };
        let passage = pass_prepared(&request, prepare, dispatch(), &mut output, &mut cancel).await;
        let calls = calls.lock().unwrap().clone();
        (passage, calls)
    }

    const LONG: Duration = Duration::from_secs(20);
    const WHOLE: [&str; 6] = ["prepare", "observe", "told", "dispatch", "observe again", "tear down"];

    #[tokio::test]
    async fn the_calls_are_made_in_their_order() {
        let (passage, calls) = go(good(), LONG, None).await;
        assert_eq!(calls, WHOLE);
        assert_eq!(passage.dispatched, Dispatched::Yes);
        assert!(matches!(passage.end, End::Result(_)), "{:?}", passage.end);
    }

    #[tokio::test]
    async fn nothing_is_dispatched_into_a_boundary_that_does_not_prove_itself() {
        let leak = Observation::host(Fact::Environment { names: vec!["T".into()], leaked: vec!["T".into()] });
        let refused = Script { before: vec![leak], ..good() };
        let silent = Script { wrong_nonce: true, ..good() };
        let early = Script { early: Some(done(0)), ..good() };
        let sorry = Script { early: Some(FromGuest::Notice("no \u{1b}[31mdisk".into())), ..good() };
        let blind = Script { before: vec![], ..good() };
        for (script, calls_made) in [
            (refused, &["prepare", "observe", "tear down"][..]),
            (blind, &["prepare", "observe", "tear down"][..]),
            (silent, &["prepare", "tear down"][..]),
            (early, &["prepare", "tear down"][..]),
            (sorry.clone(), &["prepare", "tear down"][..]),
        ] {
            let (passage, calls) = go(script, LONG, None).await;
            assert_eq!(calls, calls_made);
            assert_eq!(passage.dispatched, Dispatched::No);
            assert!(matches!(passage.end, End::Refused(_) | End::NotProven(_)), "{:?}", passage.end);
        }
        // Why an agent has no boundary to offer is shown, without what would paint a terminal.
        let (passage, _) = go(sorry, LONG, None).await;
        let End::NotProven(why) = passage.end else { panic!("{:?}", passage.end) };
        assert!(why.ends_with("disk") && why.contains("could not make the boundary ready") && !why.contains('\u{1b}'));
    }

    #[tokio::test]
    async fn a_boundary_that_is_not_there_is_no_result() {
        let (passage, calls) = go(Script { unavailable: true, ..good() }, LONG, None).await;
        assert_eq!(calls, ["prepare"]);
        assert!(matches!(passage.end, End::NotPrepared(_)));
    }

    #[tokio::test]
    async fn a_boundary_that_changed_is_told() {
        let changed = Observation::host(Fact::Changed {
            control: ControlId::Seccomp,
            what: "seccomp".into(),
            before: "every thread".into(),
            after: "1 of 2 threads".into(),
        });
        let (passage, _) = go(Script { after: Some(vec![changed.clone()]), ..good() }, LONG, None).await;
        assert_eq!(passage.changed, [changed]);
        assert_eq!(
            crate::evidence::judge::weigh(&passage.observations).grades[&ControlId::Seccomp],
            Status::NotEnforced
        );
        let (passage, _) = go(Script { after: None, ..good() }, LONG, None).await;
        assert!(passage.unobserved.is_some());
    }

    #[tokio::test]
    async fn at_the_deadline_it_is_observed_before_it_is_torn_down() {
        let (passage, calls) = go(Script { says: vec![], ..good() }, Duration::from_millis(50), None).await;
        assert_eq!(calls, WHOLE);
        assert!(matches!(passage.end, End::TimedOut));
        assert_eq!(passage.limit_hit(), Some(LimitHit::Time));
    }

    #[tokio::test]
    async fn cancelled_while_running_is_torn_down_all_the_same() {
        let (passage, calls) = go(Script { says: vec![], ..good() }, LONG, Some(CancelSignal::Terminate)).await;
        assert_eq!(calls, WHOLE);
        assert!(matches!(passage.end, End::Cancelled(CancelSignal::Terminate)));
    }

    #[tokio::test]
    async fn a_boundary_that_ends_by_itself_has_no_result() {
        let (passage, calls) = go(Script { says: vec![], lingers: false, ..good() }, LONG, None).await;
        assert_eq!(calls, ["prepare", "observe", "told", "dispatch", "tear down"]);
        assert!(matches!(passage.end, End::Gone));
    }

    #[tokio::test]
    async fn a_hostile_guest_ends_in_a_verdict() {
        let huge = Script { says: vec![], raw: vec![0xff; 8], ..good() };
        let garbage = Script { says: vec![], raw: vec![2, 0, 0, 0, 0xee, 0xee], ..good() };
        let answer = FromGuest::Answer {
            protocol: plimsoll_guest::PROTOCOL,
            nonce: [0; 32],
            kernel: String::new(),
            boot_id: String::new(),
        };
        let again = Script { says: vec![answer], ..good() };
        for script in [huge, garbage, again] {
            let (passage, calls) = go(script, LONG, None).await;
            assert_eq!(calls, WHOLE);
            assert!(matches!(passage.end, End::Protocol(_)), "{:?}", passage.end);
        }
        // A frame cut short by the end of the boundary is the end of the boundary.
        let cut = encode(&FromGuest::Output { stream: Stream::Stdout, bytes: vec![1; 50] }).unwrap();
        let cut = Script { says: vec![], raw: cut[..20].to_vec(), lingers: false, ..good() };
        assert!(matches!(go(cut, LONG, None).await.0.end, End::Gone));
    }
}
