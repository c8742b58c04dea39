//! JUnit, Markdown and the page.

use std::path::Path;

use plimsoll::report::{Logs, Verdict, guest_junit, junit, markdown};

use crate::{commit_all, python, samples};

fn read(root: &Path, name: &str) -> String {
    std::fs::read_to_string(root.join("report").join(name)).unwrap()
}

const JUNITPARSER: &str = r"
from junitparser import JUnitXml, TestSuite
for file in sys.argv[1:]:
    xml = JUnitXml.fromfile(file)
    total = [0, 0, 0, 0]
    for suite in xml:
        assert isinstance(suite, TestSuite), suite
        assert not list(suite.testsuites()), 'nested'
        counted = [0, 0, 0, 0]
        for case in suite:
            assert case.name is not None and case.classname, case
            assert case.time >= 0
            assert len(case.result) <= 1, case.result
            counted[0] += 1
            for result in case.result:
                counted[{'Failure': 1, 'Error': 2, 'Skipped': 3}[type(result).__name__]] += 1
        assert counted == [suite.tests, suite.failures, suite.errors, suite.skipped], (counted, suite)
        total = [a + b for a, b in zip(total, counted)]
    assert total == [xml.tests, xml.failures, xml.errors, xml.skipped], total
    print('red' if total[1] or total[2] else 'green')
";

const ETREE: &str = r"
import re
import xml.etree.ElementTree as ET
for file in sys.argv[1:]:
    root = ET.parse(file).getroot()
    assert root.tag == 'testsuites'
    for element in root.iter():
        if element.tag in ('testsuite', 'testsuites'):
            for key in ('name', 'tests', 'failures', 'errors', 'skipped', 'time'):
                assert key in element.attrib, (element.tag, key)
        if 'time' in element.attrib:
            assert re.fullmatch(r'[0-9]+\.[0-9]{3}', element.attrib['time']), element.attrib
";

