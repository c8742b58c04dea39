//! What a boundary leaves outside itself: a mount point and a record on disk, and cgroups.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::backend::{PrepareError, cgroup};
use crate::evidence::proc::ProcDir;

/// The empty directory, below a boundary's scratch directory, that its tmpfs is mounted on.
pub const BASE: &str = "boundary";
/// Names the boundary for [`sweep`].
const RECORD: &str = "boundary.id";

/// What a boundary has on disk: an empty directory to mount on, and its name for [`sweep`]. Removed on drop.
#[derive(Debug)]
pub struct Mark {
    scratch: PathBuf,
    kept: bool,
}

impl Mark {
    /// Makes both.
    ///
    /// # Errors
    /// If they cannot be made.
    pub fn make(scratch: &Path, id: &str) -> Result<Self, PrepareError> {
        let base = scratch.join(BASE);
        let mark = Self { scratch: scratch.to_owned(), kept: false };
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&base)
            .map_err(PrepareError::io(format!("make {}", base.display())))?;
        let record = scratch.join(RECORD);
        std::fs::write(&record, id).map_err(PrepareError::io(format!("write {}", record.display())))?;
        Ok(mark)
    }

    /// Writes down where the boundary's cgroups are: whoever sweeps may live in others.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn add(&self, id: &str, groups: &[PathBuf]) -> Result<(), PrepareError> {
        let record = self.scratch.join(RECORD);
        let lines: Vec<String> =
            std::iter::once(id.to_owned()).chain(groups.iter().map(|g| g.display().to_string())).collect();
        std::fs::write(&record, lines.join("\n")).map_err(PrepareError::io(format!("write {}", record.display())))
    }

    /// Leaves them to the teardown.
    pub fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if !self.kept {
            let _ = remove_files(&self.scratch);
        }
    }
}

/// Mounts in the runner's own namespace below a boundary's directory: there should be none.
#[must_use]
pub fn mounts_below(scratch: &Path) -> Vec<String> {
    let mounts = ProcDir::own().and_then(|own| own.mounts()).unwrap_or_default();
    mounts
        .into_iter()
        .filter(|m| Path::new(&m.point).starts_with(scratch))
        .map(|m| format!("mount {}", m.point))
        .collect()
}

/// Removes both; says what could not be removed.
#[must_use]
pub fn remove_files(scratch: &Path) -> Vec<String> {
    let gone = |removed: io::Result<()>, path: PathBuf| match removed {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Some(format!("{} ({e})", path.display())),
        _ => None,
    };
    let (base, record) = (scratch.join(BASE), scratch.join(RECORD));
    [gone(std::fs::remove_dir(&base), base), gone(std::fs::remove_file(&record), record)]
        .into_iter()
        .flatten()
        .collect()
}

/// How far below a run's directory boundaries have theirs.
const SWEEP_DEPTH: u32 = 3;

/// Undoes what boundaries of a killed runner left outside their scratch directories: their cgroups, and whatever might
/// still be in those. `scratch` is such a directory, or the whole run's. Processes and mounts need no sweeping: they end
/// with the runner. Says what could not be removed.
#[must_use]
pub fn sweep(scratch: &Path) -> Vec<String> {
    let mut left = Vec::new();
    sweep_below(scratch, SWEEP_DEPTH, &mut left);
    left
}

fn sweep_below(directory: &Path, depth: u32, left: &mut Vec<String>) {
    if let Ok(record) = std::fs::read_to_string(directory.join(RECORD)) {
        let mut lines = record.lines();
        let id = lines.next().unwrap_or_default();
        if !id.is_empty() && id.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-') {
            let groups = cgroup::sweep(id, &lines.map(PathBuf::from).collect::<Vec<_>>());
            if !groups.is_empty() {
                // The record is what the next sweep goes by.
                return left.extend(groups);
            }
        }
        left.extend(remove_files(directory));
    }
    if depth == 0 {
        return;
    }
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        // What guests may have written to is not looked into.
        let ours = entry.file_name() != "workspace" && entry.file_name() != "image";
        if ours && entry.file_type().is_ok_and(|t| t.is_dir()) {
            sweep_below(&entry.path(), depth - 1, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sweeping_removes_the_traces_of_a_dead_boundary_and_ignores_a_strange_record() {
        let dir = tempfile::tempdir().unwrap();
        let step = dir.path().join("01-step/gvisor");
        std::fs::create_dir_all(step.join(BASE)).unwrap();
        std::fs::write(step.join(RECORD), "../../etc").unwrap();
        assert_eq!(sweep(dir.path()), Vec::<String>::new());
        assert!(!step.join(BASE).exists() && !step.join(RECORD).exists());
    }
}
