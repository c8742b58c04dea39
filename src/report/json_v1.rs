//! `plimsoll.boundary-report.v1`: the report as others read it.
//!
//! [`ReportV1`] is made from the model ([`From<&Report>`](ReportV1#impl-From<%26Report>-for-ReportV1)), [sealed](ReportV1::seal) with its
//! digests, and written as `report.json`. It is *evidence collected by the runner*: whoever runs the job can write another.
//! [`ReportV1::read`] takes one back in; it comes from an untrusted job then, so its size is bounded and what it doesn't
//! know is an error.
//!
//! # Digests
//!
//! All are SHA-256, lowercase hex, over canonical JSON as [`canonical`](super::canonical) defines it.
//!
//! * `request_sha256`: of the request: step definitions, flags, policy.
//! * `result_sha256`: of what has to repeat under `deterministic: true`. See [`ReportV1::result`] for its exact shape.
//! * `record_sha256`: of this whole record without the member `digests.record_sha256`.

use std::collections::BTreeMap;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    ArtifactRecord, Ci, ControlRecord, GuestTests, Host, ImageRecord, PolicyRecord, RefusalRecord, Report,
    ReportOrigin, Resources, ResultRecord, StepReport, Tool, Verdict, canonical,
};
use crate::backend::BinaryRecord;
use crate::backend::output::{FileRecord, StreamRecord};
use crate::evidence::{ControlId, Fact, Observation, Origin, Status, Tier};
use crate::exit::Exit;
use crate::gate::Dispatched;

/// The value of `schema`.
pub const SCHEMA: &str = "plimsoll.boundary-report.v1";
/// The largest record that is read back, bytes.
pub const MAX_BYTES: usize = 32 * 1024 * 1024;

/// A boundary report: evidence collected by the runner about which isolation boundary untrusted code ran behind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "plimsoll.boundary-report.v1")]
pub struct ReportV1 {
    /// Always `plimsoll.boundary-report.v1`.
    pub schema: String,
    /// Outcome of the run: the gravest of its steps.
    pub verdict: Verdict,
    /// Exit code of `plimsoll run`.
    pub exit_code: Exit,
    /// Who vouches for the report. `local` is the job's own statement.
    pub origin: ReportOrigin,
    /// The program that wrote it.
    pub tool: Tool,
    /// The operator's policy.
    pub policy: PolicyRecord,
    /// The machine.
    pub host: Host,
    /// The CI job, where there is one; claimed by the environment.
    pub ci: Option<Ci>,
    /// When the run began, RFC 3339, UTC.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub started_at: Timestamp,
    /// When it ended, RFC 3339, UTC.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub ended_at: Timestamp,
    /// Steps in the order of the step files.
    pub steps: Vec<StepV1>,
    /// The other files of the report directory that were made from this record: `junit.xml`, `summary.md`, `report.html`.
    pub renderings: Vec<FileV1>,
    /// Digests; see each.
    pub digests: DigestsV1,
}

/// One step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StepV1 {
    /// From 1, over all step files.
    pub index: u32,
    /// As the step file names it. Untrusted text.
    pub name: String,
    /// Outcome of this step.
    pub verdict: Verdict,
    /// What the step alone would exit with.
    pub exit_code: Exit,
    /// The step failed, and `continue-on-error` forgave it.
    pub forgiven: bool,
    /// Whether its code was started; `unknown` if the runner stopped between the two.
    pub dispatched: Dispatched,
    /// The command as the step file gives it. Untrusted text.
    pub command: String,
    /// Root file system, where there is one.
    pub image: Option<ImageRecord>,
    /// Grants, in words.
    pub grants: Vec<String>,
    /// The backend, if one was chosen.
    pub backend: Option<BackendV1>,
    /// The boundary's strength.
    pub isolation: IsolationV1,
    /// Controls with their grades and what was seen.
    pub controls: Vec<ControlV1>,
    /// The artifact, if it was read.
    pub artifact: Option<ArtifactRecord>,
    /// How the code ended, if it was dispatched.
    pub result: Option<ResultV1>,
    /// What it cost.
    pub resources: Resources,
    /// Output files.
    pub outputs: Vec<FileV1>,
    /// Counts from the guest's own JUnit report. Unverified.
    pub guest_tests: Option<GuestTests>,
    /// Why it was refused or could not be tried.
    pub refusal: Option<RefusalRecord>,
    /// Remarks. Untrusted text.
    pub notices: Vec<String>,
}

/// The backend. What an engine calls itself is a label, not evidence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BackendV1 {
    /// Name; with a reason where `auto` chose it and it did not come up.
    pub name: String,
    /// Version the engine prints or was built with, if it came up.
    pub engine_version: Option<String>,
    /// Executables used.
    pub binaries: Vec<BinaryRecord>,
    /// Settings worth knowing later.
    pub settings: BTreeMap<String, String>,
}

