//! From a record back to the model, so that what was rendered from it can be rendered again.
//!
//! Everything that a rendering shows is in the record, but for excerpts of the logs and the cases of the guest's own tests.

use super::json_v1::{BackendV1, ControlV1, FileV1, ReportV1, ResultV1, StepV1, StreamV1};
use super::{ControlRecord, Report, ResultRecord, StepReport};
use crate::backend::EngineRecord;
use crate::backend::output::{FileRecord, StreamRecord};
use crate::evidence::Observation;
use crate::spec::slug;

/// The model of a record. Cases of guests' own tests are left empty.
#[must_use]
pub fn model(record: &ReportV1) -> Report {
    Report {
        verdict: record.verdict,
        exit_code: record.exit_code,
        origin: record.origin,
        tool: record.tool.clone(),
        policy: record.policy.clone(),
        host: record.host.clone(),
        ci: record.ci.clone(),
        started_at: record.started_at,
        ended_at: record.ended_at,
        steps: record.steps.iter().map(step).collect(),
        request_sha256: record.digests.request_sha256.clone(),
    }
}

fn step(step: &StepV1) -> StepReport {
    StepReport {
        verdict: step.verdict,
        exit: step.exit_code,
        forgiven: step.forgiven,
        dispatched: step.dispatched,
        command: step.command.clone(),
        image: step.image.clone(),
        grants: step.grants.clone(),
        engine: step.backend.as_ref().and_then(engine),
        backend: step.backend.as_ref().map(|backend| backend.name.clone()),
        tier: step.isolation.tier,
        controls: step.controls.iter().map(control).collect(),
        artifact: step.artifact.clone(),
        result: step.result.as_ref().map(result),
        resources: step.resources,
        outputs: step.outputs.iter().map(file).collect(),
        guest_tests: step.guest_tests,
        refusal: step.refusal.clone(),
        notices: step.notices.clone(),
        ..StepReport::untried(step.index, &step.name, &directory(step), step.isolation.floor)
    }
}

/// The part of a step's directory after its number: as its logs are recorded, or as its name gives it where it has none.
fn directory(step: &StepV1) -> String {
    let prefix = format!("steps/{:02}-", step.index);
    let recorded = step.result.as_ref().and_then(|r| r.stdout.path.strip_prefix(&prefix)?.strip_suffix("/stdout.log"));
    recorded.map_or_else(|| slug(&step.name), str::to_owned)
}

fn engine(backend: &BackendV1) -> Option<EngineRecord> {
    Some(EngineRecord {
        name: backend.name.clone(),
        engine_version: backend.engine_version.clone()?,
        binaries: backend.binaries.clone(),
        settings: backend.settings.clone(),
    })
}

fn control(control: &ControlV1) -> ControlRecord {
    let seen = control.observations.iter();
    ControlRecord {
        id: control.id,
        status: control.status,
        required: control.required,
        observations: seen.map(|o| Observation { origin: o.origin, fact: o.value.clone() }).collect(),
    }
}

fn result(result: &ResultV1) -> ResultRecord {
    let stream = |s: &StreamV1| StreamRecord {
        bytes: s.bytes,
        kept: s.kept,
        sha256: s.sha256.clone(),
        kept_sha256: s.kept_sha256.clone(),
    };
    ResultRecord {
        exit_code: result.exit_code,
        signal: result.signal,
        timed_out: result.timed_out,
        limit_hit: result.limit_hit.clone(),
        message: result.message.clone(),
        stdout: stream(&result.stdout),
        stderr: stream(&result.stderr),
    }
}

fn file(file: &FileV1) -> FileRecord {
    FileRecord { path: file.path.clone(), bytes: file.bytes, sha256: file.sha256.clone() }
}
