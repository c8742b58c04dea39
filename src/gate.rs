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

use crate::backend::channel::{Cancel, CancelSignal, ChallengeError, Ended, cancelled};
use crate::backend::{BackendKind, EngineRecord, Output, Phase, Plan, PrepareError, Sandbox, Usage};
use crate::evidence::{ControlId, Fact, Judgement, Observation, Refusal, Tier, judge};

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
}

/// What a step asks of the gate.
#[derive(Debug)]
pub struct Request<'a> {
    /// Which backend.
    pub backend: BackendKind,
    /// What its boundary is built to.
    pub plan: &'a Plan,
    /// The weakest tier that will do.
    pub floor: Tier,
    /// Controls that have to be enforced, on top of those always required.
    pub required: &'a BTreeSet<ControlId>,
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
        }
    }

    /// A limit that ended the run: the host's own knowledge first, the guest's word where the host has none.
    #[must_use]
    pub fn limit_hit(&self) -> Option<LimitHit> {
        match &self.end {
            End::TimedOut => Some(LimitHit::Time),
            End::Result(result) => result.limit_hit,
            _ => None,
        }
    }
}

/// Takes one step through the gate.
pub async fn pass(request: Request<'_>, dispatch: Dispatch, output: &mut Output, cancel: &mut Cancel) -> Passage {
    let began = Instant::now();
    let plan = request.plan;
    let prepared = tokio::select! {
        prepared = tokio::time::timeout(PREPARE_PATIENCE, Sandbox::prepare(request.backend, plan)) => prepared,
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
                Passage::new(End::NotProven(format!("the boundary was not up after {} s", PREPARE_PATIENCE.as_secs())));
            passage.times.total = began.elapsed();
            return passage;
        }
    };
    let mut passage = Passage::new(End::NotProven(String::new()));
    passage.engine = Some(sandbox.engine());
    passage.end = cross(&request, dispatch, &mut sandbox, output, cancel, &mut passage, began).await;
    passage.usage = sandbox.usage();
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
        Err(e @ (ChallengeError::Silent(_) | ChallengeError::Wrong(_) | ChallengeError::Channel(_))) => {
            return End::NotProven(e.to_string());
        }
    };
    match sandbox.observe(Phase::Before, Some(answer.took)) {
        Ok(seen) => passage.observations.extend(seen),
        Err(e) => return End::NotProven(format!("the boundary could not be observed: {e}")),
    }
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

    // From here on the guest's code may run, whatever else happens.
    passage.dispatched = Dispatched::Yes;
    let outcome = sandbox.dispatch(admission, dispatch, output, request.plan.bounds.deadline, cancel).await;
    passage.times.run = outcome.took;
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

/// What the runner itself enforces, for every backend alike: the deadline and the output cap.
fn host_observations(plan: &Plan) -> Vec<Observation> {
    let deadline = u64::try_from(plan.bounds.deadline.as_millis()).unwrap_or(u64::MAX);
    let limit = |control, value, place: &str| {
        Observation::host(Fact::Limit { control, wanted: value, read: Some(value), place: place.to_owned() })
    };
    vec![
        limit(ControlId::TimeLimit, deadline, "the runner's own timer, in milliseconds"),
        limit(ControlId::OutputLimit, plan.bounds.output_bytes, "the runner's own writer, in bytes per stream"),
    ]
}
