//! The files as written: serde structs for `plimsoll.yml` and `/etc/plimsoll/policy.yml`, and their JSON Schemas.
//!
//! Nothing here is checked beyond its shape: [`super::step`] and [`super::policy`] turn these into types that hold
//! only what is valid. Doc comments on the fields are what an editor shows, so they address whoever writes the file. Words of
//! closed sets stay text here, so that a flag and a key are checked by the same code.
//!
//! Trust: step files come with the pull request. See [`yaml`] for what bounds them.

mod de;
mod schema;
pub mod yaml;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::de::value::MapAccessDeserializer;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::error::SpecError;
use super::place::{KeyPath, Place, Source, Spot, nearest};
use super::step::{BackendChoice, FilesystemGrant, Network};
use crate::evidence::{ControlId, Tier};
use de::{MisfitKind, NodeDeserializer};
pub use schema::{policy_schema, step_schema};
use yaml::{Node, Scalar};

/// Text as written. A number or a boolean without quotes counts as its own text: `3.10` stays `3.10`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Text(pub String);

/// A step file: steps that plimsoll runs behind an isolation boundary.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
#[schemars(rename = "StepFile", transform = schema::what_runs)]
pub struct RawSpec {
    /// Version of the file's format. Always 1.
    #[schemars(schema_with = "schema::version")]
    pub version: Text,
    /// What every step has unless it says otherwise; the same keys as a step. `env` and `sandbox` are merged key by key,
    /// `require` adds up, everything else is replaced.
    #[serde(default)]
    pub defaults: Option<RawStep>,
    /// The steps, in order. Each gets a boundary of its own; they share nothing.
    pub steps: Option<Vec<RawStep>>,
}

/// One command behind one boundary. The keys outside `sandbox` are those of a step of a GitHub workflow.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
#[schemars(rename = "Step")]
pub struct RawStep {
    /// What reports call this step. Default: the first line of `run`.
    #[schemars(with = "Option<String>")]
    pub name: Option<Text>,
    /// The code to run: a directory, or a zip, tar, tar.gz, tar.zst or tar.xz. Relative to this file; default: this file's
    /// directory. It appears, writable, at `/workspace`; `.git` is left out.
    pub artifact: Option<RawArtifact>,
    /// The command. A script for `shell`, or for WebAssembly `module.wasm arg "another arg"`, which no shell sees.
    #[schemars(with = "Option<String>")]
    pub run: Option<Text>,
    /// What runs the script: `sh` (`sh -e {0}`), `bash` (`bash --noprofile --norc -eo pipefail {0}`), `python`
    /// (`python3 {0}`), or a command with `{0}` for the script's path.
    #[schemars(with = "Option<String>", extend("default" = "sh", "examples" = ["sh", "bash", "python", "perl {0}"]))]
    pub shell: Option<Text>,
    /// Environment variables. Nothing else of the job's environment is visible inside.
    #[schemars(schema_with = "schema::env")]
    pub env: Option<BTreeMap<String, Option<Text>>>,
    /// Directory in the artifact that the command starts in.
    #[schemars(with = "Option<String>", extend("default" = "."))]
    pub working_directory: Option<Text>,
    /// Minutes until the boundary is ended, decimals allowed. On the command line: `--timeout 30s`.
    #[schemars(with = "Option<f64>", range(min = 0), extend("default" = 5))]
    pub timeout_minutes: Option<Text>,
    /// Whether a failure of the code (exit code 10, and only that) still counts as success.
    #[schemars(extend("default" = false))]
    pub continue_on_error: Option<bool>,
    /// The boundary: how strong, how large, what it may reach.
    pub sandbox: Option<RawSandbox>,
    /// Files to keep: patterns relative to the artifact, such as `report.xml` or `out/**`.
    #[schemars(with = "Option<Vec<String>>")]
    pub outputs: Option<Vec<Text>>,
    /// A JUnit report that the code writes, relative to the artifact. It is merged into plimsoll's own, marked unverified.
    #[schemars(with = "Option<String>")]
    pub junit: Option<Text>,
}

