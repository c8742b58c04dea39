//! From what happened at the gate to what the report says of a step.

use std::collections::BTreeSet;

use plimsoll_guest::{GuestResult, LimitHit};

use crate::backend::channel::CancelSignal;
use crate::backend::output::Written;
use crate::backend::{PrepareError, fix};
use crate::evidence::judge::{ALWAYS_REQUIRED, row, weigh};
use crate::evidence::{ControlId, Status, Tier};
use crate::exit::Exit;
use crate::gate::{Dispatched, End, Passage};
use crate::report::{RefusalRecord, ResultRecord, StepReport, Verdict, controls};
use crate::spec::{Backend, Limit, Step};
use crate::time::millis;

/// A step's report before anything happened: what the step asked for.
#[must_use]
pub fn blank(step: &Step) -> StepReport {
    let index = u32::try_from(step.index).unwrap_or(u32::MAX);
    StepReport {
        command: step.command.to_string(),
        grants: step.grants.names().into_iter().chain(step.mounts.iter().map(mount_words)).collect(),
        ..StepReport::untried(index, &step.name, &step.slug, step.floor())
    }
}

fn mount_words(mount: &crate::spec::Mount) -> String {
    let path = mount.sent_as.as_ref().unwrap_or(&mount.path);
    format!("mount: {} at {} (read-only)", path.display(), mount.at.display())
}

/// Every control that the step could not run without.
#[must_use]
pub fn required(step: &Step) -> BTreeSet<ControlId> {
    let mut all = step.required();
    all.extend(ALWAYS_REQUIRED);
    all.extend(row(step.floor()));
    all
}

/// Ends a step's report that never reached a boundary, or that was turned away at it.
pub fn refuse(report: &mut StepReport, exit: Exit, refusal: RefusalRecord) {
    report.exit = exit;
    report.verdict = Verdict::of(exit);
    report.refusal = Some(refusal);
}

/// Ends a step's report that was cancelled.
pub fn cancel(report: &mut StepReport, signal: CancelSignal) {
    report.exit = match signal {
        CancelSignal::Interrupt => Exit::Interrupted,
        CancelSignal::Terminate => Exit::Terminated,
    };
    report.verdict = Verdict::Cancelled;
}

/// Writes down what happened at the gate, and what was written.
pub fn passage(report: &mut StepReport, step: &Step, passage: Passage, written: Written) {
    report.dispatched = passage.dispatched;
    report.engine.clone_from(&passage.engine);
    if passage.judgement.is_some() {
        let whole = weigh(&passage.observations);
        report.tier = Some(whole.tier);
        report.controls = controls(&whole.grades, &required(step), &passage.observations);
    }
    report.resources.prepare_ms += millis(passage.times.prepare);
    report.resources.run_ms = millis(passage.times.run);
    report.resources.boundary_memory_bytes = passage.usage.boundary_memory_bytes;
    let guest = match &passage.end {
        End::Result(result) => Some(result),
        _ => None,
    };
    // The host's figures win; the guest's fill in where the host has none.
    report.resources.cpu_ms = passage.usage.cpu_ms.or(guest.map(|g| g.cpu_ms));
    let guest_peak = guest.map(|g| g.peak_memory_bytes).filter(|&bytes| bytes > 0);
    report.resources.peak_memory_bytes = passage.usage.peak_memory_bytes.or(guest_peak);
    report.outputs = written.files;
    report.notices.extend(written.notices);
    if let Some(why) = &passage.unobserved {
        report.notices.push(format!("the second observation could not be made: {why}"));
    }
    if passage.dispatched != Dispatched::No {
        report.result = Some(ResultRecord {
            exit_code: guest.and_then(|g| g.exit_code),
            signal: guest.and_then(|g| g.signal),
            timed_out: matches!(passage.end, End::TimedOut),
            limit_hit: passage.limit_hit().map(|limit| limit_word(limit).to_owned()),
            message: message(step, &passage),
            stdout: written.stdout,
            stderr: written.stderr,
        });
    }
    decide(report, step, &passage);
    if let Some(failure) = written.failure {
        let message = format!("the runner failed to write what the guest sent: {failure}");
        refuse(
            report,
            Exit::Internal,
            refusal("collect", "write-failed", message, "look at the disk that holds the report directory"),
        );
    }
    if report.exit == Exit::GuestFailed && step.continue_on_error {
        report.forgiven = true;
    }
}

/// The step's outcome.
fn decide(report: &mut StepReport, step: &Step, passage: &Passage) {
    let done = |report: &mut StepReport, exit: Exit| {
        report.exit = exit;
        report.verdict = Verdict::of(exit);
    };
    if !passage.changed.is_empty() {
        let what: Vec<String> = passage.changed.iter().map(|o| o.fact.words()).collect();
        let record =
            refusal("changed", "boundary-changed", what.join("; "), "treat everything this step wrote as suspect");
        return refuse(report, Exit::Refused, record);
    }
    match &passage.end {
        End::NotPrepared(error) => {
            let (exit, record) = not_prepared(error);
            refuse(report, exit, record);
        }
        End::NotProven(why) => {
            let help = "run `plimsoll doctor` on this host";
            refuse(report, Exit::Refused, refusal("observe", "not-proven", why.clone(), help));
        }
        End::Refused(why) => {
            let reason = if why.floor.is_some() { "floor-not-proven" } else { "control-not-satisfied" };
            let gvisor = report.backend.as_deref() == Some(Backend::Gvisor.name());
            let help = if why.floor.is_some() && gvisor && crate::backend::gvisor::lacks_a_uid() {
                fix::ROOT_WITHOUT_ADMIN.to_owned()
            } else if why.floor.is_some() {
                format!(
                    "see the controls that are not enforced; `plimsoll doctor` says what this host can prove for `{}`",
                    step.floor()
                )
            } else {
                control_help(&why.unmet).to_owned()
            };
            refuse(report, Exit::Refused, refusal("judge", reason, why.to_string(), &help));
        }
        End::CancelledBefore(signal) | End::Cancelled(signal) => cancel(report, *signal),
        End::Result(GuestResult { refused: Some(what), .. }) => {
            let help = "grant it in the step file (`sandbox.grants`), or change the program";
            refuse(report, Exit::Refused, refusal("grant", "not-granted", what.clone(), help));
        }
        // A result that could not be followed by a second look is not one to call passed.
        End::Result(result)
            if result.exit_code == Some(0)
                && result.signal.is_none()
                && result.limit_hit.is_none()
                && passage.unobserved.is_none() =>
        {
            done(report, Exit::Passed);
        }
        End::Result(_) | End::TimedOut | End::Gone | End::Protocol(_) => done(report, Exit::GuestFailed),
    }
}

