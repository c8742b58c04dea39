//! From YAML text to a tree, and from a key path back to a line: the only file that knows the YAML library.
//!
//! The text comes with the pull request, so it is hostile. What bounds it: the size ([`MAX_BYTES`], checked by
//! [`super::Source::read`]), the number of opening brackets and the absence of directives (both make the scanner
//! quadratic: 256 kB of `{a: ` took 23 s), the library's own nesting limit of 128, and a budget on what aliases
//! expand to ([`MAX_NODES`], [`MAX_TEXT`]).
//!
//! YAML is read as one plain document: no merge keys, no tags, no second document, no duplicate keys, and keys are text
//! (so GitHub's `on:` is `on`, which YAML 1.1 would read as true). Scalars keep the text as written: a version number
//! `3.10` does not become `3.1`.
//!
//! The library tells where a *failure* was, not where a value is. [`locate`] uses that: it walks to the wanted value
//! and fails there on purpose.

use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, EnumAccess, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::super::place::{KeyPath, Segment, Spot};

/// Longest file that is read, in bytes.
pub const MAX_BYTES: u64 = 1024 * 1024;
/// Most nodes of a tree, aliases expanded.
const MAX_NODES: usize = 100_000;
/// Most bytes of text in a tree, aliases expanded.
const MAX_TEXT: usize = 4 * 1024 * 1024;
/// Most opening brackets in a file, wherever they stand. The scanner's time grows with the square of how deep flow
/// collections nest, and no simple count of nesting survives quoting; 8192 take half a second at worst.
const MAX_BRACKETS: usize = 8192;

/// A value of a YAML document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    /// One word or text.
    Scalar(Scalar),
    /// A sequence.
    List(Vec<Node>),
    /// A mapping, in the order written.
    Map(Vec<(String, Node)>),
}

/// A scalar as written, and what YAML takes it for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scalar {
    /// The text, quotes and escapes resolved; empty for null.
    pub text: String,
    /// The kind that YAML's core schema sees.
    pub kind: ScalarKind,
}

/// What a scalar is under YAML's core schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScalarKind {
    /// Nothing, `~` or `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number, written without quotes.
    Number,
    /// Anything else.
    Text,
}

impl Node {
    /// The value of a key, when this is a mapping that has it.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Node> {
        match self {
            Node::Map(entries) => entries.iter().find(|(k, _)| k == key).map(|(_, v)| v),
            _ => None,
        }
    }

    /// Whether this is null, which counts as a key left out.
    #[must_use]
    pub fn is_null(&self) -> bool {
        matches!(self, Node::Scalar(Scalar { kind: ScalarKind::Null, .. }))
    }

    /// What this is, in words for a message.
    #[must_use]
    pub fn describe(&self) -> &'static str {
        match self {
            Node::Scalar(Scalar { kind: ScalarKind::Null, .. }) => "nothing",
            Node::Scalar(Scalar { kind: ScalarKind::Bool(_), .. }) => "true or false",
            Node::Scalar(Scalar { kind: ScalarKind::Number, .. }) => "a number",
            Node::Scalar(Scalar { kind: ScalarKind::Text, .. }) => "text",
            Node::List(_) => "a list",
            Node::Map(_) => "a mapping",
        }
    }
}

/// Why a text is no document of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// What is wrong, in words.
    pub reason: String,
    /// Where, counted from 1, when known.
    pub line: Option<usize>,
    /// Column in characters, counted from 1.
    pub column: Option<usize>,
    /// The key path that led there, when the tree had been entered.
    pub path: KeyPath,
}

impl Fault {
    fn at_line(reason: impl Into<String>, line: usize) -> Fault {
        Fault { reason: reason.into(), line: Some(line), column: Some(1), path: KeyPath::root() }
    }
}

/// Reads one document.
///
/// # Errors
/// A [`Fault`] for text that is not YAML, breaks a bound, or uses what is not supported.
pub fn parse(text: &str) -> Result<Node, Fault> {
    refuse_costly(text)?;
    let mut state = State::default();
    let mut node = match TreeSeed(&mut state).deserialize(serde_yaml::Deserializer::from_str(text)) {
        Ok(node) => node,
        Err(error) => return Err(fault(&error, state)),
    };
    // The typed pass above loses how a number or a boolean was written; the second pass asks for text.
    if state.rewrite {
        TextSeed(&mut node)
            .deserialize(serde_yaml::Deserializer::from_str(text))
            .map_err(|error| fault(&error, State::default()))?;
    }
    Ok(node)
}