/// What is plimsoll's own among a step's keys.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
#[schemars(rename = "Sandbox")]
pub struct RawSandbox {
    /// What makes the boundary. `auto` is the strongest of `firecracker` and `gvisor` that this host proves; it is `wasm`
    /// when the first word of `run` ends in `.wasm` or `.wat`.
    #[schemars(with = "Option<BackendChoice>", extend("default" = "auto"))]
    pub backend: Option<Text>,
    /// Refuse to run behind anything weaker. Default: what the backend is for: `container` for wasm, `kernel` for gvisor and
    /// auto, `vm` for firecracker.
    #[schemars(with = "Option<Tier>")]
    pub minimum_isolation: Option<Text>,
    /// Controls that must be enforced, beyond those that the tier needs; else nothing runs. Adds to `defaults`.
    #[schemars(with = "Option<Vec<ControlId>>")]
    pub require: Option<Vec<Text>>,
    /// The file system around the code: `host` (this machine's own toolchain, read-only; gvisor's default), `dir:PATH`,
    /// `tar:PATH`, `oci-layout:PATH[:TAG]`, `docker-archive:PATH`, or a registry reference.
    #[schemars(with = "Option<String>", extend("examples" = ["host", "dir:build/rootfs", "tar:build/rootfs.tar"]))]
    pub image: Option<Text>,
    /// Digest that the image must have: `sha256:` and 64 hexadecimal digits.
    #[schemars(with = "Option<String>", regex(pattern = "^sha256:[0-9a-f]{64}$"))]
    pub image_digest: Option<Text>,
    /// Kernel of a microVM: `distro`, or the path of one.
    #[schemars(with = "Option<String>", extend("default" = "distro"))]
    pub kernel: Option<Text>,
    /// CPUs' worth of time, such as `1` or `0.5`. A limit written here must be enforced, or nothing runs.
    #[schemars(schema_with = "schema::cpus")]
    pub cpus: Option<Text>,
    /// Memory, such as `512MiB`. A limit written here must be enforced, or nothing runs.
    #[schemars(schema_with = "schema::memory")]
    pub memory: Option<Text>,
    /// What the code can write, such as `1GiB`. A limit written here must be enforced, or nothing runs.
    #[schemars(schema_with = "schema::disk")]
    pub disk: Option<Text>,
    /// Processes and threads. A limit written here must be enforced, or nothing runs.
    #[schemars(with = "Option<u32>", range(min = 1), extend("default" = 128))]
    pub pids: Option<Text>,
    /// Output kept of each stream, such as `1MiB`; the rest is counted and dropped.
    #[schemars(schema_with = "schema::output")]
    pub output: Option<Text>,
    /// Directories or files of this machine to show inside, read-only.
    pub mounts: Option<Vec<RawMount>>,
    /// Network of the boundary. `none` is the only value.
    #[schemars(with = "Option<Network>", extend("default" = "none"))]
    pub network: Option<Text>,
    /// What a WebAssembly module may reach.
    pub grants: Option<RawGrants>,
    /// WebAssembly only: fixed clock, seeded randomness, fuel; the same input gives the same result digest.
    #[schemars(extend("default" = false))]
    pub deterministic: Option<bool>,
}

/// A directory or file of the host, shown inside read-only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
#[schemars(rename = "Mount")]
pub struct RawMount {
    /// Path on this machine, relative to this file; `~/` is the home directory.
    #[schemars(with = "String")]
    pub path: Text,
    /// Absolute path inside.
    #[schemars(with = "String", regex(pattern = "^/"))]
    pub at: Text,
}

/// What a WebAssembly module may reach beyond its memory, arguments, environment and standard streams.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
#[schemars(rename = "Grants")]
pub struct RawGrants {
    /// The artifact at `/workspace`: not at all, to read, or to write as well. Default: `none`, and `read-only` when `run`
    /// names an installed runtime such as `python`.
    #[schemars(with = "Option<FilesystemGrant>")]
    pub filesystem: Option<Text>,
}

