//! Private directories for runs, and the removal of what a killed run left.
//!
//! Each run has one directory below the state directory, locked with flock(2) for as long as the runner lives; the
//! kernel drops the lock however the runner ends. A directory whose lock can be taken belongs to nobody any more, so
//! the next start, or `plimsoll clean`, removes it with everything that its backends left.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, open};

use crate::artifact::beneath::DIRECTORY;
use crate::lock::Lock;

/// Why there is no scratch space.
#[derive(Debug, thiserror::Error)]
pub enum ScratchError {
    /// The state directory is not ours alone.
    #[error("state directory {} is not a directory that only uid {uid} can write", path.display())]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// Who we are.
        uid: u32,
    },
    /// Something failed.
    #[error("failed to use the state directory {}", path.display())]
    Io {
        /// The directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl ScratchError {
    /// What the user can do about it.
    #[must_use]
    pub fn help(&self) -> String {
        match self {
            Self::Foreign { path, uid: 0 } => {
                format!("as root: `chown root:root {0} && chmod go-w {0}`, or remove it", path.display())
            }
            Self::Foreign { path, .. } => format!(
                "have whoever owns {0} (`ls -ld {0}`) or root remove it; or set TMPDIR to a directory of your own",
                path.display()
            ),
            Self::Io { path, .. } if path.starts_with("/var/lib") => {
                format!("see to it that {} can be written and has room (`df -hi /var/lib`)", path.display())
            }
            Self::Io { .. } => "set TMPDIR to a directory that this user can write, with room".to_owned(),
        }
    }
}

/// A run's own directory, 0700, removed on drop.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    _lock: Lock<File>,
}

/// What a sweep found and removed.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Swept {
    /// Leftover runs removed.
    pub removed: Vec<String>,
    /// What could not be removed, with the reason.
    pub failed: Vec<String>,
}

impl Scratch {
    /// A fresh directory below `state`, which is made if need be.
    ///
    /// # Errors
    /// If the state directory belongs to somebody else or cannot be used.
    pub fn create(state: &Path) -> Result<Self, ScratchError> {
        let gate = enter(state, FlockOperation::LockShared)?;
        let id = fresh_id().map_err(|source| ScratchError::Io { path: state.to_owned(), source })?;
        let path = state.join(&id);
        let make = || -> io::Result<Lock<File>> {
            DirBuilder::new().mode(0o700).create(&path)?;
            Ok(Lock::of(directory(&path)?, FlockOperation::NonBlockingLockExclusive)?)
        };
        let lock = make().map_err(|source| ScratchError::Io { path: path.clone(), source })?;
        drop(gate);
        Ok(Self { path, _lock: lock })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            tracing::warn!("failed to remove {}: {error}", self.path.display());
        }
    }
}

/// Removes every run below `state` that no runner holds. `release` undoes what backends left outside the directory.
///
/// # Errors
/// If the state directory belongs to somebody else or cannot be listed. Absent is no error.
pub fn sweep(state: &Path, release: impl Fn(&Path) -> Vec<String>) -> Result<Swept, ScratchError> {
    let mut swept = Swept::default();
    if !state.exists() {
        return Ok(swept);
    }
    let _gate = enter(state, FlockOperation::LockExclusive)?;
    let io_error = |source| ScratchError::Io { path: state.to_owned(), source };
    for entry in std::fs::read_dir(state).map_err(io_error)? {
        let path = entry.map_err(io_error)?.path();
        let Ok(run) = directory(&path) else { continue };
        let Ok(_lock) = Lock::of(run, FlockOperation::NonBlockingLockExclusive) else { continue }; // a live run
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let left = release(&path);
        // The directory is the record of what is left: it goes last.
        if left.is_empty() {
            match std::fs::remove_dir_all(&path) {
                Ok(()) => swept.removed.push(name),
                Err(e) => swept.failed.push(format!("{}: {e}", path.display())),
            }
        }
        swept.failed.extend(left);
    }
    Ok(swept)
}

