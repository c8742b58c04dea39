//! `report.html`: the report as a page.
//!
//! One file, no script, no request to anywhere: the content security policy allows the page's own style sheet (by its
//! digest) and nothing else. Verdict and tier come first. Guest text is escaped by [`crate::text`], never by hand.

use maud::{DOCTYPE, Markup, PreEscaped, html};
use sha2::{Digest, Sha256};

use super::{Logs, Report, StepReport, Verdict, words};
use crate::evidence::{Status, Tier};
use crate::gate::Dispatched;
use crate::text::Untrusted;

mod drawing;
mod step;

const STYLE: &str = include_str!("style.css");
/// Steps that get a card; more are counted.
const MAX_STEPS: usize = 200;
/// The largest page that is aimed at, bytes; beyond it, steps show no output.
const BUDGET: usize = 8 * 1024 * 1024;

/// The page.
#[must_use]
pub fn render(report: &Report, logs: &Logs) -> String {
    let policy =
        format!("default-src 'none'; style-src 'sha256-{}'; base-uri 'none'; form-action 'none'", digest(STYLE));
    let decisive = decisive(report);
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta http-equiv="Content-Security-Policy" content=(policy);
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="referrer" content="no-referrer";
                meta name="robots" content="noindex";
                title { (report.verdict) " – Plimsoll boundary report" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                main {
                    (head(report, decisive))
                    @if let Some(step) = decisive { (tiles(report, step)) }
                    (steps(report, logs))
                }
                (foot(report))
            }
        }
    };
    page.into_string()
}

/// The style sheet's SHA-256 in base 64, as a content security policy names it.
fn digest(style: &str) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let hash = Sha256::digest(style);
    let mut out = String::new();
    for three in hash.chunks(3) {
        let n = three.iter().fold(0u32, |n, b| n << 8 | u32::from(*b)) << (8 * (3 - three.len()));
        for i in 0..4 {
            let sextet = (n >> (18 - 6 * i)) & 63;
            out.push(if i > three.len() { '=' } else { char::from(ALPHABET[sextet as usize]) });
        }
    }
    out
}

/// Untrusted text on one line.
fn text(text: &str, limit: usize) -> Markup {
    PreEscaped(Untrusted::new(text).for_html(limit))
}

/// The step that the head of the page shows: the gravest, and of those the one with the weakest boundary.
fn decisive(report: &Report) -> Option<&StepReport> {
    report.steps.iter().min_by_key(|s| {
        let grave = match s.verdict {
            _ if s.forgiven => 3,
            Verdict::Passed => 4,
            Verdict::Skipped => 5,
            Verdict::Failed => 1,
            Verdict::Cancelled => 2,
            Verdict::Refused | Verdict::Error => 0,
        };
        (grave, s.proven(), s.tier)
    })
}

fn head(report: &Report, decisive: Option<&StepReport>) -> Markup {
    html! {
        div.head {
            div {
                p.mark { (drawing::sign()) "Plimsoll boundary report" }
                h1 class={ "verdict v-" (report.verdict) } { (word(report.verdict)) @if let Some(tier) = behind(report) { " " small { "behind a " (tier) " boundary" } } }
                p.lead { (lead(report)) }
                (meta(report))
            }
            @if let Some(step) = decisive {
                figure.ship {
                    (drawing::ship(step.floor, step.tier))
                    figcaption { (caption(step, report.steps.len())) }
                }
            }
        }
    }
}

const fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Passed => "Passed",
        Verdict::Failed => "Failed",
        Verdict::Refused => "Refused",
        Verdict::Error => "Not done",
        Verdict::Cancelled => "Cancelled",
        Verdict::Skipped => "Nothing to run",
    }
}