/// The outcome of a step whose boundary could not be prepared.
#[must_use]
pub fn not_prepared(error: &PrepareError) -> (Exit, RefusalRecord) {
    let message = crate::text::chain(error);
    match error {
        PrepareError::Unavailable { help, .. } | PrepareError::Unfit { help, .. } => {
            (Exit::Unavailable, refusal("prepare", "backend-unavailable", message, help))
        }
        PrepareError::Image { .. } => {
            (Exit::Rejected, refusal("image", "image-rejected", message, "see `sandbox.image` in the step file"))
        }
        PrepareError::Io { .. } => {
            let help = "this is a fault of the host or of plimsoll; run again with --verbose";
            (Exit::Internal, refusal("prepare", "internal", message, help))
        }
    }
}

/// A refusal; an empty help is none.
#[must_use]
pub fn refusal(stage: &str, reason: &str, message: String, help: &str) -> RefusalRecord {
    RefusalRecord {
        stage: stage.to_owned(),
        reason: reason.to_owned(),
        message,
        help: Some(help.to_owned()).filter(|h| !h.is_empty()),
    }
}

/// The refusal of a floor that none of the backends in question reaches.
#[must_use]
pub fn out_of_reach(backends: &[Backend], floor: Tier) -> RefusalRecord {
    let reach: Vec<String> = backends.iter().map(|b| format!("`{b}` reaches `{}`", b.reaches())).collect();
    let message = if reach.is_empty() {
        "the policy leaves no backend for this step".to_owned()
    } else {
        format!("the floor is `{floor}`, but {}", reach.join(" and "))
    };
    let best = Backend::ALL.into_iter().filter(|b| b.reaches() >= floor).min_by_key(|b| b.reaches());
    let help = match best {
        Some(Backend::Firecracker) => {
            "choose `backend: firecracker`, and give the step an image of its own (`sandbox.image`)".to_owned()
        }
        Some(best) => format!("choose a backend that reaches the floor, such as `{best}`"),
        None => format!("nothing reaches `{floor}`: lower `minimum-isolation`"),
    };
    refusal("judge", "floor-out-of-reach", message, &help)
}

/// What helps where a control is required and not satisfied.
fn control_help(unmet: &[(ControlId, Status)]) -> &'static str {
    let any = |controls: &[ControlId]| unmet.iter().any(|(control, _)| controls.contains(control));
    if any(&[ControlId::MemoryLimit, ControlId::CpuLimit, ControlId::PidsLimit]) {
        "limits of memory, CPU and processes take a cgroup: run as root, or have one delegated to this user (systemd: \
         `Delegate=yes` in the runner's unit); or leave the limit out of the step"
    } else if any(&[ControlId::DiskLimit]) {
        "with gvisor `disk` is in force only together with the memory limit, and not below it: write `disk` as large as \
         `memory`, or leave it out"
    } else {
        "drop the requirement, or run where the host can enforce it; `plimsoll doctor` says what it can"
    }
}

const fn limit_word(limit: LimitHit) -> &'static str {
    match limit {
        LimitHit::Memory => "memory",
        LimitHit::Pids => "pids",
        LimitHit::Disk => "disk",
        LimitHit::Time => "time",
        LimitHit::Fuel => "fuel",
    }
}

/// How it ended, in words; a limit by its key and value, so that whoever wants another one knows where to write it.
fn message(step: &Step, passage: &Passage) -> Option<String> {
    let limit = match passage.limit_hit() {
        Some(LimitHit::Memory) => Limit::Memory,
        Some(LimitHit::Pids) => Limit::Pids,
        Some(LimitHit::Disk) => Limit::Disk,
        // Fuel is given out by the time that a deterministic program has.
        Some(LimitHit::Time | LimitHit::Fuel) => Limit::Timeout,
        None => return end_words(&passage.end),
    };
    let key = match limit {
        Limit::Timeout => "`timeout-minutes`".to_owned(),
        limit => format!("`sandbox.{}`", limit.key()),
    };
    let reached = format!("the limit {key} ({}) was reached", limit.show(step.limits.amount(limit)));
    Some(match end_words(&passage.end) {
        Some(words) => format!("{reached}: {words}"),
        None => reached,
    })
}

fn end_words(end: &End) -> Option<String> {
    match end {
        End::Result(result) => result.message.clone(),
        End::TimedOut => Some("the deadline passed; everything inside was killed".to_owned()),
        End::Gone => Some("the boundary ended by itself, without a result".to_owned()),
        End::Protocol(why) => Some(format!("the guest broke the protocol: {why}")),
        End::Cancelled(_) => Some("cancelled while running".to_owned()),
        End::NotPrepared(_) | End::NotProven(_) | End::Refused(_) | End::CancelledBefore(_) => None,
    }
}
