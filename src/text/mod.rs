//! Text that a guest or a pull request wrote, and the one way to each place where it is shown.
//!
//! [`Untrusted`] has no `Display`: its text reaches XML, HTML, Markdown, a terminal, a log or a workflow command only through
//! the function for that place, which leaves nothing in it that the place obeys, and which is bounded. Live output goes
//! through a [`LogFilter`] per stream. Everything is first made plain by the cleaner: no escape sequences, no
//! invisible characters (see `clean`).
//!
//! Limits count bytes of the plain text. The escaping of the place comes on top; it is at most sixfold.

use std::borrow::Cow;

mod clean;
mod log;

pub use log::{LogFilter, LogTarget, StopCommands};

use clean::Cleaner;
pub(crate) use clean::is_invisible;

/// Text from somebody who is not trusted. It need not be UTF-8.
#[derive(Clone, PartialEq, Eq)]
pub struct Untrusted<'a>(Cow<'a, [u8]>);

impl<'a> From<&'a [u8]> for Untrusted<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self(Cow::Borrowed(bytes))
    }
}

impl<'a> From<&'a str> for Untrusted<'a> {
    fn from(text: &'a str) -> Self {
        Self(Cow::Borrowed(text.as_bytes()))
    }
}

impl<'a> From<&'a String> for Untrusted<'a> {
    fn from(text: &'a String) -> Self {
        Self::from(text.as_str())
    }
}

impl From<Vec<u8>> for Untrusted<'static> {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Cow::Owned(bytes))
    }
}

impl From<String> for Untrusted<'static> {
    fn from(text: String) -> Self {
        Self(Cow::Owned(text.into_bytes()))
    }
}

impl std::fmt::Debug for Untrusted<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Untrusted({:?})", self.for_terminal(120))
    }
}

impl<'a> Untrusted<'a> {
    /// Wraps text or bytes.
    pub fn new(text: impl Into<Untrusted<'a>>) -> Self {
        text.into()
    }

    /// One line for a terminal or a plain message. Line ends and tabs are shown as `\n` and `\t`.
    #[must_use]
    pub fn for_terminal(&self, limit: usize) -> String {
        cut_end(self.line(), limit)
    }

    /// One line for a log that `target` reads.
    #[must_use]
    pub fn for_log_line(&self, target: LogTarget, limit: usize) -> String {
        log::neutralise(self.for_terminal(limit), target)
    }

    /// The data of a workflow command (what follows the second `::`), escaped as the Actions runner undoes it. Line ends
    /// stay.
    #[must_use]
    pub fn for_workflow_command(&self, limit: usize) -> String {
        // A runner of another make may not undo the escapes: nothing in it looks like a command there either.
        let text = cut_end(self.block(), limit).replace("##[", "##\\[");
        text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A")
    }

    /// The value of a workflow command's property (`file=…`, `title=…`).
    #[must_use]
    pub fn for_workflow_property(&self, limit: usize) -> String {
        let text = self.for_terminal(limit).replace("##[", "##\\[");
        text.replace('%', "%25").replace(':', "%3A").replace(',', "%2C")
    }

    /// Content of an XML element, for a writer that escapes or wraps it in CDATA: only characters that XML 1.0 allows, and
    /// no `]]>`. Line ends stay; what is too long is cut in the middle.
    #[must_use]
    pub fn for_xml(&self, limit: usize) -> String {
        break_cdata(&cut_middle(self.block(), limit))
    }

    /// The value of an XML attribute, for a writer that escapes it. One line.
    #[must_use]
    pub fn for_xml_attribute(&self, limit: usize) -> String {
        break_cdata(&self.for_terminal(limit))
    }

    /// Text or a quoted attribute value in HTML, escaped; one line.
    #[must_use]
    pub fn for_html(&self, limit: usize) -> String {
        escape_html(&self.for_terminal(limit))
    }

    /// Content of a `pre` element, escaped. Line ends stay; what is too long is cut in the middle.
    #[must_use]
    pub fn for_html_block(&self, limit: usize) -> String {
        escape_html(&cut_middle(self.block(), limit))
    }

