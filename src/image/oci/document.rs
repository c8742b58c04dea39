//! The JSON documents of an image, as far as they matter here: the OCI image specification's `image-index.md`,
//! `manifest.md` and `config.md`, their Docker equivalents, and the list in what `docker save` writes.
//!
//! They are hostile: bounded in size by whoever reads them, and refused where two readers could take them for
//! different things (a manifest that is also an index, CVE-2021-41190).

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use crate::artifact::Digest;

/// Largest document, bytes.
pub const MAX_DOCUMENT: u64 = 4 << 20;
/// Most bytes of an image's environment: what Linux takes for one string of it.
const MAX_ENV: usize = 128 << 10;
/// What a tag is in an index (`annotations.md`).
const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// Reads a document.
///
/// # Errors
/// Why it is none, as a fragment.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    serde_json::from_slice(bytes).map_err(|e| e.to_string())
}

/// What a document says about another one or about a layer.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// What it is said to be.
    #[serde(default)]
    pub media_type: String,
    digest: String,
    /// Its bytes.
    pub size: u64,
    /// For which machine, in an index.
    pub platform: Option<Platform>,
    annotations: Option<BTreeMap<String, String>>,
}

impl Descriptor {
    /// Its digest.
    ///
    /// # Errors
    /// For another algorithm than SHA-256.
    pub fn digest(&self) -> Result<Digest, String> {
        digest(&self.digest)
    }

    /// The tag under which it stands in an index.
    #[must_use]
    pub fn tag(&self) -> Option<&str> {
        self.annotations.as_ref()?.get(REF_NAME).map(String::as_str)
    }

    /// Whether it stands for an index.
    #[must_use]
    pub fn is_index(&self) -> bool {
        matches!(
            &*self.media_type,
            "application/vnd.oci.image.index.v1+json" | "application/vnd.docker.distribution.manifest.list.v2+json"
        )
    }

    /// Whether it stands for a manifest.
    #[must_use]
    pub fn is_manifest(&self) -> bool {
        matches!(
            &*self.media_type,
            "application/vnd.oci.image.manifest.v1+json" | "application/vnd.docker.distribution.manifest.v2+json"
        )
    }

    /// Whether it stands for a layer that can be applied. Its compression is told by its bytes.
    fn is_layer(&self) -> bool {
        let kinds = [
            "application/vnd.oci.image.layer.v1.tar",
            "application/vnd.oci.image.layer.nondistributable.v1.tar",
            "application/vnd.docker.image.rootfs.diff.tar",
            "application/vnd.docker.image.rootfs.foreign.diff.tar",
        ];
        let rest = kinds.into_iter().find_map(|kind| self.media_type.strip_prefix(kind));
        matches!(rest, Some("" | "+gzip" | ".gzip" | "+zstd" | ".zstd"))
    }
}

/// `sha256:…` and nothing else.
fn digest(text: &str) -> Result<Digest, String> {
    let parsed = text.strip_prefix("sha256:").and_then(|hex| hex.parse().ok());
    parsed.ok_or_else(|| format!("{text:?} is no sha256 digest"))
}

/// A machine that an image is for.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Platform {
    /// `linux`, …
    #[serde(default)]
    pub os: String,
    /// As Go says it: `amd64`, …
    #[serde(default)]
    pub architecture: String,
}

impl Platform {
    /// Whether this host runs it.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        let ours = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        self.os == "linux" && self.architecture == ours
    }
}

/// A list of images.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    schema_version: u32,
    /// What is in it.
    pub manifests: Vec<Descriptor>,
    layers: Option<IgnoredAny>,
    config: Option<IgnoredAny>,
}

impl Index {
    /// Reads one.
    ///
    /// # Errors
    /// Why it is none.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let index: Index = parse(bytes)?;
        if index.schema_version != 2 {
            return Err(format!("schemaVersion is {}, not 2", index.schema_version));
        }
        if index.layers.is_some() || index.config.is_some() {
            return Err("it is an index and a manifest at once".to_owned());
        }
        Ok(index)
    }
}

/// One image.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    schema_version: u32,
    /// Its configuration.
    pub config: Descriptor,
    /// From the lowest to the topmost.
    pub layers: Vec<Descriptor>,
    manifests: Option<IgnoredAny>,
}

impl Manifest {
    /// Reads one.
    ///
    /// # Errors
    /// Why it is none, or none with a root file system.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let manifest: Manifest = parse(bytes)?;
        if manifest.schema_version != 2 {
            return Err(format!("schemaVersion is {}, not 2", manifest.schema_version));
        }
        if manifest.manifests.is_some() {
            return Err("it is a manifest and an index at once".to_owned());
        }
        if let Some(layer) = manifest.layers.iter().find(|layer| !layer.is_layer()) {
            return Err(format!("a layer of the type {:?} can't be applied", layer.media_type));
        }
        Ok(manifest)
    }
}

