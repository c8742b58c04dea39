//! What a client asks for: steps as merged from files and flags, not yet checked, and where their bytes are among the
//! descriptors that come along.
//!
//! [`Request::steps`] checks all of it by the code that checks step files. What a service can't do for somebody else is
//! refused there as well ([`Unserved`]), before anything is queued.

use serde::{Deserialize, Serialize};

use crate::report::Ci;
use crate::spec::raw::RawStep;
use crate::spec::{ArtifactSource, ImageSource, Kernel, SpecError, Step, wire};

/// Most steps of a request.
pub const MAX_STEPS: usize = 1000;

/// What a client asks for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// The steps, in order.
    pub steps: Vec<SentStep>,
    /// Steps that run at the same time.
    pub jobs: u16,
    /// How gVisor intercepts system calls, if the user chose.
    #[serde(default)]
    pub platform: Option<String>,
    /// The CI job, as the client's environment has it: a claim.
    #[serde(default)]
    pub ci: Option<Ci>,
    /// The machine's name, as CI gives it: a claim.
    #[serde(default)]
    pub runner: Option<String>,
}

/// A step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SentStep {
    /// From 1, over all files.
    pub index: u32,
    /// As a file would have it; its paths are names.
    pub step: RawStep,
    /// The artifact's bytes.
    pub artifact: Option<Sent>,
    /// The image's, where it is one of files.
    #[serde(default)]
    pub image: Option<Sent>,
    /// The kernel's, where the step names one.
    #[serde(default)]
    pub kernel: Option<Sent>,
}

/// Bytes that came as a descriptor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sent {
    /// Which of the descriptors, from 0.
    pub fd: u32,
    /// What they are.
    pub kind: Kind,
    /// The last component of the path over there.
    pub name: String,
}

/// What a descriptor's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The file itself.
    File,
    /// A directory, as a tar.
    Tree,
}

/// Why a request can't be served.
#[derive(Debug, thiserror::Error)]
pub enum Unserved {
    /// It is no request that a client of ours makes.
    #[error("the request is malformed: {0}")]
    Malformed(String),
    /// A step is wrong.
    #[error("step {index} can't be read")]
    Step {
        /// Which.
        index: u32,
        /// Why.
        #[source]
        source: Box<SpecError>,
    },
    /// The step needs something that the service does for nobody.
    #[error("step {index} {what}")]
    NotHere {
        /// Which.
        index: u32,
        /// What.
        what: &'static str,
        /// What to do.
        help: &'static str,
    },
}

impl Unserved {
    /// What to do about it.
    #[must_use]
    pub fn help(&self) -> String {
        match self {
            Unserved::Malformed(_) => "use the `plimsoll` of the same release as the service".to_owned(),
            Unserved::Step { source, .. } => source.help().unwrap_or_default(),
            Unserved::NotHere { help, .. } => (*help).to_owned(),
        }
    }
}

impl Request {
    /// The steps, checked. Their paths are still names from over there, that nobody opens.
    ///
    /// # Errors
    /// As [`Unserved`] says.
    pub fn steps(&self, descriptors: usize) -> Result<Vec<Step>, Unserved> {
        let malformed = |why: &str| Unserved::Malformed(why.to_owned());
        if self.steps.len() > MAX_STEPS {
            return Err(Unserved::Malformed(format!("{} steps, where {MAX_STEPS} are allowed", self.steps.len())));
        }
        if self.jobs == 0 {
            return Err(malformed("no step may run"));
        }
        if self.platform.as_deref().is_some_and(|p| !matches!(p, "systrap" | "ptrace" | "kvm")) {
            return Err(malformed("an unknown platform"));
        }
        let mut before = 0;
        let mut steps = Vec::new();
        for sent in &self.steps {
            if sent.index <= before {
                return Err(malformed("steps are not in order"));
            }
            before = sent.index;
            let all = [&sent.artifact, &sent.image, &sent.kernel];
            for file in all.into_iter().flatten() {
                if usize::try_from(file.fd).map_or(true, |fd| fd >= descriptors) {
                    return Err(malformed("a descriptor did not come along"));
                }
                if !is_name(&file.name) {
                    return Err(malformed("a name that no file has"));
                }
            }
            let step = wire::from_raw(&sent.step, usize::try_from(sent.index).unwrap_or(usize::MAX))
                .map_err(|source| Unserved::Step { index: sent.index, source: Box::new(source) })?;
            sent.served(&step)?;
            steps.push(step);
        }
        Ok(steps)
    }
}

