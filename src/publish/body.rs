//! The text of a comment or note: one for the whole change, with a section per job.
//!
//! A body begins with a marker that finds it again, then the verdict over all sections, then the sections, each between
//! markers that say whose it is. Markers are HTML comments, which are hidden. A section's own text can hold none: wherever
//! an HTML comment begins in it (in code that a guest printed, never in text of ours), that is broken.
//!
//! Sections come from [`report::markdown`](crate::report::markdown), so that a comment says what the summary says. They have
//! two parts, what is read first and the details; where a body gets too long, details go first, those of what passed before
//! those of what did not, then whole sections, and what is left out is counted.

use std::fmt::Write;

use sha2::{Digest, Sha256};

use super::{Publication, Said, Standing};
use crate::report::markdown::{self, Frame};
use crate::report::{ReportOrigin, Verdict, words};
use crate::text::Untrusted;

/// First line of every body of ours.
pub const MARKER: &str = "<!-- plimsoll:comment v1 -->";
const DETAILS: &str = "<!-- plimsoll:details -->";
const END: &str = "<!-- plimsoll:end -->";
const SECTION: &str = "<!-- plimsoll:section v1 ";
/// Bytes of a section: several fit into a body.
const SECTION_BUDGET: usize = markdown::BUDGET;
/// Sections of a body; more are not read back.
const MAX_SECTIONS: usize = 200;
/// Longest label shown, bytes.
const LABEL: usize = 120;

/// What a section comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mark {
    /// Refused.
    Refused,
    /// Error.
    Error,
    /// No report.
    Missing,
    /// Not to be believed.
    Unverified,
    /// Failed.
    Failed,
    /// Cancelled.
    Cancelled,
    /// Passed.
    Passed,
    /// Nothing to do.
    Skipped,
}

impl Mark {
    const ALL: [Mark; 8] = [
        Mark::Refused,
        Mark::Error,
        Mark::Missing,
        Mark::Unverified,
        Mark::Failed,
        Mark::Cancelled,
        Mark::Passed,
        Mark::Skipped,
    ];

    /// Of what is published.
    #[must_use]
    pub fn of(what: &Publication) -> Self {
        match (&what.said, &what.standing) {
            (Said::Missing(_), _) => Mark::Missing,
            (_, Standing::Unverified(_)) => Mark::Unverified,
            (Said::Pending, _) => Mark::Skipped,
            (Said::Report { report, .. }, _) => match report.verdict {
                Verdict::Passed => Mark::Passed,
                Verdict::Failed => Mark::Failed,
                Verdict::Refused => Mark::Refused,
                Verdict::Error => Mark::Error,
                Verdict::Cancelled => Mark::Cancelled,
                Verdict::Skipped => Mark::Skipped,
            },
        }
    }

    /// The word shown, and used in markers.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Mark::Refused => "refused",
            Mark::Error => "error",
            Mark::Missing => "no report",
            Mark::Unverified => "unverified",
            Mark::Failed => "failed",
            Mark::Cancelled => "cancelled",
            Mark::Passed => "passed",
            Mark::Skipped => "skipped",
        }
    }

    /// The picture before it.
    #[must_use]
    pub const fn icon(self) -> &'static str {
        match self {
            Mark::Refused => markdown::icon(Verdict::Refused),
            Mark::Error | Mark::Missing => markdown::icon(Verdict::Error),
            Mark::Unverified => "❔",
            Mark::Failed => markdown::icon(Verdict::Failed),
            Mark::Cancelled => markdown::icon(Verdict::Cancelled),
            Mark::Passed => markdown::icon(Verdict::Passed),
            Mark::Skipped => markdown::icon(Verdict::Skipped),
        }
    }
}

/// One job's part of a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    /// Whose: hex, from the workflow's and the job's names and the matrix values.
    pub key: String,
    /// Number of the run it is about; a greater one is newer.
    pub run: u64,
    /// Attempt of that run.
    pub attempt: u64,
    /// The commit it is about, hex.
    pub sha: String,
    /// What it comes to.
    pub mark: Mark,
    /// What is read first.
    pub brief: String,
    /// The details.
    pub details: String,
}

impl Section {
    /// Of what is published.
    #[must_use]
    pub fn of(what: &Publication) -> Self {
        let context = what.context.as_ref();
        let workflow = context.and_then(|c| c.workflow.as_deref()).unwrap_or_default();
        let label = what.label();
        let key = hex::encode(Sha256::digest(format!("{workflow}\0{label}")));
        let producer = context.and_then(|c| c.producer.as_ref()).and_then(|p| p.run);
        let sha = context.and_then(|c| c.head_sha.clone()).unwrap_or_default();
        let (brief, details) = text(what, &label, &sha);
        Self {
            key: key[..16].to_owned(),
            run: producer.or(context.and_then(|c| c.run)).unwrap_or(0),
            attempt: context.and_then(|c| c.attempt).unwrap_or(0),
            sha,
            mark: Mark::of(what),
            brief: inert(&brief),
            details: inert(&details),
        }
    }

