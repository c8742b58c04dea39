//! The report directory and the outputs directory on disk.
//!
//! [`ReportDir::claim`] comes before anything else in a run: it refuses what isn't ours, and makes an old report invalid, so
//! that no failure later can leave yesterday's success standing. Logs are then written below
//! [`ReportDir::staging`]; [`ReportDir::commit`] renders the rest and swaps the whole directory in. Dropped without a commit, nothing
//! is left under the name but, at most, the emptied old directory.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, mkdirat, openat};
use sha2::{Digest, Sha256};

use super::dir::{Kind, Slot};
use super::json_v1::{FileV1, ReportV1};
use super::staging::Staging;
use super::{Logs, Report, canonical, html, junit, markdown};
use crate::artifact::beneath::DIRECTORY;

pub use super::dir::{ClaimError, Owner};

/// The record.
pub const REPORT_JSON: &str = "report.json";
/// The JUnit rendering.
pub const JUNIT_XML: &str = "junit.xml";
/// The Markdown rendering.
pub const SUMMARY_MD: &str = "summary.md";
/// The page.
pub const REPORT_HTML: &str = "report.html";
/// What was published where.
pub const PUBLISH_JSON: &str = "publish.json";
/// The same while it is being written.
pub const PUBLISH_JSON_NEW: &str = "publish.json.new";
/// Names of what is written after the record, beside it.
pub(super) const LATER: [&str; 3] = [super::sign::REPORT_DSSE, PUBLISH_JSON, PUBLISH_JSON_NEW];

pub(super) const REPORT_MARKER: &str = "# A report directory of plimsoll's. The next run replaces it as a whole.\n*\n";
pub(super) const OUTPUTS_MARKER: &str =
    "# An outputs directory of plimsoll's: untrusted files. The next run replaces it as a whole.\n*\n";

static REPORT: Kind = Kind {
    what: "report directory",
    flag: "--report-dir",
    marker: REPORT_MARKER,
    ours: |name, directory| {
        if directory {
            name == "steps"
        } else {
            [REPORT_JSON, JUNIT_XML, SUMMARY_MD, REPORT_HTML].iter().chain(&LATER).any(|n| name == *n)
        }
    },
    stranger_below: super::dir::stranger_in_steps,
};

static OUTPUTS: Kind = Kind {
    what: "outputs directory",
    flag: "--outputs-dir",
    marker: OUTPUTS_MARKER,
    ours: |name, directory| directory && is_step_directory(name),
    // What guests named.
    stranger_below: |_| None,
};

/// Whether a name is that of a step's directory: `01-unit-tests`.
pub fn is_step_directory(name: &OsStr) -> bool {
    let bytes = name.as_bytes();
    let digits = bytes.iter().take_while(|b| b.is_ascii_digit()).count();
    (2..=10).contains(&digits) && bytes.get(digits) == Some(&b'-') && !bytes[digits + 1..].contains(&b'/')
}

