//! `publish.json`: what was published where, and what degraded.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat, renameat, unlinkat};
use serde::Serialize;

use super::{Outcome, Publication, Standing, Target};
use crate::report::write::{PUBLISH_JSON, PUBLISH_JSON_NEW};

/// The value of `schema`.
pub const SCHEMA: &str = "plimsoll.publish.v1";
/// What was published where.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Record {
    /// Always [`SCHEMA`].
    pub schema: &'static str,
    /// When, RFC 3339, UTC.
    pub published_at: Timestamp,
    /// How far the report is to be believed: `own`, `signed` or `unverified`.
    pub standing: &'static str,
    /// Why it is not to be believed further.
    pub reasons: Vec<String>,
    /// The targets, in the order in which they were tried.
    pub targets: Vec<Entry>,
}

/// One target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Entry {
    /// Which.
    pub target: Target,
    /// `posted`, `updated`, `unchanged`, `skipped`, `degraded` or `failed`.
    pub outcome: &'static str,
    /// Link to what is there.
    pub url: Option<String>,
    /// Why not, in words.
    pub reason: Option<String>,
}

/// Why the record could not be written.
#[derive(Debug, thiserror::Error)]
#[error("failed to write {PUBLISH_JSON} in {}", path.display())]
pub struct WriteError {
    /// The report directory.
    pub path: PathBuf,
    /// Why.
    #[source]
    pub source: io::Error,
}

impl Record {
    pub(super) fn new(what: &Publication) -> Self {
        let reasons = match &what.standing {
            Standing::Unverified(reasons) => reasons.clone(),
            _ => Vec::new(),
        };
        let standing = what.standing.name();
        Self { schema: SCHEMA, published_at: super::now(), standing, reasons, targets: Vec::new() }
    }

    /// Of publishing that a cancelled job had no more time for.
    #[must_use]
    pub fn cut_short(what: &Publication, targets: &[Target]) -> Self {
        let mut record = Self::new(what);
        for &target in targets {
            record.add(target, Outcome::Failed("the job was cancelled".to_owned()));
        }
        record
    }

    pub(super) fn add(&mut self, target: Target, outcome: Outcome) {
        let (url, reason) = (outcome.url().map(str::to_owned), outcome.reason().map(str::to_owned));
        self.targets.push(Entry { target, outcome: outcome.name(), url, reason });
    }

    /// Whether `--publish-required` is content with it.
    #[must_use]
    pub fn is_fine(&self) -> bool {
        self.targets.iter().all(|entry| !matches!(entry.outcome, "degraded" | "failed"))
    }

    /// Writes it into a report directory, which may be a stranger's: nothing in it is followed or kept.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn write(&self, directory: &Path) -> Result<(), WriteError> {
        let write = || -> io::Result<()> {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let root = openat(CWD, directory, flags, Mode::empty())?;
            let _ = unlinkat(&root, PUBLISH_JSON_NEW, AtFlags::empty());
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let mut file = File::from(openat(&root, PUBLISH_JSON_NEW, flags, Mode::from_raw_mode(0o644))?);
            let text = serde_json::to_string_pretty(self)?;
            file.write_all(format!("{text}\n").as_bytes())?;
            renameat(&root, PUBLISH_JSON_NEW, &root, PUBLISH_JSON)?;
            Ok(())
        };
        write().map_err(|source| WriteError { path: directory.to_owned(), source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let targets = vec![];
        Record { schema: SCHEMA, published_at: super::super::now(), standing: "own", reasons: vec![], targets }
    }

    #[test]
    fn it_replaces_a_link_and_follows_none() {
        let dir = tempfile::tempdir().unwrap();
        let precious = dir.path().join("precious");
        std::fs::write(&precious, "x").unwrap();
        let report = dir.path().join("report");
        std::fs::create_dir(&report).unwrap();
        for name in [PUBLISH_JSON, PUBLISH_JSON_NEW] {
            std::os::unix::fs::symlink(&precious, report.join(name)).unwrap();
        }
        record().write(&report).unwrap();
        assert_eq!(std::fs::read_to_string(&precious).unwrap(), "x");
        let text = std::fs::read_to_string(report.join(PUBLISH_JSON)).unwrap();
        assert!(text.contains("\"plimsoll.publish.v1\""), "{text}");
        assert!(!report.join(PUBLISH_JSON_NEW).exists());
    }

    #[test]
    fn what_degraded_or_failed_is_not_fine() {
        for (outcome, fine) in [
            (Outcome::Posted { url: None }, true),
            (Outcome::Skipped("x".to_owned()), true),
            (Outcome::Degraded("x".to_owned()), false),
            (Outcome::Failed("x".to_owned()), false),
        ] {
            let mut record = record();
            assert_eq!(outcome.is_fine(), fine);
            record.add(Target::GithubStatus, outcome);
            assert_eq!(record.is_fine(), fine);
        }
    }
}
