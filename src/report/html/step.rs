//! The card of one step.

use maud::{Markup, PreEscaped, html};
use plimsoll_guest::Stream;

use super::drawing::{self, Part, bar};
use super::text;
use crate::evidence::{ControlId, Fact, Origin, Status};
use crate::gate::Dispatched;
use crate::report::guest_junit::CaseOutcome;
use crate::report::{ControlRecord, Logs, StepReport, Verdict, words};
use crate::text::Untrusted;

/// Bytes of each stream that are shown.
pub(super) const OUTPUT: usize = 24 * 1024;
const MAX_CASES: usize = 200;
const MAX_OUTPUTS: usize = 200;
const MAX_FACTS: usize = 24;
const FACT: usize = 600;

pub(super) fn card(step: &StepReport, logs: &Logs, output: usize, ladder: bool) -> Markup {
    let id = format!("step-{}", step.index);
    html! {
        article.card aria-labelledby=(id) {
            header {
                h2 id=(id) { span.no { (format!("{:02}", step.index)) } (text(&step.name, 200)) }
                (verdict(step))
            }
            @if let Some(refusal) = &step.refusal {
                section { div.callout.stop[step.verdict == Verdict::Error] {
                    p { b { (ran(step)) } " Stopped at " (text(&refusal.stage, 40)) ": " (text(&refusal.message, 2000)) }
                    @if let Some(help) = &refusal.help { p { b { "What to do: " } (text(help, 1000)) } }
                } }
            }
            section.two.ladder-left[ladder] {
                @if ladder { (drawing::ladder(step.floor, step.tier)) (about(step)) }
                @else { (about(step)) (resources(step)) }
            }
            @if ladder { section { (resources(step)) } }
            (outputs_of(step, logs, output))
            (controls(step, ladder))
            (guest_tests(step))
            (files(step))
            (notices(step))
        }
    }
}

fn verdict(step: &StepReport) -> Markup {
    let (class, shape) = match step.verdict {
        _ if step.forgiven => ("calm", "half"),
        Verdict::Passed => ("good", "full"),
        Verdict::Failed | Verdict::Error => ("bad", "full"),
        Verdict::Refused => ("warn", "full"),
        Verdict::Cancelled | Verdict::Skipped => ("calm", ""),
    };
    html! {
        @if let Some(tier) = step.tier {
            span class={ "chip half " (if step.proven() { "calm" } else { "warn" }) } { (tier) " proven" }
        }
        span class={ "chip " (class) " " (shape) } { (step.verdict) @if step.forgiven { ", forgiven" } }
    }
}

const fn ran(step: &StepReport) -> &'static str {
    match step.dispatched {
        Dispatched::No => "Nothing ran.",
        Dispatched::Yes => "The code had been started.",
        Dispatched::Unknown => "Whether the code ran is not known.",
    }
}

fn about(step: &StepReport) -> Markup {
    html! {
        div {
            h3 { "What ran" }
            dl.facts {
                @if !step.command.is_empty() { dt { "Command" } dd { code.command { (PreEscaped(Untrusted::new(&step.command).for_html_block(600))) } } }
                dt { "Ended" } dd { (text(&words::ending(step), 80))
                    @if let Some(message) = step.result.as_ref().and_then(|r| r.message.as_ref()) { span.muted { ": " (text(message, 300)) } }
                }
                dt { "Backend" } dd {
                    @match (&step.engine, &step.backend) {
                        (Some(engine), _) => { (text(&engine.name, 40)) " " span.muted { (text(&engine.engine_version, 80)) } }
                        (None, Some(name)) => { (text(name, 200)) span.muted { " (did not come up)" } }
                        (None, None) => { span.muted { "none" } }
                    }
                }
                @if let Some(artifact) = &step.artifact {
                    dt { "Artifact" } dd {
                        (text(&artifact.source, 300)) span.muted { " · " (text(&artifact.format, 20)) " · " (words::count(artifact.files, "file")) " · " (words::bytes(artifact.bytes)) }
                        div.mono.small.muted { (text(&artifact.sha256, 80)) }
                    }
                }
                @if let Some(image) = &step.image {
                    dt { "Image" } dd { (text(&image.reference, 300)) @if let Some(digest) = &image.digest { div.mono.small.muted { (text(digest, 100)) } } }
                }
                dt { "Grants" } dd { @if step.grants.is_empty() { "none" } @else { @for (i, grant) in step.grants.iter().take(40).enumerate() { @if i > 0 { ", " } (text(grant, 200)) } } }
            }
        }
    }
}

/// A limit that was read back, if one was.
fn limit(step: &StepReport, id: ControlId) -> Option<u64> {
    step.controls.iter().filter(|c| c.id == id).flat_map(|c| &c.observations).find_map(|o| match &o.fact {
        Fact::Limit { control, read: Some(read), .. } if *control == id && o.origin == Origin::Host => Some(*read),
        _ => None,
    })
}

