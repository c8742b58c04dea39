//! Whether the files of a report are those on record: logs, outputs, and nothing beside them.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{FileType, Mode, OFlags, fstat, openat};
use sha2::{Digest, Sha256};

use super::{Check, open_beneath};
use crate::report::dir;
use crate::report::json_v1::{FileV1, ReportV1, StepV1, StreamV1};
use crate::report::write::{
    JUNIT_XML, LATER, OUTPUTS_MARKER, PUBLISH_JSON, REPORT_HTML, REPORT_JSON, REPORT_MARKER, SUMMARY_MD,
    is_step_directory,
};

/// Bytes read of all files together; what is beyond is a fault.
const MAX_READ: u64 = 64 * 1024 * 1024 * 1024;

impl Check {
    /// A step's logs are there as recorded.
    pub(super) fn logs(&mut self, i: usize, step: &StepV1, root: BorrowedFd<'_>) {
        let Some(result) = &step.result else { return };
        for (stream, name) in [(&result.stdout, "stdout"), (&result.stderr, "stderr")] {
            let place = format!("steps[{i}].result.{name}");
            self.require(
                stream.truncated == (stream.kept < stream.bytes) && stream.kept <= stream.bytes,
                &place,
                || format!("truncated is {}, with {} of {} bytes kept", stream.truncated, stream.kept, stream.bytes),
            );
            self.require(stream.truncated || stream.sha256 == stream.kept_sha256, &place, || {
                "nothing was dropped, but the two digests differ".to_owned()
            });
            let parts: Vec<&str> = stream.path.split('/').collect();
            let ours = matches!(parts.as_slice(), ["steps", directory, file]
                if is_step_directory(directory.as_ref()) && directory.starts_with(&format!("{:02}-", step.index)) && *file == format!("{name}.log"));
            if ours {
                self.log(root, stream);
            } else {
                self.fault(place, format!("the path `{}` is not that of a log of this step", stream.path));
            }
        }
    }

    fn log(&mut self, root: BorrowedFd<'_>, stream: &StreamV1) {
        let file = FileV1 { path: stream.path.clone(), bytes: stream.kept, sha256: stream.kept_sha256.clone() };
        self.file(root, &file.path.clone(), &file);
    }

    /// A file has the size and digest on record.
    pub(super) fn file(&mut self, root: BorrowedFd<'_>, path: &str, expected: &FileV1) {
        let (file, size) = match open_beneath(root, path) {
            Ok(opened) => opened,
            Err(e) => return self.fault(path, format!("cannot be read: {e}")),
        };
        if size != expected.bytes {
            return self.fault(path, format!("has {size} bytes, {} are on record", expected.bytes));
        }
        if self.read.saturating_add(size) > MAX_READ {
            return self.fault(path, "is not read: there is too much in this report");
        }
        self.read += size;
        match hash(file, size) {
            Ok(sha256) => {
                self.require(sha256 == expected.sha256, path, || format!("has digest {sha256}, another is on record"))
            }
            Err(e) => self.fault(path, format!("cannot be read: {e}")),
        }
    }

    /// Nothing else lies in the report directory.
    pub(super) fn strangers(&mut self, report: &ReportV1, root: BorrowedFd<'_>) {
        let files = [dir::MARKER, REPORT_JSON, JUNIT_XML, SUMMARY_MD, REPORT_HTML];
        let mut known: BTreeSet<String> = files.iter().chain(&LATER).map(|f| (*f).to_owned()).collect();
        let mut directories: BTreeSet<String> = BTreeSet::new();
        for path in report.steps.iter().filter_map(|s| s.result.as_ref()).flat_map(|r| [&r.stdout.path, &r.stderr.path])
        {
            known.insert(path.clone());
            let mut at = path.as_str();
            while let Some((above, _)) = at.rsplit_once('/') {
                directories.insert(above.to_owned());
                at = above;
            }
        }
        // A step that was not dispatched may have its logs, empty.
        self.walk(root, "", &mut |path, directory, size| {
            let empty_step = || {
                let parts: Vec<&str> = path.split('/').collect();
                match parts.as_slice() {
                    ["steps"] => directory,
                    ["steps", step] => directory && is_step_directory(step.as_ref()),
                    ["steps", step, "stdout.log" | "stderr.log"] => {
                        !directory && size == 0 && is_step_directory(step.as_ref())
                    }
                    _ => false,
                }
            };
            if directory { directories.contains(path) || empty_step() } else { known.contains(path) || empty_step() }
        });
    }