/// Why a report could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// A file of it.
    #[error("failed to write {path}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The record could not be serialised.
    #[error("failed to serialise the report")]
    Record(#[from] serde_json::Error),
    /// The directory could not be put in its place.
    #[error("failed to put {path} in place")]
    Swap {
        /// Where it belongs.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

/// The report directory of a run that is under way.
#[derive(Debug)]
pub struct ReportDir(Slot);

impl ReportDir {
    /// Claims the directory for this process's user; an old report in it is invalid from here on.
    ///
    /// # Errors
    /// If the path is a link, somebody else's, not a report directory, in use by another run, or can't be written.
    pub fn claim(path: &Path) -> Result<Self, ClaimError> {
        Self::claim_for(path, Owner::of_process())
    }

    /// The same, with the files to belong to `owner` in the end.
    ///
    /// # Errors
    /// As [`ReportDir::claim`].
    pub fn claim_for(path: &Path, owner: Owner) -> Result<Self, ClaimError> {
        Slot::claim(path, &REPORT, Some(REPORT_JSON), owner).map(Self)
    }

    /// Where the report will be, absolute.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// The directory being built, absolute. Steps' logs belong below `steps/` in it; see [`ReportDir::step`].
    #[must_use]
    pub fn staging(&self) -> &Path {
        self.0.staging()
    }

    /// The directory being built, to be written down in case this run is killed.
    ///
    /// # Errors
    /// If it can't be looked at.
    pub fn being_built(&self) -> io::Result<Staging> {
        self.0.being_built()
    }

    /// Makes and names the directory for a step's logs; `directory` is [`StepReport::directory`](super::StepReport::directory).
    ///
    /// # Errors
    /// If the name is not a step's, or the directory exists or can't be made.
    pub fn step(&self, directory: &str) -> io::Result<PathBuf> {
        let steps = self.staging().join("steps");
        match std::fs::create_dir(&steps) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        let path = steps.join(checked(directory)?);
        std::fs::create_dir(&path)?;
        Ok(path)
    }

    /// The logs written so far.
    #[must_use]
    pub fn logs(&self) -> Logs {
        Logs::new(self.staging())
    }

    /// Renders the report in every form and swaps the directory in. Gives the record as it was written.
    ///
    /// # Errors
    /// If a file can't be written or the directory not put in place; then no report is left under the name.
    pub fn commit(self, report: &Report) -> Result<ReportV1, WriteError> {
        let logs = self.logs();
        let mut record = ReportV1::from(report);
        for (name, text) in rendered(report, &logs) {
            self.write(name, text.as_bytes())?;
            let sha256 = hex::encode(Sha256::digest(&text));
            record.renderings.push(FileV1 { path: name.to_owned(), bytes: text.len() as u64, sha256 });
        }
        record.seal()?;
        self.write(REPORT_JSON, &canonical::stored(&record)?)?;
        let path = self.path().to_path_buf();
        self.0.swap().map_err(|source| WriteError::Swap { path, source })?;
        Ok(record)
    }

    /// Swaps in a report that somebody else made and that was written to [`ReportDir::staging`] whole.
    ///
    /// # Errors
    /// If the directory can't be put in place; then no report is left under the name.
    pub fn install(self) -> Result<(), WriteError> {
        let path = self.path().to_path_buf();
        self.0.swap().map_err(|source| WriteError::Swap { path, source })
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), WriteError> {
        let path = self.staging().join(name);
        std::fs::write(&path, bytes).map_err(|source| WriteError::File { path, source })
    }
}

/// What is rendered from a report: the file's name and its text, in the order of the record.
pub(super) fn rendered(report: &Report, logs: &Logs) -> [(&'static str, String); 3] {
    [
        (JUNIT_XML, junit::render(report, logs)),
        (SUMMARY_MD, markdown::render(report, logs, markdown::BUDGET)),
        (REPORT_HTML, html::render(report, logs)),
    ]
}

/// The directory for untrusted output files of a run that is under way.
#[derive(Debug)]
pub struct OutputsDir(Slot);

impl OutputsDir {
    /// Claims the directory for this process's user; old outputs in it are removed.
    ///
    /// # Errors
    /// As [`ReportDir::claim`].
    pub fn claim(path: &Path) -> Result<Self, ClaimError> {
        Self::claim_for(path, Owner::of_process())
    }

    /// The same, with the files to belong to `owner` in the end.
    ///
    /// # Errors
    /// As [`ReportDir::claim`].
    pub fn claim_for(path: &Path, owner: Owner) -> Result<Self, ClaimError> {
        Slot::claim(path, &OUTPUTS, None, owner).map(Self)
    }

    /// Where the outputs will be, absolute.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// The directory being built, absolute.
    #[must_use]
    pub fn staging(&self) -> &Path {
        self.0.staging()
    }

    /// As [`ReportDir::being_built`].
    ///
    /// # Errors
    /// If it can't be looked at.
    pub fn being_built(&self) -> io::Result<Staging> {
        self.0.being_built()
    }

    /// Makes and opens the directory for a step's outputs, for [`Output::create`](crate::backend::Output::create).
    ///
    /// # Errors
    /// If the name is not a step's, or the directory exists or can't be made.
    pub fn step(&self, directory: &str) -> io::Result<OwnedFd> {
        let name = checked(directory)?;
        mkdirat(self.0.staging_fd(), name, Mode::from_raw_mode(0o755))?;
        Ok(openat(self.0.staging_fd(), name, DIRECTORY, Mode::empty())?)
    }

    /// Swaps the directory in, if any step has one in it; otherwise there is no such directory afterwards. Says which.
    ///
    /// # Errors
    /// If it can't be put in place.
    pub fn commit(self) -> io::Result<bool> {
        let any = self.0.has_content()?;
        if any {
            self.0.swap()?
        } else {
            self.0.withdraw()?
        }
        Ok(any)
    }
}

fn checked(directory: &str) -> io::Result<&str> {
    if is_step_directory(OsStr::new(directory)) {
        Ok(directory)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{directory:?} is no step's directory")))
    }
}
