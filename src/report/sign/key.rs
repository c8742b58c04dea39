//! The keys: Ed25519 (RFC 8032), in PEM as OpenSSL reads and writes them.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{DecodePrivateKey, DecodePublicKey, EncodePrivateKey, EncodePublicKey, KeypairBytes};
use ed25519_dalek::{Signature, Signer};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RawMode, fstat, fsync, openat, renameat, unlinkat};
use rustix::io::Errno;
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

/// Largest file of a private key, bytes; one has 119.
const MAX_PRIVATE: u64 = 4 * 1024;
/// Largest file of public keys, bytes; one key has 113, and some lines of comment.
const MAX_PUBLIC: u64 = 64 * 1024;
const BEGIN: &str = "-----BEGIN PUBLIC KEY-----";
const END: &str = "-----END PUBLIC KEY-----";

/// Why a key can't be had, or not be kept.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// Input or output failed.
    #[error("failed to {action} the key {}", path.display())]
    Io {
        /// What was being done: `read`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The file can't be trusted with a private key.
    #[error("the key {} {reason}", path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
        /// What is wrong: `can be read or written by others than its owner (mode 0644)`.
        reason: String,
    },
    /// The file holds no key of the right kind.
    #[error("{} {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: &'static str,
    },
    /// There is no randomness to make a key of.
    #[error("failed to make a key: the kernel gives no randomness")]
    NoRandomness,
}

impl KeyError {
    /// What the user can do about it.
    #[must_use]
    pub fn help(&self) -> Option<String> {
        match self {
            Self::Exposed { path, .. } => Some(format!(
                "somebody may know it: make a new one with `plimsoll setup service --rotate-key`, or, if nobody can have read {}, \
                 `chmod 0600` it and give it to root",
                path.display()
            )),
            Self::Malformed { .. } => Some(
                "`plimsoll setup service` makes service.key (private) and service.pub (public) in /etc/plimsoll".into(),
            ),
            Self::Io { .. } | Self::NoRandomness => None,
        }
    }
}

/// A private key. Its memory is wiped when it is dropped, and its `Debug` form names only the public half.
pub struct SigningKey {
    key: ed25519_dalek::SigningKey,
    public: PublicKey,
}

impl SigningKey {
    /// A fresh one.
    ///
    /// # Errors
    /// If the kernel gives no randomness.
    pub fn generate() -> Result<Self, KeyError> {
        let mut seed = Zeroizing::new([0u8; 32]);
        getrandom::fill(seed.as_mut_slice()).map_err(|_| KeyError::NoRandomness)?;
        Ok(Self::of(ed25519_dalek::SigningKey::from_bytes(&seed)))
    }

    fn of(key: ed25519_dalek::SigningKey) -> Self {
        let public = PublicKey::of(key.verifying_key());
        Self { key, public }
    }

