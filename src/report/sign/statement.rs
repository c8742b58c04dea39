//! The statement: what is signed of a report.
//!
//! An in-toto statement v1 says of *subjects*, known by their digests, that a *predicate* holds. Here the subjects are
//! `report.json` itself, and each step's artifact and outputs; the predicate is the report with a list of what in it the
//! service has only been told. A run that was refused before any artifact was read has the report as its only subject: the
//! statement is about that and nothing else.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::report::json_v1::{ReadError, ReportV1};
use crate::report::write::REPORT_JSON;
use crate::report::{ReportOrigin, canonical};

/// The value of `_type`.
pub const STATEMENT_TYPE: &str = "https://in-toto.io/Statement/v1";
/// The value of `predicateType`.
pub const PREDICATE_TYPE: &str = "https://github.com/plimsoll-ci/plimsoll/attestation/boundary-report/v1";
/// Format of an artifact whose digest is that of a listing.
const DIRECTORY: &str = "directory";

/// An in-toto statement about a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Statement {
    /// Always [`STATEMENT_TYPE`].
    #[serde(rename = "_type")]
    pub kind: String,
    /// The record, then for each step its artifact and its outputs.
    pub subject: Vec<Subject>,
    /// Always [`PREDICATE_TYPE`].
    #[serde(rename = "predicateType")]
    pub predicate_type: String,
    /// What is said of them.
    pub predicate: Predicate,
}

/// Something that the statement is about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Subject {
    /// `report.json`; `steps/1/artifact`, or `steps/1/artifact.listing` where the digest is of a directory's listing;
    /// `steps/1/outputs/PATH`. The number is the step's index.
    pub name: String,
    /// Its digest.
    pub digest: DigestSet,
}

/// The digests of a subject; one is enough.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DigestSet {
    /// SHA-256, lowercase hex.
    pub sha256: String,
}

/// What a host's service says of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "plimsoll boundary report attestation v1")]
pub struct Predicate {
    /// The boundary report.
    pub report: ReportV1,
    /// The same report as a file, byte for byte.
    pub report_json: ReportFile,
    /// JSON pointers (RFC 6901) into `report`, sorted: what the client merely claims. All else the service saw or did itself.
    pub claimed: Vec<String>,
    /// Who signs.
    pub signer: Signer,
}

/// `report.json` as it lies in the report directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReportFile {
    /// Size, bytes.
    pub bytes: u64,
    /// SHA-256, lowercase hex.
    pub sha256: String,
}

/// Who signs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Signer {
    /// SHA-256 of the public key as SubjectPublicKeyInfo in DER, lowercase hex.
    pub key_id: String,
    /// The host's own name for itself.
    pub host: String,
}

