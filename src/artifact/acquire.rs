//! From a path to an unpacked artifact.
//!
//! Main function: [`acquire`]. The path is opened once; directory or file is decided by what was opened.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rustix::fs::{FileType, Mode, OFlags};

use super::budget::Budget;
use super::digest::Digest;
use super::directory::{self, FileId};
use super::helper::{Running, unpack_in_helper};
use super::rejection::{Error, Rejection, Rule};
use super::tree::Purpose;
use super::unpack::{Request, Summary};

/// What to bring in and on which terms.
#[derive(Debug)]
pub struct Acquire<'a> {
    /// A file or directory of this host. A link is followed: the path is the step's, not the artifact's.
    pub path: &'a Path,
    /// What the tree is for. A directory is always copied as an artifact.
    pub purpose: Purpose,
    /// The digest that it must have.
    pub sha256: Option<Digest>,
    /// The limits.
    pub budget: Budget,
    /// How long unpacking may take.
    pub deadline: Duration,
    /// Directories that a directory artifact doesn't carry, wherever they lie in it: our own report and outputs.
    pub exclude: &'a [FileId],
}

/// Unpacks or copies an artifact into the empty directory `destination`. Blocks; set `cancel` to end it early.
///
/// `start` starts the helper for archives, see [`unpack_in_helper`]; the destination must be writable for the uid that
/// it gets.
///
/// # Errors
/// [`Error::Rejected`] is the artifact's fault, a path that leads nowhere included. The destination is then empty.
pub fn acquire<H: Running>(
    what: &Acquire<'_>,
    destination: BorrowedFd<'_>,
    cancel: &AtomicBool,
    start: impl FnOnce(OwnedFd, BorrowedFd<'_>) -> io::Result<H>,
) -> Result<Summary, Error> {
    let shown = what.path.as_os_str().as_bytes();
    // NONBLOCK: the path may be a FIFO.
    let fd = rustix::fs::open(what.path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()).map_err(
        |error| match error {
            rustix::io::Errno::NOENT => Rejection::new(Rule::Missing, "does not exist"),
            error => Rejection::new(Rule::Unreadable, format!("can't be opened: {}", io::Error::from(error))).at(shown),
        },
    )?;
    let stat = rustix::fs::fstat(&fd).map_err(|e| Error::failed("examine the artifact", e))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => {
            let destination =
                destination.try_clone_to_owned().map_err(|e| Error::failed("duplicate the destination", e))?;
            directory::copy(fd.as_fd(), destination, &what.budget, what.sha256, what.exclude)
        }
        FileType::RegularFile => {
            let file_name = what.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let executable = stat.st_mode & 0o111 != 0;
            let request = Request {
                file_name,
                executable,
                purpose: what.purpose,
                budget: what.budget.clone(),
                sha256: what.sha256,
            };
            unpack_in_helper(&File::from(fd), destination, &request, what.deadline, cancel, start)
        }
        _ => Err(Rejection::new(Rule::Kind, "is neither a file nor a directory").at(shown).into()),
    }
}