    /// Reads one from a file that belongs to this process's user or root, and that nobody else can read or write.
    ///
    /// # Errors
    /// If it is a symbolic link, others can read or write it, or it holds something else than one PKCS #8 key in PEM.
    pub fn load(path: &Path) -> Result<Self, KeyError> {
        let io = |source: Errno| KeyError::Io { action: "read", path: path.to_owned(), source: source.into() };
        let exposed = |reason: String| KeyError::Exposed { path: path.to_owned(), reason };
        let malformed = KeyError::Malformed { path: path.to_owned(), reason: "holds no Ed25519 private key in PEM" };
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = match openat(CWD, path, flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::LOOP) => return Err(exposed("is a symbolic link".to_owned())),
            Err(e) => return Err(io(e)),
        };
        let stat = fstat(&file).map_err(io)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(exposed("is not a regular file".to_owned()));
        }
        if stat.st_uid != 0 && stat.st_uid != rustix::process::geteuid().as_raw() {
            return Err(exposed(format!("belongs to another user (uid {})", stat.st_uid)));
        }
        // A POSIX ACL shows in the bits of the group.
        let mode = Mode::from_raw_mode(stat.st_mode).as_raw_mode();
        if mode & 0o077 != 0 {
            return Err(exposed(format!("can be read or written by others than its owner (mode {mode:04o})")));
        }
        if stat.st_nlink != 1 {
            return Err(exposed(format!("has {} names (hard links)", stat.st_nlink)));
        }
        let mut text = Zeroizing::new(String::with_capacity(MAX_PRIVATE as usize + 1));
        match File::from(file).take(MAX_PRIVATE + 1).read_to_string(&mut text) {
            Ok(n) if n as u64 <= MAX_PRIVATE => {}
            Ok(_) => return Err(malformed),
            Err(e) if e.kind() == io::ErrorKind::InvalidData => return Err(malformed),
            Err(source) => return Err(KeyError::Io { action: "read", path: path.to_owned(), source }),
        }
        ed25519_dalek::SigningKey::from_pkcs8_pem(&text).map(Self::of).map_err(|_| malformed)
    }

    /// Writes it, in PKCS #8 and PEM, to a file that only its owner can read. There is at all times either the old file or the
    /// whole new one under the name.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn save(&self, path: &Path) -> Result<(), KeyError> {
        let io = |source: io::Error| KeyError::Io { action: "write", path: path.to_owned(), source };
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io(io::ErrorKind::InvalidFilename.into()));
        };
        let above = if above.as_os_str().is_empty() { Path::new(".") } else { above };
        // Without the public half: OpenSSL reads version 1 of the format alone.
        let secret = KeypairBytes { secret_key: self.key.to_bytes(), public_key: None };
        let pem = secret.to_pkcs8_pem(LineEnding::LF).map_err(|_| io(io::ErrorKind::InvalidData.into()))?;
        let write = || -> io::Result<()> {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let directory = openat(CWD, above, flags, Mode::empty())?;
            let mut fresh = name.to_owned();
            fresh.push(".new");
            match unlinkat(&directory, &fresh, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(e) => return Err(e.into()),
            }
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = openat(&directory, &fresh, flags, Mode::from_raw_mode(0o600 as RawMode))?;
            let mut file = File::from(file);
            let written = file.write_all(pem.as_bytes()).and_then(|()| file.sync_all());
            let placed = written.and_then(|()| Ok(renameat(&directory, &fresh, &directory, name)?));
            if placed.is_err() {
                let _ = unlinkat(&directory, &fresh, AtFlags::empty());
            }
            placed?;
            Ok(fsync(directory.as_fd())?)
        };
        write().map_err(io)
    }

    /// The half that may be known.
    #[must_use]
    pub fn public(&self) -> &PublicKey {
        &self.public
    }

    pub(super) fn sign(&self, message: &[u8]) -> [u8; 64] {
        self.key.sign(message).to_bytes()
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SigningKey").field("public", &self.public).finish_non_exhaustive()
    }
}

/// A public key.
#[derive(Clone, PartialEq, Eq)]
pub struct PublicKey {
    key: ed25519_dalek::VerifyingKey,
    pem: String,
    id: String,
}

impl PublicKey {
    fn of(key: ed25519_dalek::VerifyingKey) -> Self {
        // Encoding 32 bytes behind a constant header has no way to fail.
        let der = key.to_public_key_der().map(|der| der.as_bytes().to_vec()).unwrap_or_default();
        let pem = key.to_public_key_pem(LineEnding::LF).unwrap_or_default();
        Self { key, pem, id: hex::encode(Sha256::digest(der)) }
    }

