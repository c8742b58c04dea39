//! Brings engines and what they need to this host: what `plimsoll setup` does.
//!
//! Each of [`gvisor`], [`firecracker`], [`guest_kernel`], [`userns`] and [`wasm_python`] plans what is to be written
//! ([`Plan`]); [`Plan::carry_out`] writes it, each file in one step: made beside its place, synced, renamed over it. What comes
//! from outside ([`source`]) is compared with a digest first: one that is written here, one that the user gives, or the
//! release's own. Nothing that came is ever executed here.
//!
//! What root installs is recorded ([`crate::spec::policy::ENGINES_FILE`]), so that runs know it for an engine that the operator
//! brought. A plain user's is not, since whoever could replace it could record it.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::artifact::Digest;
use crate::spec::policy::{ENGINES_FILE, Recorded, RecordedEngine};

pub mod firecracker;
pub mod guest_kernel;
pub mod gvisor;
pub mod source;
mod tree;
pub mod userns;
pub mod wasm_python;

pub use source::{Source, SourceError};

/// Where things go.
#[derive(Debug, Clone)]
pub struct Place {
    /// Everything is below this; `/` but for the tree of a machine that is being built.
    pub root: PathBuf,
    /// A plain user's own directories: for programs and for data. None for root.
    pub user: Option<(PathBuf, PathBuf)>,
}

impl Place {
    /// Of a path as it will be on the machine.
    #[must_use]
    pub fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Where programs go.
    #[must_use]
    pub fn programs(&self) -> PathBuf {
        self.user.as_ref().map_or_else(|| self.at("/usr/local/bin"), |(programs, _)| programs.clone())
    }

    /// Where WebAssembly runtimes go.
    #[must_use]
    pub fn runtimes(&self) -> PathBuf {
        let user = self.user.as_ref().map(|(_, data)| data.join("plimsoll/wasm"));
        user.unwrap_or_else(|| self.at("/usr/local/share/plimsoll/wasm"))
    }
}

/// Why something is not set up.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// It did not come, or not as it should be.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// It is not for this machine.
    #[error("{0}")]
    Unfit(String),
    /// It takes root.
    #[error("{0} takes root")]
    Root(&'static str),
    /// It can't be written.
    #[error("failed to {action} {}", path.display())]
    Io {
        /// Completes "failed to …".
        action: &'static str,
        /// What.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl SetupError {
    fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| SetupError::Io { action, path: path.to_owned(), source }
    }

    /// What to do about it, in one line.
    #[must_use]
    pub fn help(&self) -> &str {
        match self {
            SetupError::Source(error) => error.help(),
            SetupError::Unfit(_) => "name another release or another source: `--release`, `--from`",
            SetupError::Root(_) => "run it with sudo",
            SetupError::Io { .. } => "look at the rights of that directory, or run it as root",
        }
    }
}

/// A file to be written.
#[derive(Debug, Clone)]
pub struct Put {
    /// Where.
    pub to: PathBuf,
    /// Its permissions.
    pub mode: u32,
    /// Its content.
    pub content: Vec<u8>,
    /// If it is an engine: its name and version, and where it comes from.
    pub engine: Option<(String, String, String)>,
}

/// What is to be done.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// Files.
    pub files: Vec<Put>,
    /// How what came was verified, and what else is to be said.
    pub notes: Vec<String>,
}

impl Plan {
    /// Does it, or says what would be done; the lines say which.
    ///
    /// # Errors
    /// If something can't be written; files that were are in place, whole.
    pub fn carry_out(&self, place: &Place, dry_run: bool) -> Result<Vec<String>, SetupError> {
        let mut lines = self.notes.clone();
        let mut engines = Vec::new();
        for file in &self.files {
            let sha256 = Digest::of(&file.content);
            let word = if same(&file.to, &file.content, file.mode) {
                "is there already"
            } else if dry_run {
                "would be written"
            } else {
                put(&file.to, &file.content, file.mode)?;
                "written"
            };
            lines.push(format!("{} {word} (sha256 {sha256})", file.to.display()));
            if let Some((engine, version, source)) = &file.engine {
                let (engine, version, source) = (engine.clone(), version.clone(), source.clone());
                // As the machine will see it.
                let path = Path::new("/").join(file.to.strip_prefix(&place.root).unwrap_or(&file.to));
                engines.push(RecordedEngine { engine, version, path, sha256, source });
            }
        }
        if engines.is_empty() {
            return Ok(lines);
        }
        if place.user.is_some() {
            lines.push(
                "not recorded, since this user could replace it: a policy's `engines` makes it an identified engine"
                    .to_owned(),
            );
            return Ok(lines);
        }
        let file = place.at(ENGINES_FILE);
        if dry_run {
            lines.push(format!("would be recorded in {}", file.display()));
            return Ok(lines);
        }
        record(&file, engines)?;
        lines.push(format!("recorded in {}: an identified engine from now on", file.display()));
        Ok(lines)
    }
}

