//! The service's keys on disk: `service.key`, which only root reads, and `service.pub`, for everybody.
//!
//! `service.pub` holds the key in use and below it those before, each under a line with its dates, so that reports of before a
//! rotation can still be verified. It names a new key before that is used: whatever happens between the two writes, no report
//! is signed with a key that it does not hold.

use std::io;

use jiff::Timestamp;

use super::root::{Change, Directory, Root, destroy, failed};
use crate::cli::failure::Failure;
use crate::exit::Exit;
use crate::report::sign::{KeyError, PublicKey, SigningKey};

/// The directory, below the root.
pub(super) const DIRECTORY: &str = "etc/plimsoll";
const PRIVATE: &str = "service.key";
const PUBLIC: &str = "service.pub";
/// Where [`SigningKey::save`] builds one.
const FRESH: &str = "service.key.new";
const HEAD: &str = "\
# The keys of this host's Plimsoll service, the one in use first. `plimsoll verify --key` takes this file as it is.
# `plimsoll setup service` rewrites it. Remove the block of a key that may have leaked: what it signed is then no longer believed.
";

/// What became of the keys.
pub(super) struct Keys {
    /// Of `service.key`.
    pub private: Change,
    /// Of `service.pub`.
    pub public: Change,
    /// The key in use; `None` if one would have been made.
    pub id: Option<String>,
}

/// A key in `service.pub`.
struct Entry {
    key: PublicKey,
    /// `made 2026-11-30, replaced 2026-12-24`.
    dates: String,
}

/// Sees to it that there is a key, a new one if `rotate`.
pub(super) fn set_up(root: &Root, rotate: bool) -> Result<Keys, Failure> {
    let Some(directory) = root.directory(DIRECTORY)? else {
        return Ok(Keys { private: Change::Made, public: Change::Made, id: None });
    };
    let _lock = directory.lock()?;
    let old = match SigningKey::load(&directory.exact(PRIVATE)) {
        Ok(key) => Some(key),
        Err(KeyError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => None,
        // It can't be trusted, which is what a rotation is for.
        Err(KeyError::Exposed { .. } | KeyError::Malformed { .. }) if rotate => None,
        Err(e) => return Err(unusable(&directory, PRIVATE, &e)),
    };
    let before = directory.read(PUBLIC)?;
    let mut entries = match &before {
        Some(bytes) => entries(bytes).map_err(|why| malformed(&directory, why))?,
        None => Vec::new(),
    };
    let today = Timestamp::now().strftime("%F").to_string();
    let fresh = if rotate || old.is_none() {
        Some(SigningKey::generate().map_err(|e| unusable(&directory, PRIVATE, &e))?)
    } else {
        None
    };
    let Some(current) = fresh.as_ref().or(old.as_ref()).map(|key| key.public().clone()) else {
        return Err(Failure::new(Exit::Internal, "there is no key"));
    };
    let mut dates = format!("made {today}");
    if let Some(at) = entries.iter().position(|entry| entry.key == current) {
        dates = entries.remove(at).dates;
    } else if fresh.is_none() {
        dates = format!("found {today}");
    }
    for entry in entries.iter_mut().filter(|entry| !entry.dates.contains("replaced")) {
        entry.dates = format!("{}, replaced {today}", entry.dates);
    }
    entries.insert(0, Entry { key: current.clone(), dates });
    let text = render(&entries);
    let public = match &before {
        Some(bytes) if *bytes == text.as_bytes() => Change::Unchanged,
        Some(_) => Change::Replaced,
        None => Change::Made,
    };
    let had = directory.doomed(PRIVATE).ok().flatten();
    let private = match (&fresh, &had) {
        (None, _) => Change::Unchanged,
        (Some(_), Some(_)) => Change::Replaced,
        (Some(_), None) => Change::Made,
    };
    if root.is_dry() {
        return Ok(Keys { private, public, id: fresh.is_none().then(|| current.id().to_owned()) });
    }
    if public != Change::Unchanged {
        directory.write(PUBLIC, text.as_bytes(), 0o644)?;
    }
    // Of one that was killed.
    if let Some(file) = directory.doomed(FRESH)? {
        destroy(file).map_err(|e| failed("destroy", &directory.shown(FRESH), e))?;
        directory.remove(FRESH).map_err(|e| failed("remove", &directory.shown(FRESH), e.into()))?;
    }
    if let Some(fresh) = &fresh {
        fresh.save(&directory.exact(PRIVATE)).map_err(|e| unusable(&directory, PRIVATE, &e))?;
        if let Some(had) = had {
            destroy(had).map_err(|e| failed("destroy the old", &directory.shown(PRIVATE), e))?;
        }
    }
    Ok(Keys { private, public, id: Some(current.id().to_owned()) })
}

fn entries(bytes: &[u8]) -> Result<Vec<Entry>, &'static str> {
    let text = std::str::from_utf8(bytes).map_err(|_| "is no file of keys in PEM")?;
    let dates = |id: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix("# key ")?.strip_prefix(id)?.strip_prefix(", "));
        line.unwrap_or("found").to_owned()
    };
    // A key that is there twice is one key.
    let mut entries: Vec<Entry> = Vec::new();
    for key in PublicKey::parse(text)? {
        if !entries.iter().any(|entry| entry.key == key) {
            entries.push(Entry { dates: dates(key.id()), key });
        }
    }
    Ok(entries)
}

fn render(entries: &[Entry]) -> String {
    let block = |entry: &Entry| format!("\n# key {}, {}\n{}", entry.key.id(), entry.dates, entry.key.pem());
    HEAD.to_owned() + &entries.iter().map(block).collect::<String>()
}

fn malformed(directory: &Directory, why: &str) -> Failure {
    let path = directory.shown(PUBLIC);
    Failure::new(Exit::Internal, format!("{} {why}", path.display())).with_help(format!(
        "look at it and move it away; without it `plimsoll setup service` writes it again, with the key in use (keys of before \
         have to be put back by hand): mv {0} {0}.old",
        path.display()
    ))
}

/// The error, with the file's real name.
fn unusable(directory: &Directory, name: &str, error: &KeyError) -> Failure {
    let (exact, shown) = (directory.exact(name), directory.shown(name));
    let real = |text: String| text.replace(&*exact.to_string_lossy(), &shown.to_string_lossy());
    let mut message = error.to_string();
    if let KeyError::Io { source, .. } = error {
        message = format!("{message}: {source}");
    }
    let failure = Failure::new(Exit::Internal, real(message));
    match error.help() {
        Some(help) => failure.with_help(real(help)),
        None => failure,
    }
}