    fn marker(&self) -> String {
        let Self { key, run, attempt, sha, mark, .. } = self;
        let sha = if sha.is_empty() { "-" } else { sha };
        let mark = mark.word().replace(' ', "-");
        format!("{SECTION}key={key} run={run} attempt={attempt} sha={sha} verdict={mark} -->")
    }

    /// Reads a marker of [`Section::marker`]'s.
    fn marked(line: &str) -> Option<Self> {
        let fields = line.strip_prefix(SECTION)?.strip_suffix(" -->")?;
        let mut fields = fields.split(' ');
        let mut field = |name: &str| fields.next()?.strip_prefix(name)?.strip_prefix('=');
        let hex = |text: &str| text.bytes().all(|b| b.is_ascii_hexdigit());
        let key = field("key").filter(|k| k.len() == 16 && hex(k))?.to_owned();
        let (run, attempt) = (field("run")?.parse().ok()?, field("attempt")?.parse().ok()?);
        let sha = field("sha").filter(|s| *s == "-" || hex(s))?.trim_matches('-').to_owned();
        let word = field("verdict")?.replace('-', " ");
        let mark = Mark::ALL.into_iter().find(|m| m.word() == word)?;
        Some(Self { key, run, attempt, sha, mark, brief: String::new(), details: String::new() })
    }
}

/// Leaves no place where an HTML comment begins.
fn inert(text: &str) -> String {
    text.replace("<!--", "<!\\--")
}

/// What a section says: the part that is read first, and the details.
fn text(what: &Publication, label: &str, sha: &str) -> (String, String) {
    let title = format!("#### {} {}\n\n", Mark::of(what).icon(), Untrusted::new(label).for_markdown(LABEL));
    let around = around(what, sha);
    match &what.said {
        Said::Report { report, logs } => {
            let headline = match &what.standing {
                Standing::Unverified(_) => format!("It says: {}.", report.verdict),
                _ => words::headline(report),
            };
            let head = format!("{title}**{headline}** {around}\n\n");
            markdown::framed(report, logs, &Frame { head, budget: SECTION_BUDGET })
        }
        Said::Missing(why) => {
            let why = Untrusted::new(why).for_markdown(300);
            (format!("{title}**There is no report:** {why}. {around}\n"), String::new())
        }
        Said::Pending => (format!("{title}It runs. {around}\n"), String::new()),
    }
}

/// Commit, link and, above all, who says so.
fn around(what: &Publication, sha: &str) -> String {
    let mut text = String::new();
    if let Some(short) = sha.get(..7) {
        let _ = write!(text, "Commit `{short}`, ");
    }
    if let Some(url) = what.run_url().filter(|url| is_plain(url)) {
        let _ = write!(text, "[run]({url}). ");
    }
    match &what.standing {
        Standing::Own if what.report().is_some_and(|(report, _)| report.origin == ReportOrigin::Service) => {
            text.push_str("_Run and signed by the service of the runner's host._");
        }
        Standing::Own => text.push_str("_Evidence collected by the job itself._"),
        Standing::Signed { host, key_id, artifact } => {
            let compared = if *artifact {
                "Steps and artifact are those that were given to compare."
            } else {
                "The steps are those of the step file; the artifact was not compared."
            };
            let host = Untrusted::new(host).for_markdown(80);
            let key = key_id.get(..16).unwrap_or(key_id);
            let _ = write!(text, "Signed by the service on {host} with the key `{key}`. {compared}");
        }
        Standing::Unverified(reasons) => {
            let _ = writeln!(text, "\n\n_{UNVERIFIED}_\n");
            for reason in reasons.iter().take(10) {
                let _ = writeln!(text, "- {}", Untrusted::new(reason).for_markdown(400));
            }
        }
    }
    text
}

/// What stands over a report that nothing vouches for.
pub const UNVERIFIED: &str = "unverified: claimed by the pull request's own job";

/// Whether an address can stand in a Markdown link as it is.
fn is_plain(url: &str) -> bool {
    let known = |b: u8| b.is_ascii_alphanumeric() || b"-._~:/%@+,=!$&#?".contains(&b);
    (url.starts_with("https://") || url.starts_with("http://")) && url.bytes().all(known)
}

