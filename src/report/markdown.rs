//! `summary.md`: the report as GitHub's job summary, and as a comment on a pull or merge request.
//!
//! The verdict comes first. The document is put together from parts that each close what they open, most important first;
//! a part that no longer fits the budget is left out and counted. Guest text stands in code spans and fences only, where no
//! mention, reference, link, element or quick action is live.

use std::fmt::Write;

use plimsoll_guest::Stream;

use super::{Logs, Report, StepReport, Verdict, words};
use crate::evidence::Status;
use crate::gate::Dispatched;
use crate::text::Untrusted;

/// Bytes of `summary.md`: fits a GitHub comment (65,536 characters), and with that a job summary and a GitLab note.
pub const BUDGET: usize = 60_000;
/// Rows of the table of steps; more are counted.
const MAX_ROWS: usize = 100;
/// Bytes of each excerpt at first; less when the whole does not fit.
const EXCERPTS: [usize; 4] = [6000, 2000, 500, 0];
const NAME: usize = 100;
/// Room for the line that counts what is left out, and for the foot.
const MARGIN: usize = 400;

/// What stands around a report.
#[derive(Debug, Clone)]
pub struct Frame {
    /// The beginning, in place of the verdict's heading; ends with an empty line.
    pub head: String,
    /// Bytes of both parts together.
    pub budget: usize,
}

/// What is true of everything that is rendered.
pub const FOOT: &str =
    concat!("<sub>plimsoll ", env!("CARGO_PKG_VERSION"), ". Everything the code printed or wrote is untrusted.</sub>");

/// The document, of at most about `budget` bytes (at least the verdict).
#[must_use]
pub fn render(report: &Report, logs: &Logs, budget: usize) -> String {
    let (first, rest) = framed(report, logs, &Frame { head: head(report), budget });
    let mut text = first + &rest;
    let foot = foot(report);
    if text.len() + foot.len() <= budget {
        text.push_str(&foot);
    }
    text
}

/// The same in a frame, in two parts: what is read first, and the details. Each closes what it opens.
#[must_use]
pub fn framed(report: &Report, logs: &Logs, frame: &Frame) -> (String, String) {
    let mut first = frame.head.clone();
    let mut left_out = 0;
    let budget = frame.budget.saturating_sub(MARGIN);
    if !report.steps.is_empty() {
        let table = table(report);
        if first.len() + table.len() <= budget { first.push_str(&table) } else { left_out += 1 }
    }
    let mut rest = String::new();
    let mut add = |part: String| {
        let fits = first.len() + rest.len() + part.len() <= budget;
        if fits {
            rest.push_str(&part);
        }
        fits
    };
    let mut gravest_first: Vec<&StepReport> = report.steps.iter().collect();
    gravest_first.sort_by_key(|s| match s.verdict {
        Verdict::Passed | Verdict::Skipped => 2,
        _ if s.forgiven => 1,
        _ => 0,
    });
    for step in gravest_first {
        let placed = EXCERPTS.iter().any(|&limit| add(details(step, logs, limit, report.steps.len() == 1)));
        left_out += u32::from(!placed);
    }
    if left_out > 0 {
        let _ = writeln!(rest, "\n_{left_out} more parts did not fit here; the whole is in `report.html`._");
    }
    (first, rest)
}

/// The picture of a verdict.
#[must_use]
pub const fn icon(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Passed => "✅",
        Verdict::Failed => "❌",
        Verdict::Refused => "⛔",
        Verdict::Error => "⚠️",
        Verdict::Cancelled => "🚫",
        Verdict::Skipped => "⏭️",
    }
}

fn head(report: &Report) -> String {
    format!("### {} Plimsoll: {}\n\n{}\n\n", icon(report.verdict), report.verdict, words::headline(report))
}

fn table(report: &Report) -> String {
    let mut text =
        "| | Step | Backend | Floor | Proven | Result | Time | Memory |\n|---|---|---|---|---|---|--:|--:|\n"
            .to_owned();
    for step in report.steps.iter().take(MAX_ROWS) {
        let name = Untrusted::new(&step.name).for_markdown_cell(NAME);
        let backend = backend_name(step).map_or_else(|| "–".to_owned(), |b| Untrusted::from(b).for_markdown_cell(40));
        let proven = match step.tier {
            Some(tier) if step.proven() => format!("**{tier}**"),
            Some(tier) => format!("{tier} (below the floor)"),
            None => "–".to_owned(),
        };
        let memory = step.resources.peak_memory_bytes.map_or_else(|| "–".to_owned(), |n| unbroken(&words::bytes(n)));
        let forgiven = if step.forgiven { " (forgiven)" } else { "" };
        let result = Untrusted::from(words::ending(step)).for_markdown_cell(80);
        let result = unbroken(result.trim_matches('`'));
        let _ = writeln!(
            text,
            "| {} | {name} | {backend} | {} | {proven} | {result}{forgiven} | {} | {memory} |",
            icon(step.verdict),
            step.floor,
            unbroken(&words::millis(step.resources.total_ms)),
        );
    }
    if report.steps.len() > MAX_ROWS {
        let _ = writeln!(text, "\n_and {} more_", report.steps.len() - MAX_ROWS);
    }
    text.push('\n');
    text
}

/// Words that stay on one line, however narrow the table.
fn unbroken(words: &str) -> String {
    words.replace(' ', "&nbsp;")
}

fn backend_name(step: &StepReport) -> Option<String> {
    step.engine.as_ref().map(|e| e.name.clone()).or_else(|| step.backend.clone())
}

