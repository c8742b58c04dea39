//! Excerpts of the guest's logs, for renderings. The bytes are raw and hostile.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use plimsoll_guest::Stream;
use rustix::fs::{CWD, Mode, OFlags, openat};

use super::StepReport;
use super::dir::open_beneath;

/// Where the logs of a report are. The directory may be a stranger's: no link in it is followed.
#[derive(Debug, Clone)]
pub struct Logs {
    root: Option<Arc<OwnedFd>>,
}

impl Logs {
    /// The logs below `root`, a report directory or one being built.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Self { root: openat(CWD, root, flags, Mode::empty()).ok().map(Arc::new) }
    }

    /// The logs below an open directory.
    ///
    /// # Errors
    /// If the runner has no descriptor left.
    pub fn beneath(root: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(Self { root: Some(Arc::new(root.try_clone_to_owned()?)) })
    }

    /// Head and tail of a step's log, about `limit` bytes in all, with a mark where something is left out. Empty if there is
    /// no such log: then the step wrote nothing.
    #[must_use]
    pub fn excerpt(&self, step: &StepReport, stream: Stream, limit: usize) -> Vec<u8> {
        let name = match stream {
            Stream::Stdout => "stdout.log",
            Stream::Stderr => "stderr.log",
        };
        let record = step.result.as_ref().map(|r| match stream {
            Stream::Stdout => &r.stdout,
            Stream::Stderr => &r.stderr,
        });
        let path = format!("steps/{}/{name}", step.directory());
        let opened = self.root.as_ref().and_then(|root| open_beneath(root.as_fd(), &path).ok());
        let mut text = opened.and_then(|(file, size)| excerpt(file, size, limit as u64).ok()).unwrap_or_default();
        if let Some(record) = record.filter(|r| r.truncated()) {
            let dropped = record.bytes - record.kept;
            text.extend_from_slice(
                format!("\n[… {dropped} bytes beyond the output limit were not kept …]\n").as_bytes(),
            );
        }
        text
    }
}

fn excerpt(mut file: File, size: u64, limit: u64) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    if size <= limit {
        file.take(limit).read_to_end(&mut text)?;
        return Ok(text);
    }
    let half = limit / 2;
    (&mut file).take(half).read_to_end(&mut text)?;
    let mut tail = Vec::new();
    file.seek(SeekFrom::Start(size - half))?;
    file.take(half).read_to_end(&mut tail)?;
    // Whole lines where they are not too long.
    if let Some(end) = text.iter().rposition(|&b| b == b'\n').filter(|&end| end > text.len() / 2) {
        text.truncate(end);
    }
    if let Some(end) = tail.iter().position(|&b| b == b'\n').filter(|&end| end < tail.len() / 2) {
        tail.drain(..=end);
    }
    let cut = size - (text.len() + tail.len()) as u64;
    text.extend_from_slice(format!("\n[… {cut} bytes left out here; the whole is in the .log file …]\n").as_bytes());
    text.extend_from_slice(&tail);
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_excerpt_has_head_and_tail_in_whole_lines_and_counts_the_rest() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let whole = (0..10_000).map(|i| format!("line {i}\n")).collect::<String>();
        std::fs::write(&path, &whole).unwrap();
        let cut = |limit| excerpt(File::open(&path).unwrap(), whole.len() as u64, limit).unwrap();
        let text = String::from_utf8(cut(100)).unwrap();
        let (head, rest) = text.split_once("\n[… ").unwrap();
        let (count, tail) = rest.split_once(" bytes left out here; the whole is in the .log file …]\n").unwrap();
        assert!(head.starts_with("line 0\n") && tail.starts_with("line ") && tail.ends_with("line 9999\n"));
        assert_eq!(count.parse::<usize>().unwrap() + head.len() + tail.len(), whole.len());
        assert_eq!(cut(1_000_000), whole.as_bytes());
    }
}
