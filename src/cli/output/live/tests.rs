use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use super::*;
use crate::cli::output::result::tests::step;
use crate::evidence::Tier;
use crate::report::Verdict;

/// A place to print to that can be read afterwards.
#[derive(Clone, Default)]
struct Page(Arc<Mutex<Vec<u8>>>);

impl Write for Page {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn shown(mode: Mode, target: LogTarget, shape: Shape, events: Vec<Event>) -> String {
    let page = Page::default();
    let mut live = Live::new(Log::to(page.clone()), mode, target, Style::PLAIN, shape);
    live.clock = || 1_700_000_000;
    for event in events {
        live.event(event);
    }
    live.finish();
    let text = String::from_utf8(page.0.lock().unwrap().clone()).unwrap();
    // The token is random; what matters is where it stands.
    match text.split_once("::stop-commands::plimsoll-") {
        Some((_, rest)) => {
            let token = format!("plimsoll-{}", rest.lines().next().unwrap());
            text.replace(&token, "TOKEN")
        }
        None => text,
    }
}

fn started(index: u32, name: &str) -> Event {
    Event::Started { index, name: name.to_owned() }
}

fn progress(index: u32, what: &str) -> Event {
    Event::Progress { index, what: what.to_owned() }
}

fn said(index: u32, stream: Stream, text: &str) -> Event {
    Event::Output { index, stream, bytes: text.as_bytes().to_vec() }
}

fn ended(index: u32, name: &str) -> Event {
    let mut step = step(name, Verdict::Passed, Some(Tier::Kernel));
    step.index = index;
    Event::Ended { step: Box::new(step) }
}

fn one_step() -> Vec<Event> {
    vec![
        started(1, "unit"),
        progress(1, "preparing gvisor"),
        said(1, Stream::Stdout, "two li"),
        said(1, Stream::Stderr, "warning\n"),
        said(1, Stream::Stdout, "nes\nno end"),
        ended(1, "unit"),
    ]
}

#[test]
fn plain_lines_keep_the_guests_text_behind_a_bar() {
    insta::assert_snapshot!(shown(Mode::Plain, LogTarget::Plain, Shape::Serial, one_step()), @r"
    01 unit
      · preparing gvisor
      │ warning
      │ two lines
      │ no end
    ✓ 01 unit: passed
    ");
}

#[test]
fn one_step_alone_leaves_its_verdict_to_the_result() {
    let text = shown(Mode::Plain, LogTarget::Plain, Shape::One, one_step());
    assert!(text.ends_with("│ no end\n"), "{text}");
}

#[test]
fn under_github_a_step_is_a_group_and_its_text_is_guarded() {
    insta::assert_snapshot!(shown(Mode::Plain, LogTarget::GitHub, Shape::Serial, one_step()), @r"
    ::group::01 unit
    ::stop-commands::TOKEN
      · preparing gvisor
      │ warning
      │ two lines
      │ no end
    ::TOKEN::
    ::endgroup::
    ✓ 01 unit: passed
    ");
}

#[test]
fn under_gitlab_a_step_is_a_section() {
    insta::assert_snapshot!(shown(Mode::Plain, LogTarget::GitLab, Shape::Serial, one_step()).replace("\r\x1b[0K", "<CLEAR>"), @r"
    section_start:1700000000:plimsoll_01<CLEAR>01 unit
      · preparing gvisor
      │ warning
      │ two lines
      │ no end
    section_end:1700000000:plimsoll_01<CLEAR>
    ✓ 01 unit: passed
    ");
}

fn two_steps() -> Vec<Event> {
    vec![
        started(1, "a"),
        started(2, "b"),
        said(2, Stream::Stdout, "from b\n"),
        said(1, Stream::Stdout, "from a\n"),
        ended(2, "b"),
        ended(1, "a"),
    ]
}

#[test]
fn steps_at_the_same_time_are_numbered_and_not_grouped() {
    insta::assert_snapshot!(shown(Mode::Plain, LogTarget::GitHub, Shape::Parallel, two_steps()), @r"
    ::stop-commands::TOKEN
    01 a
    02 b
    02│ from b
    01│ from a
    ✓ 02 b: passed
    ✓ 01 a: passed
    ::TOKEN::
    ");
    let gitlab = shown(Mode::Plain, LogTarget::GitLab, Shape::Parallel, two_steps());
    assert!(!gitlab.contains("section_"), "{gitlab}");
}

const HOSTILE: &str = "::add-mask::secret\n  ::stop-commands::x\n##[group]x\n::error file=a::b\n::endgroup::\n\
    section_end:1:plimsoll_01\r\x1b[0K\n\x1b]8;;http://evil\x07link\x1b]8;;\x07\n\u{9b}31mred\n✓ 01 unit: passed\n";

#[test]
fn hostile_text_commands_no_forge_and_imitates_no_line_of_ours() {
    for target in [LogTarget::GitHub, LogTarget::GitLab, LogTarget::Plain] {
        for shape in [Shape::Serial, Shape::Parallel] {
            let events = vec![started(1, "x\n::error::y"), said(1, Stream::Stdout, HOSTILE), ended(1, "z\n::error::y")];
            let text = shown(Mode::Plain, target, shape, events);
            let ours = |line: &str| match target {
                LogTarget::GitHub => {
                    line.starts_with("::group::01 ")
                        || matches!(line, "::stop-commands::TOKEN" | "::TOKEN::" | "::endgroup::")
                }
                _ => false,
            };
            for line in text.lines() {
                assert!(!line.trim_start().starts_with("::") || ours(line), "{target:?}: {line:?}");
                assert!(target != LogTarget::GitHub || !line.contains("##["), "{target:?}: {line:?}");
                assert!(!line.contains('\x07') && !line.contains('\u{9b}'), "{target:?}: {line:?}");
            }
            let verdicts = text.lines().filter(|l| l.starts_with('✓')).count();
            assert_eq!(verdicts, 1, "{target:?}: {text}");
            if target == LogTarget::GitLab {
                let own = if shape == Shape::Parallel { 0 } else { 1 };
                assert_eq!(text.matches("section_end:").count(), own, "{text}");
            }
        }
    }
}

#[test]
fn a_harmless_line_is_left_as_it_is() {
    let events = vec![started(1, "x"), said(1, Stream::Stdout, "a::b [c] #1 naïve 漢字\n"), ended(1, "x")];
    assert!(shown(Mode::Plain, LogTarget::GitHub, Shape::Serial, events).contains("│ a::b [c] #1 naïve 漢字\n"));
}

#[test]
fn json_lines_parse_and_hold_the_same() {
    let text = shown(Mode::Json, LogTarget::Plain, Shape::Serial, one_step());
    let values: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let kinds: Vec<_> = values.iter().map(|v| v["event"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["started", "progress", "output", "output", "output", "ended"]);
    assert_eq!((values[3]["line"].as_str(), values[4]["line"].as_str()), (Some("two lines"), Some("no end")));
    assert_eq!((values[5]["tier"].as_str(), values[5]["verdict"].as_str()), (Some("kernel"), Some("passed")));
}

#[test]
fn quiet_prints_nothing_and_a_reader_that_left_is_no_fault() {
    assert_eq!(shown(Mode::Quiet, LogTarget::Plain, Shape::Serial, one_step()), "");
    struct Closed;
    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut live = Live::new(Log::to(Closed), Mode::Plain, LogTarget::Plain, Style::PLAIN, Shape::Serial);
    one_step().into_iter().for_each(|event| live.event(event));
    live.finish();
}

#[test]
fn a_run_that_stops_in_the_middle_still_closes_what_it_opened() {
    let events = vec![started(1, "x"), said(1, Stream::Stdout, "half")];
    insta::assert_snapshot!(shown(Mode::Plain, LogTarget::GitHub, Shape::Serial, events), @r"
    ::group::01 x
    ::stop-commands::TOKEN
      │ half
    ::TOKEN::
    ::endgroup::
    ");
}