/// Whether that is there already.
fn same(path: &Path, content: &[u8], mode: u32) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| {
        meta.is_file() && meta.permissions().mode() & 0o7777 == mode && meta.len() == content.len() as u64
    }) && fs::read(path).is_ok_and(|found| found == content)
}

/// Writes a file in one step: whoever reads it sees the old one or the new one.
fn put(path: &Path, content: &[u8], mode: u32) -> Result<(), SetupError> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    DirBuilder::new().recursive(true).mode(0o755).create(directory).map_err(SetupError::io("make", directory))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let fresh = directory.join(format!(".{name}.{}.new", std::process::id()));
    let write = || -> io::Result<()> {
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(&fresh)?;
        file.write_all(content)?;
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        file.sync_all()?;
        fs::rename(&fresh, path)?;
        File::open(directory)?.sync_all()
    };
    let _ = fs::remove_file(&fresh);
    write().map_err(|e| {
        let _ = fs::remove_file(&fresh);
        SetupError::io("write", path)(e)
    })
}

/// Adds engines to the record, in place of those of the same path.
fn record(file: &Path, engines: Vec<RecordedEngine>) -> Result<(), SetupError> {
    let mut recorded = match fs::read(file) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|e| SetupError::io("understand", file)(e.into()))?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => Recorded::default(),
        Err(e) => return Err(SetupError::io("read", file)(e)),
    };
    recorded.engines.retain(|old| engines.iter().all(|new| new.path != old.path));
    recorded.engines.extend(engines);
    let mut text = serde_json::to_vec_pretty(&recorded).map_err(|e| SetupError::io("write", file)(e.into()))?;
    text.push(b'\n');
    put(file, &text, 0o644)
}

/// The machine as releases name it.
const fn machine() -> &'static str {
    std::env::consts::ARCH
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(to: PathBuf, content: &str) -> Plan {
        let engine = Some(("runsc".to_owned(), "1".to_owned(), "here".to_owned()));
        Plan { files: vec![Put { to, mode: 0o755, content: content.into(), engine }], notes: Vec::new() }
    }

    #[test]
    fn a_plan_is_told_before_it_is_carried_out_and_not_done_twice() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place { root: dir.path().to_owned(), user: None };
        let to = place.programs().join("runsc");
        let dry = plan(to.clone(), "new").carry_out(&place, true).unwrap();
        assert!(dry[0].contains("would be written") && !to.exists() && !place.at(ENGINES_FILE).exists());
        // A link there is replaced, and not written through.
        fs::create_dir_all(place.programs()).unwrap();
        fs::write(dir.path().join("target"), "kept").unwrap();
        std::os::unix::fs::symlink(dir.path().join("target"), &to).unwrap();
        for (content, word) in [("new", "written"), ("new", "is there already"), ("newer", "written")] {
            let lines = plan(to.clone(), content).carry_out(&place, false).unwrap();
            assert!(lines[0].contains(word), "{lines:?}");
            assert_eq!(fs::read_to_string(&to).unwrap(), content);
        }
        assert_eq!(fs::read_to_string(dir.path().join("target")).unwrap(), "kept");
        let recorded: Recorded = serde_json::from_slice(&fs::read(place.at(ENGINES_FILE)).unwrap()).unwrap();
        assert_eq!(recorded.engines.len(), 1);
        assert_eq!(recorded.engines[0].sha256, Digest::of(b"newer"));
        assert_eq!(recorded.engines[0].path, Path::new("/usr/local/bin/runsc"));
        let names: Vec<_> = fs::read_dir(place.programs()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["runsc"]);
    }

    #[test]
    fn a_plain_users_engine_is_not_recorded() {
        let dir = tempfile::tempdir().unwrap();
        let place =
            Place { root: dir.path().to_owned(), user: Some((dir.path().join("bin"), dir.path().join("share"))) };
        let lines = plan(place.programs().join("runsc"), "x").carry_out(&place, false).unwrap();
        assert!(lines[1].contains("not recorded") && !place.at(ENGINES_FILE).exists());
    }
}
