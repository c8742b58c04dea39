//! A small repository that uses plimsoll, made anew for each test.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::common::{binary, program, repository};

/// A checkout with WebAssembly programs that need no engine but our own.
pub struct Project {
    dir: TempDir,
}

impl Project {
    /// A repository with the programs of `tests/forge/project`, and files given.
    pub fn new(files: &[(&str, &str)]) -> Self {
        let project = Self { dir: tempfile::tempdir().unwrap() };
        for entry in fs::read_dir(repository().join("tests/forge/project")).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), project.path(entry.file_name().to_str().unwrap())).unwrap();
        }
        for (name, text) in files {
            let path = project.path(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let git = |args: &[&str]| program("git").args(args).dir(project.root()).run().exits(0);
        git(&["init", "--quiet", "--initial-branch=main"]);
        git(&["remote", "add", "origin", "https://forge.invalid/octo/widgets.git"]);
        git(&["add", "--all"]);
        git(&["-c", "user.name=t", "-c", "user.email=t@t.invalid", "commit", "--quiet", "--message=x"]);
        project
    }

    pub fn root(&self) -> &Path {
        self.dir.path()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// A file of this repository with the built binary in place of a word.
pub fn with_binary(text: &str) -> String {
    text.replace("@BINARY@", binary().to_str().unwrap())
}
