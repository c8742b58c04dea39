//! Who vouches for a report of another job: its signature, and whether it holds together.
//!
//! The one place where publishing meets `report::sign` and `report::verify`.

use std::path::Path;

use crate::report::json_v1::ReportV1;
use crate::report::verify;

/// A public key of a service.
#[derive(Debug, Clone)]
pub struct PublicKey;

/// A key that can't be read.
#[derive(Debug, thiserror::Error)]
#[error("failed to read the key {}: this version checks no signatures", .0.display())]
pub struct KeyError(std::path::PathBuf);

impl PublicKey {
    /// Reads keys.
    ///
    /// # Errors
    /// Always.
    pub fn load(path: &Path) -> Result<Vec<Self>, KeyError> {
        Err(KeyError(path.to_owned()))
    }
}

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
    /// What does not agree in it.
    pub faults: Vec<String>,
    /// What was looked at, if it could be read.
    pub record: Option<ReportV1>,
}

impl Proof {
    /// Looks at the report in a directory.
    #[must_use]
    pub fn of(directory: &Path, keys: &[PublicKey]) -> Self {
        let signature = Err(if keys.is_empty() {
            "there is no key to check a signature with (--key)".to_owned()
        } else {
            "no service signed it".to_owned()
        });
        match verify::verify(directory, None) {
            Ok(verified) => {
                let faults = verified.faults.iter().map(ToString::to_string).collect();
                Self { signature, faults, record: verified.report }
            }
            Err(error) => Self { signature, faults: vec![crate::text::chain(&error)], record: None },
        }
    }
}
