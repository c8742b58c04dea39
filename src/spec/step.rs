//! A step as the rest of plimsoll sees it: everything checked, every default filled in, every path resolved.
//!
//! Only [`super::build`] makes a [`Step`], and only [`super::policy::Policy::apply`] changes one (to something tighter).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::digest::Sha256Digest;
use super::limits::Limits;
use super::place::Place;
use super::shell::Shell;
use crate::evidence::{ControlId, Tier};

/// What makes a boundary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Backend {
    /// wasmtime in a jailed worker process.
    Wasm,
    /// gVisor's runsc.
    Gvisor,
    /// A Firecracker microVM.
    Firecracker,
}

impl Backend {
    /// All of them, the strongest last.
    pub const ALL: [Backend; 3] = [Backend::Wasm, Backend::Gvisor, Backend::Firecracker];

    /// The word used in files and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Backend::Wasm => "wasm",
            Backend::Gvisor => "gvisor",
            Backend::Firecracker => "firecracker",
        }
    }

    /// The tier that its boundary reaches when everything is in place; also its default floor.
    #[must_use]
    pub const fn reaches(self) -> Tier {
        match self {
            Backend::Wasm => Tier::Container,
            Backend::Gvisor => Tier::Kernel,
            Backend::Firecracker => Tier::Vm,
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What the user chose as the backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BackendChoice {
    /// The strongest of firecracker and gvisor that this host proves at or above the floor.
    Auto,
    /// A Firecracker microVM; needs KVM.
    Firecracker,
    /// gVisor's runsc.
    Gvisor,
    /// WebAssembly in a jailed worker process.
    Wasm,
}

impl BackendChoice {
    /// All choices.
    pub const ALL: [BackendChoice; 4] =
        [BackendChoice::Auto, BackendChoice::Firecracker, BackendChoice::Gvisor, BackendChoice::Wasm];

    /// The word used in files and flags.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            BackendChoice::Auto => "auto",
            BackendChoice::Firecracker => "firecracker",
            BackendChoice::Gvisor => "gvisor",
            BackendChoice::Wasm => "wasm",
        }
    }

    /// The backends that this may become, the strongest first.
    #[must_use]
    pub const fn candidates(self) -> &'static [Backend] {
        match self {
            BackendChoice::Auto => &[Backend::Firecracker, Backend::Gvisor],
            BackendChoice::Firecracker => &[Backend::Firecracker],
            BackendChoice::Gvisor => &[Backend::Gvisor],
            BackendChoice::Wasm => &[Backend::Wasm],
        }
    }

    /// The floor of a step that states none.
    #[must_use]
    pub const fn default_floor(self) -> Tier {
        match self {
            BackendChoice::Auto => Tier::Kernel,
            BackendChoice::Firecracker => Backend::Firecracker.reaches(),
            BackendChoice::Gvisor => Backend::Gvisor.reaches(),
            BackendChoice::Wasm => Backend::Wasm.reaches(),
        }
    }
}

impl fmt::Display for BackendChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The network of a boundary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Network {
    /// Nothing but its own loopback.
    None,
}

/// How much of the artifact a WebAssembly module may reach. Ordered: more is greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FilesystemGrant {
    /// Nothing.
    None,
    /// To read.
    ReadOnly,
    /// To read and to write; the host's copy does not change.
    Work,
}

impl FilesystemGrant {
    /// All grants, from none to the most.
    pub const ALL: [FilesystemGrant; 3] = [FilesystemGrant::None, FilesystemGrant::ReadOnly, FilesystemGrant::Work];

    /// The word used in files and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            FilesystemGrant::None => "none",
            FilesystemGrant::ReadOnly => "read-only",
            FilesystemGrant::Work => "work",
        }
    }
}

/// What a WebAssembly module may reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Grants {
    /// Of the artifact.
    pub filesystem: FilesystemGrant,
}

impl Grants {
    /// The grants for the report's `grants[]`: empty when nothing is granted.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        match self.filesystem {
            FilesystemGrant::None => Vec::new(),
            grant => vec![format!("filesystem:{}", grant.name())],
        }
    }
}

/// Where the code comes from. Forge sources are understood here; whoever fetches says whether it can.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ArtifactSource {
    /// A directory or an archive.
    Path(PathBuf),
    /// An archive whose digest is checked before it is unpacked.
    PathWithDigest {
        /// The file.
        path: PathBuf,
        /// The digest that it must have.
        sha256: Sha256Digest,
    },
    /// An artifact of a GitHub workflow run.
    GitHub {
        /// The artifact's name.
        name: String,
        /// The run; `None` is the one that this job belongs to.
        run_id: Option<u64>,
    },
    /// The artifacts of a GitLab job.
    GitLab {
        /// The job's name.
        job: String,
        /// Branch or tag; `None` is this job's pipeline.
        reference: Option<String>,
    },
}