/// Finds where a key or its value stands: line and column, from 1. A value that an alias stands for is found at
/// its anchor. `None` when the text has no such key.
#[must_use]
pub fn locate(text: &str, path: &KeyPath, spot: Spot) -> Option<(usize, usize)> {
    let seed = Locate { path: path.segments(), spot };
    let error = seed.deserialize(serde_yaml::Deserializer::from_str(text)).err()?;
    let found = error.location()?;
    Some((found.line(), found.column()))
}

fn refuse_costly(text: &str) -> Result<(), Fault> {
    if let Some(index) = text.lines().position(|line| line.starts_with('%')) {
        return Err(Fault::at_line("YAML directives (lines that begin with `%`) are not supported", index + 1));
    }
    let mut brackets = 0;
    for (index, line) in text.lines().enumerate() {
        brackets += line.bytes().filter(|b| matches!(b, b'[' | b'{')).count();
        if brackets > MAX_BRACKETS {
            return Err(Fault::at_line(format!("more than {MAX_BRACKETS} opening brackets in one file"), index + 1));
        }
    }
    Ok(())
}

fn fault(error: &serde_yaml::Error, state: State) -> Fault {
    let location = error.location();
    let reason = state.problem.unwrap_or_else(|| {
        let words = error.to_string();
        match &location {
            Some(l) => words.replacen(&format!(" at line {} column {}", l.line(), l.column()), "", 1),
            None => words,
        }
    });
    Fault {
        reason,
        line: location.as_ref().map(serde_yaml::Location::line),
        column: location.as_ref().map(serde_yaml::Location::column),
        path: KeyPath::from(state.path),
    }
}

/// What the tree pass carries: the budget spent, where it is, and the problem that made it stop (the library's error
/// adds the location).
#[derive(Default)]
struct State {
    nodes: usize,
    text: usize,
    path: Vec<Segment>,
    problem: Option<String>,
    rewrite: bool,
}

impl State {
    fn stop<E: serde::de::Error>(&mut self, problem: impl Into<String>) -> E {
        let problem = problem.into();
        let error = E::custom(&problem);
        self.problem.get_or_insert(problem);
        error
    }

    fn spend<E: serde::de::Error>(&mut self, text: usize) -> Result<(), E> {
        self.nodes += 1;
        self.text += text;
        if self.nodes > MAX_NODES {
            return Err(self.stop(format!("more than {MAX_NODES} values, aliases expanded")));
        }
        if self.text > MAX_TEXT {
            return Err(self.stop(format!("more than {MAX_TEXT} bytes of text, aliases expanded")));
        }
        Ok(())
    }
}

struct TreeSeed<'s>(&'s mut State);

impl<'de> DeserializeSeed<'de> for TreeSeed<'_> {
    type Value = Node;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Node, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl TreeSeed<'_> {
    fn scalar<E: serde::de::Error>(self, text: &str, kind: ScalarKind) -> Result<Node, E> {
        self.0.spend(text.len())?;
        self.0.rewrite |= matches!(kind, ScalarKind::Bool(_) | ScalarKind::Number);
        Ok(Node::Scalar(Scalar { text: text.to_owned(), kind }))
    }
}