/// One sentence below the verdict, which the page has said already.
fn lead(report: &Report) -> String {
    match (report.verdict, report.steps.as_slice()) {
        (Verdict::Passed, [step]) if !step.forgiven => {
            format!("The floor asked for was {}. It was proven from the host before the code was started.", step.floor)
        }
        (Verdict::Failed, [step]) => {
            let ending = words::ending(step);
            format!("The floor asked for was {}, and it was proven. The code behind it failed: {ending}.", step.floor)
        }
        (Verdict::Refused, steps) if steps.iter().all(|s| s.dispatched == Dispatched::No) => {
            "What was asked for could not be proven, or is not allowed here. Nothing ran.".to_owned()
        }
        _ => words::headline(report),
    }
}

/// The weakest tier that code ran behind, where that is part of the verdict.
fn behind(report: &Report) -> Option<Tier> {
    let tier = report.steps.iter().filter_map(|s| s.tier).min();
    tier.filter(|_| matches!(report.verdict, Verdict::Passed | Verdict::Failed))
}

fn caption(step: &StepReport, steps: usize) -> Markup {
    let which = |step: &StepReport| html! { @if steps > 1 { " (step " (step.index) ")" } };
    html! {
        @match step.tier {
            Some(tier) if step.proven() => {
                "The water stands at " b { (tier) } ", the tier that was proven" (which(step)) ". It may not rise above the load line at "
                b { (step.floor) } ", the floor that was asked for."
            }
            Some(tier) => {
                "The water stands at " b { (tier) } ", above the load line at " b { (step.floor) } (which(step)) ": she is not let out of port."
            }
            None => { "No boundary was observed" (which(step)) ". The load line is at " b { (step.floor) } ", the floor that was asked for." }
        }
    }
}

fn meta(report: &Report) -> Markup {
    let took = u64::try_from(report.ended_at.duration_since(report.started_at).as_millis()).unwrap_or(0);
    html! {
        p.meta.muted.small {
            @if let Some(ci) = &report.ci {
                @if let Some(repository) = &ci.repository { span { (text(repository, 200)) } }
                @if let Some(sha) = &ci.sha { span.mono { (text(sha.get(..12).unwrap_or(sha), 20)) } }
                @if let Some(number) = ci.pull_request { span { "pull request " (number) } }
                @if let Some(job) = &ci.job { span { "job " (text(job, 100)) } }
                @if let Some(url) = ci.run_url.as_ref().filter(|u| u.starts_with("https://") || u.starts_with("http://")) {
                    a href=(text(url, 500)) rel="noreferrer noopener nofollow" { "the run" }
                }
            }
            span { (report.started_at.strftime("%Y-%m-%d %H:%M:%S UTC")) }
            span { "took " (words::millis(took)) }
            span { "exit code " (report.exit_code.code()) }
        }
    }
}

fn tiles(report: &Report, step: &StepReport) -> Markup {
    let single = report.steps.len() == 1;
    let enforced = step.controls.iter().filter(|c| c.status == Status::Enforced).count();
    let total: u64 = report.steps.iter().map(|s| s.resources.total_ms).sum();
    let peak = report.steps.iter().filter_map(|s| s.resources.peak_memory_bytes).max();
    let weakest: Option<Tier> =
        report.steps.iter().filter(|s| s.verdict != Verdict::Skipped).map(|s| s.tier).min().flatten();
    html! {
        dl.tiles {
            div.tile {
                dt { @if single { "Proven tier" } @else { "Weakest tier proven" } }
                dd { (weakest.map_or("none", Tier::name)) small { @if single { "floor " (step.floor) } @else { "each step has its own floor" } } }
            }
            @if single {
                div.tile { dt { "Result" } dd { (text(&words::ending(step), 60)) @if step.result.as_ref().is_some_and(|r| !r.timed_out && r.exit_code.or(r.signal).is_some()) { small { "as the inside says" } } } }
                @if step.tier.is_some() {
                    div.tile { dt { "Controls enforced" } dd { (enforced) " of " (step.controls.len()) small { (step.controls.iter().filter(|c| c.required).count()) " required" } } }
                }
            } @else {
                @let passed = report.steps.iter().filter(|s| s.verdict == Verdict::Passed).count();
                div.tile { dt { "Steps passed" } dd { (passed) " of " (report.steps.len()) small { (report.steps.iter().filter(|s| s.forgiven).count()) " forgiven" } } }
            }
            div.tile { dt { "Time" } dd { (words::millis(total)) small { @if !single { "sum of all steps" } @else if step.dispatched != Dispatched::No { (words::millis(step.resources.prepare_ms)) " until admitted" } } } }
            @if let Some(peak) = peak {
                div.tile { dt { "Peak memory" } dd { (words::bytes(peak)) small { @if single { "whole boundary" } @else { "of the largest step" } } } }
            }
        }
    }
}