/// A name that no other boundary has: 16 hexadecimal digits.
///
/// # Errors
/// If the host has no randomness.
pub fn fresh_id() -> io::Result<String> {
    let mut bytes = [0u8; 8];
    getrandom::fill(&mut bytes).map_err(|e| io::Error::other(e.to_string()))?;
    Ok(hex::encode(bytes))
}

/// Makes and checks the state directory, and takes its lock: shared to add a run, exclusive to sweep.
fn enter(state: &Path, how: FlockOperation) -> Result<Lock<File>, ScratchError> {
    let io_error = |source| ScratchError::Io { path: state.to_owned(), source };
    // The directories above are not its own: in `/var/lib/plimsoll` lies what plain users read as well.
    if let Some(above) = state.parent() {
        DirBuilder::new().mode(0o755).recursive(true).create(above).map_err(io_error)?;
    }
    match DirBuilder::new().mode(0o700).create(state) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(io_error(e)),
        _ => {}
    }
    let gate = directory(state).map_err(io_error)?;
    let meta = gate.metadata().map_err(io_error)?;
    let uid = rustix::process::geteuid().as_raw();
    if meta.uid() != uid || meta.mode() & 0o022 != 0 {
        return Err(ScratchError::Foreign { path: state.to_owned(), uid });
    }
    Lock::of(gate, how).map_err(|e| io_error(e.into()))
}

fn directory(path: &Path) -> io::Result<File> {
    Ok(File::from(open(path, DIRECTORY, Mode::empty())?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_live_run_is_left_alone_and_a_dead_one_removed() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let live = Scratch::create(&state).unwrap();
        let dead = state.join("dead");
        std::fs::create_dir_all(dead.join("deep")).unwrap();
        let swept = sweep(&state, |_| vec![]).unwrap();
        assert_eq!(swept.removed, ["dead"]);
        assert!(live.path().exists() && !dead.exists());
        let path = live.path().to_owned();
        drop(live);
        assert!(!path.exists());
    }

    #[test]
    fn what_could_not_be_released_is_still_known_next_time() {
        let dir = tempfile::tempdir().unwrap();
        let dead = dir.path().join("dead");
        std::fs::create_dir(&dead).unwrap();
        assert_eq!(sweep(dir.path(), |_| vec!["a cgroup".to_owned()]).unwrap().failed, ["a cgroup"]);
        assert!(dead.exists());
        assert_eq!(sweep(dir.path(), |_| vec![]).unwrap().removed, ["dead"]);
    }

    #[test]
    fn what_is_made_above_the_state_directory_stays_open_to_others() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("plimsoll/runs");
        drop(Scratch::create(&state).unwrap());
        let plain = dir.path().join("plain");
        DirBuilder::new().mode(0o755).create(&plain).unwrap();
        let mode = |path: &Path| path.metadata().unwrap().mode() & 0o777;
        assert_eq!((mode(&state), mode(state.parent().unwrap())), (0o700, mode(&plain)));
    }

    #[test]
    fn a_link_in_the_state_directory_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let precious = dir.path().join("precious");
        std::fs::create_dir_all(&precious).unwrap();
        std::fs::create_dir(&state).unwrap();
        std::os::unix::fs::symlink(&precious, state.join("link")).unwrap();
        assert_eq!(sweep(&state, |_| vec![]).unwrap().removed, [""; 0]);
        assert!(precious.exists());
    }

    #[test]
    fn a_state_directory_that_others_can_write_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        let error = Scratch::create(dir.path()).unwrap_err();
        assert!(matches!(error, ScratchError::Foreign { .. }));
        assert!(error.help().contains(&dir.path().display().to_string()));
        assert!(sweep(dir.path(), |_| vec![]).is_err());
    }

    #[test]
    fn nothing_to_sweep_is_no_error() {
        assert_eq!(sweep(Path::new("/nonexistent/plimsoll"), |_| vec![]).unwrap(), Swept::default());
    }
}
