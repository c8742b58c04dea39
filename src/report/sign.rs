//! Signed reports: what a host's service says of a run, in a form that a job can't forge and others can read.
//!
//! The signature stands beside the report, in `report.dsse.json`: a [DSSE v1] envelope around an [in-toto statement v1]
//! whose predicate is the boundary report. [`envelope`] makes it, with a [`SigningKey`] that only root can read; [`open`] checks it
//! against [`PublicKey`]s that somebody trusts and gives the [`Statement`].
//!
//! An envelope comes from an untrusted job. Its size is bounded, its signature is checked before its payload is parsed, and
//! there is one form for each statement: what parses but would be written differently is refused, so no byte of it is
//! without meaning. A signature proves which key made it. Whose key that is, and that only a service holds it, is for whoever
//! hands out the public key to say.
//!
//! [DSSE v1]: https://github.com/secure-systems-lab/dsse/blob/v1.0.2/envelope.md
//! [in-toto statement v1]: https://github.com/in-toto/attestation/blob/v1.1.0/spec/v1/statement.md

mod dsse;
mod key;
mod statement;

pub use dsse::{MAX_BYTES, OpenError, PAYLOAD_TYPE, Unproven, open, read};
pub use key::{KeyError, PublicKey, SigningKey};
pub use statement::{
    DigestSet, PREDICATE_TYPE, Predicate, ReportFile, STATEMENT_TYPE, SignError, Signer, Statement, Subject, claims,
};

/// The file beside `report.json` that holds the envelope.
pub const REPORT_DSSE: &str = "report.dsse.json";

/// Signs a report as it is on disk: gives the content of `report.dsse.json`.
///
/// `claimed` are JSON pointers (RFC 6901) into the report, of what the service has only been told; see [`claims`].
///
/// # Errors
/// If the report is not one of this version's, does not say that it is a service's, or a pointer points at nothing.
pub fn envelope(key: &SigningKey, report_json: &[u8], claimed: &[String]) -> Result<Vec<u8>, SignError> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let signer = Signer { key_id: key.public().id().to_owned(), host };
    let statement = Statement::about(report_json, claimed, signer)?;
    Ok(dsse::seal(key, &statement.payload()?))
}
