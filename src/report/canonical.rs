//! JSON as it is hashed, and JSON as it is stored.
//!
//! *Canonical* JSON follows RFC 8785: no white space, object members sorted by the UTF-16 code units of their names,
//! strings with the fewest escapes. Numbers are integers of up to 64 bits, in decimal (RFC 8785 would round those beyond
//! 2^53); there are no others in a report.
//!
//! *Stored* JSON is indented, and shows characters that have no picture of their own (see [`crate::text`]) as `\u` escapes,
//! so that a report printed in a terminal or opened in an editor has no power over either. Both hold the same values.

use std::io;

use serde::Serialize;
use serde_json::Value;
use serde_json::ser::{Formatter, PrettyFormatter};
use sha2::{Digest, Sha256};

/// Canonical bytes of a value.
#[must_use]
pub fn canonical(value: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    write(value, &mut out);
    out
}

/// SHA-256 of a value's canonical bytes, lowercase hex.
#[must_use]
pub fn digest(value: &Value) -> String {
    hex::encode(Sha256::digest(canonical(value)))
}

fn write(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Object(members) => {
            let mut sorted: Vec<_> = members.iter().collect();
            sorted.sort_by(|(a, _), (b, _)| a.encode_utf16().cmp(b.encode_utf16()));
            out.push(b'{');
            for (i, (name, value)) in sorted.into_iter().enumerate() {
                if i > 0 {
                    out.push(b',');
                }
                string(name, out);
                out.push(b':');
                write(value, out);
            }
            out.push(b'}');
        }
        Value::Array(values) => {
            out.push(b'[');
            for (i, value) in values.iter().enumerate() {
                if i > 0 {
                    out.push(b',');
                }
                write(value, out);
            }
            out.push(b']');
        }
        Value::String(text) => string(text, out),
        Value::Number(number) => out.extend_from_slice(number.to_string().as_bytes()),
        Value::Bool(true) => out.extend_from_slice(b"true"),
        Value::Bool(false) => out.extend_from_slice(b"false"),
        Value::Null => out.extend_from_slice(b"null"),
    }
}

fn string(text: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    for c in text.chars() {
        match c {
            '"' => out.extend_from_slice(b"\\\""),
            '\\' => out.extend_from_slice(b"\\\\"),
            '\u{8}' => out.extend_from_slice(b"\\b"),
            '\t' => out.extend_from_slice(b"\\t"),
            '\n' => out.extend_from_slice(b"\\n"),
            '\u{c}' => out.extend_from_slice(b"\\f"),
            '\r' => out.extend_from_slice(b"\\r"),
            '\0'..='\x1f' => out.extend_from_slice(format!("\\u{:04x}", u32::from(c)).as_bytes()),
            c => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    out.push(b'"');
}

/// Stored bytes of anything serialisable, with a line end.
///
/// # Errors
/// If it has a map with keys that are not text.
pub fn stored(value: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let mut out = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut out, Visible(PrettyFormatter::new()));
    value.serialize(&mut serializer)?;
    out.push(b'\n');
    Ok(out)
}

/// Indents, and escapes what cannot be seen.
struct Visible<'a>(PrettyFormatter<'a>);

impl Formatter for Visible<'_> {
    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        let mut plain = 0;
        for (at, c) in fragment.char_indices() {
            if c == '\x7f' || crate::text::is_invisible(c) {
                writer.write_all(&fragment.as_bytes()[plain..at])?;
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(writer, "\\u{unit:04x}")?;
                }
                plain = at + c.len_utf8();
            }
        }
        writer.write_all(&fragment.as_bytes()[plain..])
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_array(writer)
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_array(writer)
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.0.begin_array_value(writer, first)
    }

    fn end_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_array_value(writer)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_object(writer)
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_object(writer)
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.0.begin_object_key(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_object_value(writer)
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_object_value(writer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn canonical_form_is_that_of_rfc_8785() {
        // The sorting example of RFC 8785, section 3.2.3.
        let value = json!({
            "\u{20ac}": "Euro Sign", "\r": "Carriage Return", "\u{fb33}": "Hebrew Letter Dalet With Dagesh", "1": "One",
            "\u{1f600}": "Emoji: Grinning Face", "\u{80}": "Control", "\u{f6}": "Latin Small Letter O With Diaeresis"
        });
        let order = ["Carriage Return", "One", "Control", "Latin", "Euro", "Emoji", "Hebrew"];
        let text = String::from_utf8(canonical(&value)).unwrap();
        let places: Vec<_> = order.iter().map(|o| text.find(o).unwrap()).collect();
        assert!(places.is_sorted(), "{text}");
        let value = json!({"b": [1, -2, u64::MAX, true, null], "a": "\u{20ac}$\u{f}\nA'B\"\\\\\"/"});
        let expected = format!(r#"{{"a":"€$\u000f\nA'B\"\\\\\"/","b":[1,-2,{},true,null]}}"#, u64::MAX);
        assert_eq!(String::from_utf8(canonical(&value)).unwrap(), expected);
    }

    #[test]
    fn stored_form_shows_what_cannot_be_seen_and_reads_back_the_same() {
        let value = json!({"a\u{202e}": ["\u{9b}31m", "\u{e0041}", "é✔", {}, []]});
        let text = String::from_utf8(stored(&value).unwrap()).unwrap();
        assert!(text.contains("\\u202e") && text.contains("\\u009b31m") && text.contains("\\udb40\\udc41"));
        assert!(text.contains("é✔"));
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }
}