    /// Reads one or several from a file of PEM blocks; text around them is comment. Several are the keys of several hosts, or
    /// a host's old keys after its new one.
    ///
    /// # Errors
    /// If it can't be read, is larger than 64 KiB, or holds no key or something else beside keys.
    pub fn load(path: &Path) -> Result<Vec<Self>, KeyError> {
        let mut bytes = Vec::new();
        // A FIFO would be waited for.
        openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY, Mode::empty())
            .map_err(io::Error::from)
            .and_then(|file| File::from(file).take(MAX_PUBLIC + 1).read_to_end(&mut bytes))
            .map_err(|source| KeyError::Io { action: "read", path: path.to_owned(), source })?;
        let text = std::str::from_utf8(&bytes).ok().filter(|_| bytes.len() as u64 <= MAX_PUBLIC);
        text.ok_or("is no file of keys in PEM")
            .and_then(Self::parse)
            .map_err(|reason| KeyError::Malformed { path: path.to_owned(), reason })
    }

    /// Reads PEM blocks; see [`PublicKey::load`].
    ///
    /// # Errors
    /// In words that go on after a file's name.
    pub fn parse(text: &str) -> Result<Vec<Self>, &'static str> {
        let mut keys = Vec::new();
        let mut block: Option<String> = None;
        for line in text.lines().map(str::trim_end) {
            match &mut block {
                None if line == BEGIN => block = Some(format!("{line}\n")),
                None if line.contains("PRIVATE KEY-----") => {
                    return Err("is a private key, where a public one belongs");
                }
                None if line.starts_with("-----") => return Err("holds something else than public keys in PEM"),
                None => {}
                Some(pem) => {
                    pem.push_str(line);
                    pem.push('\n');
                    if line == END {
                        let key = ed25519_dalek::VerifyingKey::from_public_key_pem(pem)
                            .map_err(|_| "holds a key that is no Ed25519 public key in PEM")?;
                        // Of a weak key, everybody can make signatures.
                        if key.is_weak() {
                            return Err("holds a key of small order, which proves nothing");
                        }
                        keys.push(Self::of(key));
                        block = None;
                    }
                }
            }
        }
        match (block, keys.is_empty()) {
            (Some(_), _) => Err("ends in the middle of a key"),
            (None, true) => Err("holds no public key in PEM"),
            (None, false) => Ok(keys),
        }
    }

    /// SHA-256 of the key as SubjectPublicKeyInfo in DER, lowercase hex: what
    /// `openssl pkey -pubin -outform DER | sha256sum` says.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// SubjectPublicKeyInfo in PEM, with a line feed at its end.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// Whether `signature` is this key's of `message`, under the strict rules: one signature has one form.
    pub(super) fn verifies(&self, message: &[u8], signature: &[u8; 64]) -> bool {
        self.key.verify_strict(message, &Signature::from_bytes(signature)).is_ok()
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({})", self.id)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_saved_key_is_its_owners_alone_and_reads_back_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("service.key");
        let key = SigningKey::generate().unwrap();
        key.save(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
        let read = SigningKey::load(&path).unwrap();
        assert_eq!(read.public(), key.public());
        assert_eq!(read.sign(b"x"), key.sign(b"x"));
        let other = SigningKey::generate().unwrap();
        other.save(&path).unwrap();
        assert_eq!(SigningKey::load(&path).unwrap().public(), other.public());
        assert!(!format!("{key:?}").contains(&hex::encode(key.key.to_bytes())));
    }

    #[test]
    fn a_key_that_others_could_have_had_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("service.key");
        SigningKey::generate().unwrap().save(&path).unwrap();
        for mode in [0o640, 0o604, 0o620, 0o602, 0o660, 0o644] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let said = SigningKey::load(&path).unwrap_err().to_string();
            assert!(said.contains(&format!("mode {mode:04o}")), "{said}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
        SigningKey::load(&path).unwrap();
        let link = dir.path().join("link.key");
        symlink(&path, &link).unwrap();
        assert!(SigningKey::load(&link).unwrap_err().to_string().contains("symbolic link"));
        fs::remove_file(&link).unwrap();
        fs::hard_link(&path, &link).unwrap();
        assert!(SigningKey::load(&path).unwrap_err().to_string().contains("hard links"));
        assert!(SigningKey::load(dir.path()).unwrap_err().to_string().contains("regular file"));
        assert!(matches!(SigningKey::load(&dir.path().join("absent")), Err(KeyError::Io { .. })));
    }

    #[test]
    fn a_file_that_holds_no_private_key_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("service.key");
        let key = SigningKey::generate().unwrap();
        for bytes in [b"".as_slice(), b"hello", key.public().pem().as_bytes(), &[0xff; 300], &[b'x'; 5000]] {
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            assert!(matches!(SigningKey::load(&path), Err(KeyError::Malformed { .. })), "{bytes:?}");
        }
    }

    #[test]
    fn several_public_keys_are_read_in_order_with_comments_between() {
        let [a, b] = [(); 2].map(|()| SigningKey::generate().unwrap().public().clone());
        let text = format!("# of host a\n{}\n# of host b, made 2026-11-30\r\n{}", a.pem(), b.pem());
        assert_eq!(PublicKey::parse(&text).unwrap(), [a.clone(), b]);
        assert_eq!(PublicKey::parse(a.pem().trim_end()).unwrap(), std::slice::from_ref(&a));
        assert_eq!(PublicKey::parse(&a.pem().replace('\n', "\r\n")).unwrap(), [a]);
    }

    #[test]
    fn what_is_no_public_key_is_refused() {
        let key = SigningKey::generate().unwrap();
        let pem = key.public().pem();
        let private = KeypairBytes { secret_key: key.key.to_bytes(), public_key: None };
        let private = private.to_pkcs8_pem(LineEnding::LF).unwrap();
        // The neutral element: for it, a signature of everything is easily made.
        let mut neutral = [0u8; 32];
        neutral[0] = 1;
        let weak = PublicKey::of(ed25519_dalek::VerifyingKey::from_bytes(&neutral).unwrap());
        for (text, why) in [
            ("", "holds no public key"),
            ("# only words\n", "holds no public key"),
            (private.as_str(), "is a private key"),
            (weak.pem(), "small order"),
            (&pem.replace("PUBLIC KEY", "CERTIFICATE"), "something else"),
            (&pem.replace("END", "ENDE"), "in the middle"),
            (&pem.replace("MCow", "MCox"), "no Ed25519"),
            (&format!("{pem}{}", private.as_str()), "is a private key"),
        ] {
            assert!(PublicKey::parse(text).unwrap_err().contains(why), "{why}: {text}");
        }
    }
}
