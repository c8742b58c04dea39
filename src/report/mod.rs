//! The boundary report: what a run did and what it proved.
//!
//! [`Report`] is the model that the run fills and every rendering reads. What leaves the process is a versioned struct
//! made from it (`json_v1`), so that the model can change without breaking readers.
//!
//! Text that a guest or a pull request wrote is `Untrusted` and reaches XML, Markdown, HTML
//! or a terminal only through the function for that place.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::backend::EngineRecord;
use crate::backend::output::{FileRecord, StreamRecord};
use crate::evidence::{ControlId, Observation, Status, Tier};
use crate::exit::Exit;
use crate::gate::Dispatched;

pub mod canonical;
mod dir;
pub mod guest_junit;
pub mod html;
pub mod json_v1;
pub mod junit;
mod logs;
pub mod markdown;
pub mod read_back;
pub mod sign;
mod staging;
pub mod verify;
pub mod words;
pub mod write;

pub(crate) use dir::open_beneath;
pub use logs::Logs;
pub use read_back::model;
pub use staging::Staging;
pub use write::{OutputsDir, ReportDir};

/// The outcome of a step or a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The code ran behind a proven boundary and succeeded.
    Passed,
    /// The code ran and failed.
    Failed,
    /// The boundary, the policy or a grant did not allow it; or the boundary changed while it ran.
    Refused,
    /// It could not be tried: backend missing, artifact rejected, internal error.
    Error,
    /// Somebody cancelled it.
    Cancelled,
    /// There was nothing to do.
    Skipped,
}

impl Verdict {
    /// The word used in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Verdict::Passed => "passed",
            Verdict::Failed => "failed",
            Verdict::Refused => "refused",
            Verdict::Error => "error",
            Verdict::Cancelled => "cancelled",
            Verdict::Skipped => "skipped",
        }
    }

    /// The verdict that goes with an exit code.
    #[must_use]
    pub const fn of(exit: Exit) -> Self {
        match exit {
            Exit::Passed => Verdict::Passed,
            Exit::GuestFailed => Verdict::Failed,
            Exit::Refused => Verdict::Refused,
            Exit::Interrupted | Exit::Terminated => Verdict::Cancelled,
            Exit::Internal
            | Exit::Usage
            | Exit::Unavailable
            | Exit::Rejected
            | Exit::PublishFailed
            | Exit::FaultFound => Verdict::Error,
        }
    }
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// Who vouches for a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ReportOrigin {
    /// The job's own statement.
    Local,
    /// Signed by the service on the runner's host.
    Service,
}

/// A whole run.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Outcome of the run: the gravest of its steps.
    pub verdict: Verdict,
    /// The process's exit code (publishing aside).
    pub exit_code: Exit,
    /// Who vouches for it.
    pub origin: ReportOrigin,
    /// This program.
    pub tool: Tool,
    /// The operator's policy.
    pub policy: PolicyRecord,
    /// The machine.
    pub host: Host,
    /// The CI job, where there is one. Claimed by the environment.
    pub ci: Option<Ci>,
    /// When the run began.
    pub started_at: Timestamp,
    /// When it ended.
    pub ended_at: Timestamp,
    /// Steps in the order of the step files.
    pub steps: Vec<StepReport>,
    /// SHA-256 of the request as canonical JSON: step definitions, flags, policy.
    pub request_sha256: String,
}

/// This program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Tool {
    /// Version.
    pub version: String,
    /// SHA-256 of the executable, lowercase hex.
    pub sha256: String,
}

/// What the operator's policy did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PolicyRecord {
    /// SHA-256 of the policy file, absent if there is none.
    pub sha256: Option<String>,
    /// `none`, `applied`, `unverified` or `refused`.
    pub effect: String,
}

/// The machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Host {
    /// The runner's name, as CI gives it, or the host name.
    pub runner: String,
    /// Kernel release.
    pub kernel: String,
    /// CPU model.
    pub cpu: String,
    /// Hypervisor or container that the host itself runs in, as far as it shows; `none` otherwise.
    pub virtualization: String,
}

/// The CI job. All of it is claimed by the environment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Ci {
    /// `github` or `gitlab`.
    pub provider: String,
    /// `owner/name` or the project's path.
    pub repository: Option<String>,
    /// The commit that the job runs on (for a pull request on GitHub, the merge commit).
    pub sha: Option<String>,
    /// The head commit of the pull or merge request, else the same as `sha`.
    pub head_sha: Option<String>,
    /// Pull or merge request number.
    pub pull_request: Option<u64>,
    /// Job id or name.
    pub job: Option<String>,
    /// Attempt number.
    pub attempt: Option<u64>,
    /// Matrix values.
    pub matrix: BTreeMap<String, String>,
    /// Link to the run.
    pub run_url: Option<String>,
}

