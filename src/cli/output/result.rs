//! The lines at the end of a run: what ran, behind what, and how it went.
//!
//! Pure text from a [`Report`]; the golden tests are its specification.

use std::path::Path;

use super::style::{self, Style};
use crate::evidence::{Origin, Status};
use crate::exit::Exit;
use crate::gate::Dispatched;
use crate::report::{Report, ResultRecord, StepReport, Verdict};
use crate::text::{LogTarget, Untrusted};

/// Longest text of a step's shown in a line, bytes.
const MAX_TEXT: usize = 160;
/// Longest explanation shown, bytes.
const MAX_REASON: usize = 1000;
/// With more steps than this, those that passed are a line each.
const MANY: usize = 4;
/// Column where the values begin.
const LABEL: usize = 14;

/// How the result is shown.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    /// Colour.
    pub style: Style,
    /// Who reads it.
    pub target: LogTarget,
    /// Only a line per step.
    pub quiet: bool,
    /// Every fact.
    pub verbose: bool,
    /// Where the report is, as the user named it.
    pub report_dir: &'a Path,
    /// Where the outputs are.
    pub outputs_dir: &'a Path,
}

/// The result as lines, each ended.
#[must_use]
pub fn render(report: &Report, options: Options<'_>) -> String {
    let mut page = Page { options, many: report.steps.len() > MANY, text: String::new() };
    for step in &report.steps {
        page.step(step);
    }
    page.run(report);
    page.text
}

struct Page<'a> {
    options: Options<'a>,
    many: bool,
    text: String,
}

