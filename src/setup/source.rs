//! Where things come from: the project's release, a directory or a file of this host, another address.
//!
//! Main type: [`Source`]. What it gives is bytes in memory, under a limit, and whoever asks compares their digest before
//! anything else is done with them. A checksum file beside what it is about proves no more than that both come from the same
//! place, and says so; over HTTPS from the project's own release that is what there is.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256, Sha512};

use crate::artifact::rejection::shown;
use crate::env::Env;
use crate::forge::http::{self, Http, HttpError, Request, Url};

/// Longest checksum file, bytes.
const MAX_SUMS: u64 = 64 << 10;

/// Where from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A directory that holds the release's files under their own names.
    Directory(PathBuf),
    /// The one file that matters; its checksum file stands beside it.
    File(PathBuf),
    /// An address that the release's files are below.
    Url(Url),
}

/// Why something did not come.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// It is none that is known.
    #[error("`{0}` is no directory, file or address")]
    Unknown(String),
    /// A file can't be read.
    #[error("failed to read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// No answer, or none that is understood.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// The server refuses.
    #[error("{place} answers {status}")]
    Status {
        /// The address.
        place: String,
        /// The status.
        status: u16,
    },
    /// It is longer than anything of its kind.
    #[error("{name} has more than {most} bytes")]
    Large {
        /// Its name.
        name: String,
        /// The limit.
        most: u64,
    },
    /// There is no digest to compare with.
    #[error("nothing says what the digest of {0} is")]
    Unpinned(String),
    /// It is something else.
    #[error("{name} has the {algorithm} {found}, but {by} says {expected}")]
    Digest {
        /// Its name.
        name: String,
        /// Which digest.
        algorithm: &'static str,
        /// What came.
        found: String,
        /// What should.
        expected: String,
        /// Who says so.
        by: String,
    },
    /// An archive that is not as it should be.
    #[error("{name}: {why}")]
    Archive {
        /// Its name.
        name: String,
        /// Why.
        why: String,
    },
}

impl SourceError {
    /// What to do about it, in one line.
    #[must_use]
    pub const fn help(&self) -> &'static str {
        match self {
            SourceError::Unknown(_) | SourceError::Io { .. } => {
                "`--from` takes a directory with the release's files, the file itself, or an address that they are below; for a guest kernel a tree, an archive of one, or the archive's address"
            }
            SourceError::Http(_) | SourceError::Status { .. } => {
                "look at HTTPS_PROXY and SSL_CERT_FILE; without a network, copy the release's files here and name them: `--from DIR`"
            }
            SourceError::Unpinned(_) => "put the release's own checksum file beside it, or give `--sha256`",
            SourceError::Digest { .. } | SourceError::Large { .. } | SourceError::Archive { .. } => {
                "it was damaged or exchanged on its way: nothing was installed; fetch it again from the project's release"
            }
        }
    }
}

/// A digest that something must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pin {
    /// SHA-256, hex; and who says so.
    Sha256(String, String),
    /// SHA-512, hex; and who says so.
    Sha512(String, String),
}

impl Pin {
    /// Compares.
    ///
    /// # Errors
    /// [`SourceError::Digest`].
    pub fn check(&self, name: &str, bytes: &[u8]) -> Result<String, SourceError> {
        let (algorithm, expected, by, found) = match self {
            Pin::Sha256(expected, by) => ("SHA-256", expected, by, hex::encode(Sha256::digest(bytes))),
            Pin::Sha512(expected, by) => ("SHA-512", expected, by, hex::encode(Sha512::digest(bytes))),
        };
        if found == expected.to_ascii_lowercase() {
            return Ok(format!("{name}: {algorithm} as {by} says"));
        }
        let (name, expected, by) = (name.to_owned(), expected.clone(), by.clone());
        Err(SourceError::Digest { name, algorithm, found, expected, by })
    }
}

