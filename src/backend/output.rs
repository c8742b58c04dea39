//! Where a guest's output goes: capped log files, counted and hashed, and output files under a budget.
//!
//! Every byte here is hostile. Log files hold the first bytes of a stream up to the cap, raw; the rest is counted and
//! dropped, so that memory and disk stay flat whatever a guest prints. Output files are written below a directory
//! descriptor, component by component without following links, as regular files without execute bit, under names that
//! artifact stores accept.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use plimsoll_guest::{OutputBudget, Stream};
use rustix::fs::{Mode, OFlags, ResolveFlags, mkdirat, openat, openat2};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;

/// What artifact stores refuse in a name, and `%` itself so that the encoding can be undone.
const UNSTORABLE: &AsciiSet =
    &CONTROLS.add(b'"').add(b':').add(b'<').add(b'>').add(b'|').add(b'*').add(b'?').add(b'\\').add(b'%');
/// Remarks kept; more are dropped.
const MAX_NOTICES: usize = 64;
/// Longest remark kept, bytes.
const MAX_NOTICE: usize = 1024;

/// One stream, as the report records it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StreamRecord {
    /// Bytes the guest wrote.
    pub bytes: u64,
    /// Bytes kept in the file.
    pub kept: u64,
    /// SHA-256 of everything the guest wrote, lowercase hex.
    pub sha256: String,
    /// SHA-256 of what the file holds, lowercase hex; the same as `sha256` unless something was dropped.
    pub kept_sha256: String,
}

impl StreamRecord {
    /// Whether something was dropped.
    #[must_use]
    pub const fn truncated(&self) -> bool {
        self.kept < self.bytes
    }
}

/// One output file, as the report records it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRecord {
    /// Path below the step's output directory, as stored.
    pub path: String,
    /// Size, bytes.
    pub bytes: u64,
    /// SHA-256, lowercase hex.
    pub sha256: String,
}

/// A piece of output for whoever shows it live.
#[derive(Debug, Clone)]
pub struct Piece {
    /// Which stream.
    pub stream: Stream,
    /// Raw guest bytes.
    pub bytes: Vec<u8>,
}

struct Log {
    file: File,
    cap: u64,
    record: StreamRecord,
    hasher: Sha256,
}

impl Log {
    fn create(path: &Path, cap: u64) -> io::Result<Self> {
        let file = File::create_new(path)?;
        Ok(Self { file, cap, record: StreamRecord::default(), hasher: Sha256::new() })
    }

    /// Keeps what fits; says how many bytes that was.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = usize::try_from(self.cap - self.record.kept).unwrap_or(usize::MAX);
        let (kept, dropped) = bytes.split_at(bytes.len().min(room));
        self.hasher.update(kept);
        if !dropped.is_empty() && self.record.kept_sha256.is_empty() {
            self.record.kept_sha256 = hex::encode(self.hasher.clone().finalize());
        }
        self.hasher.update(dropped);
        self.record.bytes += bytes.len() as u64;
        self.file.write_all(kept)?;
        self.record.kept += kept.len() as u64;
        Ok(kept.len())
    }
}

struct Pending {
    path: String,
    announced: u64,
    file: File,
    bytes: u64,
    hasher: Sha256,
}

/// Everything a guest sends back, being written.
pub struct Output {
    stdout: Log,
    stderr: Log,
    directory: Option<OwnedFd>,
    budget: OutputBudget,
    pending: Option<Pending>,
    files: Vec<FileRecord>,
    notices: Vec<String>,
    live: Option<mpsc::UnboundedSender<Piece>>,
    failure: Option<io::Error>,
}

impl std::fmt::Debug for Output {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Output").field("files", &self.files).finish_non_exhaustive()
    }
}

/// What was written, once the run is over.
#[derive(Debug)]
pub struct Written {
    /// Standard output.
    pub stdout: StreamRecord,
    /// Standard error.
    pub stderr: StreamRecord,
    /// Output files, in the order they came.
    pub files: Vec<FileRecord>,
    /// Remarks: ours about what was left out, and the guest's. Guest-origin text.
    pub notices: Vec<String>,
    /// The host could not write something.
    pub failure: Option<io::Error>,
}

