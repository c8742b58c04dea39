//! From layers of raw steps to a [`Step`]: every check that needs no machine.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use super::check::{
    self, inside_artifact, is_module, is_reference, mount_point, nonempty, one_of, refuse_nul, wasm_command,
};
use super::digest::Sha256Digest;
use super::error::SpecError;
use super::limits::{Limit, Limits};
use super::merge::{Found, Layer, Origin, Surroundings, pick};
use super::place::{Place, shown};
use super::raw::{RawArtifact, RawGrants, RawSandbox, RawStep, Text};
use super::shell::Shell;
use super::step::{
    ArtifactSource, Backend, BackendChoice, Command, FilesystemGrant, Grants, ImageSource, Kernel, Mount, Network,
    Step, WasmProgram, slug,
};
use crate::evidence::{ControlId, Tier};

/// Longest name of a step, in characters.
const NAME: usize = 200;
/// Longest `NAME=VALUE` that Linux passes to a program (`MAX_ARG_STRLEN`, execve(2)), less the byte that ends it.
const ENV: usize = 128 * 1024 - 1;
/// Memory of a WebAssembly runtime whose step says nothing of it, bytes: the first run compiles it, and CPython's 26 MB
/// take some 660 MiB for that.
const RUNTIME_MEMORY: u64 = 1 << 30;
/// Where the artifact appears inside.
pub const WORKSPACE: &str = "/workspace";

/// Makes the step that the layers describe, the most specific layer first.
pub(super) fn build(layers: &[Layer<'_>], index: usize, around: &Surroundings) -> Result<Step, SpecError> {
    let mut builder = Builder { layers, around, places: BTreeMap::new() };
    let origin = builder.origin();
    let run = builder.run(&origin)?;
    let name = builder.name(&run)?;
    let backend = builder.backend(&run)?;
    let command = builder.command(&run, backend)?;
    let (image, image_digest) = builder.image(backend)?;
    let step = Step {
        index,
        slug: slug(&name),
        name,
        artifact: builder.artifact()?,
        env: builder.env()?,
        working_directory: builder.working_directory()?,
        continue_on_error: builder
            .pick("continue-on-error", |s| s.continue_on_error.as_ref())
            .is_some_and(|f| *f.value),
        backend,
        allowed_backends: Backend::ALL.into(),
        minimum_isolation: builder.word(
            "sandbox.minimum-isolation",
            |s| s.minimum_isolation.as_ref(),
            &Tier::ALL,
            Tier::name,
        )?,
        require: builder.require()?,
        image,
        image_digest,
        kernel: builder.kernel(backend)?,
        limits: builder.limits(&command)?,
        mounts: builder.mounts()?,
        network: builder.network()?,
        grants: builder.grants(backend, &command)?,
        deterministic: builder.deterministic(backend)?,
        outputs: builder.outputs()?,
        junit: builder.junit()?,
        refuse_vulnerable_engines: false,
        command,
        origin,
        places: builder.places,
    };
    Ok(step)
}

struct Builder<'b, 'r> {
    layers: &'b [Layer<'r>],
    around: &'b Surroundings,
    places: BTreeMap<&'static str, Place>,
}