impl Source {
    /// Reads `--from`.
    ///
    /// # Errors
    /// [`SourceError::Unknown`].
    pub fn parse(text: &str) -> Result<Self, SourceError> {
        if text.starts_with("https://") || text.starts_with("http://") {
            // The last segment is a directory's.
            let text = if text.ends_with('/') { text.to_owned() } else { format!("{text}/") };
            return Ok(Source::Url(http::base("--from", &text)?));
        }
        let path = PathBuf::from(text.strip_prefix("file://").unwrap_or(text));
        match path.metadata() {
            Ok(meta) if meta.is_dir() => Ok(Source::Directory(path)),
            Ok(meta) if meta.is_file() => Ok(Source::File(path)),
            _ => Err(SourceError::Unknown(shown(text.as_bytes()))),
        }
    }

    /// Where a name of the release is found, for people.
    #[must_use]
    pub fn place(&self, name: &str) -> String {
        match self {
            Source::Directory(path) => path.join(name).display().to_string(),
            Source::File(path) => path.display().to_string(),
            Source::Url(base) => base.join(name).map_or_else(|_| name.to_owned(), |url| http::place(&url)),
        }
    }

    /// The bytes of a release's file, at most `most`. `suffix` is what its checksum file has more; for a [`Source::File`] the
    /// name is the file's own.
    ///
    /// # Errors
    /// As [`SourceError`] says.
    pub fn get(&self, name: &str, suffix: &str, most: u64, env: &Env) -> Result<Vec<u8>, SourceError> {
        match self {
            Source::Directory(path) => read(&path.join(format!("{name}{suffix}")), most),
            Source::File(path) => {
                let mut path = path.clone().into_os_string();
                path.push(suffix);
                read(Path::new(&path), most)
            }
            Source::Url(base) => {
                let url = base.join(&format!("{name}{suffix}")).map_err(|_| SourceError::Unknown(name.to_owned()))?;
                download(url, most, env)
            }
        }
    }

    /// A release's file and how it was verified: by `pin` where there is one, else by its checksum file of that suffix.
    ///
    /// # Errors
    /// As [`SourceError`] says; a file without any digest is not given out.
    pub fn verified(
        &self,
        name: &str,
        pin: Option<Pin>,
        suffix: &str,
        most: u64,
        env: &Env,
    ) -> Result<(Vec<u8>, String), SourceError> {
        let pin = match pin {
            Some(pin) => pin,
            None => {
                let by = match self {
                    Source::File(path) => format!("{}{suffix}", path.display()),
                    _ => self.place(&format!("{name}{suffix}")),
                };
                let sums = self.get(name, suffix, MAX_SUMS, env).map_err(|e| match e {
                    SourceError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                        SourceError::Unpinned(self.place(name))
                    }
                    SourceError::Status { place, status: 404 } => {
                        SourceError::Unpinned(format!("{} ({place} answers 404)", self.place(name)))
                    }
                    e => e,
                })?;
                let own = match self {
                    Source::File(path) => path.file_name().map(|n| n.to_string_lossy().into_owned()),
                    _ => None,
                };
                listed(&String::from_utf8_lossy(&sums), &[name, own.as_deref().unwrap_or(name)], &by)
                    .ok_or_else(|| SourceError::Unpinned(self.place(name)))?
            }
        };
        let bytes = self.get(name, "", most, env)?;
        let note = pin.check(&self.place(name), &bytes)?;
        Ok((bytes, note))
    }
}

/// What a checksum file says of one of these names: `HEX  NAME`, or the digest alone.
fn listed(text: &str, names: &[&str], by: &str) -> Option<Pin> {
    let mut found = None;
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let Some(digest) = words.next().filter(|word| word.bytes().all(|b| b.is_ascii_hexdigit())) else { continue };
        let named = words.next().map(|name| name.trim_start_matches('*'));
        let is_meant = named.is_none_or(|named| names.contains(&named.rsplit('/').next().unwrap_or(named)));
        let pin = match digest.len() {
            64 => Pin::Sha256(digest.to_owned(), by.to_owned()),
            128 => Pin::Sha512(digest.to_owned(), by.to_owned()),
            _ => continue,
        };
        // Two for one name say nothing.
        if is_meant && found.replace(pin).is_some() {
            return None;
        }
    }
    found
}