/// How an image wants to be run.
#[derive(Debug, Deserialize)]
pub struct Configuration {
    #[serde(default)]
    os: String,
    #[serde(default)]
    architecture: String,
    config: Option<Container>,
    rootfs: RootFs,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Container {
    user: Option<String>,
    env: Option<Vec<String>>,
    working_dir: Option<String>,
}

#[derive(Debug, Deserialize)]
struct RootFs {
    diff_ids: Vec<String>,
}

/// What of a configuration a run uses or reports.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Environment, in its order; the last of one name counts.
    pub env: Vec<(String, String)>,
    /// `USER`, as written; empty for root.
    pub user: String,
    /// `WORKDIR`, as written; may be empty.
    pub working_directory: String,
}

impl Configuration {
    /// Reads one; says the facts and the digests of the layers' tars.
    ///
    /// # Errors
    /// Why it is none, or not for this machine.
    pub fn parse(bytes: &[u8]) -> Result<(Facts, Vec<Digest>), String> {
        let Configuration { os, architecture, config, rootfs } = parse(bytes)?;
        let platform = Platform { os, architecture };
        if !platform.is_ours() {
            return Err(format!("it is for {:?} on {:?}, not for this machine", platform.os, platform.architecture));
        }
        let diff_ids = rootfs.diff_ids.iter().map(|id| digest(id)).collect::<Result<_, _>>()?;
        let config = config.unwrap_or_default();
        let mut env: Vec<(String, String)> = Vec::new();
        let variables = config.env.unwrap_or_default();
        if variables.iter().map(|v| v.len() + 1).sum::<usize>() > MAX_ENV {
            return Err(format!("its environment has more than {MAX_ENV} bytes"));
        }
        for variable in variables {
            let (name, value) = variable.split_once('=').unwrap_or((&variable, ""));
            if name.is_empty() || variable.contains('\0') {
                return Err(format!("{variable:?} is no variable"));
            }
            env.retain(|(known, _)| known != name);
            env.push((name.to_owned(), value.to_owned()));
        }
        let facts = Facts {
            env,
            user: config.user.unwrap_or_default(),
            working_directory: config.working_dir.unwrap_or_default(),
        };
        Ok((facts, diff_ids))
    }
}

/// An entry of the list in what `docker save` writes.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Saved {
    /// Name of its configuration in the archive.
    pub config: String,
    /// Its names.
    pub repo_tags: Option<Vec<String>>,
    /// Names of its layers in the archive.
    pub layers: Vec<String>,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SHA: &str = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn a_configuration_gives_what_a_run_uses() {
        let text = format!(
            r#"{{"os":"linux","architecture":{:?},"config":{{"User":"app","Env":["A=1","B=x=y","A=2","C"],"WorkingDir":"/srv","Cmd":["x"]}},
              "rootfs":{{"type":"layers","diff_ids":[{SHA:?}]}},"history":[]}}"#,
            if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" }
        );
        let (facts, diff_ids) = Configuration::parse(text.as_bytes()).unwrap();
        let env: Vec<_> = facts.env.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        assert_eq!(env, [("B", "x=y"), ("A", "2"), ("C", "")]);
        assert_eq!((facts.user.as_str(), facts.working_directory.as_str(), diff_ids.len()), ("app", "/srv", 1));
        let bare = r#"{"os":"linux","architecture":"amd64","config":null,"rootfs":{"diff_ids":[]}}"#;
        if cfg!(target_arch = "x86_64") {
            assert_eq!(Configuration::parse(bare.as_bytes()).unwrap().0, Facts::default());
        }
        for (from, to) in [("linux", "windows"), ("A=1", "=1"), ("sha256:", "sha512:"), ("A=1", "A=\\u0000")] {
            assert!(Configuration::parse(text.replace(from, to).as_bytes()).is_err(), "{to}");
        }
    }

    #[test]
    fn a_document_of_two_kinds_is_neither() {
        let descriptor =
            format!(r#"{{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":{SHA:?},"size":1}}"#);
        let manifest = format!(r#"{{"schemaVersion":2,"config":{descriptor},"layers":[{descriptor}]}}"#);
        let index = format!(r#"{{"schemaVersion":2,"manifests":[{descriptor}]}}"#);
        assert!(Manifest::parse(manifest.as_bytes()).is_ok() && Index::parse(index.as_bytes()).is_ok());
        let both = format!(r#"{{"schemaVersion":2,"config":{descriptor},"layers":[],"manifests":[]}}"#);
        assert!(Manifest::parse(both.as_bytes()).is_err() && Index::parse(both.as_bytes()).is_err());
        assert!(Manifest::parse(manifest.replace("\":2", "\":1").as_bytes()).is_err());
        let odd = manifest.replace("layer.v1.tar", "layer.v1.tar+encrypted");
        assert!(Manifest::parse(odd.as_bytes()).unwrap_err().contains("encrypted"));
    }

    proptest! {
        #[test]
        fn nothing_makes_them_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = (Index::parse(&bytes), Manifest::parse(&bytes), Configuration::parse(&bytes));
        }
    }
}
