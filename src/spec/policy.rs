//! The operator's policy: `/etc/plimsoll/policy.yml`, which belongs to the owner of the runner.
//!
//! Step files come with the pull request; the policy does not. A step may tighten it and never loosen it. It fails
//! closed: a policy that exists but can't be read, is malformed, or could have been written by somebody else
//! ([`trust`]) refuses every run. The path is a constant: no flag and no variable moves it.
//!
//! Its limits: it binds plimsoll and not the job, which can skip or replace plimsoll; service mode binds the job.

mod rules;
mod service;
mod trust;

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::digest::Sha256Digest;
use super::error::SpecError;
use super::limits::Limit;
use super::place::{KeyPath, Place, Source, shown, shown_path};
use super::step::{Backend, ImageSource, Kernel, Step};
use crate::evidence::Tier;
use rules::{ImageRule, Rules};
pub use service::{Account, ServiceRules};
use trust::Surroundings as Trust;

/// Where the policy is.
pub const POLICY_FILE: &str = "/etc/plimsoll/policy.yml";
/// Where `plimsoll setup` records the engines that root installs by it; read as the policy is.
pub const ENGINES_FILE: &str = "/etc/plimsoll/engines.json";

/// What the policy did, for the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// There is none.
    None,
    /// It was read and holds for every step.
    Applied,
    /// It holds if there is one, but this process lives in a user namespace where neither its absence nor its owner
    /// means anything.
    Unverified,
}

impl Effect {
    /// The word used in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Effect::None => "none",
            Effect::Applied => "applied",
            Effect::Unverified => "unverified",
        }
    }
}

/// The policy in force, which may be none.
#[derive(Debug, Clone)]
pub struct Policy {
    effect: Effect,
    loaded: Option<Loaded>,
    /// Digests of the engines that root installed by `plimsoll setup`.
    recorded: BTreeSet<Sha256Digest>,
}

#[derive(Debug, Clone)]
struct Loaded {
    source: Arc<Source>,
    sha256: Sha256Digest,
    rules: Rules,
}

/// Why the policy refuses: exit code 11, `refusal.stage: policy`.
#[derive(Debug, thiserror::Error)]
pub enum PolicyRefusal {
    /// The policy exists and can't be read.
    #[error("the policy {} can't be read", shown_path(file))]
    Unreadable {
        /// The policy's path.
        file: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The record of installed engines is damaged.
    #[error("the record of installed engines, {}, is malformed", shown_path(file))]
    Engines {
        /// Its path.
        file: PathBuf,
        /// Where and how.
        #[source]
        source: serde_json::Error,
    },
    /// Somebody other than root could have written the policy, or it is no regular file.
    #[error("the policy {} can't be trusted: {reason}", shown_path(file))]
    Untrusted {
        /// The policy's path.
        file: PathBuf,
        /// The component at fault and its fault.
        reason: String,
    },
    /// The policy is no policy.
    #[error("the policy is malformed")]
    Malformed(#[source] Box<SpecError>),
    /// A step asks for what the policy does not allow.
    #[error(transparent)]
    Step(#[from] Box<Overreach>),
}

/// What a step asks for, and what the policy allows instead.
#[derive(Debug, thiserror::Error)]
#[error("step {index} (`{}`) asks for {asked} ({place}), and the policy allows {allowed} ({rule})", shown(name))]
pub struct Overreach {
    /// The step's index.
    pub index: usize,
    /// The step's name.
    pub name: String,
    /// What the step asks for, in words.
    pub asked: String,
    /// Where it does.
    pub place: Place,
    /// What the policy allows, in words.
    pub allowed: String,
    /// The policy's key.
    pub rule: Place,
}

fn malformed(error: SpecError) -> PolicyRefusal {
    PolicyRefusal::Malformed(Box::new(error))
}

impl PolicyRefusal {
    /// The word for the report's `refusal.reason`.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            PolicyRefusal::Unreadable { .. } => "policy-unreadable",
            PolicyRefusal::Untrusted { .. } => "policy-untrusted",
            PolicyRefusal::Malformed(_) | PolicyRefusal::Engines { .. } => "policy-malformed",
            PolicyRefusal::Step(_) => "not-allowed",
        }
    }

    /// What can be done, in one line.
    #[must_use]
    pub fn help(&self) -> Option<String> {
        match self {
            PolicyRefusal::Unreadable { file, .. } => {
                Some(format!("let plimsoll's user read {}, or remove it", shown_path(file)))
            }
            PolicyRefusal::Untrusted { file, .. } => Some(format!(
                "as root: `chown root:root` and `chmod go-w` on {} and every directory above it",
                shown_path(file)
            )),
            PolicyRefusal::Malformed(error) => error.help(),
            PolicyRefusal::Engines { file, .. } => {
                Some(format!("remove {}, and set up the engines again (`plimsoll setup …`)", shown_path(file)))
            }
            PolicyRefusal::Step(_) => {
                Some("change the step, or ask the owner of this runner; a step can only tighten the policy".to_owned())
            }
        }
    }
}

impl Policy {
    /// Reads the policy of this machine.
    ///
    /// # Errors
    /// When there is one and it can't be read, trusted or understood.
    pub fn load() -> Result<Policy, PolicyRefusal> {
        let trust = Trust::of_this_process();
        let policy = Policy::load_from(Path::new(POLICY_FILE), &trust)?;
        Ok(Policy { recorded: recorded(Path::new(ENGINES_FILE), &trust)?, ..policy })
    }