fn read(path: &Path, most: u64) -> Result<Vec<u8>, SourceError> {
    let io = |source| SourceError::Io { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    File::open(path).map_err(io)?.take(most + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > most {
        return Err(SourceError::Large { name: path.display().to_string(), most });
    }
    Ok(bytes)
}

fn download(url: Url, most: u64, env: &Env) -> Result<Vec<u8>, SourceError> {
    let io = |source| SourceError::Io { path: PathBuf::from(http::place(&url)), source };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(io)?;
    runtime.block_on(async {
        let response = Http::new(env)?.send(Request::download(url.clone())).await?;
        if !response.status.is_success() {
            return Err(SourceError::Status { place: http::place(&url), status: response.status.as_u16() });
        }
        Ok(response.bytes(most).await?.to_vec())
    })
}

/// One file of a verified gzip-compressed tar, found by what its name ends with.
///
/// # Errors
/// [`SourceError::Archive`] if there is not exactly one, or it is longer than `most`.
pub fn member(archive: &[u8], name: &str, is_it: impl Fn(&str) -> bool, most: u64) -> Result<Vec<u8>, SourceError> {
    let wrong = |why: String| SourceError::Archive { name: name.to_owned(), why };
    let mut tar = Vec::new();
    let decoder = flate2::read::GzDecoder::new(archive);
    decoder.take(2 * most + 1).read_to_end(&mut tar).map_err(|e| wrong(e.to_string()))?;
    if tar.len() as u64 > 2 * most {
        return Err(wrong("it is larger than any of its kind".to_owned()));
    }
    let mut input = io::BufReader::new(io::Cursor::new(&tar));
    let members = crate::artifact::tar::list(&mut input, 1000).map_err(|e| wrong(crate::text::chain(&e)))?;
    let mut found = members.iter().filter(|m| m.link.is_none() && is_it(&String::from_utf8_lossy(&m.name)));
    match (found.next(), found.next()) {
        (Some(one), None) if one.size <= most => {
            let range = usize::try_from(one.offset).ok().zip(usize::try_from(one.size).ok());
            let bytes = range.and_then(|(at, size)| tar.get(at..at.checked_add(size)?));
            bytes.map(<[u8]>::to_vec).ok_or_else(|| wrong("it is cut short".to_owned()))
        }
        (None, _) => Err(wrong("it holds no such file".to_owned())),
        _ => Err(wrong("it holds several such files, or one that is too large".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checksum_file_is_read_as_releases_write_it() {
        let (one, two) = ("a".repeat(64), "b".repeat(128));
        let pin = |text: &str| listed(text, &["x"], "it");
        assert_eq!(pin(&format!("{one}  x\n{two}  y\n")), Some(Pin::Sha256(one.clone(), "it".into())));
        assert_eq!(pin(&format!("{two} *dir/x\n")), Some(Pin::Sha512(two, "it".into())));
        assert_eq!(pin(&one), Some(Pin::Sha256(one.clone(), "it".into())));
        for none in [String::new(), format!("{one}  y"), "zz  x".to_owned(), format!("{one}  x\n{}  x", "c".repeat(64))]
        {
            assert_eq!(pin(&none), None, "{none}");
        }
    }

    #[test]
    fn what_has_no_digest_or_another_is_not_given_out() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("x"), "content").unwrap();
        let source = Source::parse(dir.path().to_str().unwrap()).unwrap();
        let get = |pin| source.verified("x", pin, ".sha256", 100, &Env::default());
        assert!(matches!(get(None), Err(SourceError::Unpinned(_))));
        std::fs::write(dir.path().join("x.sha256"), format!("{}  x\n", "0".repeat(64))).unwrap();
        assert!(matches!(get(None), Err(SourceError::Digest { .. })));
        let good = hex::encode(Sha256::digest(b"content"));
        std::fs::write(dir.path().join("x.sha256"), format!("{good}  x\n")).unwrap();
        assert_eq!(get(None).unwrap().0, b"content");
        // What the user says goes before what lies beside it.
        assert!(get(Some(Pin::Sha256("1".repeat(64), "you".into()))).is_err());
        assert!(matches!(source.verified("x", None, ".sha256", 3, &Env::default()), Err(SourceError::Large { .. })));
        let file = Source::parse(dir.path().join("x").to_str().unwrap()).unwrap();
        assert_eq!(file.verified("anything", None, ".sha256", 100, &Env::default()).unwrap().0, b"content");
        assert!(Source::parse("/no/such/thing").is_err() && Source::parse("ftp://x/").is_err());
    }
}
