//! Reads an OCI image layout (`image-layout.md`): `oci-layout`, `index.json`, and blobs by digest.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use serde::Deserialize;

use super::document::{Configuration, Descriptor, Index, MAX_DOCUMENT, Manifest, parse};
use super::{OciError, Opened, count};
use crate::artifact::Digest;
use crate::artifact::beneath::confined;
use crate::artifact::layers::Layer;
use crate::artifact::rejection::shown;

/// Deepest index within an index.
pub(super) const MAX_NESTING: usize = 3;

pub(super) fn open(path: &Path, tag: Option<&str>) -> Result<Opened, OciError> {
    let root = File::open(path).map_err(|source| OciError::Io { path: path.to_owned(), source })?;
    let layout = Layout { root: root.into(), path };
    layout.check_version()?;
    let index = layout.document("index.json", &Index::parse)?;
    let first = choose(&index.manifests, tag)?.clone();
    layout.image(first)
}

struct Layout<'p> {
    root: OwnedFd,
    path: &'p Path,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Version {
    image_layout_version: String,
}

impl Layout<'_> {
    fn check_version(&self) -> Result<(), OciError> {
        let wrong = |why: String| OciError::Layout { path: self.path.to_owned(), why };
        let bytes = self.read("oci-layout").map_err(|e| match e {
            OciError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                wrong("it has no file `oci-layout`".to_owned())
            }
            e => e,
        })?;
        let Version { image_layout_version: version } = parse(&bytes).map_err(wrong)?;
        if version.split('.').next() == Some("1") {
            return Ok(());
        }
        Err(wrong(format!("its version is {}", shown(version.as_bytes()))))
    }

    /// Goes from a descriptor of an index to the image.
    fn image(&self, mut at: Descriptor) -> Result<Opened, OciError> {
        let mut index = None;
        for _ in 0..MAX_NESTING {
            if !at.is_index() {
                break;
            }
            let (digest, bytes) = self.blob(&at)?;
            index.get_or_insert(digest);
            let inner = Index::parse(&bytes).map_err(|why| document(&digest, why))?;
            at = choose(&inner.manifests, None)?.clone();
        }
        if !at.is_manifest() {
            let why = format!("a document of the type `{}` is no image", shown(at.media_type.as_bytes()));
            return Err(OciError::Document { name: "index.json".to_owned(), why });
        }
        let (digest, bytes) = self.blob(&at)?;
        let manifest = Manifest::parse(&bytes).map_err(|why| document(&digest, why))?;
        let (id, bytes) = self.blob(&manifest.config)?;
        let (facts, diff_ids) = Configuration::parse(&bytes).map_err(|why| document(&id, why))?;
        count(&format!("sha256:{digest}"), manifest.layers.len(), diff_ids.len())?;
        let (mut files, mut layers) = (Vec::new(), Vec::new());
        for (descriptor, diff_id) in manifest.layers.iter().zip(diff_ids) {
            let sha256 = descriptor.digest().map_err(|why| document(&digest, why))?;
            let (file, length) = self.file(sha256, descriptor.size)?;
            layers.push(Layer { file: files.len(), offset: 0, length, sha256: Some(sha256), diff_id });
            files.push(file);
        }
        Ok(Opened { digest, index, facts, files, layers })
    }

    /// A document among the blobs: its digest, which is right, and its bytes.
    fn blob(&self, descriptor: &Descriptor) -> Result<(Digest, Vec<u8>), OciError> {
        let digest = descriptor.digest().map_err(|why| OciError::Document { name: "a descriptor".to_owned(), why })?;
        let wrong = |why: String| OciError::Blob { digest, why };
        if descriptor.size > MAX_DOCUMENT {
            return Err(wrong(format!("is a document of {} bytes; {MAX_DOCUMENT} are allowed", descriptor.size)));
        }
        let (file, length) = self.file(digest, descriptor.size)?;
        let mut bytes = Vec::new();
        file.take(length).read_to_end(&mut bytes).map_err(|e| wrong(format!("can't be read: {e}")))?;
        let found = Digest::of(&bytes);
        if found != digest {
            return Err(wrong(format!("has the sha256 {found}")));
        }
        Ok((digest, bytes))
    }

    /// A blob of that size.
    fn file(&self, digest: Digest, size: u64) -> Result<(File, u64), OciError> {
        let wrong = |why: String| OciError::Blob { digest, why };
        let file = self.open(&format!("blobs/sha256/{digest}")).map_err(|e| wrong(format!("can't be opened: {e}")))?;
        let length = file.metadata().map_err(|e| wrong(e.to_string()))?.len();
        if length != size {
            return Err(wrong(format!("has {length} bytes, not {size}")));
        }
        Ok((file, length))
    }

    fn document<T>(&self, name: &str, parse: &dyn Fn(&[u8]) -> Result<T, String>) -> Result<T, OciError> {
        parse(&self.read(name)?).map_err(|why| OciError::Document { name: name.to_owned(), why })
    }

    fn read(&self, name: &str) -> Result<Vec<u8>, OciError> {
        let io = |source| OciError::Io { path: self.path.join(name), source };
        let mut bytes = Vec::new();
        self.open(name).map_err(io)?.take(MAX_DOCUMENT + 1).read_to_end(&mut bytes).map_err(io)?;
        if bytes.len() as u64 > MAX_DOCUMENT {
            return Err(io(io::Error::new(io::ErrorKind::FileTooLarge, format!("more than {MAX_DOCUMENT} bytes"))));
        }
        Ok(bytes)
    }

    /// A regular file beneath the layout, through no link.
    fn open(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(confined(self.root.as_fd(), name, flags, Mode::empty())?);
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
        }
        Ok(file)
    }
}

fn document(digest: &Digest, why: String) -> OciError {
    OciError::Document { name: format!("sha256:{digest}"), why }
}

/// The one that is meant: of that tag, and for this machine where it says for which it is.
pub(super) fn choose<'d>(all: &'d [Descriptor], tag: Option<&str>) -> Result<&'d Descriptor, OciError> {
    let images = || all.iter().filter(|d| d.is_index() || d.is_manifest());
    let tagged: Vec<_> = images().filter(|d| tag.is_none_or(|tag| d.tag() == Some(tag))).collect();
    let ours: Vec<_> = tagged.iter().copied().filter(|d| d.platform.as_ref().is_none_or(|p| p.is_ours())).collect();
    // The same image may stand there under several tags.
    let distinct = ours.iter().any(|d| d.digest() != ours[0].digest());
    match ours.first() {
        Some(one) if !distinct => Ok(one),
        found => {
            let wanted =
                tag.map_or("no tag is named".to_owned(), |tag| format!("the tag `{}` is named", shown(tag.as_bytes())));
            let why = match (found, tagged.is_empty()) {
                (Some(_), _) => format!("{wanted}, and several images would do"),
                (None, true) => format!("{wanted}, and no image has it"),
                (None, false) => "no image is for this machine".to_owned(),
            };
            let choices = images().take(20).map(|d| {
                let platform =
                    d.platform.as_ref().map(|p| format!(" ({}/{})", p.os, p.architecture)).unwrap_or_default();
                shown(format!("{}{platform}", d.tag().unwrap_or("one without a tag")).as_bytes())
            });
            Err(OciError::Choice { why, choices: choices.collect() })
        }
    }
}
