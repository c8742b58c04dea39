//! Words and numbers that all renderings (and the terminal) share.

use std::collections::{BTreeMap, BTreeSet};

use super::{ControlRecord, StepReport, Verdict};
use crate::evidence::{ControlId, Fact, Status, judge};
use crate::exit::Exit;
use crate::gate::Dispatched;

/// How a step ended, in a few words. Holds no guest text.
#[must_use]
pub fn ending(step: &StepReport) -> String {
    let Some(result) = &step.result else {
        return match (step.dispatched, step.verdict) {
            (Dispatched::No, Verdict::Skipped) => "nothing to run".to_owned(),
            (Dispatched::No, _) => "nothing ran".to_owned(),
            (Dispatched::Yes, _) => "it ran, and told no result".to_owned(),
            (Dispatched::Unknown, _) => "whether it ran is not known".to_owned(),
        };
    };
    if result.timed_out {
        return "ended at its deadline".to_owned();
    }
    if let Some(limit) = &result.limit_hit {
        let known = ["memory", "pids", "disk", "time", "fuel"].contains(&limit.as_str());
        return if known { format!("reached its {limit} limit") } else { "reached a limit".to_owned() };
    }
    match (result.signal, result.exit_code) {
        (Some(signal), _) => match signal_name(signal) {
            Some(name) => format!("ended by {name}"),
            None => format!("ended by signal {signal}"),
        },
        (None, Some(code)) => format!("exit code {code}"),
        (None, None) => "the boundary ended by itself".to_owned(),
    }
}

const fn signal_name(signal: i32) -> Option<&'static str> {
    Some(match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        13 => "SIGPIPE",
        14 => "SIGALRM",
        15 => "SIGTERM",
        24 => "SIGXCPU",
        25 => "SIGXFSZ",
        31 => "SIGSYS",
        _ => return None,
    })
}

/// Whether a control is required and not satisfied. A tier's row may allow a shared namespace; then a partial grade is no
/// fault of a boundary whose tier is proven.
#[must_use]
pub fn unmet(step: &StepReport, control: &ControlRecord) -> bool {
    let allowed_by_row = control.id == ControlId::Namespaces && control.status == Status::Partial && step.proven();
    control.required && !judge::satisfies(control.id, control.status) && !allowed_by_row
}

/// A size for people: `12 B`, `3.4 KiB`, `34.1 MiB`.
#[must_use]
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut tenths = u128::from(n) * 10;
    let mut unit = 0;
    while tenths / 1024 >= 10_240 && unit < UNITS.len() - 1 {
        tenths /= 1024;
        unit += 1;
    }
    let tenths = (tenths + 512) / 1024;
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
}

/// A duration for people: `8 ms`, `1.24 s`, `2 min 5 s`.
#[must_use]
pub fn millis(ms: u64) -> String {
    match ms {
        0..1000 => format!("{ms} ms"),
        1000..60_000 => format!("{}.{:02} s", ms / 1000, ms % 1000 / 10),
        _ => format!("{} min {} s", ms / 60_000, ms % 60_000 / 1000),
    }
}

/// `1 file`, `2 files`.
#[must_use]
pub fn count(n: u64, noun: &str) -> String {
    if n == 1 { format!("{n} {noun}") } else { format!("{n} {noun}s") }
}

/// The headline: what the run comes to, in one sentence; and what is known against the engines that it ran in.
#[must_use]
pub fn headline(report: &super::Report) -> String {
    let known = vulnerabilities(report);
    if known.is_empty() { verdict(report) } else { format!("{} Known vulnerabilities: {known}.", verdict(report)) }
}

/// Versions of engines with known vulnerabilities that show in the way they are used: `firecracker 1.2.3 (CVE-…)`.
fn vulnerabilities(report: &super::Report) -> String {
    let mut known: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let seen = report.steps.iter().flat_map(|s| &s.controls).flat_map(|c| &c.observations);
    for observation in seen {
        if let Fact::Advisory { engine, version, id, applies: true, .. } = &observation.fact {
            known.entry(format!("{} {version}", engine.name())).or_default().insert(id.clone());
        }
    }
    let list = |(engine, ids): (String, BTreeSet<String>)| {
        format!("{engine} ({})", ids.into_iter().collect::<Vec<_>>().join(", "))
    };
    known.into_iter().map(list).collect::<Vec<_>>().join(", ")
}

fn verdict(report: &super::Report) -> String {
    let steps = report.steps.len() as u64;
    let with = |verdict| report.steps.iter().filter(|s| s.verdict == verdict && !s.forgiven).count() as u64;
    let forgiven = report.steps.iter().filter(|s| s.forgiven).count() as u64;
    match report.verdict {
        Verdict::Passed => {
            let base = match report.steps.iter().filter_map(|s| s.tier).min() {
                Some(tier) if forgiven == 0 && steps == 1 => {
                    return format!("The step passed behind a proven {tier} boundary.");
                }
                Some(tier) if forgiven == 0 => {
                    return format!("All {steps} steps passed behind proven boundaries; the weakest is {tier}.");
                }
                _ => format!("{} of {} passed", with(Verdict::Passed), count(steps, "step")),
            };
            format!("{base}; {forgiven} failed and was forgiven.")
        }
        Verdict::Failed => {
            if steps == 1 {
                "The code ran behind a proven boundary, and failed.".to_owned()
            } else {
                format!("{} of {steps} steps failed.", with(Verdict::Failed))
            }
        }
        Verdict::Refused if report.steps.iter().all(|s| s.dispatched == Dispatched::No) => {
            "Refused: what was asked for could not be proven or is not allowed. Nothing ran.".to_owned()
        }
        Verdict::Refused => format!(
            "{} refused.",
            if steps == 1 {
                "The step was".to_owned()
            } else {
                format!("{} of {steps} steps were", with(Verdict::Refused))
            }
        ),
        Verdict::Error => {
            let nothing =
                if report.steps.iter().all(|s| s.dispatched == Dispatched::No) { " Nothing ran." } else { "" };
            let what = match report.exit_code {
                Exit::Unavailable => "The backend is not available on this host.",
                Exit::Rejected => "The artifact or image was rejected.",
                Exit::Usage => "The step file or the command line could not be used.",
                _ => "Plimsoll failed; this says nothing about the code.",
            };
            format!("{what}{nothing}")
        }
        Verdict::Cancelled => "The run was cancelled.".to_owned(),
        Verdict::Skipped => "There was nothing to run.".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well_at_every_size() {
        for (n, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1_048_575, "1024.0 KiB"),
            (1_048_576, "1.0 MiB"),
            (35_756_032, "34.1 MiB"),
            (u64::MAX, "16384.0 PiB"),
        ] {
            assert_eq!(bytes(n), text);
        }
        for (ms, text) in [(0, "0 ms"), (999, "999 ms"), (1240, "1.24 s"), (125_000, "2 min 5 s")] {
            assert_eq!(millis(ms), text);
        }
    }
}