    /// The markers, where they are (artifact stores drop hidden files), say what plimsoll wrote; what was written after the
    /// record can't be compared with anything.
    pub(super) fn markers(&mut self, root: BorrowedFd<'_>, outputs: Option<BorrowedFd<'_>>) {
        let all = [(Some(root), dir::MARKER, REPORT_MARKER), (outputs, "outputs/.gitignore", OUTPUTS_MARKER)];
        for (directory, shown, expected) in all {
            let Some(Ok((file, _))) = directory.map(|directory| open_beneath(directory, dir::MARKER)) else { continue };
            let mut bytes = Vec::new();
            let read = file.take(expected.len() as u64 + 1).read_to_end(&mut bytes);
            self.require(read.is_ok() && bytes == expected.as_bytes(), shown, || "is not plimsoll's".to_owned());
        }
        if open_beneath(root, PUBLISH_JSON).is_ok() {
            self.unchecked.push(format!("{PUBLISH_JSON}: it is written after the report"));
        }
    }

    /// Every listed output is there as recorded, and nothing else.
    pub(super) fn outputs(&mut self, report: &ReportV1, root: BorrowedFd<'_>) {
        let mut known = BTreeSet::from([dir::MARKER.to_owned()]);
        let directories: Vec<String> = match dir::entries(root) {
            Ok(entries) => entries.into_iter().filter_map(|(name, d)| name.into_string().ok().filter(|_| d)).collect(),
            Err(e) => return self.fault("outputs", format!("cannot be listed: {e}")),
        };
        for step in report.steps.iter().filter(|s| !s.outputs.is_empty()) {
            let prefix = format!("{:02}-", step.index);
            let found: Vec<&String> = directories.iter().filter(|d| d.starts_with(&prefix)).collect();
            let [directory] = found.as_slice() else {
                self.fault("outputs", format!("there are {} directories for step {}", found.len(), step.index));
                continue;
            };
            for file in &step.outputs {
                let path = format!("{directory}/{}", file.path);
                self.file(root, &path, file);
                known.insert(path);
            }
        }
        self.walk(root, "", &mut |path, directory, _| directory || known.contains(path));
    }

    /// Calls `known` for everything below; what it doesn't know is a fault.
    fn walk(&mut self, root: BorrowedFd<'_>, at: &str, known: &mut dyn FnMut(&str, bool, u64) -> bool) {
        let entries = match dir::entries(root) {
            Ok(entries) => entries,
            Err(e) => return self.fault(if at.is_empty() { "." } else { at }, format!("cannot be listed: {e}")),
        };
        for (name, directory) in entries {
            let Some(name) = name.to_str() else {
                self.fault(at, format!("holds {name:?}, which the record does not name"));
                continue;
            };
            let path = if at.is_empty() { name.to_owned() } else { format!("{at}/{name}") };
            let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
            let kind = if directory { OFlags::RDONLY | OFlags::DIRECTORY } else { OFlags::PATH };
            let opened = openat(root, name, flags | kind, Mode::empty());
            let stat = opened.as_ref().map_err(|e| *e).and_then(fstat);
            let regular = stat.is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::RegularFile);
            let size = stat.map_or(0, |s| u64::try_from(s.st_size).unwrap_or(0));
            if !(directory || regular) || !known(&path, directory, size) {
                self.fault(path, "is not part of the record");
            } else if directory
                && let Ok(below) = opened
                && path.matches('/').count() < 64
            {
                self.walk(below.as_fd(), &path, known);
            }
        }
    }
}

fn hash(file: File, size: u64) -> io::Result<String> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0u8; 64 * 1024];
    let mut file = file.take(size);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex::encode(hasher.finalize())),
            n => hasher.update(&buffer[..n]),
        }
    }
}