impl Output {
    /// Logs go to `stdout.log` and `stderr.log` in `logs`, which exists; output files below `directory`.
    ///
    /// # Errors
    /// If the log files cannot be created or exist.
    pub fn create(
        logs: &Path,
        directory: Option<OwnedFd>,
        cap: u64,
        budget: OutputBudget,
        live: Option<mpsc::UnboundedSender<Piece>>,
    ) -> io::Result<Self> {
        Ok(Self {
            stdout: Log::create(&logs.join("stdout.log"), cap)?,
            stderr: Log::create(&logs.join("stderr.log"), cap)?,
            directory,
            budget,
            pending: None,
            files: Vec::new(),
            notices: Vec::new(),
            live,
            failure: None,
        })
    }

    /// A piece of output. What is kept is also shown live; the cap bounds what can wait there.
    pub fn stream(&mut self, stream: Stream, bytes: &[u8]) {
        let log = match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        };
        match log.write(bytes) {
            Ok(0) => {}
            Ok(kept) => {
                if let Some(live) = &self.live {
                    let _ = live.send(Piece { stream, bytes: bytes[..kept].to_vec() });
                }
            }
            Err(e) => self.failure = Some(e),
        }
    }

    /// A file begins. A name or size that does not fit is noted and its content dropped.
    pub fn file_begin(&mut self, path: &str, bytes: u64) {
        self.file_end();
        let Some(directory) = &self.directory else {
            return self.notice("an output file was sent though none was asked for".to_owned());
        };
        let used: u64 = self.files.iter().map(|f| f.bytes).sum();
        if self.files.len() as u64 >= self.budget.files {
            return self.notice(format!("output {path:?} left out: more than {} files", self.budget.files));
        }
        if used.saturating_add(bytes) > self.budget.bytes {
            return self.notice(format!("output {path:?} left out: more than {} bytes in all", self.budget.bytes));
        }
        let stored = match storable(path) {
            Ok(stored) => stored,
            Err(why) => return self.notice(format!("output {path:?} left out: {why}")),
        };
        match create_below(directory, &stored) {
            Ok(file) => {
                self.pending = Some(Pending { path: stored, announced: bytes, file, bytes: 0, hasher: Sha256::new() });
            }
            Err(e) => self.notice(format!("output {path:?} left out: {e}")),
        }
    }

    /// Content of the file begun last; more than was announced is dropped.
    pub fn file_data(&mut self, bytes: &[u8]) {
        let Some(pending) = &mut self.pending else { return };
        let room = usize::try_from(pending.announced - pending.bytes).unwrap_or(usize::MAX);
        let kept = &bytes[..bytes.len().min(room)];
        pending.hasher.update(kept);
        pending.bytes += kept.len() as u64;
        if let Err(e) = pending.file.write_all(kept) {
            self.failure = Some(e);
            self.pending = None;
        }
    }

    /// The file begun last is complete.
    pub fn file_end(&mut self) {
        let Some(pending) = self.pending.take() else { return };
        if pending.bytes != pending.announced {
            self.notice(format!(
                "output {:?} has {} of the {} bytes it announced",
                pending.path, pending.bytes, pending.announced
            ));
        }
        let sha256 = hex::encode(pending.hasher.finalize());
        self.files.push(FileRecord { path: pending.path, bytes: pending.bytes, sha256 });
    }

    /// A remark, bounded.
    pub fn notice(&mut self, mut text: String) {
        if self.notices.len() < MAX_NOTICES {
            let end = (0..=MAX_NOTICE.min(text.len())).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
            text.truncate(end);
            self.notices.push(text);
        }
    }

    /// Ends writing.
    #[must_use]
    pub fn finish(mut self) -> Written {
        self.file_end();
        let record = |log: Log| {
            let sha256 = hex::encode(log.hasher.finalize());
            let kept_sha256 = if log.record.kept_sha256.is_empty() { sha256.clone() } else { log.record.kept_sha256 };
            StreamRecord { sha256, kept_sha256, ..log.record }
        };
        Written {
            stdout: record(self.stdout),
            stderr: record(self.stderr),
            files: self.files,
            notices: self.notices,
            failure: self.failure,
        }
    }
}