/// Why a report can't be signed.
#[derive(Debug, thiserror::Error)]
pub enum SignError {
    /// It can't be read.
    #[error("failed to sign the report")]
    Read(#[from] ReadError),
    /// It does not say that a service made it.
    #[error("failed to sign the report: its origin is not `service`")]
    Origin,
    /// Something does not fit.
    #[error("failed to sign the report: {0}")]
    Unfit(String),
    /// It can't be serialised.
    #[error("failed to serialise the statement")]
    Serialise(#[source] serde_json::Error),
}

/// What a client can only have told the service: the CI context, the names of steps and of where artifacts came from.
#[must_use]
pub fn claims(report: &ReportV1) -> Vec<String> {
    let mut claims = vec!["/ci".to_owned()];
    for (i, step) in report.steps.iter().enumerate() {
        claims.push(format!("/steps/{i}/name"));
        if step.artifact.is_some() {
            claims.push(format!("/steps/{i}/artifact/source"));
        }
    }
    claims.sort();
    claims
}

impl Predicate {
    /// The JSON Schema of the predicate.
    #[must_use]
    pub fn json_schema() -> Value {
        let mut schema = schemars::schema_for!(Predicate).to_value();
        schema["$defs"]["ReportV1"]["properties"]["schema"]["const"] = crate::report::json_v1::SCHEMA.into();
        schema
    }
}

impl Statement {
    /// The statement about a report as it is on disk.
    pub(super) fn about(report_json: &[u8], claimed: &[String], signer: Signer) -> Result<Self, SignError> {
        let report = ReportV1::read(report_json)?;
        let report_json =
            ReportFile { bytes: report_json.len() as u64, sha256: hex::encode(Sha256::digest(report_json)) };
        let claimed: BTreeSet<&String> = claimed.iter().collect();
        let statement = Self {
            kind: STATEMENT_TYPE.to_owned(),
            subject: subjects(&report, &report_json.sha256),
            predicate_type: PREDICATE_TYPE.to_owned(),
            predicate: Predicate { report, report_json, claimed: claimed.into_iter().cloned().collect(), signer },
        };
        if statement.predicate.report.origin != ReportOrigin::Service {
            return Err(SignError::Origin);
        }
        statement.check().map_err(SignError::Unfit)?;
        Ok(statement)
    }

    /// Its canonical bytes.
    pub(super) fn payload(&self) -> Result<Vec<u8>, SignError> {
        serde_json::to_value(self).map(|value| canonical::canonical(&value)).map_err(SignError::Serialise)
    }

    /// Reads what somebody else wrote. It has to be in canonical form, so nothing in it goes unread.
    pub(super) fn read(payload: &[u8]) -> Result<Self, String> {
        let statement: Self = serde_json::from_slice(payload).map_err(|e| e.to_string())?;
        if statement.payload().ok().as_deref() != Some(payload) {
            return Err("it is not in canonical form, or has members that this version does not know".to_owned());
        }
        statement.check()?;
        Ok(statement)
    }

    /// Whether it holds together.
    fn check(&self) -> Result<(), String> {
        let predicate = &self.predicate;
        let require = |holds: bool, what: &str| if holds { Ok(()) } else { Err(what.to_owned()) };
        require(self.kind == STATEMENT_TYPE, "it is no in-toto statement v1")?;
        require(self.predicate_type == PREDICATE_TYPE, "its predicate is of another type")?;
        require(predicate.report.schema == crate::report::json_v1::SCHEMA, "its report is of another schema")?;
        require(predicate.report.origin == ReportOrigin::Service, "its report's origin is not `service`")?;
        let expected = subjects(&predicate.report, &predicate.report_json.sha256);
        require(self.subject == expected, "its subjects are not those of the report")?;
        for subject in &self.subject {
            let sha256 = &subject.digest.sha256;
            let hex = sha256.len() == 64 && sha256.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
            require(hex, &format!("the digest of `{}` is no SHA-256 in lowercase hex", subject.name))?;
        }
        let names: BTreeSet<&String> = self.subject.iter().map(|s| &s.name).collect();
        require(names.len() == self.subject.len(), "two of its subjects have one name")?;
        let report = serde_json::to_value(&predicate.report).map_err(|e| e.to_string())?;
        for pointer in &predicate.claimed {
            require(points(&report, pointer), &format!("`{pointer}` points at nothing in the report"))?;
        }
        let sorted = predicate.claimed.windows(2).all(|pair| pair[0] < pair[1]);
        require(sorted, "the list of what is claimed is not sorted")
    }
}

/// Whether a pointer leads to something. The empty one is the whole report, which nobody claims.
fn points(report: &Value, pointer: &str) -> bool {
    !pointer.is_empty() && report.pointer(pointer).is_some()
}

/// What a statement about this report is about.
fn subjects(report: &ReportV1, report_sha256: &str) -> Vec<Subject> {
    let subject = |name: String, sha256: &str| Subject { name, digest: DigestSet { sha256: sha256.to_owned() } };
    let mut subjects = vec![subject(REPORT_JSON.to_owned(), report_sha256)];
    for step in &report.steps {
        let index = step.index;
        if let Some(artifact) = &step.artifact {
            let name = if artifact.format == DIRECTORY { "artifact.listing" } else { "artifact" };
            subjects.push(subject(format!("steps/{index}/{name}"), &artifact.sha256));
        }
        for output in &step.outputs {
            subjects.push(subject(format!("steps/{index}/outputs/{}", output.path), &output.sha256));
        }
    }
    subjects
}