impl fmt::Display for ArtifactSource {
    /// As the report's `artifact.source` has it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ArtifactSource::Path(path) | ArtifactSource::PathWithDigest { path, .. } => write!(f, "{}", path.display()),
            ArtifactSource::GitHub { name, run_id: Some(id) } => write!(f, "github:{name}@{id}"),
            ArtifactSource::GitHub { name, run_id: None } => write!(f, "github:{name}"),
            ArtifactSource::GitLab { job, reference: Some(reference) } => write!(f, "gitlab:{job}@{reference}"),
            ArtifactSource::GitLab { job, reference: None } => write!(f, "gitlab:{job}"),
        }
    }
}

/// What runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// A script: its text goes into a file of the boundary, which the shell gets.
    Script {
        /// What runs it.
        shell: Shell,
        /// The script.
        text: String,
    },
    /// A WebAssembly program with its arguments.
    Wasm {
        /// The program.
        program: WasmProgram,
        /// Its arguments, without the program's own name.
        args: Vec<String>,
    },
}

impl fmt::Display for Command {
    /// For reports: the script, with its shell in a last line unless that is `sh`; or the words of the command, quoted
    /// where a shell would need it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Command::Script { shell, text } if *shell == Shell::default() => f.write_str(text.trim_end()),
            Command::Script { shell, text } => write!(f, "{}\nshell: {}", text.trim_end(), shell.template()),
            Command::Wasm { program, args } => {
                let name = match program {
                    WasmProgram::Module(path) => path.display().to_string(),
                    WasmProgram::Runtime(name) => name.clone(),
                };
                // NUL is refused in `run`, the one thing that can't be quoted.
                let words = std::iter::once(name.as_str()).chain(args.iter().map(String::as_str));
                f.write_str(&shlex::try_join(words).unwrap_or_else(|_| name.clone()))
            }
        }
    }
}

/// What the first word of a WebAssembly step's `run` names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WasmProgram {
    /// A module, component or text of one, in the artifact: relative, without `..`.
    Module(PathBuf),
    /// An installed runtime, such as `python`. The backend knows which there are.
    Runtime(String),
}

/// The file system around the code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageSource {
    /// The world-readable toolchain part of the runner's own tree.
    Host,
    /// A directory.
    Dir(PathBuf),
    /// A tar archive.
    Tar(PathBuf),
    /// An OCI image layout, and which of its images; the only one without a tag.
    OciLayout {
        /// Its directory.
        path: PathBuf,
        /// `org.opencontainers.image.ref.name` of the image.
        tag: Option<String>,
    },
    /// What `docker save` wrote.
    DockerArchive(PathBuf),
    /// A reference to a registry's image.
    Registry(String),
}

impl fmt::Display for ImageSource {
    /// As written in files and in the report's `image.reference`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ImageSource::Host => f.write_str("host"),
            ImageSource::Dir(path) => write!(f, "dir:{}", path.display()),
            ImageSource::Tar(path) => write!(f, "tar:{}", path.display()),
            ImageSource::OciLayout { path, tag: None } => write!(f, "oci-layout:{}", path.display()),
            ImageSource::OciLayout { path, tag: Some(tag) } => write!(f, "oci-layout:{}:{tag}", path.display()),
            ImageSource::DockerArchive(path) => write!(f, "docker-archive:{}", path.display()),
            ImageSource::Registry(reference) => f.write_str(reference),
        }
    }
}

/// The kernel of a microVM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kernel {
    /// The one that this host's distribution installed.
    Distro,
    /// A file. It runs before any of our code does, so it is guest code.
    Path {
        /// The file.
        path: PathBuf,
        /// The digests that the operator's policy lists; whoever boots it hashes what it boots. `None` without a policy.
        listed: Option<BTreeSet<Sha256Digest>>,
    },
}

/// A directory or file of the host, shown inside read-only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// On the host, absolute or relative to the current directory.
    pub path: PathBuf,
    /// Inside: absolute, without `.` and `..`.
    pub at: PathBuf,
    /// Where `path` is a copy of what somebody sent: what they call it, which is only a claim.
    pub sent_as: Option<PathBuf>,
}