impl Page<'_> {
    fn line(&mut self, line: &str) {
        self.text.push_str(line.trim_end());
        self.text.push('\n');
    }

    fn field(&mut self, label: &str, value: &str) {
        let label = self.options.style.dim(&format!("{label:<LABEL$}"));
        self.line(&format!("  {label}{value}"));
    }

    /// Text that came with the request or out of the boundary, as part of a line.
    fn shown(&self, text: &str, limit: usize) -> String {
        Untrusted::new(text).for_log_line(self.options.target, limit)
    }

    fn step(&mut self, step: &StepReport) {
        let style = self.options.style;
        let name = self.shown(&step.name, MAX_TEXT);
        let head = format!("{} {:02} {name}", style::sign(step.verdict), step.index);
        self.line(&format!("{} {}", style.verdict(step.verdict, &head), headline(step)));
        if self.options.quiet {
            return self.refusal(step);
        }
        // Of many steps, those that passed are a line each: what went wrong should not have to be looked for.
        if self.many && step.verdict == Verdict::Passed && !self.options.verbose {
            return;
        }
        let command = step.command.lines().map(str::trim).filter(|l| !l.is_empty()).collect::<Vec<_>>();
        let more = match command.len() {
            0 | 1 => String::new(),
            2 => " (and 1 more line)".to_owned(),
            n => format!(" (and {} more lines)", n - 1),
        };
        let command = self.shown(command.first().unwrap_or(&""), MAX_TEXT);
        let verb = match step.dispatched {
            Dispatched::No => "did not run",
            Dispatched::Yes => "ran",
            Dispatched::Unknown => "may have run",
        };
        self.field(verb, &format!("{command}{more}"));
        self.engine(step);
        self.field("isolation", &isolation(step, style));
        self.controls(step);
        self.refusal(step);
        self.result(step);
        self.resources(step);
        for grant in &step.grants {
            self.field("granted", &self.shown(grant, MAX_TEXT));
        }
        for notice in step.notices.iter().take(if self.options.verbose { usize::MAX } else { 3 }) {
            self.field("note", &self.shown(notice, MAX_REASON));
        }
    }

    fn refusal(&mut self, step: &StepReport) {
        let Some(refusal) = &step.refusal else { return };
        self.field("because", &format!("{} ({})", self.shown(&refusal.message, MAX_REASON), refusal.stage));
        if let Some(help) = &refusal.help {
            self.field("help", &self.shown(help, MAX_REASON));
        }
    }

    fn engine(&mut self, step: &StepReport) {
        let mut parts: Vec<String> = step.backend.iter().map(|b| self.shown(b, MAX_TEXT)).collect();
        if let Some(engine) = &step.engine {
            parts.push(self.shown(&engine.engine_version, MAX_TEXT));
            parts.extend(engine.settings.iter().map(|(k, v)| self.shown(&format!("{k} {v}"), MAX_TEXT)));
        }
        if let Some(image) = &step.image {
            parts.push(format!("image {}", self.shown(&image.reference, MAX_TEXT)));
        }
        if !parts.is_empty() {
            self.field("backend", &parts.join(", "));
        }
        if let Some(artifact) = &step.artifact {
            let short = artifact.sha256.get(..12).unwrap_or(&artifact.sha256);
            let text = format!(
                "{} ({}, {}, {}, sha256 {short}…)",
                self.shown(&artifact.source, MAX_TEXT),
                artifact.format,
                files(artifact.files),
                bytes(artifact.bytes)
            );
            self.field("artifact", &text);
        }
    }

    fn controls(&mut self, step: &StepReport) {
        let style = self.options.style;
        let mut marked = false;
        for status in [Status::Enforced, Status::Partial, Status::NotEnforced, Status::Unknown] {
            let of_status: Vec<_> = step.controls.iter().filter(|c| c.status == status).collect();
            if of_status.is_empty() {
                continue;
            }
            let names: Vec<_> =
                of_status.iter().map(|c| if c.required { format!("{}*", c.id) } else { c.id.to_string() }).collect();
            marked |= of_status.iter().any(|c| c.required);
            let label = match status {
                Status::NotEnforced => "not enforced".to_owned(),
                other => other.to_string(),
            };
            let names = names.join(" ");
            let names = match status {
                Status::Enforced => style.good(&names),
                Status::Partial => style.warn(&names),
                Status::NotEnforced | Status::Unknown => style.dim(&names),
            };
            self.field(&label, &names);
        }
        if marked && !self.options.verbose {
            self.field("", &style.dim("* required: the step would have been refused without it"));
        }
        if self.options.verbose {
            for control in &step.controls {
                for seen in &control.observations {
                    let origin = match seen.origin {
                        Origin::Host => "host saw",
                        Origin::Guest => "guest said",
                    };
                    let words = self.shown(&seen.fact.words(), MAX_REASON);
                    self.field("", &format!("{:<17} {:<13} {origin}: {words}", control.id, control.status));
                }
            }
        }
    }

    fn result(&mut self, step: &StepReport) {
        let Some(result) = &step.result else { return };
        let mut end = match (result.exit_code, result.signal) {
            (_, Some(signal)) => format!("signal {signal}"),
            (Some(code), None) => format!("exit code {code}"),
            (None, None) => "no exit code".to_owned(),
        };
        if result.timed_out {
            end.push_str(", ended at the deadline");
        } else if let Some(limit) = &result.limit_hit {
            end.push_str(&format!(", {} limit hit", self.shown(limit, MAX_TEXT)));
        }
        for (name, stream) in [("stdout", &result.stdout), ("stderr", &result.stderr)] {
            if stream.bytes > 0 {
                end.push_str(&format!(", {name} {}", bytes(stream.bytes)));
                if stream.kept < stream.bytes {
                    end.push_str(&format!(" ({} kept)", bytes(stream.kept)));
                }
            }
        }
        self.field("result", &end);
        if let Some(message) = result.message.as_deref().filter(|m| !m.trim().is_empty()) {
            self.field("", &self.shown(message, MAX_REASON));
        }
        if let Some(tests) = &step.guest_tests {
            let text = format!(
                "{} tests by the guest's own count: {} failed, {} errors, {} skipped (unverified)",
                tests.total, tests.failed, tests.errors, tests.skipped
            );
            self.field("tests", &text);
        }
        if !step.outputs.is_empty() {
            let sum = step.outputs.iter().map(|o| o.bytes).sum();
            let place = self.options.outputs_dir.join(step.directory());
            let count = files(step.outputs.len() as u64);
            let place = self.shown(&place.to_string_lossy(), MAX_TEXT);
            self.field("outputs", &format!("{count}, {} in {place} (untrusted)", bytes(sum)));
        }
    }

    fn resources(&mut self, step: &StepReport) {
        let r = &step.resources;
        let mut times =
            format!("prepare {}, run {}, total {}", millis(r.prepare_ms), millis(r.run_ms), millis(r.total_ms));
        if let Some(cpu) = r.cpu_ms {
            times.push_str(&format!("; cpu {}", millis(cpu)));
        }
        self.field("times", &times);
        match (r.peak_memory_bytes, r.boundary_memory_bytes) {
            (Some(peak), Some(own)) => {
                self.field("memory", &format!("peak {}; the boundary itself {}", bytes(peak), bytes(own)));
            }
            (Some(peak), None) => self.field("memory", &format!("peak {}", bytes(peak))),
            (None, Some(own)) => self.field("memory", &format!("the boundary itself {}", bytes(own))),
            (None, None) => {}
        }
    }

    fn run(&mut self, report: &Report) {
        let style = self.options.style;
        let place = self.options.report_dir.join("report.html");
        let place = self.shown(&place.to_string_lossy(), MAX_REASON);
        let verdict = style.verdict(report.verdict, report.verdict.name());
        let counts = match report.steps.len() {
            0 => ", no steps".to_owned(),
            1 => String::new(),
            n => {
                let passed = report.steps.iter().filter(|s| s.verdict == Verdict::Passed).count();
                format!(", {passed} of {n} steps passed")
            }
        };
        let code = report.exit_code.code();
        self.line(&format!("{verdict}{counts}, exit code {code}; report: {place}"));
        if report.policy.effect == "unverified" && !self.options.quiet {
            self.line(&style.warn(
                "the operator's policy is unverified: this process lives in a user namespace, where its owner can't be told",
            ));
        }
    }
}

