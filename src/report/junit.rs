//! `junit.xml`: the report for tools that know JUnit.
//!
//! One flat suite per step. Its first case, `run`, is the step's verdict; then one case per control; then the guest's own
//! cases under a class name that begins with [`UNVERIFIED`]. The file is red exactly when the verdict is not `passed` (or
//! `skipped`): a required control that is not satisfied is a failure, one that nobody asked for and that is not enforced is skipped
//! with its reason, and a
//! guest's claim that one of its cases failed counts only where its step failed too.
//!
//! `junit-report` writes the document; a second pass over it sets what that leaves out (times with three decimals, `skipped`,
//! totals). Sizes stay below what GitLab takes: 30 MB and 250,000 XML objects.

use std::borrow::Cow;

use junit_report::{Duration, OffsetDateTime};
use junit_report::{ReportBuilder, TestCase, TestCaseBuilder, TestSuiteBuilder};
use plimsoll_guest::Stream;
use quick_xml::events::{BytesStart, Event};
use quick_xml::{Reader, Writer, XmlVersion};

use super::guest_junit::{Case, CaseOutcome};
use super::{ControlRecord, Logs, Report, StepReport, Verdict, words};
use crate::evidence::Status;
use crate::text::Untrusted;

/// First part of the class names of guests' own cases.
pub const UNVERIFIED: &str = "guest (unverified)";
/// The largest file written, bytes.
pub const MAX_BYTES: usize = 28 * 1000 * 1000;
/// Cases of guests, in all steps together; each is at most three XML objects.
const MAX_GUEST_CASES: usize = 50_000;
const NAME: usize = 400;
const MESSAGE: usize = 2000;

/// How much of what guests said is shown: cases in all, and bytes of output and of a case's text.
#[derive(Debug, Clone, Copy)]
struct Detail {
    cases: usize,
    output: usize,
    text: usize,
}

/// What is tried until the file is small enough.
const DETAILS: [Detail; 4] = [
    Detail { cases: MAX_GUEST_CASES, output: 64 * 1024, text: 4096 },
    Detail { cases: 10_000, output: 8 * 1024, text: 512 },
    Detail { cases: 1_000, output: 1024, text: 128 },
    Detail { cases: 0, output: 0, text: 0 },
];

/// The document.
#[must_use]
pub fn render(report: &Report, logs: &Logs) -> String {
    let mut text = String::new();
    for detail in DETAILS {
        text = write(report, logs, detail);
        if text.len() <= MAX_BYTES {
            break;
        }
    }
    text
}

fn write(report: &Report, logs: &Logs, detail: Detail) -> String {
    // A date outside four-digit years can't be written; no clock that works says such a thing.
    let started = OffsetDateTime::from_unix_timestamp(report.started_at.as_second().clamp(0, 253_402_300_799))
        .unwrap_or(OffsetDateTime::UNIX_EPOCH);
    let mut builder = ReportBuilder::new();
    let mut room = detail.cases;
    for step in &report.steps {
        let mut suite = TestSuiteBuilder::new(&suite_name(step));
        suite.set_timestamp(started);
        suite.testsuite.hostname = Untrusted::new(&report.host.runner).for_xml_attribute(NAME);
        suite.testsuite.package = format!("plimsoll.{}", step.directory());
        suite.add_testcase(run_case(step));
        let observed = step.tier.is_some();
        suite.add_testcases(step.controls.iter().map(|c| control_case(step, c, observed)));
        let shown = step.guest_cases.as_slice().len().min(room);
        room -= shown;
        suite.add_testcases(step.guest_cases.as_slice()[..shown].iter().map(|c| guest_case(step, c, detail)));
        let output = |stream| {
            let raw = if detail.output == 0 { Vec::new() } else { logs.excerpt(step, stream, detail.output) };
            Untrusted::new(raw).for_xml(detail.output * 2)
        };
        suite.testsuite.system_out = Some(output(Stream::Stdout)).filter(|text| !text.is_empty());
        suite.testsuite.system_err = Some(output(Stream::Stderr)).filter(|text| !text.is_empty());
        builder.add_testsuite(suite.build());
    }
    let red = |step: &StepReport| !step.forgiven && !matches!(step.verdict, Verdict::Passed | Verdict::Skipped);
    let explained = report.steps.iter().any(red) || matches!(report.verdict, Verdict::Passed | Verdict::Skipped);
    if report.steps.is_empty() || !explained {
        // A run that failed before, between or after its steps must not look like a success.
        let name = "plimsoll";
        let case = if matches!(report.verdict, Verdict::Passed | Verdict::Skipped) {
            TestCase::skipped_with_cause("run", "skipped", "there was nothing to run")
        } else {
            let message = format!("the run ended as {}: {}", report.verdict, report.exit_code.describe());
            TestCase::error("run", Duration::ZERO, report.verdict.name(), &message)
        };
        let mut suite = TestSuiteBuilder::new(name);
        suite.set_timestamp(started).add_testcase(with_class(case, "plimsoll"));
        suite.testsuite.hostname = Untrusted::new(&report.host.runner).for_xml_attribute(NAME);
        builder.add_testsuite(suite.build());
    }
    let mut document = Vec::new();
    // Writing to memory does not fail, and neither does reading back what was written.
    let written = builder.build().write_xml(&mut document).is_ok();
    let finished = written.then(|| String::from_utf8(document).ok()).flatten().and_then(|text| complete(&text));
    finished.unwrap_or_else(|| {
        "<?xml version=\"1.0\" encoding=\"utf-8\"?><testsuites tests=\"1\" failures=\"0\" errors=\"1\" skipped=\"0\" time=\"0.000\"><testsuite \
         name=\"plimsoll\" tests=\"1\" failures=\"0\" errors=\"1\" skipped=\"0\" time=\"0.000\"><testcase name=\"junit\" classname=\"plimsoll\" \
         time=\"0.000\"><error type=\"internal\" message=\"the report could not be written as JUnit\"/></testcase></testsuite></testsuites>\n"
            .to_owned()
    })
}

