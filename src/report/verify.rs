//! `plimsoll verify`: checks a report directory against itself, and judges again.
//!
//! The directory comes from somebody who is not trusted. Files are opened beneath it only (`openat2`, no links), have to be
//! regular, and are read within budgets. [`verify`] recomputes every digest, weighs the recorded facts again with the same judge
//! that admits runs ([`evidence::judge`](crate::evidence::judge)), and checks that grades, tiers, verdicts and exit codes follow from one
//! another. A report that passes is *consistent*; who wrote it, that does not show.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::json_v1::{self, ControlV1, FileV1, ReadError, ReportV1, StepV1, StreamV1};
use super::write::{JUNIT_XML, LATER, REPORT_HTML, REPORT_JSON, SUMMARY_MD, is_step_directory};
use super::{ReportOrigin, Verdict, dir};
use crate::evidence::judge::{self, ALWAYS_REQUIRED};
use crate::evidence::{ControlId, Fact, Observation, Status, Tier};
use crate::exit::Exit;
use crate::gate::Dispatched;
use crate::text::Untrusted;

/// Bytes read of all files together; what is beyond is a fault.
const MAX_READ: u64 = 64 * 1024 * 1024 * 1024;
/// Faults listed; more are counted.
const MAX_FAULTS: usize = 200;

/// Something that does not agree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Where: a file, or a place in the record such as `steps[0].isolation`.
    pub place: String,
    /// What is wrong. One line without control characters, though it may quote the report.
    pub what: String,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.place, self.what)
    }
}

/// What came of it.
#[derive(Debug)]
pub struct Verified {
    /// The record, if it could be read at all.
    pub report: Option<ReportV1>,
    /// Everything that does not agree, at most some hundreds; empty if the report is consistent.
    pub faults: Vec<Fault>,
    /// What was not looked at, in words.
    pub unchecked: Vec<String>,
}

impl Verified {
    /// Whether nothing was found.
    #[must_use]
    pub fn consistent(&self) -> bool {
        self.faults.is_empty()
    }

    /// 0, or 15 if a fault was found.
    #[must_use]
    pub fn exit(&self) -> Exit {
        if self.consistent() { Exit::Passed } else { Exit::FaultFound }
    }
}

/// The directory could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("failed to open {path}")]
pub struct VerifyError {
    /// Which.
    pub path: PathBuf,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// Verifies the report in `directory`, and the output files in `outputs` if that is given.
///
/// # Errors
/// If a directory can't be opened. Everything else that is wrong is a fault.
pub fn verify(directory: &Path, outputs: Option<&Path>) -> Result<Verified, VerifyError> {
    let root = open_directory(directory)?;
    let outputs = outputs.map(open_directory).transpose()?;
    let mut check = Check { faults: Vec::new(), dropped: 0, unchecked: Vec::new(), read: 0 };
    let report = check.record(root.as_fd());
    if let Some(report) = &report {
        check.run(report);
        if report.origin == ReportOrigin::Service {
            check.fault(
                "origin".to_owned(),
                "is service, but there is no signature that this version can check".to_owned(),
            );
        }
        for (i, step) in report.steps.iter().enumerate() {
            check.step(i, step);
            check.logs(i, step, root.as_fd());
        }
        check.renderings(report, root.as_fd());
        check.strangers(report, root.as_fd());
        match &outputs {
            Some(outputs) => check.outputs(report, outputs.as_fd()),
            None if report.steps.iter().any(|s| !s.outputs.is_empty()) => {
                check.unchecked.push("output files: no outputs directory was given".to_owned());
            }
            None => {}
        }
        check.unchecked.push("the digest of the request: the request itself is not in the report".to_owned());
    }
    if check.dropped > 0 {
        let what = format!("{} more faults are not listed", check.dropped);
        check.faults.push(Fault { place: REPORT_JSON.to_owned(), what });
    }
    Ok(Verified { report, faults: check.faults, unchecked: check.unchecked })
}

fn open_directory(path: &Path) -> Result<OwnedFd, VerifyError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat(CWD, path, flags, Mode::empty()).map_err(|e| VerifyError { path: path.to_path_buf(), source: e.into() })
}

