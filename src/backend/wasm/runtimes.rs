//! Installed WebAssembly runtimes: interpreters that a step names instead of a module, such as `python`.
//!
//! A runtime is one file, `<name>.wasm`, in one of a few directories. It is guest code like any module: it runs in the
//! jail, and the report names its digest.

use std::fs::File;
use std::path::PathBuf;

use super::ModuleFile;
use crate::env::{Env, Var};

/// Largest runtime, bytes.
const MAX_RUNTIME: u64 = 256 << 20;

/// Where runtimes are looked for, in order: `PLIMSOLL_WASM_PATH`, the user's data, the system's.
#[must_use]
pub fn directories(env: &Env) -> Vec<PathBuf> {
    let listed = env.os(Var::WasmPath).map(|list| std::env::split_paths(list).collect::<Vec<_>>()).unwrap_or_default();
    let user = env
        .path(Var::XdgDataHome)
        .filter(|p| p.is_absolute())
        .or_else(|| env.path(Var::Home).filter(|p| p.is_absolute()).map(|home| home.join(".local/share")))
        .map(|data| data.join("plimsoll/wasm"));
    let system = ["/usr/local/share/plimsoll/wasm", "/usr/share/plimsoll/wasm"].map(PathBuf::from);
    listed.into_iter().filter(|p| p.is_absolute()).chain(user).chain(system).collect()
}

/// The file of a runtime, if it is installed. A name is a plain word.
#[must_use]
pub fn find(name: &str, env: &Env) -> Option<PathBuf> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '+');
    if name.is_empty() || name.starts_with('.') || !name.chars().all(plain) {
        return None;
    }
    directories(env).into_iter().map(|d| d.join(format!("{name}.wasm"))).find(|file| file.is_file())
}

/// Opens a runtime by its name.
///
/// # Errors
/// What to do about one that is missing or cannot be read.
pub fn open(name: &str) -> Result<ModuleFile, String> {
    let env = Env::process();
    let Some(path) = find(name, &env) else {
        let first = directories(&env).into_iter().next().unwrap_or_default();
        return Err(format!(
            "put its WASI module at {} (CPython's: `plimsoll setup wasm-python`)",
            first.join(format!("{name}.wasm")).display()
        ));
    };
    match File::open(&path).and_then(ModuleFile::new) {
        Ok(module) if module.bytes() > MAX_RUNTIME => {
            Err(format!("{} is larger than {MAX_RUNTIME} bytes", path.display()))
        }
        Ok(module) => Ok(module),
        Err(e) => Err(format!("{} cannot be read: {e}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_is_found_by_a_plain_name_only() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        for file in ["python.wasm", "sub/x.wasm"] {
            std::fs::write(dir.path().join(file), "").unwrap();
        }
        let env: Env = [(Var::WasmPath, dir.path())].into_iter().collect();
        assert_eq!(find("python", &env), Some(dir.path().join("python.wasm")));
        for name in ["sub/x", "../x", "", ".", "ruby"] {
            assert_eq!(find(name, &env), None, "{name}");
        }
    }

    #[test]
    fn a_relative_search_path_is_not_believed() {
        let env: Env = [(Var::WasmPath, "artifact:/opt/x"), (Var::Home, "/h")].into_iter().collect();
        let found = directories(&env);
        assert_eq!(found[..2], [PathBuf::from("/opt/x"), PathBuf::from("/h/.local/share/plimsoll/wasm")]);
    }
}