/// The boundary's strength.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct IsolationV1 {
    /// Weakest tier that would do.
    pub floor: Tier,
    /// Tier that host-side facts prove, if a boundary was observed.
    pub tier: Option<Tier>,
    /// The tier is at or above the floor.
    pub proven: bool,
}

/// A control.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ControlV1 {
    /// Which.
    pub id: ControlId,
    /// Its grade.
    pub status: Status,
    /// The step could not have run without it.
    pub required: bool,
    /// What was seen.
    pub observations: Vec<ObservationV1>,
}

/// Something seen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ObservationV1 {
    /// `host`: seen by the runner from outside. `guest`: said by the inside; it may lower a grade, never raise one.
    pub origin: Origin,
    /// In words.
    pub fact: String,
    /// What was read; grades follow from it alone.
    pub value: Fact,
}

/// How the guest's code ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResultV1 {
    /// Exit code, as the inside says.
    pub exit_code: Option<i32>,
    /// Signal number, as the inside says.
    pub signal: Option<i32>,
    /// The host ended it at the deadline.
    pub timed_out: bool,
    /// `memory`, `pids`, `disk`, `time`, `fuel`.
    pub limit_hit: Option<String>,
    /// What was said or seen about the end. Untrusted text.
    pub message: Option<String>,
    /// Standard output.
    pub stdout: StreamV1,
    /// Standard error.
    pub stderr: StreamV1,
}

/// One output stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StreamV1 {
    /// The log file, relative to the report directory.
    pub path: String,
    /// Bytes that the guest wrote.
    pub bytes: u64,
    /// Bytes in the log file: the first ones.
    pub kept: u64,
    /// SHA-256 of everything that the guest wrote.
    pub sha256: String,
    /// SHA-256 of the log file.
    pub kept_sha256: String,
    /// Something was dropped: `kept` is less than `bytes`.
    pub truncated: bool,
}

/// A file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FileV1 {
    /// For an output, relative to the step's directory below the outputs directory; for a rendering, to the report directory.
    pub path: String,
    /// Size, bytes.
    pub bytes: u64,
    /// SHA-256, lowercase hex.
    pub sha256: String,
}

/// Digests over canonical JSON (RFC 8785; numbers are integers in decimal), SHA-256, lowercase hex.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DigestsV1 {
    /// Of the request: step definitions, flags, policy.
    pub request_sha256: String,
    /// Of what has to repeat under `deterministic: true`: the run's verdict and, for each step, its index, verdict, exit
    /// code, and the result's exit code, signal, timed_out, limit_hit, bytes and sha256 of both streams, and path, bytes and
    /// sha256 of each output file, sorted by path. No times, process ids or measurements.
    pub result_sha256: String,
    /// Of this whole record without the member `digests.record_sha256`.
    pub record_sha256: String,
}

/// Why a record could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It is larger than [`MAX_BYTES`].
    #[error("the record has more than {MAX_BYTES} bytes")]
    TooLarge,
    /// It is no JSON, or not of this shape.
    #[error("the record is not a {SCHEMA}: {0}")]
    Shape(#[source] serde_json::Error),
    /// It names another schema.
    #[error("the record's schema is not {SCHEMA}")]
    Schema,
}

impl ReportV1 {
    /// Reads a record that somebody else wrote.
    ///
    /// # Errors
    /// If it is too large, malformed, or has anything that this version doesn't know. Digests are not compared here.
    pub fn read(bytes: &[u8]) -> Result<Self, ReadError> {
        if bytes.len() > MAX_BYTES {
            return Err(ReadError::TooLarge);
        }
        let record: Self = serde_json::from_slice(bytes).map_err(ReadError::Shape)?;
        if record.schema == SCHEMA { Ok(record) } else { Err(ReadError::Schema) }
    }

    /// The JSON Schema of the record.
    #[must_use]
    pub fn json_schema() -> Value {
        let mut schema = schemars::schema_for!(ReportV1).to_value();
        schema["properties"]["schema"]["const"] = SCHEMA.into();
        schema
    }

    /// Fills in the digests, over everything else that is in it now.
    ///
    /// # Errors
    /// If the record can't be serialised.
    pub fn seal(&mut self) -> serde_json::Result<()> {
        self.digests.result_sha256 = canonical::digest(&self.result());
        self.digests.record_sha256 = record_digest(serde_json::to_value(&*self)?);
        Ok(())
    }

