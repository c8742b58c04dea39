//! Reading the JUnit report that a guest wrote about its own tests.
//!
//! It is hostile, and worth no more than the guest's word: it is counted and merged, marked as unverified, and decides
//! nothing. Document type declarations and entities are refused, sizes, depth and counts are bounded, numbers are checked.
//! What doesn't fit is an error in words, for a notice; it never fails a run.

use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};
use quick_xml::{XmlVersion, escape::resolve_predefined_entity};

use super::GuestTests;

/// The largest report that is read, bytes.
pub const MAX_BYTES: u64 = 16 * 1024 * 1024;
/// Cases kept; more are counted.
pub const MAX_CASES: usize = 10_000;
const MAX_DEPTH: usize = 32;
const MAX_ATTRIBUTES: usize = 64;
const MAX_NAME: usize = 512;
const MAX_MESSAGE: usize = 1024;
const MAX_TEXT: usize = 4096;
/// The longest time that a case is believed to have taken, seconds.
const MAX_TIME: f64 = 1e7;

/// How a case ended, as the guest says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum CaseOutcome {
    /// Passed.
    #[default]
    Passed,
    /// Not run.
    Skipped,
    /// Something else than the tested thing went wrong.
    Error,
    /// Failed.
    Failed,
}

/// One case. All text is the guest's, bounded but raw.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Case {
    /// Class, with the suites around it where it has none: `pkg.TestThing`.
    pub classname: String,
    /// Name.
    pub name: String,
    /// Milliseconds.
    pub millis: u64,
    /// How it ended; of several, failed before error before skipped.
    pub outcome: CaseOutcome,
    /// The short message of that outcome.
    pub message: String,
    /// Its text, such as a trace.
    pub text: String,
}

/// What a report says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cases {
    counts: GuestTests,
    cases: Vec<Case>,
}

impl Cases {
    /// All its cases, counted here and not as its attributes claim.
    #[must_use]
    pub const fn counts(&self) -> GuestTests {
        self.counts
    }

    /// The first [`MAX_CASES`] of them.
    #[must_use]
    pub fn as_slice(&self) -> &[Case] {
        &self.cases
    }
}

/// Why something is not read as a JUnit report. Holds no guest text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unreadable(String);

/// Reads a report.
///
/// # Errors
/// When it isn't one, or is larger or deeper than is reasonable.
pub fn parse(bytes: &[u8]) -> Result<Cases, Unreadable> {
    read(bytes).map_err(Unreadable)
}