/// Opens a regular file beneath a directory, through no link.
fn open_beneath(root: BorrowedFd<'_>, path: &str) -> io::Result<(File, u64)> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let fd = openat2(root, path, flags, Mode::empty(), resolve)?;
    let stat = fstat(&fd)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(io::Error::other("is not a regular file"));
    }
    Ok((File::from(fd), u64::try_from(stat.st_size).unwrap_or(0)))
}

struct Check {
    faults: Vec<Fault>,
    dropped: usize,
    unchecked: Vec<String>,
    read: u64,
}

impl Check {
    fn fault(&mut self, place: impl Into<String>, what: impl Into<String>) {
        if self.faults.len() < MAX_FAULTS {
            let place = Untrusted::from(place.into()).for_terminal(200);
            let what = Untrusted::from(what.into()).for_terminal(500);
            self.faults.push(Fault { place, what });
        } else {
            self.dropped += 1;
        }
    }

    fn require(&mut self, holds: bool, place: &str, what: impl FnOnce() -> String) {
        if !holds {
            self.fault(place, what());
        }
    }

    /// Reads the record and recomputes its digests.
    fn record(&mut self, root: BorrowedFd<'_>) -> Option<ReportV1> {
        let bytes = open_beneath(root, REPORT_JSON).and_then(|(file, _)| {
            let mut bytes = Vec::new();
            file.take(json_v1::MAX_BYTES as u64 + 1).read_to_end(&mut bytes)?;
            Ok(bytes)
        });
        let bytes = match bytes {
            Ok(bytes) => bytes,
            Err(e) => {
                self.fault(REPORT_JSON, format!("cannot be read: {e}"));
                return None;
            }
        };
        let report = match ReportV1::read(&bytes) {
            Ok(report) => report,
            Err(ReadError::Shape(e)) => {
                self.fault(REPORT_JSON, format!("is not a {}: {e}", json_v1::SCHEMA));
                return None;
            }
            Err(e) => {
                self.fault(REPORT_JSON, e.to_string());
                return None;
            }
        };
        // Of the bytes, not of what was made of them: a member that a type skips counts too.
        let digest = serde_json::from_slice::<Value>(&bytes).map(json_v1::record_digest).unwrap_or_default();
        self.require(digest == report.digests.record_sha256, "digests.record_sha256", || {
            format!("the record's digest is {digest}")
        });
        let digest = super::canonical::digest(&report.result());
        self.require(digest == report.digests.result_sha256, "digests.result_sha256", || {
            format!("the result's digest is {digest}")
        });
        Some(report)
    }

    /// The run as a whole follows from its steps.
    fn run(&mut self, report: &ReportV1) {
        let nothing = report.steps.iter().all(|s| s.verdict == Verdict::Skipped);
        let skipped = report.exit_code == Exit::Passed && nothing && report.verdict == Verdict::Skipped;
        let expected = Verdict::of(report.exit_code);
        self.require(report.verdict == expected || skipped, "verdict", || {
            format!("is {}, but exit code {} means {expected}", report.verdict, report.exit_code.code())
        });
        self.require(report.verdict != Verdict::Passed || !report.steps.is_empty(), "verdict", || {
            "is passed, but there are no steps".to_owned()
        });
        let of_step = |s: &StepV1| if s.forgiven { Exit::Passed } else { s.exit_code };
        let of_steps = Exit::of_many(report.steps.iter().map(of_step));
        // The run may end worse than its steps (a signal, an internal error), never better.
        self.require(Exit::of_many([of_steps, report.exit_code]) == report.exit_code, "exit_code", || {
            format!("is {}, but the steps come to {}", report.exit_code.code(), of_steps.code())
        });
        let by_steps =
            matches!(report.exit_code, Exit::GuestFailed | Exit::Refused | Exit::Unavailable | Exit::Rejected);
        self.require(!by_steps || report.steps.is_empty() || of_steps == report.exit_code, "exit_code", || {
            format!("is {}, but no step ended so", report.exit_code.code())
        });
        self.require(report.started_at <= report.ended_at, "ended_at", || "is before started_at".to_owned());
        // A selection or a shard keeps the numbers that its steps have in their files.
        let mut before = 0;
        for (i, step) in report.steps.iter().enumerate() {
            self.require(step.index > before, &format!("steps[{i}].index"), || {
                format!("is {}, after {before}", step.index)
            });
            before = step.index;
        }
    }