/// A guest's path as a relative path of plain components that artifact stores accept.
fn storable(path: &str) -> Result<String, &'static str> {
    let components: Vec<&str> = path.split('/').collect();
    if path.len() > 1024 || components.len() > 32 {
        return Err("the path is too long or too deep");
    }
    if components.iter().any(|c| c.is_empty() || *c == "." || *c == "..") {
        return Err("the path is not a plain relative one");
    }
    let encode = |c: &&str| {
        let encoded = utf8_percent_encode(c, UNSTORABLE).to_string();
        // A trailing dot or space is lost on other systems.
        match encoded.strip_suffix(['.', ' ']) {
            Some(rest) => format!("{rest}{}", if encoded.ends_with('.') { "%2E" } else { "%20" }),
            None => encoded,
        }
    };
    let encoded: Vec<String> = components.iter().map(encode).collect();
    if encoded.iter().any(|c| c.len() > 255) {
        return Err("a name is longer than 255 bytes");
    }
    Ok(encoded.join("/"))
}

/// Creates a new regular file below `directory`, with the directories it needs; follows no link anywhere.
fn create_below(directory: &OwnedFd, path: &str) -> io::Result<File> {
    let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let (parents, name) = path.rsplit_once('/').map_or((None, path), |(p, n)| (Some(p), n));
    let mut at = directory.try_clone()?;
    for component in parents.into_iter().flat_map(|p| p.split('/')) {
        match mkdirat(&at, component, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(e) => return Err(e.into()),
        }
        at = openat2(&at, component, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty(), beneath)?;
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(File::from(openat(&at, name, flags, Mode::from_raw_mode(0o644))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(directory: &Path, cap: u64, budget: OutputBudget) -> Output {
        let fd = OwnedFd::from(File::open(directory).unwrap());
        let logs = directory.join("logs");
        std::fs::create_dir(&logs).unwrap();
        Output::create(&logs, Some(fd), cap, budget, None).unwrap()
    }

    const BUDGET: OutputBudget = OutputBudget { files: 3, bytes: 100 };

    #[test]
    fn beyond_the_cap_output_is_counted_and_hashed_but_not_kept() {
        let dir = tempfile::tempdir().unwrap();
        let mut out = output(dir.path(), 4, BUDGET);
        out.stream(Stream::Stdout, b"abc");
        out.stream(Stream::Stdout, b"def");
        let written = out.finish();
        assert_eq!((written.stdout.bytes, written.stdout.kept), (6, 4));
        assert_eq!(written.stdout.sha256, hex::encode(Sha256::digest(b"abcdef")));
        assert_eq!(written.stdout.kept_sha256, hex::encode(Sha256::digest(b"abcd")));
        assert_eq!(written.stderr.kept_sha256, written.stderr.sha256);
        assert!(written.stdout.truncated() && !written.stderr.truncated());
        assert_eq!(std::fs::read(dir.path().join("logs/stdout.log")).unwrap(), b"abcd");
    }

    #[test]
    fn hostile_output_names_stay_below_the_directory() {
        let outer = tempfile::tempdir().unwrap();
        let dir = outer.path().join("in");
        std::fs::create_dir(&dir).unwrap();
        std::os::unix::fs::symlink(outer.path(), dir.join("link")).unwrap();
        let mut out = output(&dir, 4, OutputBudget { files: 100, bytes: 1000 });
        for path in ["../x", "/x", "a/../../x", "link/x", "", ".", "a//b", "logs/stdout.log"] {
            out.file_begin(path, 1);
            out.file_data(b"!");
            out.file_end();
        }
        let written = out.finish();
        assert_eq!(written.files, []);
        assert_eq!(written.notices.len(), 8);
        assert!(!outer.path().join("x").exists());
    }

    #[test]
    fn names_that_artifact_stores_refuse_are_encoded() {
        assert_eq!(storable("a/b:c\"<>|*?\n%.").unwrap(), "a/b%3Ac%22%3C%3E%7C%2A%3F%0A%25%2E");
        assert_eq!(storable("out/report.xml").unwrap(), "out/report.xml");
    }

    #[test]
    fn files_beyond_the_budget_are_left_out_and_noted() {
        let dir = tempfile::tempdir().unwrap();
        let mut out = output(dir.path(), 4, BUDGET);
        for name in ["1", "2", "3", "4"] {
            out.file_begin(name, 40);
            out.file_data(&[b'x'; 50]);
            out.file_end();
        }
        let written = out.finish();
        assert_eq!(
            written.files.iter().map(|f| (f.path.as_str(), f.bytes)).collect::<Vec<_>>(),
            [("1", 40), ("2", 40)]
        );
        assert_eq!(written.notices.len(), 2);
    }
}
