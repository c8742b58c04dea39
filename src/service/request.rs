//! What a client asks for: steps as merged from files and flags, not yet checked, and where their bytes are among the
//! descriptors that come along.
//!
//! [`Request::steps`] checks all of it by the code that checks step files ([`Unserved`]), before anything is queued.

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
    /// The image's, unless it is the host's tree. A registry's comes as an image layout.
    #[serde(default)]
    pub image: Option<Sent>,
    /// The kernel's, where the step names one.
    #[serde(default)]
    pub kernel: Option<Sent>,
    /// What the step mounts, in the step's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Sent>,
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
}

impl Unserved {
    /// What to do about it.
    #[must_use]
    pub fn help(&self) -> String {
        match self {
            Unserved::Malformed(_) => "use the `plimsoll` of the same release as the service".to_owned(),
            Unserved::Step { source, .. } => source.help().unwrap_or_default(),
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
            let one = [&sent.artifact, &sent.image, &sent.kernel];
            for file in one.into_iter().flatten().chain(&sent.mounts) {
                if usize::try_from(file.fd).map_or(true, |fd| fd >= descriptors) {
                    return Err(malformed("a descriptor did not come along"));
                }
                if !is_name(&file.name) {
                    return Err(malformed("a name that no file has"));
                }
            }
            let step = wire::from_raw(&sent.step, usize::try_from(sent.index).unwrap_or(usize::MAX))
                .map_err(|source| Unserved::Step { index: sent.index, source: Box::new(source) })?;
            sent.is_whole(&step)?;
            steps.push(step);
        }
        Ok(steps)
    }
}

impl SentStep {
    /// Whether everything that the step reads came along.
    fn is_whole(&self, step: &Step) -> Result<(), Unserved> {
        let missing = |what: &str| Err(Unserved::Malformed(format!("{what} did not come along")));
        match (&step.artifact, &self.artifact) {
            (ArtifactSource::Path(_) | ArtifactSource::PathWithDigest { .. }, Some(_)) => {}
            (ArtifactSource::GitHub { .. } | ArtifactSource::GitLab { .. }, Some(Sent { kind: Kind::File, .. })) => {}
            _ => return missing("an artifact"),
        }
        let fits = match (&step.image, self.image.as_ref().map(|i| i.kind)) {
            (None | Some(ImageSource::Host), None) => true,
            (Some(ImageSource::Tar(_) | ImageSource::DockerArchive(_)), kind) => kind == Some(Kind::File),
            (Some(ImageSource::Dir(_) | ImageSource::OciLayout { .. } | ImageSource::Registry(_)), kind) => {
                kind == Some(Kind::Tree)
            }
            _ => false,
        };
        if !fits {
            return missing("an image");
        }
        if matches!(step.kernel, Kernel::Path { .. })
            && self.kernel.as_ref().is_none_or(|kernel| kernel.kind != Kind::File)
        {
            return missing("a kernel");
        }
        if step.mounts.len() != self.mounts.len() {
            return missing("a mount");
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
                "a mount did not",
            ),
            (
                one(&format!(r#""step":{{"run":"make"}},{artifact},"mounts":[{{"fd":0,"kind":"file","name":"x"}}]"#)),
                "a mount",
            ),
            (
                one(&format!(
                    r#""step":{{"run":"make","sandbox":{{"mounts":[{{"path":"/etc","at":"/x"}}]}}}},{artifact},"mounts":[{{"fd":1,"kind":"file","name":"x"}}]"#
                )),
                "a descriptor did not",
            ),
            (
                one(&format!(r#""step":{{"run":"make","sandbox":{{"image":"alpine:3"}}}},{artifact}"#)),
                "an image did not",
            ),
            (one(r#""step":{"run":"make","artifact":{"github":"dist"}},"artifact":null"#), "an artifact did not"),
            (
                one(&format!(r#""step":{{"run":"make","artifact":{{"gitlab":"build"}}}},{artifact}"#)),
                "an artifact did not",
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
