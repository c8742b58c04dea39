//! `packaging/install.sh`: what it installs, and what it must never.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::common::{Ran, program, repository};
use crate::server::Server;

/// A program that shows that it was run.
const PROGRAM: &str = "#!/bin/sh\necho ran\n";

pub fn sha256(bytes: impl AsRef<[u8]>) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// Where the release's program of this machine is.
pub fn path_of(version: &str) -> String {
    format!("/mirror/v{version}/plimsoll-{version}-{}-linux", std::env::consts::ARCH)
}

struct Runner {
    dir: TempDir,
    server: Server,
}

impl Runner {
    fn new() -> Self {
        let server = Server::start();
        server.put(&path_of("9.8.7"), PROGRAM);
        Self { dir: tempfile::tempdir().unwrap(), server }
    }

    fn program(&self) -> PathBuf {
        self.dir.path().join(format!("tools/plimsoll/9.8.7/{}/plimsoll", std::env::consts::ARCH))
    }

    fn install(&self, version: &str, sha256: &str) -> Ran {
        self.install_from(version, sha256, &self.server.url())
    }

    fn install_from(&self, version: &str, sha256: &str, url: &str) -> Ran {
        let script = format!(". '{}'; plimsoll_install \"$@\"", repository().join("packaging/install.sh").display());
        program("sh")
            .args(["-euc", &script, "sh", version, sha256, url])
            .env("RUNNER_TOOL_CACHE", self.dir.path().join("tools"))
            .env("HOME", self.dir.path())
            .run()
    }

    /// Files in the cache, whatever they are.
    fn files(&self) -> usize {
        let all = format!("{}/**/*", self.dir.path().display());
        glob::glob(&all).unwrap().filter(|path| path.as_ref().is_ok_and(|path| path.is_file())).count()
    }
}

#[test]
fn a_release_is_downloaded_once_and_is_found_again() {
    let runner = Runner::new();
    for _ in 0..2 {
        let ran = runner.install("v9.8.7", &sha256(PROGRAM)).exits(0);
        assert_eq!(ran.stdout.trim(), runner.program().to_str().unwrap());
    }
    assert_eq!(runner.server.asked(), [path_of("9.8.7")]);
    assert_eq!(fs::metadata(runner.program()).unwrap().permissions().mode() & 0o777, 0o755);
    assert_eq!(runner.files(), 1, "nothing else is left");
}

#[test]
fn what_was_changed_in_the_cache_is_replaced() {
    let runner = Runner::new();
    runner.install("9.8.7", &sha256(PROGRAM)).exits(0);
    fs::write(runner.program(), "#!/bin/sh\ntouch pwned\n").unwrap();
    runner.install("9.8.7", &sha256(PROGRAM)).exits(0);
    assert_eq!(fs::read_to_string(runner.program()).unwrap(), PROGRAM);
    assert_eq!(runner.server.asked().len(), 2);
}

#[test]
fn what_has_another_digest_is_not_installed() {
    let runner = Runner::new();
    let ran = runner.install("9.8.7", &sha256("another program")).exits(12);
    assert!(
        ran.stdout.contains("was not run: its SHA-256 is ") && ran.stdout.contains(&sha256(PROGRAM)),
        "{}",
        ran.all()
    );
    assert_eq!(runner.files(), 0, "nothing of it is left");
    // Nor is what was there for another digest given out, when its successor cannot be had.
    runner.install("9.8.7", &sha256(PROGRAM)).exits(0);
    runner.install("9.8.7", &sha256("another program")).exits(12);
}

#[test]
fn a_version_that_is_not_there_says_where_it_was_looked_for() {
    let runner = Runner::new();
    let ran = runner.install("9.9.9", &sha256(PROGRAM)).exits(12);
    assert!(ran.stdout.contains(&path_of("9.9.9")) && ran.stdout.contains("404"), "{}", ran.all());
    assert_eq!(ran.stdout.lines().count(), 1, "{}", ran.all());
    assert_eq!(runner.files(), 0);
}

#[test]
fn inputs_that_are_none_are_named() {
    let runner = Runner::new();
    let digest = sha256(PROGRAM);
    let url = runner.server.url();
    for (version, sha256, url, named) in [
        ("latest", "", url.as_str(), "name a version"),
        ("", &*digest, &url, "version"),
        ("../../9.8.7", &digest, &url, "version"),
        ("9.8.7\n::error::x", &digest, &url, "version"),
        ("..", &digest, &url, "version"),
        ("9.8.7", "", &url, "SHA256SUMS"),
        ("9.8.7", "abc", &url, "64 digits"),
        ("9.8.7", &"Z".repeat(64), &url, "hexadecimal"),
        ("9.8.7", &digest, "ftp://mirror", "https://"),
        ("9.8.7", &digest, "--output=x", "https://"),
        ("9.8.7", &digest, "https://mirror\n::error::x", "blank"),
    ] {
        let ran = runner.install_from(version, sha256, url).exits(12);
        assert!(ran.stdout.contains(named) && ran.stdout.lines().count() == 1, "{version:?}: {}", ran.all());
    }
    assert!(runner.server.asked().is_empty());
    assert_eq!(runner.files(), 0);
}

#[test]
fn a_directory_serves_as_a_mirror() {
    let runner = Runner::new();
    let mirror = tempfile::tempdir().unwrap();
    let file = mirror.path().join(path_of("9.8.7").trim_start_matches("/mirror/"));
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(&file, PROGRAM).unwrap();
    let url = format!("file://{}", mirror.path().display());
    runner.install_from("9.8.7", &sha256(PROGRAM), &url).exits(0);
    assert_eq!(fs::read_to_string(runner.program()).unwrap(), PROGRAM);
}

#[test]
fn wget_will_do_and_neither_is_named() {
    let runner = Runner::new();
    let tools = tempfile::tempdir().unwrap();
    let give = |name: &str| {
        let found =
            std::env::split_paths(&std::env::var_os("PATH").unwrap()).map(|d| d.join(name)).find(|p| p.is_file());
        found.map(|path| std::os::unix::fs::symlink(path, tools.path().join(name)).unwrap()).is_some()
    };
    for name in ["sh", "uname", "sha256sum", "mkdir", "mktemp", "rm", "tr", "chmod", "mv"] {
        assert!(give(name), "{name}");
    }
    let install = || {
        let script = format!(". '{}'; plimsoll_install \"$@\"", repository().join("packaging/install.sh").display());
        program("sh")
            .args(["-euc", &script, "sh", "9.8.7", &sha256(PROGRAM), &runner.server.url()])
            .env("PATH", tools.path())
            .env("RUNNER_TOOL_CACHE", "")
            .env("HOME", runner.dir.path())
            .run()
    };
    let ran = install().exits(12);
    assert!(ran.stdout.contains("neither curl nor wget"), "{}", ran.all());
    if give("wget") {
        let ran = install().exits(0);
        // Without a tool cache, as on GitLab: the user's own.
        assert!(ran.stdout.contains("/.cache/plimsoll-releases/9.8.7/"), "{}", ran.all());
    }
}

/// The component is one file, so it has the function itself.
#[test]
fn the_component_has_the_same_function() {
    let script = fs::read_to_string(repository().join("packaging/install.sh")).unwrap();
    let function = &script[script.find("plimsoll_install() {").unwrap()..];
    let template = fs::read_to_string(repository().join("templates/run.yml")).unwrap();
    let inlined: String =
        template.lines().map(|line| format!("{}\n", line.strip_prefix("      ").unwrap_or(line))).collect();
    assert!(inlined.contains(function), "copy packaging/install.sh into templates/run.yml");
}