#[test]
fn junit_is_accepted_by_strict_readers_and_is_red_exactly_when_the_verdict_is() {
    let root = tempfile::tempdir().unwrap();
    let all = commit_all(root.path());
    let files: Vec<_> = all.iter().map(|(name, _)| root.path().join(name).join("report/junit.xml")).collect();
    python("xml.etree.ElementTree", ETREE, &files);
    let Some(said) = python("junitparser", JUNITPARSER, &files) else { return };
    let colour = |verdict| if matches!(verdict, Verdict::Passed | Verdict::Skipped) { "green" } else { "red" };
    let expected: Vec<&str> = all.iter().map(|(_, sample)| colour(sample.report.verdict)).collect();
    assert_eq!(said.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn a_guests_claim_of_failure_does_not_turn_a_passed_step_red() {
    let mut sample = samples::passed();
    let cases =
        guest_junit::parse(b"<testsuite><testcase name='x'><failure message='m'/></testcase></testsuite>").unwrap();
    sample.report.steps[0].guest_cases = cases;
    let text = junit::render(&sample.report, &Logs::new(Path::new("/nonexistent")));
    assert!(!text.contains("<failure") && !text.contains("<error"), "{text}");
    assert!(text.contains("claimed-failure"));
}

#[test]
fn junit_of_a_refused_step() {
    let root = tempfile::tempdir().unwrap();
    samples::refused().commit(root.path());
    insta::assert_snapshot!("refused.junit", read(root.path(), "junit.xml"));
}

#[test]
fn junit_stays_below_gitlabs_limits_whatever_guests_write() {
    let case = format!("<testcase name='{0}'><failure message='{0}'>{0}</failure></testcase>", "&amp;".repeat(500));
    let cases = guest_junit::parse(format!("<testsuite>{}</testsuite>", case.repeat(400)).as_bytes()).unwrap();
    let mut sample = samples::failed();
    let step = sample.report.steps[0].clone();
    sample.report.steps =
        (0..10).map(|_| plimsoll::report::StepReport { guest_cases: cases.clone(), ..step.clone() }).collect();
    let text = junit::render(&sample.report, &Logs::new(Path::new("/nonexistent")));
    assert!(text.len() <= junit::MAX_BYTES, "{}", text.len());
    assert!(text.matches('<').count() < 500_000);
    assert!(text.contains("name=\"run\""));
}

#[test]
fn the_summary_of_a_passed_and_of_a_refused_run() {
    for (name, mut sample) in
        [("passed", samples::passed()), ("refused", samples::refused()), ("mixed", samples::mixed())]
    {
        let root = tempfile::tempdir().unwrap();
        sample.commit(root.path());
        insta::assert_snapshot!(format!("{name}.summary"), read(root.path(), "summary.md"));
    }
}

/// Markdown outside of code spans and fences, and the number of elements left open.
fn live(markdown: &str) -> (String, i64) {
    let (mut text, mut open, mut fence) = (String::new(), 0, None::<String>);
    for line in markdown.lines() {
        let ticks: String = line.chars().take_while(|&c| c == '`').collect();
        match &fence {
            Some(f) if line == f => fence = None,
            Some(_) => continue,
            None if ticks.len() >= 3 && line[ticks.len()..].chars().all(|c| c.is_ascii_alphabetic()) => {
                fence = Some(ticks)
            }
            None => {
                let mut rest = line;
                let before = text.len();
                while let Some(start) = rest.find('`') {
                    text.push_str(&rest[..start]);
                    let run = rest[start..].chars().take_while(|&c| c == '`').count();
                    let (after, ticks) = (&rest[start + run..], "`".repeat(run));
                    let mut at = 0;
                    rest = loop {
                        match after[at..].find(&ticks) {
                            None => break after,
                            Some(end) => {
                                let end = at + end;
                                let long = after[end..].chars().take_while(|&c| c == '`').count();
                                at = end + long;
                                if long == run {
                                    break &after[at..];
                                }
                            }
                        }
                    };
                }
                text.push_str(rest);
                let line = &text[before..];
                open += line.matches("<details").count() as i64 - line.matches("</details>").count() as i64;
                text.push('\n');
            }
        }
    }
    assert!(fence.is_none(), "a fence is open at the end");
    (text, open)
}

#[test]
fn guest_text_is_nowhere_live_in_the_summary() {
    let root = tempfile::tempdir().unwrap();
    samples::hostile().commit(root.path());
    let text = read(root.path(), "summary.md");
    let (live, open) = live(&text);
    assert_eq!(open, 0);
    for forbidden in ["@octocat", "Fixes #1", "GH-12", "https://", "<script", "<img", "<!--", "<object", "owner/repo#3"]
    {
        assert!(!live.contains(forbidden), "{forbidden} in {live}");
    }
    assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}') && !text.contains('\u{e0041}'));
    assert!(!text.lines().any(|l| l.starts_with("/close")));
}

#[test]
fn a_small_budget_keeps_the_verdict_first_and_closes_everything() {
    for (name, mut sample) in samples::all() {
        let root = tempfile::tempdir().unwrap();
        sample.commit(root.path());
        let logs = Logs::new(&root.path().join("report"));
        for budget in [0, 200, 500, 1000, 2000, 4000, 10_000] {
            let text = markdown::render(&sample.report, &logs, budget);
            assert!(text.starts_with("### "), "{name}");
            assert!(text.lines().next().unwrap().contains(sample.report.verdict.name()));
            assert!(text.len() <= budget.max(400), "{name}: {} of {budget}", text.len());
            assert_eq!(live(&text).1, 0, "{name} at {budget}");
        }
    }
}

#[test]
fn the_page_holds_no_markup_of_the_guests_and_asks_for_nothing() {
    let root = tempfile::tempdir().unwrap();
    samples::hostile().commit(root.path());
    let page = read(root.path(), "report.html");
    for forbidden in
        ["<script", "<img", "<object", "<!--", "onerror=alert(1)>", "javascript:", "src=\"", "url(", "<link"]
    {
        assert!(!page.contains(forbidden), "{forbidden}");
    }
    assert!(!page.contains("href="), "a link that is no https link is not one");
    assert!(page.contains("default-src 'none'") && page.contains("&lt;script&gt;"));
    assert!(!page.chars().any(|c| c == '\u{1b}' || c == '\u{202e}' || c == '\0' || c == '\u{9b}'));
    // Every element is closed: what follows guest text is still the page.
    for element in ["pre", "details", "section", "article", "div", "table", "dl", "figure", "svg"] {
        let open = page.matches(&format!("<{element}>")).count() + page.matches(&format!("<{element} ")).count();
        assert_eq!(open, page.matches(&format!("</{element}>")).count(), "{element}");
    }
}

#[test]
fn the_page_says_verdict_and_tier_first() {
    let root = tempfile::tempdir().unwrap();
    samples::passed().commit(root.path());
    let page = read(root.path(), "report.html");
    let body = &page[page.find("<body>").unwrap()..];
    let place = |text: &str| body.find(text).unwrap_or_else(|| panic!("{text}"));
    assert!(place("behind a kernel boundary") < place("The floor asked for was kernel"));
    assert!(place("the load line at kernel") < place("What ran"));
    assert!(place("What ran") < place(">Controls<") && place(">Controls<") < place("plimsoll verify"));
    assert!(!page.contains("attestation"));
}