/// One step, complete.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// From 1, over all files in the order given. A selection keeps it.
    pub index: usize,
    /// What people call it: one line.
    pub name: String,
    /// The name for a directory: lowercase letters, digits and hyphens. Not unique without the index.
    pub slug: String,
    /// Where it was written: a file's key, or the flag that made it.
    pub origin: Place,
    /// Where the code comes from.
    pub artifact: ArtifactSource,
    /// What runs.
    pub command: Command,
    /// Environment variables, all of them.
    pub env: BTreeMap<String, String>,
    /// Below `/workspace`: relative, without `..`; empty is the artifact's root.
    pub working_directory: PathBuf,
    /// Whether exit code 10 counts as success.
    pub continue_on_error: bool,
    /// The backend; `Auto` has become `Wasm` where the command says so.
    pub backend: BackendChoice,
    /// Backends that the policy leaves, all without one.
    pub allowed_backends: BTreeSet<Backend>,
    /// The floor that was stated.
    pub minimum_isolation: Option<Tier>,
    /// Controls that were stated, by the user or the policy. See [`Step::required`].
    pub require: BTreeSet<ControlId>,
    /// The file system around the code; `None` is the backend's default.
    pub image: Option<ImageSource>,
    /// Digest that the image must have.
    pub image_digest: Option<Sha256Digest>,
    /// The kernel of a microVM.
    pub kernel: Kernel,
    /// Limits, the timeout among them.
    pub limits: Limits,
    /// Read-only mounts.
    pub mounts: Vec<Mount>,
    /// The network.
    pub network: Network,
    /// What a WebAssembly module may reach.
    pub grants: Grants,
    /// Whether a WebAssembly run must repeat.
    pub deterministic: bool,
    /// Patterns of files to keep: relative, without `..`, valid for the `glob` crate.
    pub outputs: Vec<String>,
    /// The guest's own JUnit report: relative, without `..`.
    pub junit: Option<PathBuf>,
    /// Whether an engine with known vulnerabilities is refused; only a policy says so.
    pub refuse_vulnerable_engines: bool,
    /// Where each key that was found stands, for messages. See [`Step::place`].
    pub(super) places: BTreeMap<&'static str, Place>,
}

impl Step {
    /// The weakest tier that this step runs behind.
    #[must_use]
    pub fn floor(&self) -> Tier {
        self.minimum_isolation.unwrap_or(self.backend.default_floor())
    }

    /// Controls required beyond those that the tier and the design need: stated ones, and those of written limits.
    #[must_use]
    pub fn required(&self) -> BTreeSet<ControlId> {
        &self.require | &self.limits.required_controls()
    }

    /// Backends to try, the strongest first: the choice's, without those that the policy rules out.
    #[must_use]
    pub fn candidates(&self) -> Vec<Backend> {
        self.backend.candidates().iter().copied().filter(|backend| self.allowed_backends.contains(backend)).collect()
    }

    /// The name of the step's directory in reports and outputs: `01-unit-tests`.
    #[must_use]
    pub fn directory(&self) -> String {
        format!("{:02}-{}", self.index, self.slug)
    }

    /// Where a key such as `sandbox.memory` was written; the step itself for what is a default.
    #[must_use]
    pub fn place(&self, key: &str) -> &Place {
        self.places.get(key).unwrap_or(&self.origin)
    }

    /// The file that the step came from.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        self.origin.file()
    }
}

/// A name for a directory: lowercase ASCII letters and digits, everything else one hyphen, at most 40 characters.
#[must_use]
pub fn slug(name: &str) -> String {
    let mut out = String::new();
    for c in name.chars() {
        if out.len() >= 40 {
            break;
        }
        if c.is_ascii_alphanumeric() {
            out.push(c.to_ascii_lowercase());
        } else if !out.is_empty() && !out.ends_with('-') {
            out.push('-');
        }
    }
    let out = out.trim_end_matches('-');
    if out.is_empty() { "step".to_owned() } else { out.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slugs_are_safe_names() {
        assert_eq!(slug("Unit tests of the generated patch"), "unit-tests-of-the-generated-patch");
        assert_eq!(slug("../../etc/passwd"), "etc-passwd");
        assert_eq!(slug("größe\n\u{202e}x"), "gr-e-x");
        assert_eq!(slug("…"), "step");
        assert!(slug(&"ab ".repeat(100)).len() <= 40);
    }

    #[test]
    fn a_command_is_shown_with_what_matters_first() {
        let script = |shell: &str| Command::Script { shell: Shell::parse(shell).unwrap(), text: "make\ntest\n".into() };
        assert_eq!(script("sh").to_string(), "make\ntest");
        assert_eq!(script("perl {0}").to_string(), "make\ntest\nshell: perl {0}");
        let args = ["a b", "c"].map(str::to_owned).to_vec();
        let wasm = Command::Wasm { program: WasmProgram::Module("x.wasm".into()), args };
        assert_eq!(wasm.to_string(), "x.wasm 'a b' c");
    }

    #[test]
    fn floors_follow_the_design() {
        let floors = BackendChoice::ALL.map(BackendChoice::default_floor);
        assert_eq!(floors, [Tier::Kernel, Tier::Vm, Tier::Kernel, Tier::Container]);
    }
}
