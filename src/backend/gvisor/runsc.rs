//! The engine executable: found once, opened once, and executed through that descriptor ever after.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::backend::{Backend, Engines, PrepareError, process};
use crate::env::{Env, Var};
use crate::evidence::fact::EngineKind;
use crate::evidence::identity::RELEASES;
use crate::evidence::proc::executable_sha256;

/// How long `runsc --version` may take.
const VERSION_PATIENCE: Duration = Duration::from_secs(10);
/// What to do without gVisor.
const INSTALL: &str = "install gVisor (Debian, Ubuntu: `apt-get install runsc`, on Debian 12 from bookworm-backports; \
                       elsewhere https://gvisor.dev/docs/user_guide/install/), or name it with --runsc or PLIMSOLL_RUNSC";

/// An opened `runsc`.
#[derive(Debug)]
pub struct Runsc {
    path: PathBuf,
    file: File,
}

impl Runsc {
    /// The executable that the plan names, else the first in `PATH`.
    ///
    /// # Errors
    /// [`PrepareError::Unavailable`] if there is none, or it is no program.
    pub fn open(engines: &Engines) -> Result<Self, PrepareError> {
        let unavailable = |blocker: String, help: &str| PrepareError::Unavailable {
            backend: Backend::Gvisor,
            blocker,
            help: help.to_owned(),
        };
        let path = match &engines.runsc {
            Some(path) => path.clone(),
            None => in_path().ok_or_else(|| unavailable("there is no runsc in PATH".to_owned(), INSTALL))?,
        };
        let cannot = |e: io::Error| unavailable(format!("{} cannot be opened: {e}", path.display()), INSTALL);
        let path = std::path::absolute(&path).map_err(cannot)?;
        let file = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed())
            .open(&path)
            .map_err(cannot)?;
        let mut magic = [0u8; 4];
        let is_program =
            file.metadata().map_err(cannot)?.is_file() && file.read_at(&mut magic, 0).map_err(cannot)? == 4;
        if !is_program || magic != *b"\x7fELF" {
            let what = format!("{} is no program; a wrapper script cannot be identified", path.display());
            return Err(unavailable(what, "name the runsc executable itself with --runsc or PLIMSOLL_RUNSC"));
        }
        Ok(Self { path, file })
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

    /// SHA-256 of the opened file, computed on a thread of its own: 30 MB take some 20 to 100 ms.
    ///
    /// # Errors
    /// If the runner has no descriptor left.
    pub fn sha256_task(&self) -> io::Result<tokio::task::JoinHandle<io::Result<String>>> {
        let file = self.file.try_clone()?;
        Ok(tokio::task::spawn_blocking(move || executable_sha256(&file)))
    }

    /// The version: from the list of releases, else what the program says. A label.
    pub async fn version(&self, sha256: &str) -> String {
        if let Some(release) = RELEASES.iter().find(|r| r.engine == EngineKind::Runsc && r.sha256 == sha256) {
            return release.version.to_owned();
        }
        let mut command = Command::new(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        command.arg0("runsc").arg("--version").env_clear().current_dir("/");
        match process::run(command, VERSION_PATIENCE, 4096).await {
            Ok(said) => parse_version(&String::from_utf8_lossy(&said.stdout)),
            Err(_) => "unknown".to_owned(),
        }
    }
}

fn in_path() -> Option<PathBuf> {
    let path = Env::process().os(Var::Path)?.to_owned();
    std::env::split_paths(&path)
        .filter(|directory| directory.is_absolute())
        .map(|directory| directory.join("runsc"))
        .find(|p| p.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0))
}

/// `runsc version X`, of printable characters.
fn parse_version(text: &str) -> String {
    let said = text.lines().find_map(|l| l.strip_prefix("runsc version ")).unwrap_or("unknown").trim();
    said.chars().filter(|c| c.is_ascii_graphic()).take(64).collect()
}

/// A flag that the engine does not know, if that is what its error says.
#[must_use]
pub fn unknown_flag(log: &str) -> Option<String> {
    let rest = log.split("flag provided but not defined: -").nth(1)?;
    let flag: String =
        rest.trim_start_matches('-').chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
    if flag.is_empty() { None } else { Some(flag) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_engine_says_is_cut_to_a_label() {
        assert_eq!(parse_version("runsc version 0.0~20240729.0\nspec: 1.0.2-dev\n"), "0.0~20240729.0");
        assert_eq!(parse_version("runsc version \u{1b}[31mred\u{202e}"), "[31mred");
        assert_eq!(parse_version("hello"), "unknown");
    }

    #[test]
    fn an_unknown_flag_is_recognised() {
        assert_eq!(unknown_flag("flag provided but not defined: -directfs\nUsage:").as_deref(), Some("directfs"));
        assert_eq!(unknown_flag("creating container: no such file"), None);
    }

    #[test]
    fn a_script_is_no_engine_and_a_missing_file_has_a_fix() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("runsc");
        std::fs::write(&script, "#!/bin/sh\necho runsc version 1\n").unwrap();
        let open = |path: &Path| Runsc::open(&Engines { runsc: Some(path.to_owned()), ..Engines::default() });
        for path in [script.as_path(), &dir.path().join("missing"), dir.path()] {
            let Err(PrepareError::Unavailable { help, .. }) = open(path) else { panic!("{path:?} was opened") };
            assert!(help.contains("--runsc"));
        }
        assert!(open(Path::new("/bin/sh")).is_ok());
    }
}