    /// What `result_sha256` is over.
    #[must_use]
    pub fn result(&self) -> Value {
        let stream = |s: &StreamV1| json!({"bytes": s.bytes, "sha256": s.sha256});
        let step = |step: &StepV1| {
            let mut outputs: Vec<&FileV1> = step.outputs.iter().collect();
            outputs.sort_by(|a, b| a.path.cmp(&b.path));
            json!({
                "index": step.index,
                "verdict": step.verdict,
                "exit_code": step.exit_code,
                "result": step.result.as_ref().map(|r| json!({
                    "exit_code": r.exit_code,
                    "signal": r.signal,
                    "timed_out": r.timed_out,
                    "limit_hit": r.limit_hit,
                    "stdout": stream(&r.stdout),
                    "stderr": stream(&r.stderr),
                })),
                "outputs": outputs,
            })
        };
        json!({"verdict": self.verdict, "steps": self.steps.iter().map(step).collect::<Vec<_>>()})
    }
}

/// What `record_sha256` of a record should be. Takes the record as JSON, so that nothing in it goes uncounted.
#[must_use]
pub fn record_digest(mut record: Value) -> String {
    if let Some(digests) = record.get_mut("digests").and_then(Value::as_object_mut) {
        digests.remove("record_sha256");
    }
    canonical::digest(&record)
}

impl StepV1 {
    /// Everything that was seen of the step's boundary.
    #[must_use]
    pub fn observations(&self) -> Vec<Observation> {
        let observation = |o: &ObservationV1| Observation { origin: o.origin, fact: o.value.clone() };
        self.controls.iter().flat_map(|c| &c.observations).map(observation).collect()
    }
}

impl From<&Report> for ReportV1 {
    fn from(report: &Report) -> Self {
        Self {
            schema: SCHEMA.to_owned(),
            verdict: report.verdict,
            exit_code: report.exit_code,
            origin: report.origin,
            tool: report.tool.clone(),
            policy: report.policy.clone(),
            host: report.host.clone(),
            ci: report.ci.clone(),
            started_at: report.started_at,
            ended_at: report.ended_at,
            steps: report.steps.iter().map(StepV1::from).collect(),
            renderings: Vec::new(),
            digests: DigestsV1 { request_sha256: report.request_sha256.clone(), ..DigestsV1::default() },
        }
    }
}

impl From<&StepReport> for StepV1 {
    fn from(step: &StepReport) -> Self {
        Self {
            index: step.index,
            name: step.name.clone(),
            verdict: step.verdict,
            exit_code: step.exit,
            forgiven: step.forgiven,
            dispatched: step.dispatched,
            command: step.command.clone(),
            image: step.image.clone(),
            grants: step.grants.clone(),
            backend: backend(step),
            isolation: IsolationV1 { floor: step.floor, tier: step.tier, proven: step.proven() },
            controls: step.controls.iter().map(ControlV1::from).collect(),
            artifact: step.artifact.clone(),
            result: step.result.as_ref().map(|r| result(r, &step.directory())),
            resources: step.resources,
            outputs: step.outputs.iter().map(FileV1::from).collect(),
            guest_tests: step.guest_tests,
            refusal: step.refusal.clone(),
            notices: step.notices.clone(),
        }
    }
}

impl From<&ControlRecord> for ControlV1 {
    fn from(control: &ControlRecord) -> Self {
        let observation =
            |o: &Observation| ObservationV1 { origin: o.origin, fact: o.fact.words(), value: o.fact.clone() };
        Self {
            id: control.id,
            status: control.status,
            required: control.required,
            observations: control.observations.iter().map(observation).collect(),
        }
    }
}

impl From<&FileRecord> for FileV1 {
    fn from(file: &FileRecord) -> Self {
        Self { path: file.path.clone(), bytes: file.bytes, sha256: file.sha256.clone() }
    }
}

fn backend(step: &StepReport) -> Option<BackendV1> {
    match (&step.engine, &step.backend) {
        (Some(engine), _) => Some(BackendV1 {
            name: engine.name.clone(),
            engine_version: Some(engine.engine_version.clone()),
            binaries: engine.binaries.clone(),
            settings: engine.settings.clone(),
        }),
        (None, Some(name)) => Some(BackendV1 {
            name: name.clone(),
            engine_version: None,
            binaries: Vec::new(),
            settings: BTreeMap::new(),
        }),
        (None, None) => None,
    }
}

fn result(result: &ResultRecord, directory: &str) -> ResultV1 {
    let stream = |name: &str, s: &StreamRecord| StreamV1 {
        path: format!("steps/{directory}/{name}.log"),
        bytes: s.bytes,
        kept: s.kept,
        sha256: s.sha256.clone(),
        kept_sha256: s.kept_sha256.clone(),
        truncated: s.truncated(),
    };
    ResultV1 {
        exit_code: result.exit_code,
        signal: result.signal,
        timed_out: result.timed_out,
        limit_hit: result.limit_hit.clone(),
        message: result.message.clone(),
        stdout: stream("stdout", &result.stdout),
        stderr: stream("stderr", &result.stderr),
    }
}
