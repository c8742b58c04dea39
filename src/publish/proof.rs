//! Who vouches for a report of another job: its signature, and whether it holds together.
//!
//! The one place where publishing meets `report::sign` and `report::verify`.

use std::path::Path;

use crate::report::json_v1::ReportV1;
pub use crate::report::sign::PublicKey;
use crate::report::sign::REPORT_DSSE;
use crate::report::verify::{self, Provenance};

/// A signature that was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// The host's name for itself.
    pub host: String,
    /// The key's id, hex.
    pub key_id: String,
}

/// What is known of a report's origin.
#[derive(Debug, Clone)]
pub struct Proof {
    /// Who signed it; or why that does not show.
    pub signature: Result<Signature, String>,
    /// What else does not agree in it.
    pub faults: Vec<String>,
    /// What was looked at, if it could be read. With a signature and without faults it is what was signed.
    pub record: Option<ReportV1>,
}

impl Proof {
    /// Looks at the report in a directory.
    #[must_use]
    pub fn of(directory: &Path, keys: &[PublicKey]) -> Self {
        let looked = if keys.is_empty() {
            verify::verify(directory, None)
        } else {
            verify::verify_signed(directory, None, keys)
        };
        let verified = match looked {
            Ok(verified) => verified,
            Err(error) => {
                let signature = Err("no signature could be looked for".to_owned());
                return Self { signature, faults: vec![crate::text::chain(&error)], record: None };
            }
        };
        let (about_signature, faults): (Vec<_>, Vec<_>) =
            verified.faults.into_iter().partition(|fault| fault.place == REPORT_DSSE);
        let signature = match verified.provenance {
            _ if keys.is_empty() => Err("there is no key to check a signature with (--key)".to_owned()),
            Provenance::Proven { signer, .. } if about_signature.is_empty() => {
                Ok(Signature { host: signer.host, key_id: signer.key_id })
            }
            _ => Err(match about_signature.first() {
                Some(fault) => format!("no service signed it with a key that was given: {fault}"),
                None => "no service signed it with a key that was given".to_owned(),
            }),
        };
        Self { signature, faults: faults.iter().map(ToString::to_string).collect(), record: verified.report }
    }
}
