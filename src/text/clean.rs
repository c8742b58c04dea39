//! The cleaner: bytes that claim to be text in, text without power out.
//!
//! A small state machine after ECMA-48 and what terminals really do. It keeps its state between calls, so that a
//! sequence or a character that is cut in half by a chunk's end is still recognised.
//!
//! * Control sequences (CSI, OSC, DCS, SOS, PM, APC, two-character escapes; the 7-bit form, the 8-bit form, and the 8-bit
//!   form as UTF-8) are removed.
//! * `\r\n` and a lone `\r` end a line: a progress bar becomes lines, and nothing overwrites what stood there.
//! * Other control characters, invisible characters, bidirectional controls, tag characters, noncharacters and bytes that
//!   are no UTF-8 are shown as escapes: `\x07`, `\u{202e}`.

use unicode_normalization::char::is_combining_mark;

/// A control string (OSC and its kin) that is longer than this is taken for text from here on.
const MAX_STRING: usize = 4096;
/// A control sequence (CSI) that is longer than this is taken for text from here on.
const MAX_SEQUENCE: usize = 256;
/// Combining marks in a row that are still believed to be language.
const MAX_MARKS: u8 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum State {
    #[default]
    Ground,
    /// After ESC.
    Escape,
    /// After ESC and an intermediate character, such as `ESC (`.
    Intermediate,
    /// In a CSI sequence; how many characters so far.
    Sequence(usize),
    /// In a control string; how many characters so far.
    Text(usize),
    /// After ESC in a control string.
    TextEscape(usize),
}

/// A character, or a byte that is none.
#[derive(Debug, Clone, Copy)]
enum Symbol {
    Char(char),
    Byte(u8),
}

