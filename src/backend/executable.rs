//! An engine's executable: found once, opened once, and executed through that descriptor ever after.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::process;
use crate::env::{Env, Var};
use crate::evidence::fact::EngineKind;
use crate::evidence::identity::RELEASES;
use crate::evidence::proc::executable_sha256;

/// How long `--version` may take.
const VERSION_PATIENCE: Duration = Duration::from_secs(10);

/// An opened executable.
#[derive(Debug)]
pub struct Executable {
    path: PathBuf,
    file: File,
}

/// Why an executable cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// None was named, and there is none to be found.
    #[error("there is no {0} in PATH")]
    NotFound(&'static str),
    /// It is there and cannot be opened.
    #[error("{path} cannot be opened: {source}")]
    Unopened {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A script or something else that is no ELF file.
    #[error("{0} is no program; a wrapper script cannot be identified")]
    NoProgram(PathBuf),
}

impl Executable {
    /// The executable at `path` or, if none is given, the first `name` in `PATH`.
    ///
    /// # Errors
    /// If there is none, or it is no program.
    pub fn open(name: &'static str, path: Option<&Path>) -> Result<Self, OpenError> {
        let path = match path {
            Some(path) => path.to_owned(),
            None => in_path(name).ok_or(OpenError::NotFound(name))?,
        };
        let cannot = |source: io::Error| OpenError::Unopened { path: path.clone(), source };
        let absolute = std::path::absolute(&path).map_err(cannot)?;
        let file = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed())
            .open(&absolute)
            .map_err(cannot)?;
        let mut magic = [0u8; 4];
        let is_program =
            file.metadata().map_err(cannot)?.is_file() && file.read_at(&mut magic, 0).map_err(cannot)? == 4;
        if !is_program || magic != *b"\x7fELF" {
            return Err(OpenError::NoProgram(absolute));
        }
        Ok(Self { path: absolute, file })
    }

    /// Path it was opened by: a label, and what its directory's owner is looked up by.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// For handing to the launcher.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Finds out what the opened file is while other things are done: 30 MB take some 20 to 100 ms to hash.
    ///
    /// The version is the one in the list of releases, else what the program says after `prefix`: a label.
    ///
    /// # Errors
    /// If the runner has no descriptor left.
    pub fn identify(&self, engine: EngineKind, prefix: &'static str) -> io::Result<Identifying> {
        let (path, file) = (self.path.clone(), self.file.try_clone()?);
        let known = Self { path, file: file.try_clone()? };
        Ok(Identifying(tokio::spawn(async move {
            let hashed = tokio::task::spawn_blocking(move || executable_sha256(&file)).await;
            let sha256 = hashed.unwrap_or_else(|e| Err(io::Error::other(e)))?;
            let version = known.version(engine, &sha256, prefix).await;
            Ok(Identity { sha256, version })
        })))
    }

    async fn version(&self, engine: EngineKind, sha256: &str, prefix: &str) -> String {
        if let Some(release) = RELEASES.iter().find(|r| r.engine == engine && r.sha256 == sha256) {
            return release.version.to_owned();
        }
        let mut command = Command::new(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        command.arg0("engine").arg("--version").env_clear().current_dir("/");
        match process::run(command, VERSION_PATIENCE, 4096).await {
            Ok(said) => parse_version(&String::from_utf8_lossy(&said.stdout), prefix),
            Err(_) => "unknown".to_owned(),
        }
    }
}

/// The version of a program that says none as the engine does.
pub const NO_VERSION: &str = "none";

/// What an executable is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// SHA-256, lowercase hex.
    pub sha256: String,
    /// A label.
    pub version: String,
}

/// An [`Identity`] on its way.
#[derive(Debug)]
pub struct Identifying(tokio::task::JoinHandle<io::Result<Identity>>);

impl Identifying {
    /// Waits for it.
    ///
    /// # Errors
    /// If the executable cannot be read.
    pub async fn finish(self) -> io::Result<Identity> {
        self.0.await.unwrap_or_else(|e| Err(io::Error::other(e)))
    }
}

fn in_path(name: &str) -> Option<PathBuf> {
    let path = Env::process().os(Var::Path)?.to_owned();
    std::env::split_paths(&path)
        .filter(|directory| directory.is_absolute())
        .map(|directory| directory.join(name))
        .find(|p| p.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0))
}

/// What stands after `prefix`, of printable characters.
fn parse_version(text: &str, prefix: &str) -> String {
    let said = text.lines().find_map(|l| l.strip_prefix(prefix)).unwrap_or(NO_VERSION).trim();
    said.chars().filter(|c| c.is_ascii_graphic()).take(64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_engine_says_is_cut_to_a_label() {
        let runsc = |text| parse_version(text, "runsc version ");
        assert_eq!(runsc("runsc version 0.0~20240729.0\nspec: 1.0.2-dev\n"), "0.0~20240729.0");
        assert_eq!(runsc("runsc version \u{1b}[31mred\u{202e}"), "[31mred");
        assert_eq!(runsc("hello"), NO_VERSION);
        assert_eq!(parse_version("Firecracker v1.12.1\n\n", "Firecracker v"), "1.12.1");
    }

    #[test]
    fn a_script_is_no_engine_nor_is_a_directory_or_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("runsc");
        std::fs::write(&script, "#!/bin/sh\necho runsc version 1\n").unwrap();
        for path in [script.as_path(), &dir.path().join("missing"), dir.path()] {
            assert!(Executable::open("runsc", Some(path)).is_err(), "{path:?} was opened");
        }
        assert!(matches!(Executable::open("no-such-engine", None), Err(OpenError::NotFound(_))));
        assert!(Executable::open("runsc", Some(Path::new("/bin/sh"))).is_ok());
    }
}
