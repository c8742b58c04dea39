//! The files of a result as they come in: each under a name that may be there, beneath one of two directories.
//!
//! The service is root's, and its names are checked all the same: what is written here is written with the caller's
//! rights, into a workspace.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, mkdirat};
use rustix::io::Errno;

use super::protocol::{self, Tree};
use crate::artifact::beneath::{DIRECTORY, confined};
use crate::report::json_v1::{ReadError, ReportV1};
use crate::report::sign::REPORT_DSSE;
use crate::report::write::{JUNIT_XML, REPORT_HTML, REPORT_JSON, SUMMARY_MD, is_step_directory};

/// Most files of a result.
const MAX_FILES: usize = 1_000_000;
/// Deepest path.
const MAX_DEPTH: usize = 70;

/// Why a result is not one.
#[derive(Debug, thiserror::Error)]
pub enum ReceiptError {
    /// A file that no result has.
    #[error("the service sent a file of a name that no result has")]
    Name,
    /// Bytes that no file is for, or a file that ends early.
    #[error("the service sent a file's bytes out of order")]
    Order,
    /// Too many.
    #[error("the service sent too many files")]
    Many,
    /// Writing it.
    #[error("failed to write what the service sent")]
    Io(#[from] io::Error),
    /// The record.
    #[error("the service's report can't be read")]
    Record(#[from] ReadError),
}

/// The files of a result, being received.
#[derive(Debug)]
pub struct Receipt {
    report: PathBuf,
    outputs: PathBuf,
    current: Option<(File, u64)>,
    files: usize,
}

impl Receipt {
    /// Into these directories, which exist.
    #[must_use]
    pub const fn new(report: PathBuf, outputs: PathBuf) -> Self {
        Self { report, outputs, current: None, files: 0 }
    }

    /// A file begins.
    ///
    /// # Errors
    /// As [`ReceiptError`] says.
    pub fn begin(&mut self, file: &protocol::File) -> Result<(), ReceiptError> {
        self.end()?;
        self.files += 1;
        if self.files > MAX_FILES {
            return Err(ReceiptError::Many);
        }
        let parts = checked(file.tree, &file.path).ok_or(ReceiptError::Name)?;
        let root = match file.tree {
            Tree::Report => &self.report,
            Tree::Outputs => &self.outputs,
        };
        self.current = Some((create(root, &parts)?, file.bytes));
        Ok(())
    }

    /// The next bytes of the file.
    ///
    /// # Errors
    /// As [`ReceiptError`] says.
    pub fn data(&mut self, bytes: &[u8]) -> Result<(), ReceiptError> {
        let (file, left) = self.current.as_mut().ok_or(ReceiptError::Order)?;
        *left = left.checked_sub(bytes.len() as u64).ok_or(ReceiptError::Order)?;
        Ok(file.write_all(bytes)?)
    }

    /// The file ends, if there is one.
    ///
    /// # Errors
    /// If it is not whole.
    pub fn end(&mut self) -> Result<(), ReceiptError> {
        match self.current.take() {
            None | Some((_, 0)) => Ok(()),
            Some(_) => Err(ReceiptError::Order),
        }
    }

    /// The record that came.
    ///
    /// # Errors
    /// If there is none, or it can't be read.
    pub fn report(&self, directory: &Path) -> Result<ReportV1, ReceiptError> {
        Ok(ReportV1::read(&std::fs::read(directory.join(REPORT_JSON))?)?)
    }
}

/// The components of a path that a result may have.
fn checked(tree: Tree, path: &str) -> Option<Vec<&str>> {
    let parts: Vec<&str> = path.split('/').collect();
    let storable = |part: &&str| {
        !part.is_empty() && part.len() <= 255 && !matches!(*part, "." | "..") && !part.chars().any(char::is_control)
    };
    if parts.len() > MAX_DEPTH || !parts.iter().all(storable) {
        return None;
    }
    let fits = match (tree, parts.as_slice()) {
        (Tree::Report, [name]) => [REPORT_JSON, REPORT_DSSE, JUNIT_XML, SUMMARY_MD, REPORT_HTML].contains(name),
        (Tree::Report, ["steps", step, log]) => {
            is_step_directory(step.as_ref()) && matches!(*log, "stdout.log" | "stderr.log")
        }
        (Tree::Report, _) => false,
        (Tree::Outputs, [step, _, ..]) => is_step_directory(step.as_ref()),
        (Tree::Outputs, _) => false,
    };
    fits.then_some(parts)
}

/// A new file beneath a directory, through no link.
fn create(root: &Path, parts: &[&str]) -> io::Result<File> {
    let mut at: OwnedFd = File::open(root)?.into();
    let Some((name, above)) = parts.split_last() else { return Err(io::ErrorKind::InvalidInput.into()) };
    for part in above {
        match mkdirat(&at, *part, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(e.into()),
        }
        at = confined(std::os::fd::AsFd::as_fd(&at), *part, DIRECTORY, Mode::empty())?;
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(confined(std::os::fd::AsFd::as_fd(&at), *name, flags, Mode::from_raw_mode(0o644))?.into())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn file(tree: Tree, path: &str, bytes: u64) -> protocol::File {
        protocol::File { tree, path: path.to_owned(), bytes }
    }

    #[test]
    fn files_of_a_result_are_written_and_others_are_not() {
        let (report, outputs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut receipt = Receipt::new(report.path().into(), outputs.path().into());
        for (tree, path) in [
            (Tree::Report, "report.json"),
            (Tree::Report, "steps/01-x/stdout.log"),
            (Tree::Outputs, "01-x/deep/er/file.txt"),
        ] {
            receipt.begin(&file(tree, path, 4)).unwrap();
            receipt.data(b"ab").unwrap();
            receipt.data(b"cd").unwrap();
        }
        receipt.end().unwrap();
        assert_eq!(fs::read_to_string(outputs.path().join("01-x/deep/er/file.txt")).unwrap(), "abcd");
        assert_eq!(fs::read_to_string(report.path().join("steps/01-x/stdout.log")).unwrap(), "abcd");
        for (tree, path) in [
            (Tree::Report, "../x"),
            (Tree::Report, "/etc/passwd"),
            (Tree::Report, "steps/01-x/run.sh"),
            (Tree::Report, "steps/../report.json"),
            (Tree::Report, ".gitignore"),
            (Tree::Outputs, "01-x"),
            (Tree::Outputs, "x/file"),
            (Tree::Outputs, "01-x/../../file"),
            (Tree::Outputs, "01-x//file"),
            (Tree::Outputs, "01-x/a\nb"),
            (Tree::Outputs, ""),
        ] {
            assert!(matches!(receipt.begin(&file(tree, path, 0)), Err(ReceiptError::Name)), "{path}");
        }
    }

    #[test]
    fn a_file_is_what_was_announced_and_is_written_once() {
        let (report, outputs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut receipt = Receipt::new(report.path().into(), outputs.path().into());
        assert!(matches!(receipt.data(b"x"), Err(ReceiptError::Order)));
        receipt.begin(&file(Tree::Report, "junit.xml", 1)).unwrap();
        assert!(matches!(receipt.data(b"xy"), Err(ReceiptError::Order)));
        assert!(matches!(receipt.end(), Err(ReceiptError::Order)), "cut short");
        assert!(matches!(receipt.begin(&file(Tree::Report, "junit.xml", 1)), Err(ReceiptError::Io(_))));
        std::os::unix::fs::symlink("/tmp", outputs.path().join("01-x")).unwrap();
        assert!(matches!(receipt.begin(&file(Tree::Outputs, "01-x/f", 1)), Err(ReceiptError::Io(_))));
        assert!(matches!(receipt.report(report.path()), Err(ReceiptError::Io(_))));
    }
}