impl SentStep {
    /// Whether everything that the step reads came along.
    fn served(&self, step: &Step) -> Result<(), Unserved> {
        let not_here = |what, help| Err(Unserved::NotHere { index: self.index, what, help });
        match (&step.artifact, &self.artifact) {
            (ArtifactSource::Path(_) | ArtifactSource::PathWithDigest { .. }, Some(_)) => {}
            (ArtifactSource::GitHub { .. } | ArtifactSource::GitLab { .. }, _) => {
                return not_here(
                    "names an artifact of a forge, which the service has no token for",
                    "download it in a step before, and name its path",
                );
            }
            (_, None) => return Err(Unserved::Malformed("an artifact did not come along".to_owned())),
        }
        let fits = match (&step.image, self.image.as_ref().map(|i| i.kind)) {
            (None | Some(ImageSource::Host), None) => true,
            (Some(ImageSource::Tar(_) | ImageSource::DockerArchive(_)), kind) => kind == Some(Kind::File),
            (Some(ImageSource::Dir(_) | ImageSource::OciLayout { .. }), kind) => kind == Some(Kind::Tree),
            (Some(ImageSource::Registry(_)), _) => {
                return not_here(
                    "names an image of a registry, which the service does not fetch for anybody",
                    "copy it to a directory (`skopeo copy docker://… oci:DIR:TAG`) and name that: `image: oci-layout:DIR:TAG`",
                );
            }
            _ => false,
        };
        if !fits {
            return Err(Unserved::Malformed("an image did not come along".to_owned()));
        }
        if matches!(step.kernel, Kernel::Path { .. })
            && self.kernel.as_ref().is_none_or(|kernel| kernel.kind != Kind::File)
        {
            return Err(Unserved::Malformed("a kernel did not come along".to_owned()));
        }
        if !step.mounts.is_empty() {
            return not_here(
                "has `sandbox.mounts`, and the service shows nobody's directories inside",
                "put the files into the artifact or the image; or run with `--service never`",
            );
        }
        Ok(())
    }
}

/// Whether a text can be one file's name.
fn is_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= 255 && !matches!(name, "." | "..") && !name.contains(['/', '\0'])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(json: &str) -> Result<Vec<Step>, String> {
        let request: Request = serde_json::from_str(json).map_err(|e| e.to_string())?;
        request.steps(1).map_err(|e| crate::text::chain(&e))
    }

    #[test]
    fn a_request_is_checked_before_anything_is_done_for_it() {
        let artifact = r#""artifact":{"fd":0,"kind":"tree","name":"dist"}"#;
        let one = |rest: &str| format!(r#"{{"steps":[{{"index":1,{rest}}}],"jobs":1}}"#);
        let harmless = one(&format!(r#""step":{{"run":"make"}},{artifact}"#));
        assert_eq!(request(&harmless).unwrap().len(), 1);
        for (hostile, why) in [
            (one(r#""step":{"run":"make"},"artifact":null"#), "did not come along"),
            (one(r#""step":{"run":"make"},"artifact":{"fd":1,"kind":"file","name":"x"}"#), "did not come along"),
            (one(r#""step":{"run":"make"},"artifact":{"fd":0,"kind":"file","name":"../x"}"#), "no file has"),
            (one(&format!(r#""step":{{"run":"make","sandbox":{{"image":"tar:/etc/x.tar"}}}},{artifact}"#)), "image"),
            (
                one(&format!(
                    r#""step":{{"run":"make","sandbox":{{"mounts":[{{"path":"/etc","at":"/x"}}]}}}},{artifact}"#
                )),
                "sandbox.mounts",
            ),
            (
                one(&format!(
                    r#""step":{{"run":"make","sandbox":{{"backend":"firecracker","image":"host","kernel":"/boot/k"}}}},{artifact}"#
                )),
                "kernel",
            ),
            (one(&format!(r#""step":{{"run":"make","shel":"sh"}},{artifact}"#)), "shel"),
            (harmless.replace(r#""jobs":1"#, r#""jobs":0"#), "no step may run"),
            (harmless.replace(r#""jobs":1"#, r#""jobs":1,"platform":"/bin/sh""#), "platform"),
            (harmless.replace(r#""jobs":1"#, r#""jobs":1,"policy":"none""#), "unknown field"),
        ] {
            let error = request(&hostile).unwrap_err();
            assert!(error.contains(why), "{hostile}: {error}");
        }
    }
}