fn suite_name(step: &StepReport) -> String {
    format!("{:02} {}", step.index, Untrusted::new(&step.name).for_xml_attribute(NAME))
}

fn with_class(mut case: TestCase, class: &str) -> TestCase {
    case.set_classname(class);
    case
}

fn millis(ms: u64) -> Duration {
    Duration::milliseconds(i64::try_from(ms).unwrap_or(i64::MAX).min(i64::MAX / 1_000_000))
}

/// The step's verdict as a case.
fn run_case(step: &StepReport) -> TestCase {
    let time = millis(step.resources.total_ms);
    let why = why(step);
    let case = match step.verdict {
        _ if step.forgiven => TestCase::skipped_with_cause("run", "forgiven", &format!("forgiven: {why}")),
        Verdict::Passed => TestCase::success("run", time),
        Verdict::Skipped => TestCase::skipped_with_cause("run", "skipped", &why),
        Verdict::Failed => TestCase::failure("run", time, "failed", &why),
        Verdict::Refused | Verdict::Error | Verdict::Cancelled => {
            let kind = step.refusal.as_ref().map_or(step.verdict.name(), |r| r.reason.as_str());
            let mut case = TestCaseBuilder::error("run", time, &Untrusted::new(kind).for_xml_attribute(80), &why);
            if let Some(help) = step.refusal.as_ref().and_then(|r| r.help.as_ref()) {
                case.set_trace(&format!("help: {}", Untrusted::new(help).for_xml(MESSAGE)));
            }
            case.build()
        }
    };
    with_class(case, &format!("plimsoll.{}", step.directory()))
}

/// In one line, why the verdict is what it is.
fn why(step: &StepReport) -> String {
    if let Some(refusal) = &step.refusal {
        return Untrusted::new(&refusal.message).for_xml_attribute(MESSAGE);
    }
    let ending = words::ending(step);
    let limit = step.result.as_ref().filter(|r| r.timed_out || r.limit_hit.is_some());
    Untrusted::from(match limit.and_then(|r| r.message.as_ref()) {
        Some(message) => format!("{ending}: {message}"),
        None => ending,
    })
    .for_xml_attribute(MESSAGE)
}

fn control_case(step: &StepReport, control: &ControlRecord, observed: bool) -> TestCase {
    let name = control.id.name();
    let facts: Vec<String> = control.observations.iter().map(|o| o.fact.words()).collect();
    let facts = if facts.is_empty() { "nothing was observed".to_owned() } else { facts.join("; ") };
    let message = Untrusted::from(format!("{}: {facts}", control.status)).for_xml_attribute(MESSAGE);
    let case = if words::unmet(step, control) && !matches!(step.verdict, Verdict::Passed | Verdict::Skipped) {
        if observed {
            TestCase::failure(name, Duration::ZERO, control.status.name(), &message)
        } else {
            TestCase::skipped_with_cause(name, "unobserved", "no boundary was observed")
        }
    } else if control.status == Status::Enforced || (control.required && !words::unmet(step, control)) {
        TestCase::success(name, Duration::ZERO)
    } else {
        TestCase::skipped_with_cause(name, control.status.name(), &message)
    };
    with_class(case, &format!("plimsoll.{}.controls", step.directory()))
}

