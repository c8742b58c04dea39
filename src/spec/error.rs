//! What can be wrong with a step file, a policy file, a workflow or the flags that stand for one.

use std::path::PathBuf;

use super::place::{Place, shown, shown_path};

/// A request that can't be understood: exit code 2. Each names its place, and what the user can do ([`SpecError::help`]).
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The file can't be read.
    #[error("{}: can't be read", shown_path(file))]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The path is a directory, a link, a pipe or a device.
    #[error("{}: not a regular file, and no link to one is followed", shown_path(file))]
    NotAFile {
        /// The path.
        file: PathBuf,
    },
    /// The file is longer than anything a person writes.
    #[error("{}: longer than {limit} bytes", shown_path(file))]
    TooLong {
        /// The file.
        file: PathBuf,
        /// The limit in bytes.
        limit: u64,
    },
    /// The file is no UTF-8.
    #[error("{}:{line}: not UTF-8", shown_path(file))]
    NotUtf8 {
        /// The file.
        file: PathBuf,
        /// Line of the first bad byte.
        line: usize,
    },
    /// The text is no YAML document that is supported.
    #[error("{}{}: {}{reason}", shown_path(file), position(*line, *column), prefix(key))]
    Syntax {
        /// The file.
        file: PathBuf,
        /// Line, from 1.
        line: Option<usize>,
        /// Column, from 1.
        column: Option<usize>,
        /// The key path reached; empty before the first key.
        key: String,
        /// What is wrong.
        reason: String,
    },
    /// A key that means nothing here.
    #[error("{place}: unknown key{}", hint(nearest.as_deref(), " (the nearest known key is "))]
    UnknownKey {
        /// Where.
        place: Place,
        /// The known key that is most like it.
        nearest: Option<String>,
        /// Every key known there.
        known: Vec<String>,
        /// What to do, for keys of GitHub's that have no meaning here.
        help: Option<String>,
    },
    /// A key that must be there and is not.
    #[error("{place}: the key `{key}` is missing")]
    MissingKey {
        /// The mapping that lacks it.
        place: Place,
        /// The key.
        key: String,
    },
    /// `${{ … }}` where nothing evaluates it.
    #[error("{}: the expression `{}` is left over", at_line(place, *line), shown(expression))]
    Expression {
        /// The key.
        place: Place,
        /// Line of the expression itself, which may be far below its key.
        line: Option<usize>,
        /// The expression, as written.
        expression: String,
    },
    /// A word that is none of a closed set.
    #[error("{place}: `{}` is none of {}{}", shown(value), choices.join(", "), hint(nearest.as_deref(), " (the nearest is "))]
    UnknownWord {
        /// Where.
        place: Place,
        /// The word.
        value: String,
        /// What may stand there.
        choices: Vec<String>,
        /// The choice that is most like it.
        nearest: Option<String>,
    },
    /// A value that breaks a rule.
    #[error("{place}: {reason}")]
    Invalid {
        /// Where.
        place: Place,
        /// The rule, and how the value breaks it.
        reason: String,
        /// What to write instead.
        help: Option<String>,
    },
    /// Flags that describe no step.
    #[error("nothing to run: {reason}")]
    NothingToRun {
        /// Why.
        reason: String,
    },
    /// `--step`, `--job` or the like names what is not there.
    #[error("{flag}: there is no {what} `{}`{}", shown(name), hint(nearest.as_deref(), " (the nearest is "))]
    NotThere {
        /// The flag.
        flag: &'static str,
        /// What was looked for: `step`, `job`.
        what: &'static str,
        /// The name looked for.
        name: String,
        /// The names there are.
        names: Vec<String>,
        /// The one most like it.
        nearest: Option<String>,
    },
}

impl SpecError {
    /// What the user can do, in one line.
    #[must_use]
    pub fn help(&self) -> Option<String> {
        match self {
            SpecError::UnknownKey { help: Some(help), .. } => Some(help.clone()),
            SpecError::UnknownKey { known, .. } => Some(format!("keys known there: {}", known.join(", "))),
            SpecError::MissingKey { key, .. } if key == "version" => Some("begin the file with `version: 1`".into()),
            SpecError::MissingKey { .. } | SpecError::Unreadable { .. } | SpecError::Syntax { .. } => None,
            SpecError::NotAFile { .. } => Some("name the step file itself, such as `ci/plimsoll.yml`".into()),
            SpecError::TooLong { .. } => Some("put scripts into the artifact and call them from `run`".into()),
            SpecError::NotUtf8 { .. } => Some("save the file as UTF-8".into()),
            SpecError::Expression { .. } => {
                Some("plimsoll evaluates no expressions: pass the value by a flag, such as `--env NAME=VALUE`".into())
            }
            SpecError::UnknownWord { .. } => None,
            SpecError::Invalid { help, .. } => help.clone(),
            SpecError::NothingToRun { .. } => Some(
                "name a step file (`plimsoll run plimsoll.yml`) or a command (`plimsoll run --run 'make test'`)".into(),
            ),
            SpecError::NotThere { what, names, .. } if names.is_empty() => Some(format!("there are no {what}s at all")),
            SpecError::NotThere { what, names, .. } => {
                let names: Vec<_> = names.iter().map(|name| format!("`{}`", shown(name))).collect();
                Some(format!("{what}s: {}", names.join(", ")))
            }
        }
    }

    /// The place, when the error has one.
    #[must_use]
    pub fn place(&self) -> Option<&Place> {
        match self {
            SpecError::UnknownKey { place, .. }
            | SpecError::MissingKey { place, .. }
            | SpecError::Expression { place, .. }
            | SpecError::UnknownWord { place, .. }
            | SpecError::Invalid { place, .. } => Some(place),
            _ => None,
        }
    }

    pub(super) fn invalid(place: &Place, reason: impl Into<String>) -> SpecError {
        SpecError::Invalid { place: place.clone(), reason: reason.into(), help: None }
    }

    pub(super) fn invalid_help(place: &Place, reason: impl Into<String>, help: impl Into<String>) -> SpecError {
        SpecError::Invalid { place: place.clone(), reason: reason.into(), help: Some(help.into()) }
    }

    pub(super) fn unknown_word<'c>(
        place: &Place,
        value: &str,
        choices: impl IntoIterator<Item = &'c str>,
    ) -> SpecError {
        let choices: Vec<String> = choices.into_iter().map(str::to_owned).collect();
        let nearest = super::place::nearest(value, choices.iter().map(String::as_str)).map(str::to_owned);
        SpecError::UnknownWord { place: place.clone(), value: value.to_owned(), choices, nearest }
    }
}

fn position(line: Option<usize>, column: Option<usize>) -> String {
    match (line, column) {
        (Some(line), Some(column)) => format!(":{line}:{column}"),
        (Some(line), None) => format!(":{line}"),
        _ => String::new(),
    }
}

fn prefix(key: &str) -> String {
    if key.is_empty() { String::new() } else { format!("{key}: ") }
}

fn hint(word: Option<&str>, before: &str) -> String {
    word.map(|word| format!("{before}`{}`)", shown(word))).unwrap_or_default()
}

/// The place with another line: an expression is named where it stands, not where its key does.
fn at_line(place: &Place, line: Option<usize>) -> String {
    match (place, line) {
        (Place::File { source, path, .. }, Some(line)) => format!("{}:{line}: {path}", shown_path(&source.file)),
        _ => place.to_string(),
    }
}
