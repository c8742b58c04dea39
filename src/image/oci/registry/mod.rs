//! Images in a registry: named, resolved to a digest, and brought into an image layout on this host.
//!
//! Main types: [`Name`] (what a step says) and [`Job`] (one errand: [`Task::Resolve`] or [`Task::Pull`]). An errand is run by
//! a helper process ([`helper`]), a copy of the runner that does nothing else: what a registry answers is hostile, and the
//! client library reads some answers into memory whole. The runner bounds the helper's memory and time and can kill it at any
//! moment; what it leaves is opened like any layout ([`super::open_layout`]) and verified there again, so nothing that the
//! helper says is believed but the digest that was asked for.
//!
//! Credentials are looked up by the runner ([`credentials`]) and go to the registry that they are for, and to the token
//! server that it names; a redirect to another host gets none.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use oci_client::Reference;
use serde::{Deserialize, Serialize};

use crate::artifact::Digest;
use crate::artifact::rejection::shown;

pub mod credentials;
pub mod helper;
mod oauth;
mod pull;

pub use credentials::Credentials;

/// A reference to a registry's image: `python:3.12-slim`, `registry.local:5000/x@sha256:…`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name(Reference);

impl Name {
    /// Reads one; without a registry it is Docker's, without tag and digest it is `latest`.
    ///
    /// # Errors
    /// Why it is none.
    pub fn parse(text: &str) -> Result<Self, String> {
        text.parse().map(Self).map_err(|e: oci_client::ParseError| e.to_string())
    }

    /// Host of the registry, with its port where one is named.
    #[must_use]
    pub fn registry(&self) -> &str {
        self.0.resolve_registry()
    }

    /// The digest that it names.
    #[must_use]
    pub fn digest(&self) -> Option<Digest> {
        self.0.digest().and_then(|digest| digest.strip_prefix("sha256:")).and_then(|hex| hex.parse().ok())
    }

    /// The same repository's image of that digest.
    #[must_use]
    pub fn at(&self, digest: Digest) -> Self {
        Self(self.0.clone_with_digest(format!("sha256:{digest}")))
    }

    /// Whether the registry is on this host, where nobody listens in between.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        let registry = self.registry();
        let host = match registry.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => host,
            _ => registry,
        };
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }
}

impl fmt::Display for Name {
    /// Whole: with registry and tag or digest.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// What to do at a registry.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub enum Task {
    /// Say the digest of the manifest or index that the name stands for.
    Resolve,
    /// Bring the image into that empty directory, as an image layout that holds this one image for this machine.
    Pull(PathBuf),
}

/// One errand.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Job {
    /// Of which image; a [`Task::Pull`] names it by digest.
    pub name: String,
    /// For the registry.
    pub credentials: Credentials,
    /// Whether the registry may be asked without TLS, if it has none.
    pub plain: bool,
    /// Most bytes of all layers together, as they are transferred.
    pub bytes: u64,
    /// What to do.
    pub task: Task,
}

/// What the helper says, one line of JSON each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub enum Said {
    /// How far it is, in bytes of layers.
    Progress {
        /// Bytes that are here.
        done: u64,
        /// Bytes of all layers.
        total: u64,
    },
    /// The errand is done; the digest of what was resolved or pulled.
    Done(Digest),
    /// It can't be done.
    Failed(Failure),
}

/// Why an errand came to nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(deny_unknown_fields)]
#[error("{message}")]
pub struct Failure {
    /// What kind of trouble.
    pub kind: Kind,
    /// A lowercase fragment; foreign text in it is escaped.
    pub message: String,
}

impl Failure {
    /// One of that kind.
    #[must_use]
    pub fn new(kind: Kind, message: impl AsRef<str>) -> Self {
        Self { kind, message: shown(message.as_ref().as_bytes()) }
    }
}

/// Kinds of trouble with a registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// No answer, or none that is worth anything, after several tries.
    Unreachable,
    /// It wants other credentials.
    Unauthorized,
    /// It has no such image.
    Missing,
    /// What it gave is not what it should be: digest, length, size, form.
    Hostile,
    /// Something on this host.
    Local,
}

impl Kind {
    /// The stable word for reports.
    #[must_use]
    pub const fn reason(self) -> &'static str {
        match self {
            Kind::Unreachable => "registry-unreachable",
            Kind::Unauthorized => "registry-unauthorized",
            Kind::Missing => "image-missing",
            Kind::Hostile => "image-rejected",
            Kind::Local => "internal",
        }
    }

    /// What to do about it, in one line.
    #[must_use]
    pub const fn help(self) -> &'static str {
        match self {
            Kind::Unreachable => {
                "look at the registry's address, HTTPS_PROXY and SSL_CERT_FILE; a registry without TLS is named by --insecure-registry"
            }
            Kind::Unauthorized => {
                "log in (`docker login`, `skopeo login`): ~/.docker/config.json and its helpers are read"
            }
            Kind::Missing => "look at the image's name and tag; it has to exist for this machine's architecture",
            Kind::Hostile => {
                "the registry gives something else than it announces: push the image again, or pin it by its digest"
            }
            Kind::Local => "look at the disk that holds the cache",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_completed_and_its_registry_is_known() {
        let of = |text: &str| {
            let name = Name::parse(text).unwrap();
            (name.to_string(), name.registry().to_owned(), name.is_loopback())
        };
        let (whole, registry, loopback) = of("python:3.12-slim");
        assert_eq!((whole.as_str(), registry.as_str()), ("docker.io/library/python:3.12-slim", "index.docker.io"));
        assert!(!loopback);
        assert!(of("localhost:5000/x").2 && of("127.0.0.1:5000/x").2 && of("127.9.9.9/x:1").2);
        for far in
            ["localhost.evil.example/x", "127.0.0.1.evil.example:5000/x", "ghcr.io/localhost/x", "10.0.0.1:5000/x"]
        {
            assert!(!of(far).2, "{far}");
        }
        let digest = Digest::of(b"x");
        let pinned = Name::parse(&format!("r.example/a:1@sha256:{digest}")).unwrap();
        assert_eq!(pinned.digest(), Some(digest));
        assert_eq!(
            Name::parse("r.example/a:1").unwrap().at(digest).to_string(),
            format!("r.example/a@sha256:{digest}")
        );
        for bad in ["", "A", "x:", "x@sha256:00", "x y"] {
            assert!(Name::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_a_registry_says_is_shown_escaped() {
        let failure = Failure::new(Kind::Hostile, "no\u{1b}[2J\nsuch");
        assert!(!failure.message.contains('\u{1b}') && !failure.message.contains('\n'));
    }
}