fn steps(report: &Report, logs: &Logs) -> Markup {
    let mut size = 0;
    let mut cards = Vec::new();
    for step in report.steps.iter().take(MAX_STEPS) {
        let output = if size < BUDGET { step::OUTPUT } else { 0 };
        let card = step::card(step, logs, output, report.steps.len() > 1).into_string();
        size += card.len();
        cards.push(card);
    }
    html! {
        @for card in cards { (PreEscaped(card)) }
        @if report.steps.len() > MAX_STEPS {
            p { "And " (report.steps.len() - MAX_STEPS) " more steps; see " code { "report.json" } "." }
        }
    }
}

fn foot(report: &Report) -> Markup {
    let host = &report.host;
    html! {
        footer {
            section.card aria-labelledby="about" {
                header { h2 #about { "Where this comes from" } }
                section.two {
                    div {
                        h3 { "Run" }
                        dl.facts {
                            dt { "Origin" } dd { @match report.origin {
                                super::ReportOrigin::Local => { "local: the job's own statement" },
                                super::ReportOrigin::Service => { "the service on the runner's host, which signs it" },
                            } }
                            dt { "Runner" } dd { (text(&host.runner, 200)) }
                            dt { "Kernel" } dd { (text(&host.kernel, 200)) }
                            dt { "CPU" } dd { (text(&host.cpu, 200)) }
                            dt { "Virtualisation" } dd { (text(&host.virtualization, 200)) }
                            dt { "Policy" } dd { (text(&report.policy.effect, 40)) @if let Some(sha256) = &report.policy.sha256 { " " span.mono.small { (text(sha256, 80)) } } }
                        }
                    }
                    div {
                        h3 { "Digests (SHA-256)" }
                        dl.facts {
                            dt { "plimsoll " (report.tool.version) } dd.mono.small { (text(&report.tool.sha256, 80)) }
                            dt { "Request" } dd.mono.small { (text(&report.request_sha256, 80)) }
                            dt { "Result, record" } dd { "in " code { "report.json" } }
                        }
                    }
                }
                section {
                    h3 { "How to check it" }
                    ul {
                        li { code { "plimsoll verify DIR" } " recomputes every digest, of this page too, and judges again from the facts recorded." }
                        li { "It shows that the report is consistent. Who wrote it, only a signature shows: this is evidence collected by the runner." }
                        li { "A fact marked “guest” was said by the inside. It may lower a grade, never raise one." }
                        li { "Everything that the code printed or wrote is untrusted, and shown here without its escape sequences; the raw bytes are in the " code { ".log" } " files." }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_style_sheets_digest_is_base_64() {
        assert_eq!(digest(""), "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=");
        assert_eq!(digest("abc"), "ungWv48Bz+pBQUDeXa4iI7ADYaOWF3qctBD/YfIAFa0=");
    }

    #[test]
    fn the_style_sheet_asks_for_nothing_from_outside() {
        for forbidden in ["url(", "@import", "http", "</"] {
            assert!(!STYLE.contains(forbidden), "{forbidden}");
        }
    }
}