/// Where the code comes from: a path, or a mapping.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RawArtifact {
    /// Whether it was one word and no mapping.
    pub bare: bool,
    /// `path`, or the word.
    pub path: Option<Text>,
    /// `sha256` of the file at `path`.
    pub sha256: Option<Text>,
    /// `github`: name of a workflow artifact.
    pub github: Option<Text>,
    /// `run-id` of the workflow run that has it.
    pub run_id: Option<Text>,
    /// `gitlab`: name of a job that has artifacts.
    pub gitlab: Option<Text>,
    /// `ref` whose latest pipeline is meant.
    pub reference: Option<Text>,
}

/// Where the code comes from, in full: `path` with `sha256`, `github` with `run-id`, or `gitlab` with `ref`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
#[schemars(rename = "ArtifactTable")]
struct RawArtifactTable {
    /// Path, relative to this file.
    #[serde(default)]
    #[schemars(with = "Option<String>")]
    path: Option<Text>,
    /// Digest that the file at `path` must have, 64 hexadecimal digits; checked before it is unpacked.
    #[serde(default)]
    #[schemars(with = "Option<String>", regex(pattern = "^(sha256:)?[0-9a-fA-F]{64}$"))]
    sha256: Option<Text>,
    /// Name of an artifact of a GitHub workflow run.
    #[serde(default)]
    #[schemars(with = "Option<String>")]
    github: Option<Text>,
    /// The workflow run; default: the one that this job belongs to.
    #[serde(default)]
    #[schemars(schema_with = "schema::run_id")]
    run_id: Option<Text>,
    /// Name of a GitLab job with artifacts.
    #[serde(default)]
    #[schemars(with = "Option<String>")]
    gitlab: Option<Text>,
    /// Branch or tag whose latest successful pipeline is meant; default: this job's pipeline.
    #[serde(default, rename = "ref")]
    #[schemars(with = "Option<String>")]
    reference: Option<Text>,
}

impl Serialize for RawArtifact {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let RawArtifact { bare: _, path, sha256, github, run_id, gitlab, reference } = self.clone();
        RawArtifactTable { path, sha256, github, run_id, gitlab, reference }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for RawArtifact {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> serde::de::Visitor<'de> for Either {
            type Value = RawArtifact;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a path or a mapping")
            }

