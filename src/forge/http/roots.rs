//! The certificates that servers are checked against.
//!
//! Without `SSL_CERT_FILE` they are the system's (and those of `SSL_CERT_DIR`, which the verifier reads by itself). A file
//! that is named and can't be used is an error: going on without it would end in one that nobody understands.

use std::fs::File;
use std::io::{self, Read};

use super::HttpError;
use crate::env::{Env, Var};

/// Largest bundle read, bytes. That of a system has about 220 KB.
const MAX_BUNDLE: u64 = 16 * 1024 * 1024;

/// The client's builder with the roots of `SSL_CERT_FILE`, if that is set.
pub(super) fn given(env: &Env, builder: reqwest::ClientBuilder) -> Result<reqwest::ClientBuilder, HttpError> {
    let Some(path) = env.path(Var::SslCertFile) else { return Ok(builder) };
    let roots = |source: Box<dyn std::error::Error + Send + Sync>| HttpError::Roots { path: path.clone(), source };
    let mut bundle = Vec::new();
    let read = File::open(&path).and_then(|file| file.take(MAX_BUNDLE).read_to_end(&mut bundle));
    read.map_err(|e| roots(e.into()))?;
    let certificates = reqwest::Certificate::from_pem_bundle(&bundle).map_err(|e| roots(e.into()))?;
    if certificates.is_empty() {
        return Err(roots(io::Error::other("it holds no certificate").into()));
    }
    Ok(match env.os(Var::SslCertDir) {
        Some(_) => builder.tls_certs_merge(certificates),
        None => builder.tls_certs_only(certificates),
    })
}