/// One step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// From 1, over all files.
    pub index: u32,
    /// As the step file names it; comes with the pull request.
    pub name: String,
    /// File-name-safe name, unique with the index: `unit-tests`.
    pub slug: String,
    /// Outcome of this step.
    pub verdict: Verdict,
    /// What the step alone would exit with.
    pub exit: Exit,
    /// The step failed, and `continue-on-error` forgave it.
    pub forgiven: bool,
    /// Whether its code was started.
    pub dispatched: Dispatched,
    /// The command as the step file gives it.
    pub command: String,
    /// Root file system, where there is one.
    pub image: Option<ImageRecord>,
    /// Grants, in words: `filesystem: read-only`, `mount: /wheels (read-only)`.
    pub grants: Vec<String>,
    /// The engine, if one came up.
    pub engine: Option<EngineRecord>,
    /// The backend that was chosen, and why if `auto` chose it.
    pub backend: Option<String>,
    /// Floor asked for.
    pub floor: Tier,
    /// Tier proven, if a boundary was observed.
    pub tier: Option<Tier>,
    /// Controls with their grades and facts, in the order of [`ControlId::ALL`].
    pub controls: Vec<ControlRecord>,
    /// The artifact, if it was read.
    pub artifact: Option<ArtifactRecord>,
    /// How the code ended, if it was dispatched.
    pub result: Option<ResultRecord>,
    /// What it cost.
    pub resources: Resources,
    /// Output files.
    pub outputs: Vec<FileRecord>,
    /// The guest's own tests, if it wrote a JUnit report. Unverified.
    pub guest_tests: Option<GuestTests>,
    /// The cases of that report, for `junit.xml`. Guest-origin text.
    pub guest_cases: guest_junit::Cases,
    /// Why it was refused or could not be tried.
    pub refusal: Option<RefusalRecord>,
    /// Remarks, some of them guest-origin.
    pub notices: Vec<String>,
}

/// A control as the report shows it.
#[derive(Debug, Clone, PartialEq)]
pub struct ControlRecord {
    /// Which.
    pub id: ControlId,
    /// Its grade, from the observations before dispatch and those of the teardown.
    pub status: Status,
    /// The step could not have run without it.
    pub required: bool,
    /// What was seen.
    pub observations: Vec<Observation>,
}

/// Where the root file system came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ImageRecord {
    /// As the step names it.
    pub reference: String,
    /// Digest, where the source has one.
    pub digest: Option<String>,
}

/// The artifact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ArtifactRecord {
    /// As the step names it.
    pub source: String,
    /// `directory`, `zip`, `tar`, `tar.gz`, `tar.zst`, `tar.xz`, `file`.
    pub format: String,
    /// SHA-256 of the file, or of the canonical listing of a directory; lowercase hex.
    pub sha256: String,
    /// Regular files unpacked.
    pub files: u64,
    /// Sum of their sizes, bytes.
    pub bytes: u64,
}

/// How the guest's code ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResultRecord {
    /// Exit code; guest-origin.
    pub exit_code: Option<i32>,
    /// Signal number; guest-origin.
    pub signal: Option<i32>,
    /// The host ended it at the deadline.
    pub timed_out: bool,
    /// `memory`, `pids`, `disk`, `time`, `fuel`.
    pub limit_hit: Option<String>,
    /// What the guest said about its end, or what the host saw; guest-origin text.
    pub message: Option<String>,
    /// Standard output.
    pub stdout: StreamRecord,
    /// Standard error.
    pub stderr: StreamRecord,
}

/// What a step cost. Milliseconds and bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Resources {
    /// From the start of the step to the admission, unpacking included.
    pub prepare_ms: u64,
    /// From dispatch to the end of the run.
    pub run_ms: u64,
    /// All of it.
    pub total_ms: u64,
    /// CPU time.
    pub cpu_ms: Option<u64>,
    /// Peak memory.
    pub peak_memory_bytes: Option<u64>,
    /// Memory that the boundary itself costs.
    pub boundary_memory_bytes: Option<u64>,
}

/// Counts from the guest's own JUnit report.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GuestTests {
    /// Cases.
    pub total: u64,
    /// Failed cases.
    pub failed: u64,
    /// Cases in error.
    pub errors: u64,
    /// Skipped cases.
    pub skipped: u64,
}

/// Why a step was refused or could not be tried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RefusalRecord {
    /// `policy`, `artifact`, `image`, `prepare`, `observe`, `judge`, `grant`, `changed`.
    pub stage: String,
    /// Short machine-readable reason, kebab-case, such as `floor-not-proven`.
    pub reason: String,
    /// In words.
    pub message: String,
    /// What to do about it.
    pub help: Option<String>,
}

impl StepReport {
    /// A step that nothing has happened to: an error until something else is known.
    #[must_use]
    pub fn untried(index: u32, name: &str, slug: &str, floor: Tier) -> Self {
        Self {
            index,
            name: name.to_owned(),
            slug: slug.to_owned(),
            verdict: Verdict::Error,
            exit: Exit::Internal,
            forgiven: false,
            dispatched: Dispatched::No,
            command: String::new(),
            image: None,
            grants: Vec::new(),
            engine: None,
            backend: None,
            floor,
            tier: None,
            controls: Vec::new(),
            artifact: None,
            result: None,
            resources: Resources::default(),
            outputs: Vec::new(),
            guest_tests: None,
            guest_cases: guest_junit::Cases::default(),
            refusal: None,
            notices: Vec::new(),
        }
    }

    /// Whether the floor is proven.
    #[must_use]
    pub fn proven(&self) -> bool {
        self.tier.is_some_and(|tier| tier >= self.floor)
    }

    /// Directory name of the step below `steps/` and the outputs directory: `01-unit-tests`.
    #[must_use]
    pub fn directory(&self) -> String {
        format!("{:02}-{}", self.index, self.slug)
    }
}

/// Controls in report order, from everything that was observed and what was required.
#[must_use]
pub fn controls(
    grades: &BTreeMap<ControlId, Status>,
    required: &BTreeSet<ControlId>,
    observations: &[Observation],
) -> Vec<ControlRecord> {
    ControlId::ALL
        .iter()
        .map(|&id| ControlRecord {
            id,
            status: grades.get(&id).copied().unwrap_or(Status::Unknown),
            required: required.contains(&id),
            observations: observations.iter().filter(|o| o.fact.control() == id).cloned().collect(),
        })
        .collect()
}
