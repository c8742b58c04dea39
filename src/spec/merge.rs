//! Precedence: flag, then step, then the file's defaults, then what is built in.
//!
//! A step is described by several [`Layer`]s, the most specific first. A key is taken from the first that has it; `env`,
//! `sandbox` and `grants` are looked into key by key; `require` adds up, since a requirement is never taken back. The
//! place of each value comes along, so that an error about a flag names the flag.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::SpecError;
use super::place::{KeyPath, Place, Source};
use super::raw::{RawArtifact, RawGrants, RawMount, RawSandbox, RawStep, Text};

/// What flags say of a step, as typed; every value is checked by the code that checks files. `Default` says nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "each field is the flag of its name, which stands for the key of its name")]
pub struct Overrides {
    pub name: Option<String>,
    /// `--artifact PATH`.
    pub artifact: Option<String>,
    pub run: Option<String>,
    pub shell: Option<String>,
    /// `--env NAME=VALUE`, repeated; they add to the files' `env`.
    pub env: BTreeMap<String, String>,
    pub working_directory: Option<String>,
    /// `--timeout 30s`: a duration, where files have `timeout-minutes`.
    pub timeout: Option<String>,
    pub continue_on_error: Option<bool>,
    pub backend: Option<String>,
    pub minimum_isolation: Option<String>,
    /// `--require CONTROL`, repeated; they add to the files' `require`.
    pub require: Vec<String>,
    pub image: Option<String>,
    pub image_digest: Option<String>,
    pub kernel: Option<String>,
    pub cpus: Option<String>,
    pub memory: Option<String>,
    pub disk: Option<String>,
    pub pids: Option<String>,
    /// `--output-limit SIZE`.
    pub output: Option<String>,
    /// `--mount PATH:AT`, repeated; they replace the files' `mounts`.
    pub mounts: Vec<String>,
    pub network: Option<String>,
    /// `--grant filesystem=read-only`, repeated.
    pub grants: Vec<String>,
    pub deterministic: Option<bool>,
    /// `--outputs PATTERN`, repeated; they replace the files' `outputs`.
    pub outputs: Vec<String>,
    pub junit: Option<String>,
}

impl Overrides {
    /// The flags in the shape of a step.
    pub(super) fn to_raw(&self) -> Result<RawStep, SpecError> {
        let text = |value: &Option<String>| value.clone().map(Text);
        let list =
            |values: &[String]| (!values.is_empty()).then(|| values.iter().cloned().map(Text).collect::<Vec<_>>());
        let mounts = self.mounts.iter().map(|mount| parse_mount(mount)).collect::<Result<Vec<_>, _>>()?;
        Ok(RawStep {
            name: text(&self.name),
            artifact: self.artifact.clone().map(|path| RawArtifact {
                bare: true,
                path: Some(Text(path)),
                ..RawArtifact::default()
            }),
            run: text(&self.run),
            shell: text(&self.shell),
            env: (!self.env.is_empty())
                .then(|| self.env.iter().map(|(name, value)| (name.clone(), Some(Text(value.clone())))).collect()),
            working_directory: text(&self.working_directory),
            timeout_minutes: text(&self.timeout),
            continue_on_error: self.continue_on_error,
            sandbox: Some(RawSandbox {
                backend: text(&self.backend),
                minimum_isolation: text(&self.minimum_isolation),
                require: list(&self.require),
                image: text(&self.image),
                image_digest: text(&self.image_digest),
                kernel: text(&self.kernel),
                cpus: text(&self.cpus),
                memory: text(&self.memory),
                disk: text(&self.disk),
                pids: text(&self.pids),
                output: text(&self.output),
                mounts: (!mounts.is_empty()).then_some(mounts),
                network: text(&self.network),
                grants: parse_grants(&self.grants)?,
                deterministic: self.deterministic,
            }),
            outputs: list(&self.outputs),
            junit: text(&self.junit),
        })
    }
}

fn parse_mount(text: &str) -> Result<RawMount, SpecError> {
    // From the right: a host path may hold a colon, a path inside rarely does.
    let (path, at) =
        text.rsplit_once(':').filter(|(path, at)| !path.is_empty() && at.starts_with('/')).ok_or_else(|| {
            let place = Place::Flag("--mount");
            SpecError::invalid_help(&place, "not a mount", "write `--mount HOST_PATH:/path/inside`")
        })?;
    Ok(RawMount { path: Text(path.to_owned()), at: Text(at.to_owned()) })
}

fn parse_grants(texts: &[String]) -> Result<Option<RawGrants>, SpecError> {
    let mut grants = RawGrants::default();
    for text in texts {
        match text.split_once('=') {
            Some(("filesystem", value)) => grants.filesystem = Some(Text(value.to_owned())),
            _ => {
                let help = "write `--grant filesystem=read-only` or `--grant filesystem=work`";
                return Err(SpecError::invalid_help(&Place::Flag("--grant"), "not a grant", help));
            }
        }
    }
    Ok((!texts.is_empty()).then_some(grants))
}