fn read(bytes: &[u8]) -> Result<Cases, String> {
    if bytes.len() as u64 > MAX_BYTES {
        return Err(format!("it has more than {MAX_BYTES} bytes"));
    }
    let text = std::str::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned())?;
    let mut reader = Reader::from_str(text.trim_start_matches('\u{feff}'));
    reader.config_mut().check_end_names = true;
    let mut parser = Parser::default();
    loop {
        let event = reader.read_event().map_err(|_| format!("it is malformed at byte {}", reader.error_position()))?;
        match event {
            Event::Eof => return parser.end(),
            Event::Start(element) => parser.open(&element)?,
            Event::Empty(element) => {
                parser.open(&element)?;
                parser.close();
            }
            Event::End(_) => parser.close(),
            Event::Text(text) => parser.text(&text.xml10_content()),
            Event::CData(text) => parser.text(&text.xml10_content()),
            Event::GeneralRef(reference) => {
                let c = reference.resolve_char_ref().map_err(|_| "it has a bad character reference".to_owned())?;
                match c {
                    Some(c) => parser.text(c.encode_utf8(&mut [0; 4])),
                    None => match resolve_predefined_entity(&reference.xml10_content()) {
                        Some(text) => parser.text(text),
                        None => return Err("it uses an entity".to_owned()),
                    },
                }
            }
            Event::DocType(_) => return Err("it has a document type declaration".to_owned()),
            Event::Decl(declaration) => match declaration.encoding() {
                Some(Ok(name)) if !name.eq_ignore_ascii_case("utf-8") && !name.eq_ignore_ascii_case("us-ascii") => {
                    return Err("it declares another encoding than UTF-8".to_owned());
                }
                _ => {}
            },
            Event::PI(_) | Event::Comment(_) => {}
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Element {
    Root,
    Suite,
    Case,
    Outcome(CaseOutcome),
    Other,
}

#[derive(Default)]
struct Parser {
    open: Vec<Element>,
    /// Names of the suites around, one for each [`Element::Suite`] that is open.
    suites: Vec<String>,
    case: Option<Case>,
    seen_root: bool,
    report: Cases,
}

impl Parser {
    fn open(&mut self, element: &BytesStart<'_>) -> Result<(), String> {
        if self.open.len() >= MAX_DEPTH {
            return Err(format!("its elements are nested deeper than {MAX_DEPTH}"));
        }
        let name = element.local_name();
        let kind = match (name.as_ref(), self.open.last()) {
            ("testsuites", None) => Element::Root,
            ("testsuite", None | Some(Element::Root | Element::Suite)) => Element::Suite,
            (_, None) => return Err("its root is neither `testsuites` nor `testsuite`".to_owned()),
            ("testcase", Some(Element::Root | Element::Suite)) => Element::Case,
            ("failure", Some(Element::Case)) => Element::Outcome(CaseOutcome::Failed),
            ("error", Some(Element::Case)) => Element::Outcome(CaseOutcome::Error),
            ("skipped", Some(Element::Case)) => Element::Outcome(CaseOutcome::Skipped),
            _ => Element::Other,
        };
        if self.open.is_empty() && std::mem::replace(&mut self.seen_root, true) {
            return Err("it has two roots".to_owned());
        }
        match kind {
            Element::Root | Element::Other => {}
            Element::Suite => {
                let mut name = String::new();
                attributes(element, |key, value| {
                    if key == "name" {
                        name = bounded(value, MAX_NAME);
                    }
                })?;
                self.suites.push(name);
            }
            Element::Case => {
                let mut case = Case::default();
                attributes(element, |key, value| match key {
                    "name" => case.name = bounded(value, MAX_NAME),
                    "classname" => case.classname = bounded(value, MAX_NAME),
                    "time" => case.millis = millis(value),
                    _ => {}
                })?;
                if case.classname.is_empty() {
                    let around: Vec<&str> = self.suites.iter().map(String::as_str).filter(|s| !s.is_empty()).collect();
                    case.classname = bounded(&around.join("."), MAX_NAME);
                }
                self.case = Some(case);
            }
            Element::Outcome(outcome) => {
                let mut message = String::new();
                attributes(element, |key, value| {
                    if key == "message" {
                        message = bounded(value, MAX_MESSAGE);
                    }
                })?;
                if let Some(case) = &mut self.case
                    && outcome > case.outcome
                {
                    (case.outcome, case.message, case.text) = (outcome, message, String::new());
                }
            }
        }
        self.open.push(kind);
        Ok(())
    }

    fn close(&mut self) {
        match self.open.pop() {
            Some(Element::Suite) => {
                self.suites.pop();
            }
            Some(Element::Case) => {
                let Some(case) = self.case.take() else { return };
                let tests = &mut self.report.counts;
                tests.total += 1;
                match case.outcome {
                    CaseOutcome::Passed => {}
                    CaseOutcome::Skipped => tests.skipped += 1,
                    CaseOutcome::Error => tests.errors += 1,
                    CaseOutcome::Failed => tests.failed += 1,
                }
                if self.report.cases.len() < MAX_CASES {
                    self.report.cases.push(case);
                }
            }
            _ => {}
        }
    }

    fn text(&mut self, text: &str) {
        if let Some(Element::Outcome(outcome)) = self.open.last()
            && let Some(case) = &mut self.case
            && case.outcome == *outcome
        {
            let room = MAX_TEXT.saturating_sub(case.text.len());
            case.text.push_str(&text[..text.floor_char_boundary(room)]);
        }
    }

    fn end(self) -> Result<Cases, String> {
        match (self.seen_root, self.open.is_empty()) {
            (false, _) => Err("it is empty".to_owned()),
            (true, false) => Err("it ends in the middle".to_owned()),
            (true, true) => Ok(self.report),
        }
    }
}

fn attributes(element: &BytesStart<'_>, mut with: impl FnMut(&str, &str)) -> Result<(), String> {
    let mut all = element.attributes();
    // Looking for duplicates takes quadratic time.
    for (count, attribute) in all.with_checks(false).enumerate() {
        if count >= MAX_ATTRIBUTES {
            return Err(format!("an element has more than {MAX_ATTRIBUTES} attributes"));
        }
        let attribute = attribute.map_err(|_| "an attribute is malformed".to_owned())?;
        let value = attribute
            .normalized_value(XmlVersion::Implicit1_0)
            .map_err(|_| "an attribute uses an entity or a bad character reference".to_owned())?;
        with(attribute.key.as_ref(), &value);
    }
    Ok(())
}

fn bounded(text: &str, limit: usize) -> String {
    text[..text.floor_char_boundary(limit)].to_owned()
}

/// Seconds as text, with a comma for thousands or decimals as some writers have it; nonsense is nothing.
fn millis(text: &str) -> u64 {
    let seconds: f64 = text.trim().parse().or_else(|_| text.trim().replace(',', ".").parse()).unwrap_or(0.0);
    if seconds.is_finite() && (0.0..=MAX_TIME).contains(&seconds) {
        // In range by the check above.
        (seconds * 1000.0).round() as u64
    } else {
        0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_report_of_pytest_is_read() {
        let report = read(
            br#"<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest" errors="0" failures="9"
            tests="3" time="0.021"><properties><property name="a" value="b"/></properties>
            <testcase classname="test_a.TestA" name="test_ok" time="0.001" />
            <testcase classname="test_a" name="test_bad" time="1,5"><failure message="assert 1 == 2">trace &lt;here&gt;
&#65;<![CDATA[ <raw> ]]></failure><system-out>noise</system-out></testcase>
            <testcase name="test_skip"><skipped type="pytest.skip" message="why"/></testcase></testsuite></testsuites>"#,
        )
        .unwrap();
        assert_eq!(report.counts, GuestTests { total: 3, failed: 1, errors: 0, skipped: 1 });
        let bad = &report.cases[1];
        assert_eq!((bad.millis, bad.outcome, bad.message.as_str()), (1500, CaseOutcome::Failed, "assert 1 == 2"));
        assert_eq!(bad.text, "trace <here>\nA <raw> ");
        assert_eq!(report.cases[2].classname, "pytest");
    }

    #[test]
    fn nested_suites_are_flattened_and_one_outcome_counts() {
        let report = read(
            br#"<testsuite name="a"><testsuite name="b"><testcase name="x"><skipped/><error message="e">1</error>
            <failure message="f">2</failure><error message="late">3</error></testcase></testsuite></testsuite>"#,
        )
        .unwrap();
        let case = &report.cases[0];
        assert_eq!((case.classname.as_str(), case.message.as_str(), case.text.as_str()), ("a.b", "f", "2"));
        assert_eq!(report.counts, GuestTests { total: 1, failed: 1, errors: 0, skipped: 0 });
    }

    #[test]
    fn a_document_type_or_an_entity_is_refused() {
        let bomb = br#"<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]><testsuites>&b;</testsuites>"#;
        assert!(read(bomb).unwrap_err().contains("document type"));
        assert!(read(b"<testsuites>&b;</testsuites>").unwrap_err().contains("entity"));
        assert!(read(b"<testsuite name='&b;'/>").unwrap_err().contains("entity"));
        assert!(read(b"<testsuite name='&lt;ok&gt;'/>").is_ok());
    }

    #[test]
    fn what_is_no_report_is_refused_in_words() {
        for bad in [
            &b""[..],
            b"   ",
            b"hello",
            b"<html/>",
            b"<testsuites>",
            b"<testsuites></testsuite>",
            b"<testsuites/><testsuites/>",
            b"\xff<testsuites/>",
            b"<?xml version='1.0' encoding='UTF-16'?><testsuites/>",
        ] {
            assert!(read(bad).is_err(), "{}", String::from_utf8_lossy(bad));
        }
        assert!(read(&vec![b' '; MAX_BYTES as usize + 1]).is_err());
        assert!(read(format!("<testsuites>{}", "<a>".repeat(100)).as_bytes()).unwrap_err().contains("nested"));
        let many = (0..1000).map(|i| format!(" a{i}=''")).collect::<String>();
        assert!(read(format!("<testsuite{many}/>").as_bytes()).unwrap_err().contains("attributes"));
    }

    #[test]
    fn numbers_are_sane_and_cases_bounded() {
        for (text, expected) in
            [("NaN", 0), ("-1", 0), ("inf", 0), ("1e300", 0), ("1e3", 1_000_000), ("", 0), ("0.0005", 1)]
        {
            assert_eq!(millis(text), expected, "{text}");
        }
        let cases = "<testcase name='x'/>".repeat(MAX_CASES + 5);
        let report = read(format!("<testsuites>{cases}</testsuites>").as_bytes()).unwrap();
        assert_eq!((report.counts.total, report.cases.len()), (MAX_CASES as u64 + 5, MAX_CASES));
        let long =
            format!("<testsuite><testcase name='{0}'><failure>{0}</failure></testcase></testsuite>", "é".repeat(9999));
        let report = read(long.as_bytes()).unwrap();
        assert!(report.cases[0].name.len() <= MAX_NAME && report.cases[0].text.len() <= MAX_TEXT);
    }

    proptest! {
        #[test]
        fn nothing_that_a_guest_writes_panics_or_grows(
            tokens in prop::collection::vec(prop::sample::select(vec![
                "<testsuites>", "</testsuites>", "<testsuite name='a'>", "</testsuite>", "<testcase name='x' time='1'>",
                "</testcase>", "<failure message='m'>", "</failure>", "<skipped/>", "<error>", "</error>", "text", "&lt;",
                "&#x41;", "&#0;", "&#xFFFFFFFF;", "&e;", "<![CDATA[", "]]>", "<!--", "-->", "<?pi", "?>", "<!DOCTYPE", ">",
                "<", "\"", "'", "=", "\0", "é", "\u{feff}", " ",
            ]), 0..40),
        ) {
            let text = tokens.concat();
            if let Ok(report) = read(text.as_bytes()) {
                prop_assert!(report.cases.len() <= tokens.len());
                let t = report.counts;
                prop_assert!(t.total >= t.failed + t.errors + t.skipped);
            }
        }

        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&bytes);
        }
    }
}