    /// No policy, for tests and for code that has none to apply.
    #[must_use]
    pub fn absent() -> Policy {
        Policy { effect: Effect::None, loaded: None, recorded: BTreeSet::new() }
    }

    /// A policy of this text, for tests.
    #[cfg(test)]
    pub(crate) fn of_text(text: &str) -> Policy {
        let source = Source::from_bytes(Path::new(POLICY_FILE), text.as_bytes().to_vec()).unwrap();
        let rules = Rules::parse(&source).unwrap();
        let loaded = Loaded { source, sha256: Sha256Digest::of(text.as_bytes()), rules };
        Policy { effect: Effect::Applied, loaded: Some(loaded), recorded: BTreeSet::new() }
    }

    /// The same from another path: for tests of the library, not for anything a user can reach.
    fn load_from(file: &Path, trust: &Trust) -> Result<Policy, PolicyRefusal> {
        let Some(bytes) = trust::read(file, trust)? else {
            return Ok(Policy {
                effect: if trust.verifies() { Effect::None } else { Effect::Unverified },
                loaded: None,
                recorded: BTreeSet::new(),
            });
        };
        let sha256 = Sha256Digest::of(&bytes);
        let source = Source::from_bytes(file, bytes).map_err(malformed)?;
        let rules = Rules::parse(&source).map_err(malformed)?;
        let effect = if trust.verifies() { Effect::Applied } else { Effect::Unverified };
        Ok(Policy { effect, loaded: Some(Loaded { source, sha256, rules }), recorded: BTreeSet::new() })
    }

    /// What the policy does, for the report.
    #[must_use]
    pub fn effect(&self) -> Effect {
        self.effect
    }

    /// Digest of the file's bytes, for the report.
    #[must_use]
    pub fn sha256(&self) -> Option<Sha256Digest> {
        self.loaded.as_ref().map(|loaded| loaded.sha256)
    }

    /// Digests of engines that the operator vouches for, beside the built-in list.
    #[must_use]
    pub fn engines(&self) -> BTreeSet<Sha256Digest> {
        let listed = self.loaded.as_ref().map(|loaded| loaded.rules.engines.clone()).unwrap_or_default();
        &listed | &self.recorded
    }

    /// Whether engines with known vulnerabilities are refused.
    #[must_use]
    pub fn refuses_vulnerable_engines(&self) -> bool {
        self.loaded.as_ref().is_some_and(|loaded| loaded.rules.refuse_vulnerable_engines)
    }

    /// Who may ask the service, and for how much.
    #[must_use]
    pub fn service(&self) -> ServiceRules {
        self.loaded.as_ref().map(|loaded| loaded.rules.service.clone()).unwrap_or_default()
    }

    /// The step under this policy: as it was or tighter. Paths that a rule speaks of come back without symlinks, so that
    /// what was compared is what is used.
    ///
    /// # Errors
    /// [`PolicyRefusal::Step`] when the step asks for what is not allowed.
    pub fn apply(&self, step: &Step) -> Result<Step, PolicyRefusal> {
        let mut tightened = step.clone();
        if let Some(loaded) = &self.loaded {
            Application { step: &mut tightened, source: &loaded.source }.run(&loaded.rules)?;
        }
        Ok(tightened)
    }
}

/// What `plimsoll setup` recorded of the engines that root installed: [`ENGINES_FILE`]. As trusted as the policy, or refused.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recorded {
    /// The engines.
    pub engines: Vec<RecordedEngine>,
}