/// One step, whole: everything that it opens, it closes.
fn details(step: &StepReport, logs: &Logs, excerpt: usize, only: bool) -> String {
    let mut text = String::new();
    let quiet = matches!(step.verdict, Verdict::Passed | Verdict::Skipped);
    if !only || quiet {
        let open = if quiet { "" } else { " open" };
        let name = Untrusted::new(&step.name).for_html(NAME);
        // Inside `code` nothing is live, entities included.
        let _ =
            writeln!(text, "<details{open}><summary>{} <code>{}</code></summary>\n", icon(step.verdict), inert(&name));
    }
    if let Some(refusal) = &step.refusal {
        let ran = match step.dispatched {
            Dispatched::No => "nothing ran",
            Dispatched::Yes => "the code had been started",
            Dispatched::Unknown => "whether the code ran is not known",
        };
        let _ = writeln!(
            text,
            "**{}** at {} ({ran}):\n\n{}",
            if step.verdict == Verdict::Refused { "Refused" } else { "Stopped" },
            Untrusted::new(&refusal.stage).for_markdown(40),
            Untrusted::new(&refusal.message).fenced(2000),
        );
        if let Some(help) = &refusal.help {
            let _ = writeln!(text, "What to do:\n\n{}", Untrusted::new(help).fenced(1000));
        }
    }
    if let Some(message) = step.result.as_ref().and_then(|r| r.message.as_ref()) {
        let _ = writeln!(text, "- Ended: {}", Untrusted::new(message).for_markdown(300));
    }
    if let Some(artifact) = &step.artifact {
        let _ = writeln!(
            text,
            "- Artifact {} ({}, {}), SHA-256 `{}`",
            Untrusted::new(&artifact.source).for_markdown(200),
            words::count(artifact.files, "file"),
            words::bytes(artifact.bytes),
            Untrusted::new(&artifact.sha256).for_markdown(80).trim_matches('`'),
        );
    }
    let is_script = step.command.trim_end().contains('\n');
    if !step.command.is_empty() && !is_script {
        let _ = writeln!(text, "- Command {}", Untrusted::new(&step.command).for_markdown(300));
    }
    controls(step, &mut text);
    if let Some(tests) = &step.guest_tests {
        let _ = writeln!(
            text,
            "- The guest's own tests (unverified): {} of {} passed, {} failed, {} in error, {} skipped",
            tests.total.saturating_sub(tests.failed + tests.errors + tests.skipped),
            tests.total,
            tests.failed,
            tests.errors,
            tests.skipped
        );
    }
    if !step.outputs.is_empty() {
        let size = step.outputs.iter().map(|f| f.bytes).sum();
        let _ = writeln!(text, "- {}, {}", words::count(step.outputs.len() as u64, "output file"), words::bytes(size));
    }
    for notice in step.notices.iter().take(10) {
        let _ = writeln!(text, "- Note: {}", Untrusted::new(notice).for_markdown(300));
    }
    if is_script {
        let _ = writeln!(text, "\ncommand:\n\n{}", Untrusted::new(&step.command).fenced(1000).trim_end());
    }
    if excerpt > 0 {
        for (stream, title) in [(Stream::Stdout, "stdout"), (Stream::Stderr, "stderr")] {
            let raw = logs.excerpt(step, stream, excerpt);
            if !raw.is_empty() {
                // Escapes may need more than the raw bytes did; the cut keeps the budget's arithmetic honest.
                let _ = writeln!(text, "\n{title}:\n\n{}", Untrusted::new(raw).fenced(excerpt * 2).trim_end());
            }
        }
    }
    if !only || quiet {
        text.push_str("\n</details>\n");
    }
    text.push('\n');
    text
}

/// HTML text in which Markdown sees nothing to act on: whatever is neither letter, digit nor space becomes a reference.
fn inert(html: &str) -> String {
    let mut out = String::with_capacity(html.len());
    let mut rest = html;
    while let Some(c) = rest.chars().next() {
        if c == '&'
            && let Some(end) = rest.find(';')
        {
            out.push_str(&rest[..=end]);
            rest = &rest[end + 1..];
            continue;
        }
        if c.is_alphanumeric() || c == ' ' {
            out.push(c);
        } else {
            let _ = write!(out, "&#{};", u32::from(c));
        }
        rest = &rest[c.len_utf8()..];
    }
    out
}

/// Counts by grade, and every control that is not enforced, with its facts where it matters.
fn controls(step: &StepReport, text: &mut String) {
    if step.controls.is_empty() || step.tier.is_none() {
        return;
    }
    let with = |status| step.controls.iter().filter(move |c| c.status == status);
    let _ = write!(text, "- Controls: {} enforced", with(Status::Enforced).count());
    for status in [Status::Partial, Status::NotEnforced, Status::Unknown] {
        let ids: Vec<&str> = with(status).map(|c| c.id.name()).collect();
        if !ids.is_empty() {
            let _ = write!(text, "; {status}: {}", ids.join(", "));
        }
    }
    text.push('\n');
    for control in step.controls.iter().filter(|c| words::unmet(step, c)) {
        for observation in control.observations.iter().take(3) {
            let words = Untrusted::from(observation.fact.words()).for_markdown(300);
            let _ = writeln!(text, "  - **{}** is {}: {words}", control.id, control.status);
        }
    }
}

fn foot(report: &Report) -> String {
    let policy = match &report.policy.sha256 {
        Some(sha256) => format!(", policy `{}`", sha256.get(..12).unwrap_or(sha256)),
        None => String::new(),
    };
    let took = report.ended_at.duration_since(report.started_at).as_millis();
    format!(
        "<sub>Evidence collected by the runner{policy}, plimsoll {}, {}. Everything the code printed or wrote is untrusted.</sub>\n",
        report.tool.version,
        words::millis(u64::try_from(took).unwrap_or(0)),
    )
}
