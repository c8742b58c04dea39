//! Images in files: an OCI image layout, and what `docker save` wrote.
//!
//! Main function: [`open`]. It finds the one image that is meant, checks its documents against their digests, and says where
//! its layers lie ([`Opened`]); they are applied elsewhere, in the jail ([`crate::artifact::layers`]). Files of a layout are
//! opened beneath its directory and never through a link, since it may come with the pull request.

mod archive;
pub mod document;
mod layout;
pub mod registry;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::artifact::layers::{Layer, MAX_LAYERS};
use crate::artifact::{Digest, Error as ArtifactError};
use document::Facts;

/// An image that is known and not unpacked.
#[derive(Debug)]
pub struct Opened {
    /// Of its manifest; of its configuration (Docker's image id) for what `docker save` wrote, which has no manifest.
    pub digest: Digest,
    /// Of the index that led there, where one did.
    pub index: Option<Digest>,
    /// How it wants to be run.
    pub facts: Facts,
    /// What its layers lie in.
    pub files: Vec<File>,
    /// From the lowest to the topmost.
    pub layers: Vec<Layer>,
}

/// Why an image can't be used.
#[derive(Debug, thiserror::Error)]
pub enum OciError {
    /// Something is not there or can't be read.
    #[error("failed to read {path}")]
    Io {
        /// What.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is no image of this kind.
    #[error("{path} is no image layout: {why}")]
    Layout {
        /// The directory.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// A document can't be used.
    #[error("{name}: {why}")]
    Document {
        /// Its digest or name.
        name: String,
        /// Why.
        why: String,
    },
    /// A blob is not what its digest or size says.
    #[error("the blob sha256:{digest} {why}")]
    Blob {
        /// The digest it should have.
        digest: Digest,
        /// How.
        why: String,
    },
    /// None, or several, of the images in there are meant.
    #[error("{why}; there {}", are(.choices))]
    Choice {
        /// What was looked for.
        why: String,
        /// What is there.
        choices: Vec<String>,
    },
    /// It is not the image that the step names.
    #[error("the image's digest is sha256:{found}, not sha256:{expected}")]
    Digest {
        /// The step's.
        expected: Digest,
        /// The image's.
        found: Digest,
    },
    /// The archive around it is refused.
    #[error("the archive can't be read")]
    Archive(#[source] ArtifactError),
}

fn are(choices: &[String]) -> String {
    match choices {
        [] => "is none".to_owned(),
        [one] => format!("is {one}"),
        some => format!("are {}", some.join(", ")),
    }
}

impl OciError {
    /// What to do about it, in one line.
    #[must_use]
    pub const fn help(&self) -> &'static str {
        match self {
            OciError::Io { .. } | OciError::Layout { .. } => {
                "name the directory of an OCI image layout (`skopeo copy … oci:DIR:TAG`), or the file that `docker save` wrote"
            }
            OciError::Choice { .. } => "name one: `oci-layout:PATH:TAG`; build it for this machine",
            OciError::Digest { .. } => "correct `sandbox.image-digest`, or bring the image that it names",
            OciError::Document { .. } | OciError::Blob { .. } | OciError::Archive(_) => {
                "the image is damaged or not built for this machine: build or copy it again"
            }
        }
    }
}

/// Opens a layout's image of that tag (the only one, without), and compares its digest.
///
/// # Errors
/// As [`OciError`] says.
pub fn open_layout(path: &Path, tag: Option<&str>, expected: Option<Digest>) -> Result<Opened, OciError> {
    check(layout::open(path, tag)?, expected)
}

/// Opens the image in what `docker save` wrote, and compares its digest.
///
/// # Errors
/// As [`OciError`] says.
pub fn open_archive(path: &Path, expected: Option<Digest>) -> Result<Opened, OciError> {
    check(archive::open(path)?, expected)
}

fn check(opened: Opened, expected: Option<Digest>) -> Result<Opened, OciError> {
    match expected {
        // A registry shows an index's digest, which pins the manifest as well.
        Some(expected) if expected != opened.digest && Some(expected) != opened.index => {
            Err(OciError::Digest { expected, found: opened.digest })
        }
        _ => Ok(opened),
    }
}

/// As many layers as digests of their tars, and not too many.
fn count(name: &str, layers: usize, diff_ids: usize) -> Result<(), OciError> {
    let why = if layers != diff_ids {
        format!("{layers} layers, but {diff_ids} digests of their content")
    } else if layers > MAX_LAYERS {
        format!("{layers} layers, where {MAX_LAYERS} are allowed")
    } else {
        return Ok(());
    };
    Err(OciError::Document { name: name.to_owned(), why })
}

#[cfg(test)]
pub(crate) mod tests;