/// An engine that root installed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordedEngine {
    /// `runsc`, `firecracker` or `jailer`.
    pub engine: String,
    /// The release that it is of.
    pub version: String,
    /// Where it was put.
    pub path: PathBuf,
    /// Its digest, by which it is known.
    pub sha256: Sha256Digest,
    /// Where it came from.
    pub source: String,
}

/// The digests in that file; none if it isn't there.
fn recorded(file: &Path, trust: &Trust) -> Result<BTreeSet<Sha256Digest>, PolicyRefusal> {
    let Some(bytes) = trust::read(file, trust)? else { return Ok(BTreeSet::new()) };
    let recorded: Recorded =
        serde_json::from_slice(&bytes).map_err(|source| PolicyRefusal::Engines { file: file.to_owned(), source })?;
    Ok(recorded.engines.into_iter().map(|engine| engine.sha256).collect())
}

struct Application<'a> {
    step: &'a mut Step,
    source: &'a Arc<Source>,
}

impl Application<'_> {
    fn run(&mut self, rules: &Rules) -> Result<(), PolicyRefusal> {
        if let Some(allowed) = &rules.backends {
            self.backends(allowed)?;
        }
        if let Some(minimum) = rules.minimum_isolation {
            self.minimum_isolation(minimum)?;
        }
        self.maxima(&rules.maxima)?;
        if let Some(allowed) = &rules.images {
            self.image(allowed)?;
        }
        self.kernel(&rules.kernels)?;
        if let Some(allowed) = &rules.mounts {
            self.mounts(allowed)?;
        }
        if let Some(most) = rules.filesystem_grant
            && self.step.grants.filesystem > most
        {
            let asked = format!("the grant `filesystem: {}`", self.step.grants.filesystem.name());
            return self.refuse(
                "sandbox.grants.filesystem",
                asked,
                format!("`{}` at most", most.name()),
                "grants.filesystem",
            );
        }
        self.step.require.extend(&rules.require);
        self.step.refuse_vulnerable_engines |= rules.refuse_vulnerable_engines;
        Ok(())
    }

    fn refuse(&self, key: &str, asked: String, allowed: String, rule: &str) -> Result<(), PolicyRefusal> {
        Err(PolicyRefusal::Step(Box::new(Overreach {
            index: self.step.index,
            name: self.step.name.clone(),
            asked,
            place: self.step.place(key).clone(),
            allowed,
            rule: Place::value(self.source, KeyPath::root().keys(rule)),
        })))
    }

    fn backends(&mut self, allowed: &BTreeSet<Backend>) -> Result<(), PolicyRefusal> {
        self.step.allowed_backends.retain(|backend| allowed.contains(backend));
        if !self.step.candidates().is_empty() {
            return Ok(());
        }
        let names: Vec<_> = allowed.iter().map(|backend| backend.name()).collect();
        let allowed = if names.is_empty() { "no backend".to_owned() } else { names.join(", ") };
        self.refuse("sandbox.backend", format!("the backend `{}`", self.step.backend), allowed, "backends")
    }

    fn minimum_isolation(&mut self, minimum: Tier) -> Result<(), PolicyRefusal> {
        let allowed = || format!("nothing below `{minimum}`");
        if let Some(asked) = self.step.minimum_isolation.filter(|asked| *asked < minimum) {
            return self.refuse(
                "sandbox.minimum-isolation",
                format!("isolation `{asked}`"),
                allowed(),
                "minimum-isolation",
            );
        }
        // A weaker backend can't be raised to the policy's floor: say so now, in the policy's name.
        if let Some(best) =
            self.step.candidates().iter().map(|backend| backend.reaches()).max().filter(|best| *best < minimum)
        {
            let asked = format!("the backend `{}`, which reaches `{best}`", self.step.backend);
            return self.refuse("sandbox.backend", asked, allowed(), "minimum-isolation");
        }
        self.step.minimum_isolation = Some(self.step.floor().max(minimum));
        Ok(())
    }

    fn maxima(&mut self, maxima: &[(Limit, u64)]) -> Result<(), PolicyRefusal> {
        for &(limit, most) in maxima {
            let asked = self.step.limits.amount(limit);
            if asked > most && self.step.limits.written.contains(&limit) {
                let key = match limit {
                    Limit::Timeout => limit.key().to_owned(),
                    _ => format!("sandbox.{}", limit.key()),
                };
                let rule = format!("maxima.{}", limit.key());
                let asked = format!("{} {}", limit.noun(), limit.show(asked));
                return self.refuse(&key, asked, format!("{} at most", limit.show(most)), &rule);
            }
            // Written by the policy now, if by nobody else: a maximum that is not enforced would be none.
            self.step.limits.write(limit, asked.min(most));
        }
        Ok(())
    }

    fn image(&mut self, allowed: &[ImageRule]) -> Result<(), PolicyRefusal> {
        if self.step.candidates().iter().all(|backend| *backend == Backend::Wasm) {
            return Ok(());
        }
        if let Some(
            ImageSource::Dir(path)
            | ImageSource::Tar(path)
            | ImageSource::OciLayout { path, .. }
            | ImageSource::DockerArchive(path),
        ) = &mut self.step.image
        {
            // What does not exist matches no rule by its path; a symlink counts as what it points to.
            *path = std::fs::canonicalize(&*path).unwrap_or_default();
        }
        // Without an image gvisor takes the host's tree.
        let image = self.step.image.clone().unwrap_or(ImageSource::Host).to_string();
        let options = glob::MatchOptions { require_literal_separator: true, ..glob::MatchOptions::new() };
        let fits = |rule: &ImageRule| match rule {
            ImageRule::Pattern(pattern) => pattern.matches_with(&image, options),
            ImageRule::Digest(digest) => {
                // A registry's image that names it is compared with it.
                let named = matches!(self.step.image, Some(ImageSource::Registry(_)))
                    && image.ends_with(&format!("@sha256:{digest}"));
                named || self.step.image_digest == Some(*digest)
            }
        };
        if allowed.iter().any(fits) {
            return Ok(());
        }
        let words: Vec<_> = allowed
            .iter()
            .map(|rule| match rule {
                ImageRule::Pattern(pattern) => shown(pattern.as_str()),
                ImageRule::Digest(digest) => format!("sha256:{digest}"),
            })
            .collect();
        let words = if words.is_empty() { "none".to_owned() } else { words.join(", ") };
        self.refuse("sandbox.image", format!("the image `{}`", shown(&image)), words, "images")
    }

    fn kernel(&mut self, allowed: &BTreeSet<Sha256Digest>) -> Result<(), PolicyRefusal> {
        let Kernel::Path { path, listed } = &mut self.step.kernel else { return Ok(()) };
        if !allowed.is_empty() {
            *listed = Some(allowed.clone());
            return Ok(());
        }
        let asked = format!("the kernel `{}`", shown(&path.to_string_lossy()));
        self.refuse("sandbox.kernel", asked, "no kernel but `distro`".to_owned(), "kernels")
    }

    fn mounts(&mut self, allowed: &[PathBuf]) -> Result<(), PolicyRefusal> {
        for index in 0..self.step.mounts.len() {
            let mount = &self.step.mounts[index];
            let path = mount.sent_as.as_ref().unwrap_or(&mount.path);
            // Of a copy only the claimed name can be compared. Nothing here is looked at for it: whether a path that a client
            // makes up exists is nothing for the client to learn.
            let resolved = match &mount.sent_as {
                Some(claim) => Some(claim.clone()).filter(|claim| is_plain(claim)),
                None => std::fs::canonicalize(path).ok(),
            };
            let below = |allowed: &PathBuf| {
                let found = std::fs::canonicalize(allowed).unwrap_or_else(|_| allowed.clone());
                let claimed = mount.sent_as.is_some();
                resolved.as_ref().is_some_and(|path| path.starts_with(found) || claimed && path.starts_with(allowed))
            };
            if !allowed.iter().any(below) {
                let words: Vec<_> = allowed.iter().map(|path| shown(&path.to_string_lossy())).collect();
                let words =
                    if words.is_empty() { "none".to_owned() } else { format!("what is below {}", words.join(", ")) };
                let asked = match &resolved {
                    Some(resolved) => format!("the mount `{}`", shown(&resolved.to_string_lossy())),
                    None => {
                        let why = if mount.sent_as.is_some() { "is no plain absolute path" } else { "does not exist" };
                        format!("the mount `{}`, which {why}", shown(&path.to_string_lossy()))
                    }
                };
                return self.refuse("sandbox.mounts", asked, words, "mounts");
            }
            if self.step.mounts[index].sent_as.is_none() {
                self.step.mounts[index].path = resolved.unwrap_or_default();
            }
        }
        Ok(())
    }
}

/// Whether a path means the same without being looked up, but for symbolic links.
fn is_plain(path: &Path) -> bool {
    path.is_absolute() && !path.components().any(|part| part == Component::ParentDir)
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests;
