//! Reads what `docker save` wrote: a tar with `manifest.json`, configurations and layers.
//!
//! The tar is not unpacked: a layer is a part of it.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::document::{Configuration, MAX_DOCUMENT, Saved, parse};
use super::{OciError, Opened, count};
use crate::artifact::layers::Layer;
use crate::artifact::rejection::{Rejection, Rule, shown};
use crate::artifact::tar::{Listed, list};
use crate::artifact::{Digest, Error as ArtifactError};

/// Most members of the archive: some for each layer.
const MAX_MEMBERS: usize = 10_000;
/// The list of its images.
const LIST: &str = "manifest.json";

pub(super) fn open(path: &Path) -> Result<Opened, OciError> {
    let io = |source| OciError::Io { path: path.to_owned(), source };
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(io)?;
    if !file.metadata().map_err(io)?.is_file() {
        return Err(io(std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is no regular file")));
    }
    let mut head = [0; 6];
    let read = (&file).take(6).read(&mut head).map_err(io)?;
    if head[..read].starts_with(b"\x1f\x8b") || head[..read].starts_with(b"\x28\xb5\x2f\xfd") {
        let message = "it is compressed: decompress it, as the layers are read where they lie";
        return Err(OciError::Archive(Rejection::new(Rule::Format, message).into()));
    }
    let mut input = BufReader::new(file);
    let members = list(&mut input, MAX_MEMBERS).map_err(OciError::Archive)?;
    let mut archive = Archive { input, members };
    let bytes = archive.document(LIST)?;
    let saved: Vec<Saved> = parse(&bytes).map_err(|why| named(LIST, why))?;
    let [image] = saved.as_slice() else {
        let choices = saved.iter().flat_map(|s| s.repo_tags.iter().flatten()).take(20);
        let choices = choices.map(|tag| shown(tag.as_bytes())).collect();
        let why = format!("the archive holds {} images, where one is meant", saved.len());
        return Err(OciError::Choice { why, choices });
    };
    let bytes = archive.document(&image.config)?;
    let digest = Digest::of(&bytes);
    // Its name is its digest, in each of the ways that Docker has written it.
    let stem = image.config.trim_end_matches(".json");
    let stem = stem.rsplit('/').next().unwrap_or(stem);
    if stem.parse::<Digest>().is_ok_and(|said| said != digest) {
        return Err(named(&image.config, format!("its sha256 is {digest}")));
    }
    let (facts, diff_ids) = Configuration::parse(&bytes).map_err(|why| named(&image.config, why))?;
    count(LIST, image.layers.len(), diff_ids.len())?;
    let mut layers = Vec::new();
    for (name, diff_id) in image.layers.iter().zip(diff_ids) {
        let member = archive.find(name)?;
        // What a layer is called may be its digest or something else; the digest of its tar is compared in any case.
        layers.push(Layer { file: 0, offset: member.offset, length: member.size, sha256: None, diff_id });
    }
    Ok(Opened { digest, index: None, facts, files: vec![archive.input.into_inner()], layers })
}

struct Archive {
    input: BufReader<File>,
    members: Vec<Listed>,
}

impl Archive {
    /// The one file of that name, through at most one link, as older versions wrote a layer that another image has too.
    fn find(&self, name: &str) -> Result<&Listed, OciError> {
        let file = self.one(name)?;
        let Some(link) = &file.link else { return Ok(file) };
        let target = std::str::from_utf8(link).map_err(|e| named(name, e.to_string()))?;
        let inside = match target.strip_prefix("../") {
            Some(rest) => rest,
            None => target,
        };
        let file = self.one(inside)?;
        if file.link.is_some() {
            return Err(named(name, "it is a link to a link".to_owned()));
        }
        Ok(file)
    }

    fn one(&self, name: &str) -> Result<&Listed, OciError> {
        let mut found =
            self.members.iter().filter(|m| m.name.strip_prefix(b"./").unwrap_or(&m.name) == name.as_bytes());
        match (found.next(), found.next()) {
            (Some(one), None) => Ok(one),
            (None, _) => Err(named(name, "the archive has no such file".to_owned())),
            (Some(_), Some(_)) => Err(named(name, "the archive has several files of this name".to_owned())),
        }
    }

    fn document(&mut self, name: &str) -> Result<Vec<u8>, OciError> {
        let &Listed { offset, size, .. } = self.find(name)?;
        if size > MAX_DOCUMENT {
            return Err(named(name, format!("{size} bytes; {MAX_DOCUMENT} are allowed")));
        }
        let mut bytes = Vec::new();
        let read =
            self.input.seek(SeekFrom::Start(offset)).and_then(|_| (&mut self.input).take(size).read_to_end(&mut bytes));
        read.map_err(|e| OciError::Archive(ArtifactError::failed("read the archive", e)))?;
        Ok(bytes)
    }
}

fn named(name: &str, why: String) -> OciError {
    OciError::Document { name: shown(name.as_bytes()), why }
}
