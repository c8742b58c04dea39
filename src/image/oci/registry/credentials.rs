//! Who we are to a registry, from where `docker login` and its kin keep it.
//!
//! `$DOCKER_CONFIG/config.json`, else `~/.docker/config.json`: logins, a credential helper for a registry (`credHelpers`) or
//! for all (`credsStore`), which are programs `docker-credential-…` in the user's `PATH`. A file that is not there means
//! nobody; one that can't be understood is an error, since an image might come from somewhere else without a login.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;

use docker_credential::{CredentialRetrievalError, DockerCredential, get_credential_from_reader};
use serde::{Deserialize, Serialize};

use crate::env::{Env, Var};

/// Longest configuration, bytes.
const MAX_CONFIG: u64 = 4 << 20;
/// What Docker's own registry is called there.
const DOCKER_HUB: &str = "https://index.docker.io/v1/";

/// Credentials for one registry.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub enum Credentials {
    /// Nobody in particular.
    Anonymous,
    /// A name and its password or token.
    Password {
        /// Name.
        user: String,
        /// Password.
        password: String,
    },
    /// A token that the registry's token server exchanges for one that the registry takes.
    IdentityToken {
        /// It.
        token: String,
    },
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Credentials::Anonymous => f.write_str("Anonymous"),
            Credentials::Password { user, .. } => write!(f, "Password({user:?}, ***)"),
            Credentials::IdentityToken { .. } => f.write_str("IdentityToken(***)"),
        }
    }
}

/// Why they are not known.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// The configuration can't be read.
    #[error("failed to read {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is not understood, or a helper fails.
    #[error("{} gives no credentials for {registry}: {why}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// The registry.
        registry: String,
        /// Why.
        why: String,
    },
}

impl CredentialsError {
    /// What to do about it.
    #[must_use]
    pub const fn help(&self) -> &'static str {
        "mend that file, log in again (`docker login`), or name another directory with DOCKER_CONFIG"
    }
}

impl Credentials {
    /// Those of this user for that registry. May run a credential helper.
    ///
    /// # Errors
    /// As [`CredentialsError`] says.
    pub fn of_user(registry: &str, env: &Env) -> Result<Self, CredentialsError> {
        let directory = env.path(Var::DockerConfig).or_else(|| env.path(Var::Home).map(|home| home.join(".docker")));
        let Some(path) = directory.map(|directory| directory.join("config.json")) else { return Ok(Self::Anonymous) };
        let unreadable = |source| CredentialsError::Unreadable { path: path.clone(), source };
        let mut text = Vec::new();
        match File::open(&path) {
            Ok(file) => file.take(MAX_CONFIG).read_to_end(&mut text).map_err(unreadable)?,
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(Self::Anonymous);
            }
            Err(e) => return Err(unreadable(e)),
        };
        let unusable = |why: &str| CredentialsError::Unusable {
            path: path.clone(),
            registry: registry.to_owned(),
            why: why.to_owned(),
        };
        let server = if registry == "index.docker.io" { DOCKER_HUB } else { registry };
        match get_credential_from_reader(text.as_slice(), server) {
            // As docker-credential-helpers' README says it.
            Ok(DockerCredential::UsernamePassword(user, token)) if user == "<token>" => {
                Ok(Self::IdentityToken { token })
            }
            Ok(DockerCredential::UsernamePassword(user, password)) => Ok(Self::Password { user, password }),
            Ok(DockerCredential::IdentityToken(token)) => Ok(Self::IdentityToken { token }),
            Err(CredentialRetrievalError::NoCredentialConfigured) => Ok(Self::Anonymous),
            // docker-credential-helpers' own words, with which Docker itself goes on without a login.
            Err(CredentialRetrievalError::HelperFailure { stdout, .. }) if stdout.contains("credentials not found") => {
                Ok(Self::Anonymous)
            }
            // What a helper printed may be the secret.
            Err(CredentialRetrievalError::HelperFailure { helper, .. }) => Err(unusable(&format!("{helper} failed"))),
            Err(CredentialRetrievalError::ConfigReadError) => Err(unusable("it is no such JSON")),
            Err(error) => Err(unusable(&error.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(config: &str, registry: &str) -> Result<Credentials, CredentialsError> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        Credentials::of_user(registry, &[(Var::DockerConfig, dir.path())].into_iter().collect())
    }

    #[test]
    fn a_login_is_for_its_own_registry_only() {
        // "me:s3cret" and "hub:word".
        let config = r#"{"auths": {"registry.local:5000": {"auth": "bWU6czNjcmV0"},
            "https://index.docker.io/v1/": {"auth": "aHViOndvcmQ="}}}"#;
        let password =
            |user: &str, password: &str| Credentials::Password { user: user.into(), password: password.into() };
        assert_eq!(found(config, "registry.local:5000").unwrap(), password("me", "s3cret"));
        assert_eq!(found(config, "index.docker.io").unwrap(), password("hub", "word"));
        for other in ["registry.local", "registry.local:5001", "evil.example", "xregistry.local:5000"] {
            assert_eq!(found(config, other).unwrap(), Credentials::Anonymous, "{other}");
        }
        assert!(!format!("{:?}", found(config, "registry.local:5000")).contains("s3cret"));
    }

    #[test]
    fn no_file_is_nobody_and_a_broken_one_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let none: Env = [(Var::Home, dir.path())].into_iter().collect();
        assert_eq!(Credentials::of_user("x", &none).unwrap(), Credentials::Anonymous);
        assert!(found("{", "x").is_err());
        let token = found(r#"{"auths": {"x": {"auth": "bWU6czNjcmV0", "identitytoken": "s3cret"}}}"#, "x").unwrap();
        assert_eq!(token, Credentials::IdentityToken { token: "s3cret".to_owned() });
        assert!(!format!("{token:?}").contains("s3cret"));
        let helper = found(r#"{"credHelpers": {"x": "no-such-helper-of-plimsolls-tests"}}"#, "x").unwrap_err();
        assert!(helper.to_string().contains("for x"), "{helper}");
    }
}