impl Symbol {
    /// The control code or ASCII character it is for a terminal.
    fn code(self) -> u32 {
        match self {
            Symbol::Char(c) => u32::from(c),
            Symbol::Byte(b @ 0x80..=0x9f) => u32::from(b),
            Symbol::Byte(_) => u32::MAX,
        }
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Cleaner {
    state: State,
    /// First bytes of a character whose rest has not come yet; at most three.
    partial: Vec<u8>,
    after_return: bool,
    marks: u8,
    last: Option<char>,
}

impl Cleaner {
    /// Appends the clean text of `bytes` to `out`. Lines end in `\n`; tabs stay.
    pub(super) fn push(&mut self, bytes: &[u8], out: &mut String) {
        let joined;
        let mut rest = bytes;
        if !self.partial.is_empty() {
            joined = [self.partial.as_slice(), bytes].concat();
            self.partial.clear();
            rest = &joined;
        }
        while !rest.is_empty() {
            let (good, bad, after) = match std::str::from_utf8(rest) {
                Ok(text) => (text, &[][..], &[][..]),
                Err(e) => {
                    let (good, tail) = rest.split_at(e.valid_up_to());
                    let good = std::str::from_utf8(good).unwrap_or_default();
                    match e.error_len() {
                        Some(n) => (good, &tail[..n], &tail[n..]),
                        None => {
                            self.partial.extend_from_slice(tail);
                            (good, &[][..], &[][..])
                        }
                    }
                }
            };
            good.chars().for_each(|c| self.symbol(Symbol::Char(c), out));
            bad.iter().for_each(|&b| self.symbol(Symbol::Byte(b), out));
            rest = after;
        }
    }

    /// Ends the text: what was cut in half is shown as bytes, and the state is as at the beginning.
    pub(super) fn finish(&mut self, out: &mut String) {
        for byte in std::mem::take(&mut self.partial) {
            self.symbol(Symbol::Byte(byte), out);
        }
        *self = Self::default();
    }

    fn symbol(&mut self, symbol: Symbol, out: &mut String) {
        let code = symbol.code();
        self.state = match (self.state, code) {
            (State::Ground, 0x1b) => State::Escape,
            (State::Ground, 0x9b) => State::Sequence(0),
            (State::Ground, 0x90 | 0x98 | 0x9d | 0x9e | 0x9f) => State::Text(0),
            (State::Ground, _) => {
                self.text(symbol, out);
                State::Ground
            }
            (State::Escape, 0x5b) => State::Sequence(0),
            (State::Escape, 0x5d | 0x50 | 0x58 | 0x5e | 0x5f) => State::Text(0),
            (State::Escape | State::Intermediate, 0x20..=0x2f) => State::Intermediate,
            (State::Escape | State::Intermediate, 0x30..=0x7e) => State::Ground,
            (State::Sequence(n), 0x20..=0x3f) if n < MAX_SEQUENCE => State::Sequence(n + 1),
            (State::Sequence(_), 0x40..=0x7e) => State::Ground,
            (State::Text(_), 0x07 | 0x18 | 0x1a | 0x9c) => State::Ground,
            (State::Text(n), 0x1b) => State::TextEscape(n),
            (State::Text(n), c) if n < MAX_STRING && !matches!(c, 0x0a | 0x0d) => State::Text(n + 1),
            (State::TextEscape(_), 0x5c) => State::Ground,
            (State::TextEscape(_), _) => {
                self.state = State::Escape;
                return self.symbol(symbol, out);
            }
            // Something that cannot stand here ends the sequence, and counts itself.
            _ => {
                self.state = State::Ground;
                return self.symbol(symbol, out);
            }
        };
    }

    fn text(&mut self, symbol: Symbol, out: &mut String) {
        let c = match symbol {
            Symbol::Char(c) => c,
            Symbol::Byte(byte) => {
                (self.last, self.marks, self.after_return) = (None, 0, false);
                return out.push_str(&format!("\\x{byte:02x}"));
            }
        };
        if std::mem::replace(&mut self.after_return, c == '\r') && c == '\n' {
            return;
        }
        match c {
            '\r' => out.push('\n'),
            '\n' | '\t' | ' '..='~' => out.push(c),
            '\0'..='\x1f' | '\x7f' => out.push_str(&format!("\\x{:02x}", u32::from(c))),
            // The selectors of text and emoji presentation mean something after a symbol, and only there.
            '\u{fe0e}' | '\u{fe0f}' if self.last.is_some_and(carries_selector) => out.push(c),
            c if is_invisible(c) => escape(c, out),
            c if is_combining_mark(c) => {
                self.marks = self.marks.saturating_add(1);
                let at_start = self.last.is_none_or(|l| l.is_ascii_whitespace());
                if self.marks > MAX_MARKS || at_start {
                    escape(c, out)
                } else {
                    out.push(c)
                }
                self.last = Some(c);
                return;
            }
            c => out.push(c),
        }
        self.marks = 0;
        self.last = Some(c);
    }
}

fn escape(c: char, out: &mut String) {
    out.push_str(&format!("\\u{{{:x}}}", u32::from(c)));
}

fn carries_selector(c: char) -> bool {
    !c.is_ascii() && !c.is_whitespace() && !is_invisible(c) && !matches!(c, '\u{fe0e}' | '\u{fe0f}')
}

/// Characters without a picture of their own: C1 controls, line and paragraph separators, zero-width and default-ignorable
/// ones, bidirectional controls, variation selectors, tags, interlinear annotation, noncharacters, private use.
pub(crate) fn is_invisible(c: char) -> bool {
    matches!(u32::from(c),
        0x80..=0x9f | 0xad | 0x34f | 0x61c | 0x115f..=0x1160 | 0x17b4..=0x17b5 | 0x180b..=0x180f
        | 0x200b..=0x200f | 0x2028..=0x202e | 0x2060..=0x206f | 0x2800 | 0x3164 | 0xe000..=0xf8ff
        | 0xfdd0..=0xfdef | 0xfe00..=0xfe0f | 0xfeff | 0xffa0 | 0xfff0..=0xfffb
        | 0x1bca0..=0x1bca3 | 0x1d173..=0x1d17a | 0xe0000..=0xe0fff | 0xf0000..=0x10ffff)
        || u32::from(c) & 0xfffe == 0xfffe
}