impl<'b, 'r> Builder<'b, 'r> {
    /// The most specific value of a key outside `sandbox`; its place is kept.
    fn pick<T: ?Sized>(
        &mut self,
        key: &'static str,
        get: impl Fn(&'r RawStep) -> Option<&'r T>,
    ) -> Option<Found<'b, 'r, T>> {
        let found = pick(self.layers, key, get)?;
        self.places.insert(key, found.place.clone());
        Some(found)
    }

    /// The same within `sandbox`.
    fn sandbox<T: ?Sized>(
        &mut self,
        key: &'static str,
        get: impl Fn(&'r RawSandbox) -> Option<&'r T>,
    ) -> Option<Found<'b, 'r, T>> {
        self.pick(key, |step| get(step.sandbox.as_ref()?))
    }

    /// A word of a closed set, within `sandbox`.
    fn word<W: Copy>(
        &mut self,
        key: &'static str,
        get: impl Fn(&'r RawSandbox) -> Option<&'r Text>,
        all: &[W],
        name: impl Fn(W) -> &'static str,
    ) -> Result<Option<W>, SpecError> {
        self.sandbox(key, get).map(|found| one_of(&found.place, &found.value.0, all, name)).transpose()
    }

    fn origin(&self) -> Place {
        self.layers
            .iter()
            .find_map(|layer| match &layer.origin {
                Origin::Step(source, path) | Origin::WorkflowStep(source, path) => {
                    Some(Place::value(source, path.clone()))
                }
                _ => None,
            })
            .unwrap_or(Place::Flag("the command line"))
    }

    fn run(&mut self, origin: &Place) -> Result<String, SpecError> {
        let Some(found) = self.pick("run", |s| s.run.as_ref()) else {
            return Err(match origin {
                Place::File { .. } => SpecError::MissingKey { place: origin.clone(), key: "run".into() },
                Place::Flag(_) => SpecError::NothingToRun { reason: "there is no step file and no `--run`".into() },
            });
        };
        let run = &found.value.0;
        if run.trim().is_empty() {
            return Err(SpecError::invalid_help(&found.place, "empty", "write the command to run"));
        }
        refuse_nul(&found.place, run)?;
        Ok(run.clone())
    }

    fn name(&mut self, run: &str) -> Result<String, SpecError> {
        let Some(found) = self.pick("name", |s| s.name.as_ref()) else {
            let line = run.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("step");
            return Ok(line.chars().filter(|c| !c.is_control()).take(60).collect());
        };
        let name = found.value.0.trim();
        if name.is_empty() || name.chars().any(char::is_control) || name.chars().count() > NAME {
            return Err(SpecError::invalid(&found.place, format!("a name is one line of at most {NAME} characters")));
        }
        Ok(name.to_owned())
    }

    fn backend(&mut self, run: &str) -> Result<BackendChoice, SpecError> {
        let chosen = self.word("sandbox.backend", |s| s.backend.as_ref(), &BackendChoice::ALL, BackendChoice::name)?;
        let chosen = chosen.unwrap_or(BackendChoice::Auto);
        let first = run.split_whitespace().next().unwrap_or_default().trim_matches(['"', '\'']);
        Ok(if chosen == BackendChoice::Auto && is_module(first) { BackendChoice::Wasm } else { chosen })
    }

    fn command(&mut self, run: &str, backend: BackendChoice) -> Result<Command, SpecError> {
        let shell = self.pick("shell", |s| s.shell.as_ref());
        if backend != BackendChoice::Wasm {
            let shell = match shell {
                None if self.layers.iter().any(Layer::is_workflow) => Shell::of_a_workflow(),
                None => Shell::default(),
                Some(found) => Shell::parse(&found.value.0)
                    .map_err(|bad| SpecError::invalid_help(&found.place, bad.reason, bad.help))?,
            };
            return Ok(Command::Script { shell, text: run.to_owned() });
        }
        if let Some(found) = shell.filter(|found| found.layer.is_specific()) {
            return Err(SpecError::invalid_help(
                &found.place,
                "a WebAssembly step has no shell",
                "leave `shell` out, or choose `backend: gvisor` to run a script",
            ));
        }
        let place = self.places.get("run").cloned().unwrap_or(Place::Flag("--run"));
        wasm_command(&place, run)
    }

    fn artifact(&mut self) -> Result<ArtifactSource, SpecError> {
        let Some(found) = self.pick("artifact", |s| s.artifact.as_ref()) else {
            // The file's directory; the current one when a step was written in no step file.
            let directory = self.layers.iter().map(Layer::directory).find(|d| !d.as_os_str().is_empty());
            return Ok(ArtifactSource::Path(directory.unwrap_or(Path::new(".")).to_owned()));
        };
        let RawArtifact { bare: _, path, sha256, github, run_id, gitlab, reference } = found.value;
        let place = &found.place;
        match (path, sha256, github, run_id, gitlab, reference) {
            (Some(path), None, None, None, None, None) => {
                Ok(ArtifactSource::Path(self.host_path(&below(&found, "path"), &path.0, found.layer)?))
            }
            (Some(path), Some(sha256), None, None, None, None) => Ok(ArtifactSource::PathWithDigest {
                path: self.host_path(&below(&found, "path"), &path.0, found.layer)?,
                sha256: check::digest(&place.below("sha256"), &sha256.0)?,
            }),
            (None, None, Some(name), run_id, None, None) => Ok(ArtifactSource::GitHub {
                name: nonempty(&place.below("github"), &name.0)?,
                run_id: run_id
                    .as_ref()
                    .map(|id| {
                        let digits = id.0.bytes().all(|b| b.is_ascii_digit());
                        let id = id.0.parse::<u64>().ok().filter(|_| digits);
                        id.ok_or_else(|| SpecError::invalid(&place.below("run-id"), "not the number of a workflow run"))
                    })
                    .transpose()?,
            }),
            (None, None, None, None, Some(job), reference) => Ok(ArtifactSource::GitLab {
                job: nonempty(&place.below("gitlab"), &job.0)?,
                reference: reference.as_ref().map(|r| nonempty(&place.below("ref"), &r.0)).transpose()?,
            }),
            _ => Err(SpecError::invalid_help(
                place,
                "these keys name no one source",
                "write a path, or `{path, sha256}`, `{github, run-id}` or `{gitlab, ref}`",
            )),
        }
    }

    fn env(&mut self) -> Result<BTreeMap<String, String>, SpecError> {
        let mut env = BTreeMap::new();
        for layer in self.layers {
            for (name, value) in layer.raw.env.iter().flatten() {
                if env.contains_key(name) {
                    continue;
                }
                let place = match layer.place("env") {
                    Place::File { source, path, .. } => Place::key(&source, path.key(name)),
                    flag @ Place::Flag(_) => flag,
                };
                let value = value.as_ref().map_or("", |text| text.0.as_str());
                if name.is_empty() || name.contains('=') || name.chars().any(char::is_control) {
                    return Err(SpecError::invalid(
                        &place,
                        format!("`{}` can't name an environment variable", shown(name)),
                    ));
                }
                refuse_nul(&place, value)?;
                if name.len() + 1 + value.len() > ENV {
                    return Err(SpecError::invalid(
                        &place,
                        format!("longer than {ENV} bytes, the most that Linux passes on"),
                    ));
                }
                env.insert(name.clone(), value.to_owned());
            }
        }
        Ok(env)
    }

    fn working_directory(&mut self) -> Result<PathBuf, SpecError> {
        let Some(found) = self.pick("working-directory", |s| s.working_directory.as_ref()) else {
            return Ok(PathBuf::new());
        };
        let text = &found.value.0;
        let inside = match Path::new(text).strip_prefix(WORKSPACE) {
            Ok(rest) => rest.to_str().unwrap_or_default(),
            Err(_) => text.as_str(),
        };
        if text.is_empty() {
            return Err(SpecError::invalid(&found.place, "empty"));
        }
        inside_artifact(&found.place, inside)
    }

    fn require(&mut self) -> Result<BTreeSet<ControlId>, SpecError> {
        let mut require = BTreeSet::new();
        for layer in self.layers {
            let place = layer.place("sandbox.require");
            let words = layer.raw.sandbox.iter().flat_map(|sandbox| sandbox.require.iter().flatten());
            for (index, word) in words.enumerate() {
                require.insert(one_of(&place.item(index), &word.0, ControlId::ALL, ControlId::name)?);
            }
        }
        Ok(require)
    }

    fn image(&mut self, backend: BackendChoice) -> Result<(Option<ImageSource>, Option<Sha256Digest>), SpecError> {
        let image = self.sandbox("sandbox.image", |s| s.image.as_ref());
        let digest = self.sandbox("sandbox.image-digest", |s| s.image_digest.as_ref());
        if backend == BackendChoice::Wasm {
            let places = [image.as_ref().map(|f| (f.layer, &f.place)), digest.as_ref().map(|f| (f.layer, &f.place))];
            if let Some((_, place)) = places.into_iter().flatten().find(|(layer, _)| layer.is_specific()) {
                return Err(SpecError::invalid(place, "a WebAssembly step has no image"));
            }
            return Ok((None, None));
        }
        let Some(image) = image else {
            return match digest {
                Some(found) => Err(SpecError::invalid(&found.place, "a digest without an image")),
                None => Ok((None, None)),
            };
        };
        let source = self.image_source(&image)?;
        // A digest belongs to the image beside it, not to one that a more specific layer put in its place.
        let digest = match digest.filter(|digest| digest.rank <= image.rank) {
            Some(found) if source == ImageSource::Host => {
                return Err(SpecError::invalid(&found.place, "the host's own tree has no digest"));
            }
            // Or a digest that nothing is compared with would satisfy a policy that lists it.
            Some(found) if matches!(source, ImageSource::Dir(_)) => {
                return Err(SpecError::invalid(&found.place, "a directory has no digest"));
            }
            Some(found) => Some(check::digest(&found.place, &found.value.0)?),
            None => None,
        };
        Ok((Some(source), digest))
    }

    fn image_source(&self, found: &Found<'_, '_, Text>) -> Result<ImageSource, SpecError> {
        let (text, place) = (&found.value.0, &found.place);
        if text == "host" {
            return Ok(ImageSource::Host);
        }
        if let Some((scheme, rest)) = text.split_once(':') {
            let path = || self.host_path(place, rest, found.layer);
            match scheme {
                "dir" => return path().map(ImageSource::Dir),
                "tar" => return path().map(ImageSource::Tar),
                "oci-layout" => {
                    // What follows the last colon is a tag, unless it goes on with the path.
                    let (path, tag) = match rest.rsplit_once(':') {
                        Some((path, tag)) if !tag.contains('/') => (path, Some(tag.to_owned())),
                        _ => (rest, None),
                    };
                    if tag.as_deref() == Some("") {
                        return Err(SpecError::invalid(place, "an empty tag"));
                    }
                    let path = self.host_path(place, path, found.layer)?;
                    return Ok(ImageSource::OciLayout { path, tag });
                }
                "docker-archive" => return path().map(ImageSource::DockerArchive),
                // A registry's reference has colons too.
                _ => {}
            }
        }
        if is_reference(text) {
            return Ok(ImageSource::Registry(text.clone()));
        }
        Err(SpecError::invalid_help(
            place,
            format!("`{}` is no image", shown(text)),
            "write `host`, `dir:PATH`, `tar:PATH`, `oci-layout:PATH[:TAG]`, `docker-archive:PATH`, or a reference such as `ghcr.io/acme/python:3`",
        ))
    }

    fn kernel(&mut self, backend: BackendChoice) -> Result<Kernel, SpecError> {
        let Some(found) = self.sandbox("sandbox.kernel", |s| s.kernel.as_ref()) else { return Ok(Kernel::Distro) };
        if matches!(backend, BackendChoice::Wasm | BackendChoice::Gvisor) {
            if found.layer.is_specific() {
                return Err(SpecError::invalid(&found.place, format!("the backend `{backend}` boots no kernel")));
            }
            return Ok(Kernel::Distro);
        }
        match found.value.0.as_str() {
            "distro" => Ok(Kernel::Distro),
            path => Ok(Kernel::Path { path: self.host_path(&found.place, path, found.layer)?, listed: None }),
        }
    }

    fn limits(&mut self, command: &Command) -> Result<Limits, SpecError> {
        let mut limits = Limits::default();
        if matches!(command, Command::Wasm { program: WasmProgram::Runtime(_), .. }) {
            limits.memory = RUNTIME_MEMORY;
        }
        for limit in Limit::ALL {
            let found = match limit {
                Limit::Cpus => self.sandbox("sandbox.cpus", |s| s.cpus.as_ref()),
                Limit::Memory => self.sandbox("sandbox.memory", |s| s.memory.as_ref()),
                Limit::Disk => self.sandbox("sandbox.disk", |s| s.disk.as_ref()),
                Limit::Pids => self.sandbox("sandbox.pids", |s| s.pids.as_ref()),
                Limit::Output => self.sandbox("sandbox.output", |s| s.output.as_ref()),
                Limit::Timeout => self.pick("timeout-minutes", |s| s.timeout_minutes.as_ref()),
            };
            let Some(found) = found else { continue };
            let text = &found.value.0;
            let is_flag = limit == Limit::Timeout && found.layer.is_flags();
            let amount = if is_flag { Limit::timeout(text) } else { limit.parse(text) };
            let amount = amount.map_err(|bad| {
                SpecError::invalid_help(&found.place, format!("`{}` is {}", shown(text), bad.reason), bad.help)
            })?;
            limits.write(limit, amount);
        }
        Ok(limits)
    }

    fn mounts(&mut self) -> Result<Vec<Mount>, SpecError> {
        let Some(found) = self.sandbox("sandbox.mounts", |s| s.mounts.as_ref()) else { return Ok(Vec::new()) };
        let mut mounts: Vec<Mount> = Vec::new();
        for (index, raw) in found.value.iter().enumerate() {
            let place = found.place.item(index);
            let at = mount_point(&place.below("at"), &raw.at.0)?;
            if let Some(other) = mounts.iter().find(|other| other.at.starts_with(&at) || at.starts_with(&other.at)) {
                let reason =
                    format!("`{}` overlaps another mount, `{}`", shown(&raw.at.0), shown(&other.at.to_string_lossy()));
                return Err(SpecError::invalid(&place.below("at"), reason));
            }
            let path = self.host_path(&place.below("path"), &raw.path.0, found.layer)?;
            mounts.push(Mount { path, at, sent_as: None });
        }
        Ok(mounts)
    }

    fn network(&mut self) -> Result<Network, SpecError> {
        let Some(found) = self.sandbox("sandbox.network", |s| s.network.as_ref()) else { return Ok(Network::None) };
        match found.value.0.as_str() {
            "none" => Ok(Network::None),
            other => Err(SpecError::invalid_help(
                &found.place,
                format!("the network `{}` is not supported", shown(other)),
                "`none` is the only one: fetch what the code needs before, and put it into the artifact or a mount",
            )),
        }
    }

    fn grants(&mut self, backend: BackendChoice, command: &Command) -> Result<Grants, SpecError> {
        fn filesystem(sandbox: &RawSandbox) -> Option<&Text> {
            let RawGrants { filesystem } = sandbox.grants.as_ref()?;
            filesystem.as_ref()
        }
        let found = self.sandbox("sandbox.grants.filesystem", filesystem);
        let grant = found
            .as_ref()
            .map(|found| one_of(&found.place, &found.value.0, &FilesystemGrant::ALL, FilesystemGrant::name))
            .transpose()?;
        if backend != BackendChoice::Wasm {
            return match found {
                Some(found) if found.layer.is_specific() && grant != Some(FilesystemGrant::None) => {
                    Err(SpecError::invalid(
                        &found.place,
                        "grants are for WebAssembly: other backends always have the artifact",
                    ))
                }
                _ => Ok(Grants { filesystem: FilesystemGrant::None }),
            };
        }
        // An interpreter that can't read its program is no use; the report names the grant.
        let default = match command {
            Command::Wasm { program: WasmProgram::Runtime(_), .. } => FilesystemGrant::ReadOnly,
            _ => FilesystemGrant::None,
        };
        Ok(Grants { filesystem: grant.unwrap_or(default) })
    }

    fn deterministic(&mut self, backend: BackendChoice) -> Result<bool, SpecError> {
        let Some(found) = self.sandbox("sandbox.deterministic", |s| s.deterministic.as_ref()) else { return Ok(false) };
        if *found.value && backend != BackendChoice::Wasm {
            if found.layer.is_specific() {
                return Err(SpecError::invalid(&found.place, "only WebAssembly can be deterministic"));
            }
            return Ok(false);
        }
        Ok(*found.value)
    }

    fn outputs(&mut self) -> Result<Vec<String>, SpecError> {
        let Some(found) = self.pick("outputs", |s| s.outputs.as_ref()) else { return Ok(Vec::new()) };
        let patterns = found.value.iter().enumerate().map(|(index, pattern)| {
            let place = found.place.item(index);
            let path = inside_artifact(&place, &pattern.0)?;
            let text = path.to_str().unwrap_or_default();
            if text.is_empty() {
                return Err(SpecError::invalid_help(&place, "names no file", "write `**` for all of the artifact"));
            }
            glob::Pattern::new(text)
                .map_err(|error| SpecError::invalid(&place, format!("not a pattern: {}", error.msg)))?;
            Ok(text.to_owned())
        });
        patterns.collect()
    }

    fn junit(&mut self) -> Result<Option<PathBuf>, SpecError> {
        let Some(found) = self.pick("junit", |s| s.junit.as_ref()) else { return Ok(None) };
        let path = inside_artifact(&found.place, &found.value.0)?;
        if path.as_os_str().is_empty() {
            return Err(SpecError::invalid(&found.place, "names no file"));
        }
        Ok(Some(path))
    }

    /// A path on this machine: relative to the layer's file, `~/` is the home directory.
    fn host_path(&self, place: &Place, text: &str, layer: &Layer<'_>) -> Result<PathBuf, SpecError> {
        refuse_nul(place, text)?;
        if text.is_empty() {
            return Err(SpecError::invalid(place, "an empty path"));
        }
        if let Some(rest) = text.strip_prefix("~/").or((text == "~").then_some("")) {
            let home = self.around.home.as_ref().filter(|home| home.is_absolute());
            let home =
                home.ok_or_else(|| SpecError::invalid(place, "`~` stands for no directory here: HOME is not set"))?;
            return Ok(home.join(rest));
        }
        // `.` says nothing in the middle of a path; `..` stays, since a symlink may stand before it.
        let joined: PathBuf = layer.directory().join(text).components().filter(|c| *c != Component::CurDir).collect();
        Ok(if joined.as_os_str().is_empty() { PathBuf::from(".") } else { joined })
    }
}

fn below(found: &Found<'_, '_, RawArtifact>, key: &str) -> Place {
    if found.value.bare { found.place.clone() } else { found.place.below(key) }
}