impl<'de> Visitor<'de> for TreeSeed<'_> {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Node, E> {
        self.scalar("", ScalarKind::Bool(value))
    }

    fn visit_i64<E: serde::de::Error>(self, _: i64) -> Result<Node, E> {
        self.scalar("", ScalarKind::Number)
    }

    fn visit_u64<E: serde::de::Error>(self, _: u64) -> Result<Node, E> {
        self.scalar("", ScalarKind::Number)
    }

    fn visit_i128<E: serde::de::Error>(self, _: i128) -> Result<Node, E> {
        self.scalar("", ScalarKind::Number)
    }

    fn visit_u128<E: serde::de::Error>(self, _: u128) -> Result<Node, E> {
        self.scalar("", ScalarKind::Number)
    }

    fn visit_f64<E: serde::de::Error>(self, _: f64) -> Result<Node, E> {
        self.scalar("", ScalarKind::Number)
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Node, E> {
        self.scalar(value, ScalarKind::Text)
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Node, E> {
        self.scalar("", ScalarKind::Null)
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<Node, E> {
        self.scalar("", ScalarKind::Null)
    }

    fn visit_enum<A: EnumAccess<'de>>(self, _: A) -> Result<Node, A::Error> {
        Err(self.0.stop("YAML tags (`!name`) are not supported"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Node, A::Error> {
        self.0.spend(0)?;
        let mut items = Vec::new();
        loop {
            self.0.path.push(Segment::Index(items.len()));
            let Some(item) = seq.next_element_seed(TreeSeed(self.0))? else { break };
            self.0.path.pop();
            items.push(item);
        }
        self.0.path.pop();
        Ok(Node::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        self.0.spend(0)?;
        let mut entries: Vec<(String, Node)> = Vec::new();
        let mut seen = std::collections::HashSet::new();
        while let Some(key) = map.next_key_seed(KeySeed { state: self.0, seen: &mut seen })? {
            self.0.path.push(Segment::Key(key.clone()));
            let value = map.next_value_seed(TreeSeed(self.0))?;
            self.0.path.pop();
            entries.push((key, value));
        }
        Ok(Node::Map(entries))
    }
}

struct KeySeed<'s> {
    state: &'s mut State,
    seen: &'s mut std::collections::HashSet<String>,
}

impl<'de> DeserializeSeed<'de> for KeySeed<'_> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for KeySeed<'_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key that is one word or text")
    }

    fn visit_str<E: serde::de::Error>(self, key: &str) -> Result<String, E> {
        self.state.spend(key.len())?;
        if key == "<<" {
            self.state.path.push(Segment::Key(key.to_owned()));
            return Err(self.state.stop("merge keys (`<<`) are not supported: write the keys out"));
        }
        if !self.seen.insert(key.to_owned()) {
            self.state.path.push(Segment::Key(key.to_owned()));
            return Err(self.state.stop("this key was given before, in the same mapping"));
        }
        Ok(key.to_owned())
    }
}

/// Second pass: the text of every number and boolean, along a tree that the first pass built.
struct TextSeed<'n>(&'n mut Node);

impl<'de> DeserializeSeed<'de> for TextSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        match self.0 {
            Node::Scalar(Scalar { kind: ScalarKind::Bool(_) | ScalarKind::Number, .. }) => {
                deserializer.deserialize_str(self)
            }
            Node::Scalar(_) => IgnoredAny::deserialize(deserializer).map(|_| ()),
            Node::List(_) => deserializer.deserialize_seq(self),
            Node::Map(_) => deserializer.deserialize_map(self),
        }
    }
}

impl<'de> Visitor<'de> for TextSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the same document again")
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<(), E> {
        if let Node::Scalar(scalar) = self.0 {
            value.clone_into(&mut scalar.text);
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        if let Node::List(items) = self.0 {
            for item in items {
                seq.next_element_seed(TextSeed(item))?;
            }
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        if let Node::Map(entries) = self.0 {
            for (_, value) in entries {
                map.next_key::<IgnoredAny>()?;
                map.next_value_seed(TextSeed(value))?;
            }
        }
        Ok(())
    }
}

/// Walks to a path and fails there, so that the error carries the location.
#[derive(Clone, Copy)]
struct Locate<'p> {
    path: &'p [Segment],
    spot: Spot,
}

impl<'de> DeserializeSeed<'de> for Locate<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        match self.path.first() {
            None => deserializer.deserialize_any(Here),
            Some(Segment::Key(_)) => deserializer.deserialize_map(self),
            Some(Segment::Index(_)) => deserializer.deserialize_seq(self),
        }
    }
}

impl<'de> Visitor<'de> for Locate<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a place")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let Some((Segment::Index(wanted), rest)) = self.path.split_first() else { return Ok(()) };
        for _ in 0..*wanted {
            seq.next_element::<IgnoredAny>()?;
        }
        seq.next_element_seed(Locate { path: rest, spot: self.spot })?;
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Some((Segment::Key(wanted), rest)) = self.path.split_first() else { return Ok(()) };
        let stop = rest.is_empty() && self.spot == Spot::Key;
        while let Some(matches) = map.next_key_seed(LocateKey { wanted, stop })? {
            if matches {
                map.next_value_seed(Locate { path: rest, spot: self.spot })?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
}

struct LocateKey<'p> {
    wanted: &'p str,
    stop: bool,
}

impl<'de> DeserializeSeed<'de> for LocateKey<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for LocateKey<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: serde::de::Error>(self, key: &str) -> Result<bool, E> {
        if key != self.wanted {
            return Ok(false);
        }
        if self.stop { Err(E::custom("here")) } else { Ok(true) }
    }
}

/// Fails on whatever it is shown.
struct Here;

// Every `visit_…` of the trait fails unless written, which is what is wanted here.
impl Visitor<'_> for Here {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nothing")
    }
}