/// The sections of a body of ours; none if it is not as we write them.
#[must_use]
pub fn parse(body: &str) -> Vec<Section> {
    let body = body.replace("\r\n", "\n");
    let mut sections: Vec<Section> = Vec::new();
    let mut open: Option<(Section, bool)> = None;
    for line in body.lines() {
        if let Some(section) = Section::marked(line) {
            open = Some((section, false));
        } else if line == DETAILS {
            if let Some((_, details)) = &mut open {
                *details = true;
            }
        } else if line == END {
            sections.extend(open.take().map(|(section, _)| section).filter(|_| sections.len() < MAX_SECTIONS));
        } else if let Some((section, details)) = &mut open {
            let part = if *details { &mut section.details } else { &mut section.brief };
            part.push_str(line);
            part.push('\n');
        }
    }
    sections
}

/// What a body becomes when a section is put into it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Merged {
    /// These sections.
    Sections(Vec<Section>),
    /// Nothing: a later run has spoken already.
    Outdated,
}

/// Puts a section among those that are there. Sections about other commits go, unless they are of later runs.
#[must_use]
pub fn merge(there: Vec<Section>, own: &Section) -> Merged {
    let newer = |s: &Section| {
        if s.sha == own.sha { s.key == own.key && (s.run, s.attempt) > (own.run, own.attempt) } else { s.run > own.run }
    };
    if there.iter().any(newer) {
        return Merged::Outdated;
    }
    let mut sections: Vec<Section> = Vec::new();
    for section in there.into_iter().filter(|s| s.sha == own.sha && s.key != own.key) {
        match sections.iter_mut().find(|s| s.key == section.key) {
            // A duplicate from a race: the later one of a job is its last word.
            Some(same) if (same.run, same.attempt) <= (section.run, section.attempt) => *same = section,
            Some(_) => {}
            None => sections.push(section),
        }
    }
    sections.push(own.clone());
    sections.sort_by(|a, b| (a.mark, &a.key).cmp(&(b.mark, &b.key)));
    Merged::Sections(sections)
}

/// The body with these sections, of at most `limit` characters.
#[must_use]
pub fn compose(sections: &[Section], limit: usize) -> String {
    // Without details of what passed, then without all details, then without sections from the end.
    let good = |s: &Section| matches!(s.mark, Mark::Passed | Mark::Skipped);
    let mut details: Vec<bool> = sections.iter().map(|s| !s.details.is_empty()).collect();
    let by_worth = (0..sections.len())
        .filter(|&i| good(&sections[i]))
        .chain((0..sections.len()).rev().filter(|&i| !good(&sections[i])));
    let mut count = sections.len();
    let mut left = by_worth.collect::<Vec<_>>().into_iter();
    loop {
        let body = written(sections, &details, count);
        if body.chars().count() <= limit || count == 0 {
            return body;
        }
        match left.find(|&i| details[i]) {
            Some(i) => details[i] = false,
            None => count -= 1,
        }
    }
}

fn written(sections: &[Section], details: &[bool], count: usize) -> String {
    let mut text = format!("{MARKER}\n");
    let worst = sections.iter().map(|s| s.mark).min().unwrap_or(Mark::Skipped);
    let _ = writeln!(text, "### {} Plimsoll: {}\n", worst.icon(), worst.word());
    if sections.len() > 1 {
        let parts: Vec<String> = Mark::ALL
            .into_iter()
            .map(|mark| (mark, sections.iter().filter(|s| s.mark == mark).count()))
            .filter(|(_, n)| *n > 0)
            .map(|(mark, n)| format!("{n} {}", mark.word()))
            .collect();
        let _ = writeln!(text, "{} jobs: {}.\n", sections.len(), parts.join(", "));
    }
    let mut left_out = 0;
    for (section, details) in sections.iter().zip(details).take(count) {
        let _ = write!(text, "{}\n{}", section.marker(), section.brief);
        if *details {
            let _ = write!(text, "{DETAILS}\n{}", section.details);
        } else if !section.details.is_empty() {
            left_out += 1;
        }
        let _ = writeln!(text, "{END}\n");
    }
    if count < sections.len() {
        let _ = writeln!(text, "_{} more jobs did not fit here; see their summaries._\n", sections.len() - count);
    }
    if left_out > 0 {
        let _ = writeln!(
            text,
            "_The details of {} did not fit here; see the jobs' summaries._\n",
            words::count(left_out, "job")
        );
    }
    let _ = writeln!(text, "{}", markdown::FOOT);
    text
}

#[cfg(test)]
mod tests;