            fn visit_str<E: serde::de::Error>(self, path: &str) -> Result<RawArtifact, E> {
                Ok(RawArtifact { bare: true, path: Some(Text(path.to_owned())), ..RawArtifact::default() })
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, map: A) -> Result<RawArtifact, A::Error> {
                let table = RawArtifactTable::deserialize(MapAccessDeserializer::new(map))?;
                let RawArtifactTable { path, sha256, github, run_id, gitlab, reference } = table;
                Ok(RawArtifact { bare: false, path, sha256, github, run_id, gitlab, reference })
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// What the owner of a runner allows: `/etc/plimsoll/policy.yml`. A step may tighten it, never loosen it. A key left out sets
/// no rule, but for `kernels`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
#[schemars(rename = "Policy")]
pub struct RawPolicy {
    /// Version of the file's format. Always 1; may be left out.
    #[schemars(schema_with = "schema::version")]
    pub version: Option<Text>,
    /// The weakest boundary that anything may run behind.
    #[schemars(with = "Option<Tier>")]
    pub minimum_isolation: Option<Text>,
    /// Backends that may be used.
    #[schemars(schema_with = "schema::backends")]
    pub backends: Option<Vec<Text>>,
    /// SHA-256 digests of engine binaries that count as identified, beside the built-in list of releases.
    #[schemars(schema_with = "schema::digests")]
    pub engines: Option<Vec<Text>>,
    /// SHA-256 digests of guest kernels that a step may name by path. Left out: none.
    #[schemars(schema_with = "schema::digests")]
    pub kernels: Option<Vec<Text>>,
    /// Images that may be used: `host`, patterns such as `dir:/srv/images/*` or `ghcr.io/acme/*`, or `sha256:` digests.
    #[schemars(with = "Option<Vec<String>>")]
    pub images: Option<Vec<Text>>,
    /// The most of each resource that a step may ask for. A maximum is also a limit that must be enforced.
    pub maxima: Option<RawMaxima>,
    /// Directories of this machine that steps may mount, with all below them.
    #[schemars(with = "Option<Vec<String>>")]
    pub mounts: Option<Vec<Text>>,
    /// Networks that may be used. `none` is the only one there is.
    #[schemars(with = "Option<Network>")]
    pub network: Option<Text>,
    /// The most that a WebAssembly module may be granted.
    pub grants: Option<RawGrants>,
    /// Controls that must be enforced for every step.
    #[schemars(with = "Option<Vec<ControlId>>")]
    pub require: Option<Vec<Text>>,
    /// What to do with an engine version that has known vulnerabilities: `warn` names it in the report, `refuse` doesn't use it.
    #[schemars(schema_with = "schema::vulnerable_engines")]
    pub vulnerable_engines: Option<Text>,
    /// Who may ask the service of this machine, and for how much. Only `plimsoll serve` reads it.
    pub service: Option<RawService>,
}

/// Who may ask the service, and how much it gives.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
#[schemars(rename = "Service")]
pub struct RawService {
    /// Users who may ask, by name or number. Without `users` and `groups`: everybody who can connect to the socket.
    #[schemars(schema_with = "schema::names")]
    pub users: Option<Vec<Text>>,
    /// Groups whose members may ask, by name or number.
    #[schemars(schema_with = "schema::names")]
    pub groups: Option<Vec<Text>>,
    /// Memory of all runs together. Default: seven eighths of the machine's.
    #[schemars(schema_with = "schema::memory")]
    pub memory: Option<Text>,
    /// CPUs of all runs together. Default: the machine's.
    #[schemars(schema_with = "schema::cpus")]
    pub cpus: Option<Text>,
    /// The ceiling of each user.
    pub per_user: Option<RawPerUser>,
}

/// What the runs of one user may take together.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
#[schemars(rename = "PerUser")]
pub struct RawPerUser {
    /// Memory.
    #[schemars(schema_with = "schema::memory")]
    pub memory: Option<Text>,
    /// CPUs.
    #[schemars(schema_with = "schema::cpus")]
    pub cpus: Option<Text>,
    /// Runs at the same time.
    #[schemars(with = "Option<u32>", range(min = 1))]
    pub runs: Option<Text>,
}

/// The most of each resource.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
#[schemars(rename = "Maxima")]
pub struct RawMaxima {
    /// CPUs' worth of time.
    #[schemars(schema_with = "schema::cpus")]
    pub cpus: Option<Text>,
    /// Memory.
    #[schemars(schema_with = "schema::memory")]
    pub memory: Option<Text>,
    /// What the code can write.
    #[schemars(schema_with = "schema::disk")]
    pub disk: Option<Text>,
    /// Processes and threads.
    #[schemars(with = "Option<u32>", range(min = 1))]
    pub pids: Option<Text>,
    /// Output kept of each stream.
    #[schemars(schema_with = "schema::output")]
    pub output: Option<Text>,
    /// Minutes until the boundary is ended.
    #[schemars(with = "Option<f64>", range(min = 0))]
    pub timeout_minutes: Option<Text>,
}

/// Reads a file's text into its tree, and refuses expressions that are left over.
///
/// # Errors
/// [`SpecError::Syntax`], or [`SpecError::Expression`].
pub fn tree(source: &Arc<Source>) -> Result<Node, SpecError> {
    let root = tree_with_expressions(source)?;
    refuse_expressions(source, &root, &KeyPath::root())?;
    Ok(root)
}

/// The same for a workflow file, whose expressions only matter where a step needs the value.
///
/// # Errors
/// [`SpecError::Syntax`].
pub fn tree_with_expressions(source: &Arc<Source>) -> Result<Node, SpecError> {
    yaml::parse(&source.text).map_err(|fault| SpecError::Syntax {
        file: source.file.clone(),
        line: fault.line,
        column: fault.column,
        key: fault.path.to_string(),
        reason: super::place::shown_up_to(&fault.reason, 400),
    })
}

/// Reads a node into one of the structs above.
///
/// # Errors
/// When the shape does not fit: unknown, missing or ill-typed keys.
pub fn read<T: for<'de> Deserialize<'de>>(source: &Arc<Source>, node: &Node, path: KeyPath) -> Result<T, SpecError> {
    let misfit = match T::deserialize(NodeDeserializer { node, path: path.clone() }) {
        Ok(value) => return Ok(value),
        Err(misfit) => misfit,
    };
    let path = misfit.path.unwrap_or(path);
    let place = match misfit.spot {
        Spot::Key => Place::key(source, path),
        Spot::Value => Place::value(source, path),
    };
    Err(match misfit.kind {
        MisfitKind::UnknownKey { key, known } => SpecError::UnknownKey {
            place,
            nearest: nearest(&key, known.iter().copied()).map(str::to_owned),
            known: known.iter().map(|&k| k.to_owned()).collect(),
            help: github_key(&key, known),
        },
        MisfitKind::MissingKey(key) => SpecError::MissingKey { place, key: key.to_owned() },
        MisfitKind::Other(reason) => SpecError::invalid(&place, reason),
    })
}

/// Keys of a GitHub step that people will try, and what stands in for them.
fn github_key(key: &str, known: &[&str]) -> Option<String> {
    if !known.contains(&"working-directory") {
        return None;
    }
    let help = match key {
        "uses" | "with" => "an action can't run inside the boundary: run it as a step of the workflow, before plimsoll",
        "if" => "put the condition on the workflow step that runs plimsoll, or choose steps by `--step NAME`",
        "id" => "steps have no ids: choose one by its name, with `--step NAME`",
        "timeout" => "write `timeout-minutes: 0.5`; only the flag is `--timeout 30s`",
        _ if RawSandbox::KEYS.contains(&key) => return Some(format!("`{key}` belongs under `sandbox`")),
        _ => return None,
    };
    Some(help.to_owned())
}

impl RawSandbox {
    const KEYS: [&'static str; 15] = [
        "backend",
        "minimum-isolation",
        "require",
        "image",
        "image-digest",
        "kernel",
        "cpus",
        "memory",
        "disk",
        "pids",
        "output",
        "mounts",
        "network",
        "grants",
        "deterministic",
    ];
}

fn refuse_expressions(source: &Arc<Source>, node: &Node, path: &KeyPath) -> Result<(), SpecError> {
    match node {
        Node::Scalar(Scalar { text, .. }) => {
            expression(text).map_or(Ok(()), |found| Err(left_over(source, Place::value(source, path.clone()), found)))
        }
        Node::List(items) => {
            items.iter().enumerate().try_for_each(|(index, item)| refuse_expressions(source, item, &path.item(index)))
        }
        Node::Map(entries) => entries.iter().try_for_each(|(key, value)| {
            let path = path.key(key);
            if let Some(found) = expression(key) {
                return Err(left_over(source, Place::key(source, path), found));
            }
            refuse_expressions(source, value, &path)
        }),
    }
}

/// The first `${{ … }}` of a text, or what follows a `${{` that nothing closes.
#[must_use]
pub fn expression(text: &str) -> Option<&str> {
    let start = &text[text.find("${{")?..];
    let end = start.find("}}").map_or_else(|| start.find('\n').unwrap_or(start.len()), |end| end + 2);
    Some(&start[..end])
}

/// The error for an expression, with the line that it stands in: a block of text has its key far above.
#[must_use]
pub fn left_over(source: &Arc<Source>, place: Place, found: &str) -> SpecError {
    let line = place.line_column().map(|(line, column)| {
        let lines = source.text.lines().enumerate().skip(line - 1);
        lines
            .filter_map(|(index, text)| {
                // Before the value's own column, the first line belongs to something else.
                let skip =
                    if index + 1 == line { text.char_indices().nth(column - 1).map_or(0, |(at, _)| at) } else { 0 };
                text[skip..].contains("${{").then_some(index + 1)
            })
            .next()
            .unwrap_or(line)
    });
    SpecError::Expression { place, line, expression: found.to_owned() }
}