fn resources(step: &StepReport) -> Markup {
    let r = &step.resources;
    let rest = r.total_ms.saturating_sub(r.prepare_ms).saturating_sub(r.run_ms);
    let part =
        |value, class, label: String| Part { value, class, label: if value > 0 { label } else { String::new() } };
    let time = [
        part(r.prepare_ms, "f1", format!("prepare {}", words::millis(r.prepare_ms))),
        part(r.run_ms, "f2", format!("run {}", words::millis(r.run_ms))),
        part(
            rest,
            "f3",
            format!("{} {}", if r.run_ms > 0 { "collect, tear down" } else { "the rest" }, words::millis(rest)),
        ),
    ];
    html! {
        div {
            h3 { "What it took" }
            (bar("Time", &words::millis(r.total_ms), &time, r.total_ms))
            @if let Some(peak) = r.peak_memory_bytes {
                @let own = r.boundary_memory_bytes.unwrap_or(0).min(peak);
                @let allowed = limit(step, ControlId::MemoryLimit);
                @let value = match allowed {
                    Some(allowed) => format!("{} of {}", words::bytes(peak), words::bytes(allowed)),
                    None => format!("{}, no limit read back", words::bytes(peak)),
                };
                @let parts = [
                    part(own, "f1", format!("boundary at rest {}", words::bytes(own))),
                    part(peak - own, "f2", format!("peak above it {}", words::bytes(peak - own))),
                ];
                (bar("Memory", &value, &parts, allowed.unwrap_or(peak)))
            }
            @if let Some(cpu) = r.cpu_ms {
                @let wall = r.total_ms.max(1);
                @let value = format!("{} over {}, the boundary's own included", words::millis(cpu), words::millis(r.total_ms));
                (bar("CPU", &value, &[part(cpu.min(wall), "f2", String::new())], wall))
            }
        }
    }
}

fn outputs_of(step: &StepReport, logs: &Logs, limit: usize) -> Markup {
    let shown: Vec<_> = [(Stream::Stdout, "Standard output", "stdout"), (Stream::Stderr, "Standard error", "stderr")]
        .into_iter()
        .map(|(stream, title, file)| {
            let record = step.result.as_ref().map(|r| match stream {
                Stream::Stdout => &r.stdout,
                Stream::Stderr => &r.stderr,
            });
            let raw = if limit > 0 { logs.excerpt(step, stream, limit) } else { Vec::new() };
            (title, file, record.map_or(0, |r| r.bytes), record.is_some_and(|r| r.truncated()), raw)
        })
        .filter(|(_, _, bytes, _, raw)| *bytes > 0 || !raw.is_empty())
        .collect();
    html! {
        @if !shown.is_empty() {
            section {
                h3 { "Output (untrusted)" }
                @for (title, file, bytes, truncated, raw) in &shown {
                    @let open = *file == "stdout" || step.verdict != Verdict::Passed;
                    details.more open[open] {
                        summary {
                            (title) " " span.muted.small {
                                (words::bytes(*bytes)) @if *truncated { ", cut at the output limit" }
                                " · " code { "steps/" (step.directory()) "/" (file) ".log" }
                            }
                        }
                        @if raw.is_empty() { p.muted.small { "Not shown here." } }
                        @else { pre tabindex="0" { (PreEscaped(Untrusted::new(raw.as_slice()).for_html_block(limit * 2))) } }
                    }
                }
            }
        }
    }
}

/// Colour and shape. What nobody asked for is no fault: it is calm unless it is in force.
const fn chip(status: Status, required: bool, unmet: bool) -> (&'static str, &'static str) {
    match (status, unmet) {
        (_, true) => ("bad", ""),
        (Status::Enforced, _) => ("good", "full"),
        (Status::Partial, _) => (if required { "good" } else { "warn" }, "half"),
        (Status::NotEnforced | Status::Unknown, _) => ("calm", ""),
    }
}

fn controls(step: &StepReport, fold: bool) -> Markup {
    let with = |status| step.controls.iter().filter(move |c| c.status == status).count();
    let counts: Vec<String> = [Status::Enforced, Status::Partial, Status::NotEnforced, Status::Unknown]
        .into_iter()
        .filter(|&status| with(status) > 0)
        .map(|status| format!("{} {status}", with(status)))
        .collect();
    let unmet = step.controls.iter().any(|c| words::unmet(step, c));
    let list = html! { div.controls { @for control in &step.controls { (one_control(step, control)) } } };
    html! {
        @if step.tier.is_some() && !step.controls.is_empty() {
            section {
                @if fold {
                    details.more open[unmet] {
                        summary { "Controls " span.muted.small { (counts.join(", ")) } }
                        (list)
                    }
                } @else {
                    h3 { "Controls" }
                    (list)
                }
            }
        }
    }
}

