//! `plimsoll verify`: checks a report directory against itself, and judges again.
//!
//! The directory comes from somebody who is not trusted. Files are opened beneath it only (`openat2`, no links), have to be
//! regular, and are read within budgets. [`verify`] recomputes every digest, weighs the recorded facts again with the same judge
//! that admits runs ([`evidence::judge`](crate::evidence::judge)), and checks that grades, tiers, verdicts and exit codes follow from one
//! another. What was rendered from the record is rendered again and compared. A report that passes is *consistent*; who wrote
//! it, that does not show. [`verify_signed`] asks for that as well: a service's signature by one of the keys given, over this
//! very record, on which the digests of everything else hang.

mod again;
mod files;
mod signature;

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, openat};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::Verdict;
use super::dir::open_beneath;
use super::json_v1::{self, ControlV1, ReadError, ReportV1, StepV1};
use super::sign::{PublicKey, ReportFile, Signer};
use super::write::REPORT_JSON;
use crate::evidence::judge::{self, ALWAYS_REQUIRED};
use crate::evidence::{ControlId, Fact, Observation, Status, Tier};
use crate::exit::Exit;
use crate::gate::Dispatched;
use crate::text::Untrusted;

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
    /// Who wrote it, as far as that shows.
    pub provenance: Provenance,
}

/// Who wrote a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Provenance {
    /// Whoever could write to the directory.
    NotProven,
    /// A service that has the private half of a key that was given.
    Proven {
        /// The key, and the host's name for itself.
        signer: Signer,
        /// JSON pointers into the record: what the service was only told.
        claimed: Vec<String>,
    },
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
    checked(directory, outputs, None)
}

/// The same, and a signature by one of `keys` has to be there: its absence is a fault. Without a fault the
/// [provenance](Verified::provenance) is proven, and [`Verified::report`] is what was signed.
///
/// # Errors
/// As [`verify`].
pub fn verify_signed(directory: &Path, outputs: Option<&Path>, keys: &[PublicKey]) -> Result<Verified, VerifyError> {
    checked(directory, outputs, Some(keys))
}

fn checked(directory: &Path, outputs: Option<&Path>, keys: Option<&[PublicKey]>) -> Result<Verified, VerifyError> {
    let root = open_directory(directory)?;
    let outputs = outputs.map(open_directory).transpose()?;
    let mut check = Check { faults: Vec::new(), dropped: 0, unchecked: Vec::new(), read: 0 };
    let mut provenance = Provenance::NotProven;
    let record = check.record(root.as_fd());
    if let Some((report, file)) = &record {
        provenance = check.signature(root.as_fd(), report, file, keys);
        check.run(report);
        for (i, step) in report.steps.iter().enumerate() {
            check.step(i, step);
            check.logs(i, step, root.as_fd());
        }
        check.renderings(report, root.as_fd(), outputs.as_ref().map(AsFd::as_fd));
        check.strangers(report, root.as_fd());
        check.markers(root.as_fd(), outputs.as_ref().map(AsFd::as_fd));
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
    if !check.faults.is_empty() {
        provenance = Provenance::NotProven;
    }
    let report = record.map(|(report, _)| report);
    Ok(Verified { report, faults: check.faults, unchecked: check.unchecked, provenance })
}

fn open_directory(path: &Path) -> Result<OwnedFd, VerifyError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat(CWD, path, flags, Mode::empty()).map_err(|e| VerifyError { path: path.to_path_buf(), source: e.into() })
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
    fn record(&mut self, root: BorrowedFd<'_>) -> Option<(ReportV1, ReportFile)> {
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
        Some((report, ReportFile { bytes: bytes.len() as u64, sha256: hex::encode(Sha256::digest(&bytes)) }))
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
}