/// Where a layer was written.
#[derive(Debug, Clone)]
pub(super) enum Origin {
    /// On the command line.
    Flags,
    /// Not written: made by a command from something else, such as a script file.
    Made,
    /// A step of a file.
    Step(Arc<Source>, KeyPath),
    /// What a step file has for every step.
    Defaults(Arc<Source>, KeyPath),
    /// A step of a workflow.
    WorkflowStep(Arc<Source>, KeyPath),
    /// What a workflow or one of its jobs has for its steps; shell and directory are under `defaults.run`.
    Workflow(Arc<Source>, KeyPath),
}

/// One description of a step, complete or not.
#[derive(Debug)]
pub(super) struct Layer<'r> {
    pub(super) raw: &'r RawStep,
    pub(super) origin: Origin,
}

impl Layer<'_> {
    /// Where this layer has a key (dots separate nested ones).
    pub(super) fn place(&self, key: &str) -> Place {
        match &self.origin {
            Origin::Flags | Origin::Made => Place::Flag(flag(key)),
            Origin::Step(source, path) | Origin::WorkflowStep(source, path) | Origin::Defaults(source, path) => {
                Place::value(source, path.keys(key))
            }
            Origin::Workflow(source, path) => {
                let below =
                    if matches!(key, "shell" | "working-directory") { path.keys("defaults.run") } else { path.clone() };
                Place::value(source, below.keys(key))
            }
        }
    }

    /// Whether the layer speaks of this one step, so that what can't apply to it is a mistake; what a default has for
    /// other kinds of steps is passed over.
    pub(super) fn is_specific(&self) -> bool {
        matches!(self.origin, Origin::Flags | Origin::Step(..) | Origin::WorkflowStep(..))
    }

    /// Whether the step was written for GitHub's own runner.
    pub(super) fn is_workflow(&self) -> bool {
        matches!(self.origin, Origin::WorkflowStep(..))
    }

    pub(super) fn is_flags(&self) -> bool {
        matches!(self.origin, Origin::Flags)
    }

    /// The directory that relative paths start from: the file's, or the current one.
    pub(super) fn directory(&self) -> &Path {
        match &self.origin {
            Origin::Step(source, _) | Origin::Defaults(source, _) => source.file.parent().unwrap_or(Path::new("")),
            // A workflow's paths start from the checkout, which is the current directory.
            Origin::Flags | Origin::Made | Origin::WorkflowStep(..) | Origin::Workflow(..) => Path::new(""),
        }
    }
}

/// A value with the layer that has it.
pub(super) struct Found<'l, 'r, T: ?Sized> {
    pub(super) value: &'r T,
    pub(super) layer: &'l Layer<'r>,
    /// Position of the layer: less is more specific.
    pub(super) rank: usize,
    pub(super) place: Place,
}

/// The most specific value of a key.
pub(super) fn pick<'l, 'r, T: ?Sized>(
    layers: &'l [Layer<'r>],
    key: &'static str,
    get: impl Fn(&'r RawStep) -> Option<&'r T>,
) -> Option<Found<'l, 'r, T>> {
    layers
        .iter()
        .enumerate()
        .find_map(|(rank, layer)| get(layer.raw).map(|value| Found { value, layer, rank, place: layer.place(key) }))
}

/// The flag that stands for a key.
fn flag(key: &str) -> &'static str {
    match key {
        "name" => "--name",
        "artifact" => "--artifact",
        "run" => "--run",
        "shell" => "--shell",
        "working-directory" => "--working-directory",
        "timeout-minutes" => "--timeout",
        "continue-on-error" => "--continue-on-error",
        "outputs" => "--outputs",
        "junit" => "--junit",
        "sandbox.backend" => "--backend",
        "sandbox.minimum-isolation" => "--minimum-isolation",
        "sandbox.require" => "--require",
        "sandbox.image" => "--image",
        "sandbox.image-digest" => "--image-digest",
        "sandbox.kernel" => "--kernel",
        "sandbox.cpus" => "--cpus",
        "sandbox.memory" => "--memory",
        "sandbox.disk" => "--disk",
        "sandbox.pids" => "--pids",
        "sandbox.output" => "--output-limit",
        "sandbox.mounts" => "--mount",
        "sandbox.network" => "--network",
        "sandbox.deterministic" => "--deterministic",
        _ if key.starts_with("sandbox.grants") => "--grant",
        _ if key.starts_with("env") => "--env",
        _ => "the command line",
    }
}

/// What surrounds the files: what paths and names in them are resolved against.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Surroundings {
    /// The user's home directory, for `~/`.
    pub home: Option<PathBuf>,
}
