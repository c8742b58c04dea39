//! Checks of single values: words, digests, paths, image references, the command line of a WebAssembly step.

use std::path::{Component, Path, PathBuf};

use super::build::WORKSPACE;
use super::digest::Sha256Digest;
use super::error::SpecError;
use super::place::{Place, shown};
use super::step::{Command, WasmProgram};

pub(super) fn one_of<W: Copy>(
    place: &Place,
    word: &str,
    all: &[W],
    name: impl Fn(W) -> &'static str,
) -> Result<W, SpecError> {
    all.iter()
        .copied()
        .find(|&candidate| name(candidate) == word)
        .ok_or_else(|| SpecError::unknown_word(place, word, all.iter().map(|&candidate| name(candidate))))
}

pub(super) fn digest(place: &Place, text: &str) -> Result<Sha256Digest, SpecError> {
    text.parse().map_err(|_| {
        SpecError::invalid_help(
            place,
            format!("`{}` is no SHA-256 digest", shown(text)),
            "write `sha256:` and 64 hexadecimal digits",
        )
    })
}

pub(super) fn nonempty(place: &Place, text: &str) -> Result<String, SpecError> {
    if text.trim().is_empty() || text.chars().any(char::is_control) {
        return Err(SpecError::invalid(place, "empty, or more than one line"));
    }
    Ok(text.to_owned())
}

pub(super) fn refuse_nul(place: &Place, text: &str) -> Result<(), SpecError> {
    if text.contains('\0') { Err(SpecError::invalid(place, "holds a NUL character")) } else { Ok(()) }
}

/// A path that can't leave the artifact: relative, without `..`; `.` is dropped.
pub(super) fn inside_artifact(place: &Place, text: &str) -> Result<PathBuf, SpecError> {
    refuse_nul(place, text)?;
    let mut path = PathBuf::new();
    for component in Path::new(text).components() {
        match component {
            Component::CurDir => {}
            Component::Normal(name) => path.push(name),
            Component::ParentDir => {
                return Err(SpecError::invalid(
                    place,
                    format!("`{}` leaves the artifact: `..` is not allowed", shown(text)),
                ));
            }
            Component::RootDir | Component::Prefix(_) => {
                let reason = format!("`{}` is absolute", shown(text));
                return Err(SpecError::invalid_help(
                    place,
                    reason,
                    format!("write a path relative to the artifact, which is at {WORKSPACE}"),
                ));
            }
        }
    }
    Ok(path)
}

/// A path inside for a mount: absolute, plain, and over nothing that the boundary itself puts there.
pub(super) fn mount_point(place: &Place, text: &str) -> Result<PathBuf, SpecError> {
    refuse_nul(place, text)?;
    let path = Path::new(text);
    let plain = path.is_absolute() && path.components().all(|c| matches!(c, Component::RootDir | Component::Normal(_)));
    if !plain {
        let reason = format!("`{}` is no absolute path without `..`", shown(text));
        return Err(SpecError::invalid(place, reason));
    }
    let path: PathBuf = path.components().collect();
    let taken = [WORKSPACE, "/proc", "/sys", "/dev", "/etc", "/tmp"].into_iter().find(|taken| path.starts_with(taken));
    if path == Path::new("/") {
        return Err(SpecError::invalid(place, "a mount can't stand over the whole tree"));
    }
    if let Some(taken) = taken {
        return Err(SpecError::invalid(
            place,
            format!("a mount can't stand at or below `{taken}`, which the boundary makes itself"),
        ));
    }
    Ok(path)
}

pub(super) fn is_module(word: &str) -> bool {
    word.ends_with(".wasm") || word.ends_with(".wat")
}

pub(super) fn wasm_command(place: &Place, run: &str) -> Result<Command, SpecError> {
    let line = run.trim();
    if line.contains(['\n', '\r']) {
        return Err(SpecError::invalid_help(
            place,
            "a WebAssembly step is one command, on one line",
            "write a step for each, or choose `backend: gvisor` to run a script",
        ));
    }
    let words = shlex::split(line).ok_or_else(|| SpecError::invalid(place, "has an open quote"))?;
    let quoted = |word: &str| line.contains(&format!("'{word}'")) || line.contains(&format!("\"{word}\""));
    // The user meant a shell. Handing the module an argument `&&` would look like success.
    let operators = ["|", "||", "&&", "&", ";", ">", ">>", "<"];
    if let Some(word) = words.iter().find(|word| operators.contains(&word.as_str()) && !quoted(word)) {
        return Err(SpecError::invalid_help(
            place,
            format!("`{word}` needs a shell, and a WebAssembly step has none"),
            format!("quote it ('{word}') to pass it as an argument"),
        ));
    }
    let mut words = words.into_iter();
    let first = words.next().ok_or_else(|| SpecError::invalid(place, "names no module"))?;
    let program = if is_module(&first) {
        WasmProgram::Module(inside_artifact(place, &first)?)
    } else if first.contains('/') {
        return Err(SpecError::invalid_help(
            place,
            format!("`{}` is no WebAssembly module", shown(&first)),
            "the first word is a `.wasm` or `.wat` file of the artifact, or the name of an installed runtime such as `python`",
        ));
    } else {
        WasmProgram::Runtime(first)
    };
    Ok(Command::Wasm { program, args: words.collect() })
}

/// Whether this is a reference by the grammar of the OCI distribution specification: `[host[:port]/]path[:tag][@digest]`.
pub(super) fn is_reference(text: &str) -> bool {
    let (rest, digest) = text.split_once('@').map_or((text, None), |(rest, digest)| (rest, Some(digest)));
    if digest.is_some_and(|digest| !digest.starts_with("sha256:") || digest.parse::<Sha256Digest>().is_err()) {
        return false;
    }
    let last = rest.rfind('/').map_or(0, |slash| slash + 1);
    let (path, tag) = match rest[last..].split_once(':') {
        Some((_, tag)) => (&rest[..rest.len() - tag.len() - 1], Some(tag)),
        None => (rest, None),
    };
    let tag_ok = tag.is_none_or(|tag| {
        let word = |b: u8| b.is_ascii_alphanumeric() || b"_.-".contains(&b);
        (1..=128).contains(&tag.len()) && tag.bytes().all(word) && !tag.starts_with(['.', '-'])
    });
    let mut names: Vec<&str> = path.split('/').collect();
    let is_host = |name: &str| name.contains(['.', ':']) || name == "localhost";
    if names.len() > 1 && names.first().is_some_and(|first| is_host(first)) {
        let host = names.remove(0);
        let (name, port) = host.split_once(':').unwrap_or((host, "0"));
        let label_ok = |label: &str| {
            let inner = label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
            !label.is_empty() && inner && !label.starts_with('-') && !label.ends_with('-')
        };
        let host_ok = name.split('.').all(label_ok);
        if !host_ok || port.parse::<u16>().is_err() {
            return false;
        }
    }
    let name_ok = |name: &&str| {
        let edge = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        edge(name.bytes().next())
            && edge(name.bytes().last())
            && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-".contains(&b))
    };
    tag_ok && text.len() <= 512 && names.iter().all(name_ok)
}
