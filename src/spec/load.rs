//! From files and flags to steps.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::build::build;
use super::error::SpecError;
use super::merge::{Layer, Origin, Overrides, Surroundings};
use super::place::{KeyPath, Place, Source, shown};
use super::raw::{self, RawSpec, RawStep, Text, yaml::Node};
use super::step::Step;

/// A step file, read and of the right shape.
#[derive(Debug)]
pub struct SpecFile {
    source: Arc<Source>,
    defaults: RawStep,
    steps: Vec<RawStep>,
}

impl SpecFile {
    /// Reads a step file.
    ///
    /// # Errors
    /// When it can't be read, is no YAML that is supported, or has other keys than a step file.
    pub fn read(file: &Path) -> Result<SpecFile, SpecError> {
        SpecFile::parse(&Source::read(file)?)
    }

    /// The same for a text already read.
    ///
    /// # Errors
    /// As [`SpecFile::read`].
    pub fn parse(source: &Arc<Source>) -> Result<SpecFile, SpecError> {
        let root = raw::tree(source)?;
        let whole = || Place::value(source, KeyPath::root());
        if root.is_null() {
            return Err(SpecError::invalid_help(&whole(), "empty", "begin with `version: 1` and `steps:`"));
        }
        // A file of another version may have other keys: say that first.
        match root.get("version") {
            Some(Node::Scalar(version)) if version.text != "1" && !version.text.is_empty() => {
                let place = Place::value(source, KeyPath::root().key("version"));
                let reason = format!("version `{}` is not known to this plimsoll", shown(&version.text));
                return Err(SpecError::invalid_help(&place, reason, "the only version is 1"));
            }
            _ => {}
        }
        let RawSpec { version: _, defaults, steps } = raw::read(source, &root, KeyPath::root())?;
        let steps = steps.unwrap_or_default();
        if steps.is_empty() {
            return Err(SpecError::invalid_help(
                &whole(),
                "there are no steps",
                "write at least one under `steps:`, with a `run`",
            ));
        }
        Ok(SpecFile { source: Arc::clone(source), defaults: defaults.unwrap_or_default(), steps })
    }

    pub(super) fn steps(&self, flags: &RawStep, first: usize, around: &Surroundings) -> Result<Vec<Step>, SpecError> {
        let steps = self.steps.iter().enumerate().map(|(position, raw)| {
            let path = KeyPath::root().key("steps").item(position);
            let layers = [
                Layer { raw: flags, origin: Origin::Flags },
                Layer { raw, origin: Origin::Step(Arc::clone(&self.source), path) },
                Layer {
                    raw: &self.defaults,
                    origin: Origin::Defaults(Arc::clone(&self.source), KeyPath::root().key("defaults")),
                },
            ];
            build(&layers, first + position, around)
        });
        steps.collect()
    }
}

/// The steps of several files, in order, under flags; without files the one step that the flags make.
///
/// # Errors
/// The first fault of any file or flag.
pub fn load(files: &[PathBuf], flags: &Overrides, around: &Surroundings) -> Result<Vec<Step>, SpecError> {
    let flags = flags.to_raw()?;
    if files.is_empty() {
        return build(&[Layer { raw: &flags, origin: Origin::Flags }], 1, around).map(|step| vec![step]);
    }
    let mut steps = Vec::new();
    for file in files {
        let more = SpecFile::read(file)?.steps(&flags, steps.len() + 1, around)?;
        steps.extend(more);
    }
    Ok(steps)
}

/// The step file of a directory, for a run that names none: `plimsoll.yml`, or `plimsoll.yaml`.
#[must_use]
pub fn default_file(directory: &Path) -> Option<PathBuf> {
    let directory = if directory == Path::new(".") { Path::new("") } else { directory };
    ["plimsoll.yml", "plimsoll.yaml"].into_iter().map(|name| directory.join(name)).find(|file| file.exists())
}

/// The step for `plimsoll shell SCRIPT`: GitHub has written a step's `run` into a file and calls the shell with its path.
/// The current directory is the artifact; flags say the rest.
///
/// # Errors
/// When the script can't be read, or a flag is wrong.
pub fn from_script(script: &Path, flags: &Overrides, around: &Surroundings) -> Result<Step, SpecError> {
    let text = Source::read(script)?.text.clone();
    if text.trim().is_empty() {
        return Err(SpecError::NothingToRun { reason: format!("{} is empty", super::place::shown_path(script)) });
    }
    let flags = flags.to_raw()?;
    let made = RawStep { run: Some(Text(text)), ..RawStep::default() };
    build(&[Layer { raw: &flags, origin: Origin::Flags }, Layer { raw: &made, origin: Origin::Made }], 1, around)
}