fn one_control(step: &StepReport, control: &ControlRecord) -> Markup {
    let unmet = words::unmet(step, control);
    let (class, shape) = chip(control.status, control.required, unmet);
    html! {
        details.control open[unmet] {
            summary {
                span.id {
                    (control.id)
                    @if control.required { span.req { @if unmet { "required, not satisfied" } @else { "required" } } }
                }
                span class={ "chip " (class) " " (shape) } { (control.status) }
            }
            div {
                p.muted { (control.id.describe()) }
                ul {
                    @for observation in control.observations.iter().take(MAX_FACTS) {
                        li {
                            @match observation.origin {
                                Origin::Host => { span.origin { "host" } }
                                Origin::Guest => { span.origin.guest { "guest" } }
                            }
                            (text(&observation.fact.words(), FACT))
                        }
                    }
                    @if control.observations.is_empty() { li.muted { "Nothing was observed." } }
                    @if control.observations.len() > MAX_FACTS { li.muted { "and " (control.observations.len() - MAX_FACTS) " more" } }
                }
            }
        }
    }
}

fn guest_tests(step: &StepReport) -> Markup {
    let Some(tests) = step.guest_tests else { return html! {} };
    let passed = tests.total.saturating_sub(tests.failed + tests.errors + tests.skipped);
    let part = |value, class, word: &str| Part {
        value,
        class,
        label: if value > 0 { format!("{value} {word}") } else { String::new() },
    };
    let parts = [
        part(passed, "fgood", "passed"),
        part(tests.failed, "fbad", "failed"),
        part(tests.errors, "fwarn", "in error"),
        part(tests.skipped, "f3", "skipped"),
    ];
    // What went wrong first.
    let mut cases: Vec<_> = step.guest_cases.as_slice().iter().collect();
    cases.sort_by_key(|c| std::cmp::Reverse(c.outcome));
    html! {
        section {
            h3 { "The guest's own tests (unverified)" }
            (bar("As its JUnit report says", &words::count(tests.total, "case"), &parts, tests.total))
            @if !cases.is_empty() {
                details.more open[tests.failed + tests.errors > 0] {
                    summary { "Cases" }
                    div.scroll { table {
                        thead { tr { th { "Case" } th { "Outcome" } th.num { "Time" } } }
                        tbody {
                            @for case in cases.iter().take(MAX_CASES) {
                                tr {
                                    td {
                                        span.muted { (text(&case.classname, 200)) " · " } (text(&case.name, 200))
                                        @if !case.message.is_empty() { div.small.muted { (text(&case.message, 300)) } }
                                    }
                                    td { @match case.outcome {
                                        CaseOutcome::Passed => { span.chip.good.full { "passed" } }
                                        CaseOutcome::Skipped => { span.chip.calm { "skipped" } }
                                        CaseOutcome::Error => { span.chip.warn.full { "error" } }
                                        CaseOutcome::Failed => { span.chip.bad.full { "failed" } }
                                    } }
                                    td.num { (words::millis(case.millis)) }
                                }
                            }
                        }
                    } }
                    @if cases.len() > MAX_CASES { p.muted.small { "and " (cases.len() - MAX_CASES) " more in " code { "junit.xml" } } }
                }
            }
        }
    }
}

fn files(step: &StepReport) -> Markup {
    html! {
        @if !step.outputs.is_empty() {
            section {
                h3 { "Output files (untrusted)" }
                div.scroll { table {
                    thead { tr { th { "Path" } th.num { "Size" } th { "SHA-256" } } }
                    tbody {
                        @for file in step.outputs.iter().take(MAX_OUTPUTS) {
                            tr { td.id { (text(&file.path, 300)) } td.num { (words::bytes(file.bytes)) } td.mono.small { (text(&file.sha256, 80)) } }
                        }
                    }
                } }
                @if step.outputs.len() > MAX_OUTPUTS { p.muted.small { "and " (step.outputs.len() - MAX_OUTPUTS) " more in " code { "report.json" } } }
            }
        }
        @if let Some(engine) = &step.engine {
            @if !engine.binaries.is_empty() || !engine.settings.is_empty() {
                section {
                    details.more {
                        summary { "Engine" }
                        div.scroll { table {
                            thead { tr { th { "Executable" } th { "Version it prints" } th { "SHA-256" } } }
                            tbody { @for binary in engine.binaries.iter().take(20) {
                                tr { td.id { (text(&binary.path, 200)) } td { (text(&binary.version, 80)) } td.mono.small { (text(&binary.sha256, 80)) } }
                            } }
                        } }
                        @if !engine.settings.is_empty() {
                            dl.facts { @for (key, value) in engine.settings.iter().take(40) { dt { (text(key, 80)) } dd { (text(value, 200)) } } }
                        }
                    }
                }
            }
        }
    }
}

fn notices(step: &StepReport) -> Markup {
    html! {
        @if !step.notices.is_empty() {
            section {
                h3 { "Remarks (some of them the guest's)" }
                ul.small { @for notice in step.notices.iter().take(64) { li { (text(notice, 600)) } } }
            }
        }
    }
}