fn guest_case(step: &StepReport, case: &Case, detail: Detail) -> TestCase {
    let name = Untrusted::new(&case.name).for_xml_attribute(NAME);
    let class = format!("{UNVERIFIED}.{}", Untrusted::new(&case.classname).for_xml_attribute(NAME));
    let message = Untrusted::new(&case.message).for_xml_attribute(MESSAGE.min(detail.text));
    let text = Untrusted::new(&case.text).for_xml(detail.text);
    let time = millis(case.millis);
    let red = step.verdict == Verdict::Failed && !step.forgiven;
    let result = match case.outcome {
        CaseOutcome::Passed => TestCase::success(&name, time),
        CaseOutcome::Skipped => TestCase::skipped_with_cause(&name, "skipped", &message),
        CaseOutcome::Failed if red => {
            let mut case = TestCaseBuilder::failure(&name, time, "failure", &message);
            case.set_trace(&text);
            case.build()
        }
        CaseOutcome::Error if red => {
            let mut case = TestCaseBuilder::error(&name, time, "error", &message);
            case.set_trace(&text);
            case.build()
        }
        CaseOutcome::Failed | CaseOutcome::Error => TestCase::skipped_with_cause(
            &name,
            "claimed-failure",
            &format!("the guest's own report says that this failed, but its step did not: {message}"),
        ),
    };
    with_class(result, &class)
}

/// Counts of one suite, read from its cases.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    tests: u64,
    failures: u64,
    errors: u64,
    skipped: u64,
    millis: u64,
}

/// Sets what the writer leaves out. `None` if the document is not as it wrote it.
fn complete(document: &str) -> Option<String> {
    let suites = count(document)?;
    let mut all = Counts::default();
    for suite in &suites {
        all.tests += suite.tests;
        all.failures += suite.failures;
        all.errors += suite.errors;
        all.skipped += suite.skipped;
        all.millis += suite.millis;
    }
    let mut reader = Reader::from_str(document);
    let mut writer = Writer::new(Vec::with_capacity(document.len() + 4096));
    let mut next = suites.iter();
    loop {
        let event = match reader.read_event().ok()? {
            Event::Eof => break,
            Event::Start(e) => Event::Start(completed(&e, &mut next, &all)?),
            Event::Empty(e) => Event::Empty(completed(&e, &mut next, &all)?),
            other => other,
        };
        // One element a line, where no text is: kinder to people and to diffs.
        let breaks = match &event {
            Event::Start(e) | Event::Empty(e) => matches!(e.name().as_ref(), "testsuites" | "testsuite" | "testcase"),
            Event::End(e) => matches!(e.name().as_ref(), "testsuites" | "testsuite"),
            _ => false,
        };
        if breaks {
            writer.get_mut().push(b'\n');
        }
        writer.write_event(event).ok()?;
    }
    let mut text = String::from_utf8(writer.into_inner()).ok()?;
    text.push('\n');
    Some(text)
}

fn count(document: &str) -> Option<Vec<Counts>> {
    let mut reader = Reader::from_str(document);
    let mut suites: Vec<Counts> = Vec::new();
    loop {
        let event = reader.read_event().ok()?;
        let (Event::Start(element) | Event::Empty(element)) = event else {
            if matches!(event, Event::Eof) { return Some(suites) } else { continue }
        };
        match element.name().as_ref() {
            "testsuite" => suites.push(Counts::default()),
            name => {
                let Some(suite) = suites.last_mut() else { continue };
                match name {
                    "testcase" => {
                        suite.tests += 1;
                        suite.millis += time(&element)?;
                    }
                    "failure" => suite.failures += 1,
                    "error" => suite.errors += 1,
                    "skipped" => suite.skipped += 1,
                    _ => {}
                }
            }
        }
    }
}

/// The element's time in milliseconds.
fn time(element: &BytesStart<'_>) -> Option<u64> {
    let value = element.try_get_attribute("time").ok()??;
    let seconds: f64 = value.value.parse().ok()?;
    // Written by the caller from whole milliseconds.
    Some((seconds * 1000.0).round() as u64)
}

fn seconds(millis: u64) -> String {
    format!("{}.{:03}", millis / 1000, millis % 1000)
}

fn completed<'c>(
    element: &BytesStart<'_>,
    suites: &mut impl Iterator<Item = &'c Counts>,
    all: &Counts,
) -> Option<BytesStart<'static>> {
    let name = element.name();
    let name = name.as_ref();
    let counts = match name {
        "testsuites" => Some(all),
        "testsuite" => Some(suites.next()?),
        _ => None,
    };
    let mut new = BytesStart::new(name.to_owned());
    for attribute in element.attributes() {
        let attribute = attribute.ok()?;
        let key = attribute.key.as_ref();
        if matches!(key, "tests" | "failures" | "errors" | "skipped") || (key == "time" && name != "testcase") {
            continue;
        }
        let value: Cow<'_, str> = if key == "time" {
            seconds(time(element)?).into()
        } else {
            attribute.normalized_value(XmlVersion::Implicit1_0).ok()?
        };
        new.push_attribute((key, value.as_ref()));
    }
    if name == "testsuites" {
        new.push_attribute(("name", "plimsoll"));
    }
    if let Some(counts) = counts {
        for (key, value) in [
            ("tests", counts.tests),
            ("failures", counts.failures),
            ("errors", counts.errors),
            ("skipped", counts.skipped),
        ] {
            new.push_attribute((key, value.to_string().as_str()));
        }
        new.push_attribute(("time", seconds(counts.millis).as_str()));
    }
    Some(new)
}
