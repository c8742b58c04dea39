//! gVisor's `runsc`, from its releases (<https://gvisor.dev/docs/user_guide/install/>): one file and its SHA-512.

use super::source::{Pin, Source, SourceError};
use super::{Place, Plan, Put, SetupError, machine};
use crate::env::Env;

/// Longest `runsc`, bytes; they have about 60 MB.
const MOST: u64 = 512 << 20;

/// Where the release of that name is: `latest`, or a date such as `20260601`.
///
/// # Errors
/// If it is no name of a release.
pub fn official(release: &str) -> Result<Source, SetupError> {
    if release.is_empty() || !release.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'.') || release.contains("..")
    {
        return Err(SetupError::Unfit(format!("`{}` is no release of gVisor", crate::spec::place::shown(release))));
    }
    let base = format!("https://storage.googleapis.com/gvisor/releases/release/{release}/{}/", machine());
    Ok(Source::parse(&base)?)
}

/// What is to be written.
///
/// # Errors
/// If it does not come, or can't be verified.
pub fn plan(place: &Place, source: &Source, release: &str, pin: Option<Pin>, env: &Env) -> Result<Plan, SetupError> {
    let (content, note) = source.verified("runsc", pin, ".sha512", MOST, env)?;
    program(&content, "runsc")?;
    let engine = Some(("runsc".to_owned(), release.to_owned(), source.place("runsc")));
    let file = Put { to: place.programs().join("runsc"), mode: 0o755, content, engine };
    Ok(Plan { files: vec![file], notes: vec![note] })
}

/// A program for this machine, and not a page that says where one is.
pub(super) fn program(content: &[u8], name: &str) -> Result<(), SetupError> {
    // ELF, 64 bits, and the machine (elf(5): e_machine at 18).
    let machine: [u8; 2] = match machine() {
        "aarch64" => [0xb7, 0],
        _ => [0x3e, 0],
    };
    if content.starts_with(b"\x7fELF\x02") && content.get(18..20) == Some(&machine) {
        return Ok(());
    }
    let why = "it is no program for this machine".to_owned();
    Err(SourceError::Archive { name: name.to_owned(), why }.into())
}