    /// A step's grades and tier follow from its facts, its verdict from all of it.
    fn step(&mut self, i: usize, step: &StepV1) {
        let at = |place: &str| format!("steps[{i}].{place}");
        let isolation = step.isolation;
        let observations = step.observations();
        self.facts(i, step);

        let all = judge::weigh(&observations);
        let tier = all.tier;
        match isolation.tier {
            Some(recorded) => self.require(recorded == tier, &at("isolation.tier"), || {
                format!("is {recorded}, but the recorded facts prove {tier}")
            }),
            None => self.require(tier == Tier::Process, &at("isolation.tier"), || {
                format!("is absent, but the recorded facts prove {tier}")
            }),
        }
        let proven = isolation.tier.is_some_and(|t| t >= isolation.floor);
        self.require(isolation.proven == proven, &at("isolation.proven"), || format!("should be {proven}"));
        if isolation.tier.is_some() || !step.controls.is_empty() {
            for &id in ControlId::ALL {
                let found: Vec<&ControlV1> = step.controls.iter().filter(|c| c.id == id).collect();
                let [control] = found.as_slice() else {
                    self.fault(at("controls"), format!("{id} is there {} times", found.len()));
                    continue;
                };
                // Without an observation there was nothing to weigh.
                let expected = if isolation.tier.is_some() { all.grades[&id] } else { control.status };
                self.require(control.status == expected, &at(&format!("controls.{id}")), || {
                    format!("is {}, but the recorded facts make it {expected}", control.status)
                });
            }
        }

        self.require(
            step.verdict == Verdict::of(step.exit_code)
                || (step.verdict == Verdict::Skipped && step.exit_code == Exit::Passed),
            &at("verdict"),
            || {
                format!(
                    "is {}, but exit code {} means {}",
                    step.verdict,
                    step.exit_code.code(),
                    Verdict::of(step.exit_code)
                )
            },
        );
        self.require(!step.forgiven || step.exit_code == Exit::GuestFailed, &at("forgiven"), || {
            "only exit code 10 can be forgiven".to_owned()
        });
        if step.dispatched == Dispatched::Yes {
            self.admitted(&at("dispatched"), step, &observations);
        }
        match step.verdict {
            Verdict::Passed => self.passed(&at("verdict"), step, &observations),
            Verdict::Failed => self
                .require(step.dispatched != Dispatched::No, &at("verdict"), || "is failed, but nothing ran".to_owned()),
            Verdict::Refused => self.require(step.refusal.is_some(), &at("refusal"), || "is missing".to_owned()),
            Verdict::Error | Verdict::Cancelled | Verdict::Skipped => {}
        }
        if step.dispatched == Dispatched::No {
            self.require(step.result.is_none() && step.outputs.is_empty(), &at("result"), || {
                "is there, but nothing ran".to_owned()
            });
        }
    }

    /// Each fact stands under its own control, in the words that it has.
    fn facts(&mut self, i: usize, step: &StepV1) {
        for control in &step.controls {
            for observation in &control.observations {
                let place = format!("steps[{i}].controls.{}", control.id);
                self.require(observation.value.control() == control.id, &place, || {
                    format!("has a fact about {}", observation.value.control())
                });
                if let Fact::Executable { sha256, .. } = &observation.value {
                    let known = step.backend.as_ref().is_none_or(|b| b.binaries.iter().any(|b| b.sha256 == *sha256));
                    self.require(known, &place, || {
                        "is about an executable that is not among the backend's binaries".to_owned()
                    });
                }
                self.require(observation.fact == observation.value.words(), &place, || {
                    format!("says `{}` of a value that means `{}`", observation.fact, observation.value.words())
                });
            }
        }
    }

