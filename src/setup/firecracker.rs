//! Firecracker and its jailer, from a release (<https://github.com/firecracker-microvm/firecracker/releases>): one archive
//! with its SHA-256 beside it. Both come from the same archive, so that their versions are equal.

use super::gvisor::program;
use super::source::{Pin, Source, member};
use super::{Place, Plan, Put, SetupError, machine};
use crate::env::Env;

/// The release that is meant without `--release`.
pub const RELEASE: &str = "1.16.0";
/// The oldest that is installed: what came before has known faults in its jailer.
const OLDEST: (u32, u32) = (1, 16);
/// Longest archive and longest program, bytes.
const MOST: u64 = 256 << 20;

/// Reads a release's name, with or without a `v`.
///
/// # Errors
/// If it is none, or too old.
pub fn release(text: &str) -> Result<String, SetupError> {
    let version = text.strip_prefix('v').unwrap_or(text);
    let unfit = |why: &str| SetupError::Unfit(format!("Firecracker {} {why}", crate::spec::place::shown(version)));
    let numbers: Option<Vec<u32>> = version.split('.').map(|part| part.parse().ok()).collect();
    match numbers.as_deref() {
        Some([major, minor, _]) if (*major, *minor) >= OLDEST => Ok(version.to_owned()),
        Some([_, _, _]) => Err(unfit(&format!("is older than {}.{}", OLDEST.0, OLDEST.1))),
        _ => Err(unfit("is no release: write three numbers, such as 1.16.0")),
    }
}

/// Where a release is.
///
/// # Errors
/// Never, for what [`release`] gives.
pub fn official(release: &str) -> Result<Source, SetupError> {
    let base = format!("https://github.com/firecracker-microvm/firecracker/releases/download/v{release}/");
    Ok(Source::parse(&base)?)
}

/// What is to be written.
///
/// # Errors
/// If it does not come, can't be verified, or lacks one of the two.
pub fn plan(place: &Place, source: &Source, release: &str, pin: Option<Pin>, env: &Env) -> Result<Plan, SetupError> {
    let archive = format!("firecracker-v{release}-{}.tgz", machine());
    let (content, note) = source.verified(&archive, pin, ".sha256.txt", MOST, env)?;
    let mut files = Vec::new();
    for name in ["firecracker", "jailer"] {
        let wanted = format!("{name}-v{release}-{}", machine());
        let content = member(&content, &archive, |path| path.rsplit('/').next() == Some(&wanted), MOST)?;
        program(&content, name)?;
        let engine = Some((name.to_owned(), release.to_owned(), source.place(&archive)));
        files.push(Put { to: place.programs().join(name), mode: 0o755, content, engine });
    }
    Ok(Plan { files, notes: vec![note] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_three_numbers_and_not_too_old() {
        for good in ["1.16.0", "v1.17.3", "2.0.0"] {
            assert_eq!(release(good).unwrap(), good.trim_start_matches('v'));
        }
        for bad in ["1.12.1", "1.15.9", "0.99.0", "1.16", "latest", "../1.16.0", "1.16.0/x", ""] {
            assert!(release(bad).is_err(), "{bad}");
        }
    }
}
