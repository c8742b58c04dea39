//! The layout of the sources: dependencies point one way, and what is named in one place is named nowhere else.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Modules in the order of the flow: each may use those before it, and [`COMMON`].
const ORDER: [&str; 13] = [
    "evidence", "forge", "spec", "artifact", "image", "backend", "gate", "report", "run", "setup", "publish",
    "service", "cli",
];
/// Modules that all may use, and that use only each other.
const COMMON: [&str; 5] = ["text", "time", "env", "exit", "lock"];

struct Source {
    /// Path below `src`.
    path: PathBuf,
    /// Without comments.
    code: String,
    /// Of that, what stands before the tests.
    product: String,
}

fn sources() -> Vec<Source> {
    fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.push(path);
            }
        }
    }
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut paths = Vec::new();
    walk(&src, &mut paths);
    assert!(paths.len() > 30, "the walk found the sources");
    let source = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap();
        // Links in comments point anywhere. A `//` inside a string is cut as well, which hides nothing that is looked for.
        let code: String =
            text.lines().map(|l| l.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n");
        let is_test =
            path.file_stem().is_some_and(|s| s == "tests") || path.components().any(|c| c.as_os_str() == "tests");
        let product = if is_test { String::new() } else { code.split("#[cfg(test)]").next().unwrap().to_owned() };
        Source { path: path.strip_prefix(&src).unwrap().to_owned(), code, product }
    };
    paths.into_iter().map(source).collect()
}

/// The top-level module that a file belongs to.
fn module(path: &Path) -> String {
    let first = path.components().next().unwrap().as_os_str().to_str().unwrap();
    first.trim_end_matches(".rs").to_owned()
}

/// Top-level modules that a text names by `crate::x` or `crate::{x, y}`.
fn named(code: &str) -> BTreeSet<String> {
    let word = |text: &str| text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '$') {
            continue;
        }
        let rest = &code[at + "crate::".len()..];
        let Some(list) = rest.strip_prefix('{') else {
            found.insert(word(rest));
            continue;
        };
        let mut depth = 0;
        let mut start = true;
        for (i, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => start = true,
                c if start && !c.is_whitespace() => {
                    found.insert(word(&list[i..]));
                    start = false;
                }
                _ => {}
            }
        }
    }
    found
}

#[test]
fn names_are_found_in_paths_and_in_lists() {
    let found =
        named("use crate::spec::Step; use crate::{gate, report::{Report, run}, exit::Exit};\nxcrate::no; $crate::no");
    assert_eq!(found.into_iter().collect::<Vec<_>>(), ["exit", "gate", "report", "spec"]);
}

#[test]
fn dependencies_point_one_way() {
    let mut faults = Vec::new();
    for source in sources() {
        let own = module(&source.path);
        if own == "lib" || own == "main" {
            continue;
        }
        for used in named(&source.code) {
            let allowed = used == own
                || COMMON.contains(&used.as_str())
                || match (ORDER.iter().position(|m| *m == own), ORDER.iter().position(|m| *m == used)) {
                    (Some(own), Some(used)) => used < own,
                    _ => false,
                };
            if !allowed {
                faults.push(format!("{} uses crate::{used}", source.path.display()));
            }
        }
        if !ORDER.contains(&own.as_str()) && !COMMON.contains(&own.as_str()) {
            faults.push(format!("{} is in no known module", source.path.display()));
        }
    }
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn libraries_are_named_only_where_they_belong() {
    // What is looked for, and the paths below src that may name it.
    let rules: [(&str, &[&str]); 9] = [
        ("wasmtime::", &["backend/wasm"]),
        ("wasmtime_wasi::", &["backend/wasm"]),
        ("serde_yaml::", &["spec/raw", "spec/workflow.rs"]),
        ("octocrab::", &["forge/github.rs", "publish/github"]),
        ("reqwest::", &["forge/", "artifact/fetch", "image/oci"]),
        ("clap::", &["cli/"]),
        ("clap_complete::", &["cli/"]),
        ("oci_client::", &["image/oci"]),
        ("docker_credential::", &["image/oci"]),
    ];
    let mut faults = Vec::new();
    for source in sources() {
        let path = source.path.to_str().unwrap();
        for (what, places) in rules {
            if source.code.contains(what) && !places.iter().any(|place| path.starts_with(place)) {
                faults.push(format!("{path} names {what}"));
            }
        }
    }
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn only_env_reads_the_environment() {
    // `env::args_os` is main's, `env::current_dir` and `current_exe` are no variables, `env!` is read when building.
    let readers = [
        "env::var",
        "env::vars",
        "env::temp_dir",
        "env::home_dir",
        "env::split_paths",
        "tempfile::tempdir()",
        "env = \"",
    ];
    let mut faults = Vec::new();
    for source in sources().iter().filter(|s| s.path != Path::new("env.rs")) {
        for reader in readers {
            if source.product.contains(reader) && reader != "env::split_paths" {
                faults.push(format!("{} has {reader}", source.path.display()));
            }
        }
    }
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn unsafe_code_is_in_one_module() {
    let has =
        |s: &&Source| s.code.contains("unsafe {") || s.code.contains("unsafe fn") || s.code.contains("unsafe impl");
    let places: Vec<_> =
        sources().iter().filter(has).map(|s| s.path.display().to_string()).filter(|p| p != "backend/sys.rs").collect();
    assert!(places.is_empty(), "unsafe code in {}", places.join(", "));
}