/// The verdict in a few words.
fn headline(step: &StepReport) -> String {
    match (step.verdict, step.tier, step.exit) {
        (Verdict::Passed, Some(tier), _) => format!("passed behind a proven {tier} boundary"),
        (Verdict::Failed, Some(tier), _) if step.forgiven => {
            format!("failed behind a proven {tier} boundary; forgiven by continue-on-error")
        }
        (Verdict::Failed, Some(tier), _) => format!("failed behind a proven {tier} boundary"),
        (Verdict::Refused, _, _) if step.dispatched == Dispatched::No => "refused; nothing ran".to_owned(),
        (Verdict::Error, _, Exit::Unavailable) => "could not run: the backend is not available here".to_owned(),
        (Verdict::Error, _, Exit::Rejected) => "rejected; nothing ran".to_owned(),
        (verdict, _, _) => verdict.to_string(),
    }
}

/// What became of a step, in one sentence for an annotation.
#[must_use]
pub fn sentence(step: &StepReport) -> String {
    let why = match (&step.refusal, &step.result) {
        (Some(refusal), _) => format!(": {}", refusal.message),
        (None, Some(ResultRecord { message: Some(message), timed_out, limit_hit, .. }))
            if *timed_out || limit_hit.is_some() =>
        {
            format!(": {message}")
        }
        (None, Some(result)) if result.timed_out => ": ended at the deadline".to_owned(),
        (None, Some(result)) => match (result.exit_code, result.signal) {
            (_, Some(signal)) => format!(": signal {signal}"),
            (Some(code), None) => format!(": exit code {code}"),
            (None, None) => String::new(),
        },
        (None, None) => String::new(),
    };
    format!("{} {}{why}", step.name, headline(step))
}

fn isolation(step: &StepReport, style: Style) -> String {
    match step.tier {
        Some(tier) if tier >= step.floor => style.good(&format!("{tier} proven, floor {}", step.floor)),
        Some(tier) => style.bad(&format!("only {tier} proven, floor {}", step.floor)),
        None => format!("nothing proven, floor {}", step.floor),
    }
}

fn files(count: u64) -> String {
    if count == 1 { "1 file".to_owned() } else { format!("{count} files") }
}

/// Bytes for people, binary multiples.
#[must_use]
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut unit = 0;
    let mut tenths = u128::from(n) * 10 / 1024;
    while tenths >= 10240 && unit + 1 < UNITS.len() {
        tenths /= 1024;
        unit += 1;
    }
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
}

/// Milliseconds for people.
#[must_use]
pub fn millis(ms: u64) -> String {
    match ms {
        0..1000 => format!("{ms} ms"),
        1000..60_000 => format!("{}.{} s", ms / 1000, ms % 1000 / 100),
        _ => format!("{} min {} s", ms / 60_000, ms % 60_000 / 1000),
    }
}

#[cfg(test)]
pub(super) mod tests;
