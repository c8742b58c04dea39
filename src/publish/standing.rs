//! How far a report is to be believed.
//!
//! A job that has just run its own steps states what it saw: that is as good as the job. A report that comes out of another
//! job is a file that anybody in that job could have written: a pull request's own code among them. It counts only if a
//! service signed it with a key that the job can't read, if it is about the steps that the base branch asks for, about this
//! commit and no older run, and, where that can be computed, about this artifact. Whatever is missing is a reason,
//! and with one reason nothing green is shown.

use jiff::{SignedDuration, Timestamp};

use super::proof::Proof;
use crate::forge::Context;
use crate::report::json_v1::ReportV1;
use crate::run::request;
use crate::spec::Step;
use crate::text::Untrusted;

/// By how much the clocks of a forge and of a service's host may differ.
const CLOCKS: SignedDuration = SignedDuration::from_mins(10);

/// How far a report is to be believed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// It is this job's own.
    Own,
    /// A service signed it, and everything agrees that was to be compared.
    Signed {
        /// The host's name for itself.
        host: String,
        /// The key's id, hex.
        key_id: String,
        /// The artifact's digest was compared.
        artifact: bool,
    },
    /// It is not to be believed, for these reasons.
    Unverified(Vec<String>),
}

impl Standing {
    /// The word used in `publish.json`.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Standing::Own => "own",
            Standing::Signed { .. } => "signed",
            Standing::Unverified(_) => "unverified",
        }
    }

    /// Whether success may be shown.
    #[must_use]
    pub const fn is_believed(&self) -> bool {
        !matches!(self, Standing::Unverified(_))
    }
}

/// What a report from another job is compared with.
#[derive(Debug, Clone, Default)]
pub struct Expected {
    /// The steps of the step file given, as selected; `None` if none was given.
    pub steps: Option<Vec<Step>>,
    /// SHA-256 of the artifact given, lowercase hex.
    pub artifact: Option<String>,
}

/// Weighs a report that came out of another job.
#[must_use]
pub fn weigh(report: &ReportV1, proof: &Proof, expected: &Expected, context: Option<&Context>) -> Standing {
    let mut reasons = Vec::new();
    if let Err(why) = &proof.signature {
        reasons.push(why.clone());
    }
    if let Some(first) = proof.faults.first() {
        let more = match proof.faults.len() {
            1 => String::new(),
            n => format!(" (and {} more)", n - 1),
        };
        reasons.push(format!("it does not hold together: {first}{more}"));
    }
    reasons.extend(steps(report, expected));
    reasons.extend(artifact(report, expected));
    reasons.extend(place(report, context));
    match &proof.signature {
        Ok(signature) if reasons.is_empty() => Standing::Signed {
            host: signature.host.clone(),
            key_id: signature.key_id.clone(),
            artifact: expected.artifact.is_some(),
        },
        _ => Standing::Unverified(reasons),
    }
}

/// Why the steps are not those that were asked for. The digest covers all of a step; what the report shows of it names the
/// difference where it can.
fn steps(report: &ReportV1, expected: &Expected) -> Option<String> {
    let Some(steps) = &expected.steps else {
        return Some("no step file to compare its steps with (--spec)".to_owned());
    };
    if request::digest_of(steps, report.policy.sha256.as_deref()) == report.digests.request_sha256 {
        return None;
    }
    if steps.len() != report.steps.len() {
        return Some(format!("the step file has {} steps, and it has {}", steps.len(), report.steps.len()));
    }
    for (asked, ran) in steps.iter().zip(&report.steps) {
        let pairs = [
            ("name", asked.name.clone(), ran.name.clone()),
            ("command", asked.command.to_string(), ran.command.clone()),
            ("floor", asked.floor().to_string(), ran.isolation.floor.to_string()),
        ];
        if let Some((what, asked, ran)) = pairs.iter().find(|(_, asked, ran)| asked != ran) {
            let (asked, ran) = (Untrusted::new(asked).for_terminal(80), Untrusted::new(ran).for_terminal(80));
            return Some(format!("the {what} of a step is \"{ran}\", and the step file has \"{asked}\""));
        }
    }
    let unseen = "in something that it does not show (such as environment, limits or mounts)";
    Some(format!("its steps differ from those of the step file, {unseen}"))
}

/// Why the artifact is not the one that was to be tested.
fn artifact(report: &ReportV1, expected: &Expected) -> Option<String> {
    let wanted = expected.artifact.as_ref()?;
    let tested: Vec<&str> =
        report.steps.iter().map(|s| s.artifact.as_ref().map_or("", |a| a.sha256.as_str())).collect();
    match tested.iter().find(|sha256| *sha256 != wanted) {
        None if !tested.is_empty() => None,
        Some(&other) if !other.is_empty() => {
            let other = Untrusted::new(other).for_terminal(64);
            Some(format!("it is about the artifact with the SHA-256 {other}, and the one given has {wanted}"))
        }
        _ => Some("it names no artifact".to_owned()),
    }
}

/// Why it is about something else than what is published about. The job claims its commit; that it claims another one
/// is a mix-up or a lie. The times are the service's own.
fn place(report: &ReportV1, context: Option<&Context>) -> Vec<String> {
    let Some(context) = context else { return vec!["there is no CI job to compare it with".to_owned()] };
    let mut reasons = Vec::new();
    let ci = report.ci.as_ref();
    if ci.and_then(|c| c.head_sha.as_ref()) != context.head_sha.as_ref() {
        reasons.push("it is about another commit".to_owned());
    }
    if ci.and_then(|c| c.repository.as_ref()) != context.repository.as_ref() {
        reasons.push("it is about another repository".to_owned());
    }
    let began: Option<Timestamp> = context.producer.as_ref().and_then(|p| p.started);
    if began.is_some_and(|began| report.started_at < began - CLOCKS) {
        reasons.push("it is older than the run that it came out of".to_owned());
    }
    reasons
}