    /// What was dispatched had been admitted: the floor proven and every required control satisfied, by what was seen
    /// before. What was seen later may have lowered a grade since.
    fn admitted(&mut self, place: &str, step: &StepV1, observations: &[Observation]) {
        let later = |o: &Observation| matches!(o.fact, Fact::Changed { .. } | Fact::Leftovers { .. });
        let before: Vec<Observation> = observations.iter().filter(|o| !later(o)).cloned().collect();
        let proven = judge::weigh(&before).tier >= step.isolation.floor;
        self.require(proven, place, || "is yes, but the floor is not proven".to_owned());
        let required: BTreeSet<ControlId> = step.controls.iter().filter(|c| c.required).map(|c| c.id).collect();
        for id in ALWAYS_REQUIRED {
            self.require(required.contains(&id), place, || format!("is yes, but {id} is not marked as required"));
        }
        let changed = |c: &ControlV1| {
            c.observations.iter().any(|o| matches!(o.value, Fact::Changed { .. } | Fact::Leftovers { .. }))
        };
        for control in step.controls.iter().filter(|c| c.required && !changed(c)) {
            // The rows allow a shared namespace, and have been weighed with the tier.
            let by_row = control.id == ControlId::Namespaces && control.status == Status::Partial && proven;
            self.require(judge::satisfies(control.id, control.status) || by_row, place, || {
                format!("is yes, but {} is required and {}", control.id, control.status)
            });
        }
    }

    fn passed(&mut self, place: &str, step: &StepV1, observations: &[Observation]) {
        self.require(step.dispatched == Dispatched::Yes, place, || {
            "is passed, but nothing is known to have run".to_owned()
        });
        match &step.result {
            None => self.fault(place, "is passed, but there is no result"),
            Some(r) => {
                let clean = r.exit_code == Some(0) && r.signal.is_none() && !r.timed_out && r.limit_hit.is_none();
                self.require(clean, place, || "is passed, but the code did not end with exit code 0".to_owned());
            }
        }
        self.require(step.refusal.is_none(), place, || "is passed, but there is a refusal".to_owned());
        let changed = observations.iter().any(|o| matches!(o.fact, Fact::Changed { .. }));
        self.require(!changed, place, || "is passed, but the boundary changed while running".to_owned());
    }

    fn logs(&mut self, i: usize, step: &StepV1, root: BorrowedFd<'_>) {
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
    fn file(&mut self, root: BorrowedFd<'_>, path: &str, expected: &FileV1) {
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

    fn renderings(&mut self, report: &ReportV1, root: BorrowedFd<'_>) {
        let expected = [JUNIT_XML, SUMMARY_MD, REPORT_HTML];
        let recorded: Vec<&str> = report.renderings.iter().map(|f| f.path.as_str()).collect();
        if recorded != expected {
            self.fault("renderings", format!("are {recorded:?}, not {expected:?}"));
        }
        for file in report.renderings.iter().filter(|f| expected.contains(&f.path.as_str())) {
            self.file(root, &file.path, file);
        }
    }

    /// Nothing else lies in the report directory.
    fn strangers(&mut self, report: &ReportV1, root: BorrowedFd<'_>) {
        let files = [".gitignore", REPORT_JSON, JUNIT_XML, SUMMARY_MD, REPORT_HTML];
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

    /// Every listed output is there as recorded, and nothing else.
    fn outputs(&mut self, report: &ReportV1, root: BorrowedFd<'_>) {
        let mut known = BTreeSet::from([".gitignore".to_owned()]);
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
