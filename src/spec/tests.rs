//! Tests of the way from text and flags to steps. What is hostile stands beside a harmless control.

mod files;
mod flags;
mod hostile;

use std::path::{Path, PathBuf};

use super::load::SpecFile;
use super::place::Source;
use super::{Overrides, SpecError, Step, Surroundings};

fn around() -> Surroundings {
    Surroundings { home: Some(PathBuf::from("/home/me")) }
}

/// Steps of a text that stands in `ci/plimsoll.yml`, under flags.
fn steps_with(text: &str, flags: &Overrides) -> Result<Vec<Step>, SpecError> {
    let source = Source::from_bytes(Path::new("ci/plimsoll.yml"), text.as_bytes().to_vec())?;
    SpecFile::parse(&source)?.steps(&flags.to_raw()?, 1, &around())
}

fn steps(text: &str) -> Result<Vec<Step>, SpecError> {
    steps_with(text, &Overrides::default())
}

/// The one step of a file whose step has these lines (each indented by four) after `run: make`.
fn step(lines: &str) -> Result<Step, SpecError> {
    let mut steps = steps(&format!("version: 1\nsteps:\n  - run: make\n{lines}"))?;
    assert_eq!(steps.len(), 1);
    Ok(steps.remove(0))
}

/// The message of what must fail.
fn message<T: std::fmt::Debug>(result: Result<T, SpecError>) -> String {
    result.unwrap_err().to_string()
}

fn help<T: std::fmt::Debug>(result: Result<T, SpecError>) -> String {
    result.unwrap_err().help().unwrap_or_default()
}