    /// Inline in Markdown: a code span, in which no mention, reference, link or element is live on either forge.
    #[must_use]
    pub fn for_markdown(&self, limit: usize) -> String {
        let text = self.for_terminal(limit);
        if text.trim().is_empty() {
            return "`(empty)`".to_owned();
        }
        let ticks = "`".repeat(longest_run(&text, '`') + 1);
        // One space on each side is dropped again, unless the text has none to tell from the ticks.
        let space = if text.starts_with(['`', ' ']) || text.ends_with(['`', ' ']) { " " } else { "" };
        format!("{ticks}{space}{text}{space}{ticks}")
    }

    /// The same in a cell of a table. Tables are split before code spans are found, and renderers disagree about `\|`, so
    /// that a bar is drawn broken (`¦`).
    #[must_use]
    pub fn for_markdown_cell(&self, limit: usize) -> String {
        self.for_markdown(limit).replace('|', "¦")
    }

    /// A fenced code block in Markdown, with a fence longer than any run of backticks in it, and a line end after it. It
    /// belongs at the beginning of a line. What is too long is cut in the middle.
    #[must_use]
    pub fn fenced(&self, limit: usize) -> String {
        let text = cut_middle(self.block(), limit);
        let fence = "`".repeat(longest_run(&text, '`').max(2) + 1);
        let mut block = format!("{fence}text\n");
        for line in text.trim_end_matches('\n').split('\n') {
            // GitLab looks for quick actions with an idea of code blocks that a shorter fence inside confuses.
            if is_quick_action(line) {
                block.push(' ');
            }
            block.push_str(line);
            block.push('\n');
        }
        block + &fence + "\n"
    }

    /// Clean text with its lines.
    fn block(&self) -> String {
        let mut text = String::with_capacity(self.0.len());
        let mut cleaner = Cleaner::default();
        cleaner.push(&self.0, &mut text);
        cleaner.finish(&mut text);
        text
    }

    /// Clean text on one line.
    fn line(&self) -> String {
        let text = self.block();
        if text.contains(['\n', '\t']) { text.replace('\n', "\\n").replace('\t', "\\t") } else { text }
    }
}

/// Cuts at the end, with a mark that counts.
fn cut_end(mut text: String, limit: usize) -> String {
    if text.len() > limit {
        let end = text.floor_char_boundary(limit);
        let rest = text.len() - end;
        text.truncate(end);
        text.push_str(&format!("… (+{rest} bytes)"));
    }
    text
}

/// Keeps head and tail, at line ends where there are any near, with a line between them that says what is missing.
fn cut_middle(text: String, limit: usize) -> String {
    if text.len() <= limit {
        return text;
    }
    let mut head = text.floor_char_boundary(limit / 2);
    let mut tail = text.ceil_char_boundary(text.len() - limit / 2);
    if let Some(end) = text[..head].rfind('\n').filter(|&end| end > head / 2) {
        head = end + 1;
    }
    if let Some(end) = text[tail..].find('\n').filter(|&end| end < (text.len() - tail) / 2) {
        tail += end + 1;
    }
    let join = if text[..head].ends_with('\n') || head == 0 { "" } else { "\n" };
    format!("{}{join}[… {} bytes cut …]\n{}", &text[..head], tail - head, &text[tail..])
}

fn break_cdata(text: &str) -> String {
    text.replace("]]>", "]]\\>")
}

fn escape_html(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

fn longest_run(text: &str, of: char) -> usize {
    text.split(|c| c != of).map(str::len).max().unwrap_or(0)
}

fn is_quick_action(line: &str) -> bool {
    let Some(rest) = line.strip_prefix('/') else { return false };
    let word = rest.find(|c: char| !c.is_ascii_alphabetic() && c != '_' && c != '-').unwrap_or(rest.len());
    word > 0 && rest[word..].chars().next().is_none_or(char::is_whitespace)
}

#[cfg(test)]
mod tests;

/// An error and its causes on one line, for places that hold one text.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        // Transparent wrappers repeat their cause.
        if !text.ends_with(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = error.source();
    }
    text
}
