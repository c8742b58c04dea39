//! The rules that a policy file holds, read and checked.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use super::service::ServiceRules;
use crate::evidence::{ControlId, Tier};
use crate::spec::check::{digest, one_of};
use crate::spec::digest::Sha256Digest;
use crate::spec::error::SpecError;
use crate::spec::limits::Limit;
use crate::spec::place::{KeyPath, Place, Source, shown};
use crate::spec::raw::{self, RawMaxima, RawPolicy, Text};
use crate::spec::step::{Backend, FilesystemGrant, Network};

/// The rules; `None` and empty sets of requirements set none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Rules {
    pub(super) minimum_isolation: Option<Tier>,
    pub(super) backends: Option<BTreeSet<Backend>>,
    pub(super) engines: BTreeSet<Sha256Digest>,
    pub(super) kernels: BTreeSet<Sha256Digest>,
    pub(super) images: Option<Vec<ImageRule>>,
    pub(super) maxima: Vec<(Limit, u64)>,
    pub(super) mounts: Option<Vec<PathBuf>>,
    pub(super) filesystem_grant: Option<FilesystemGrant>,
    pub(super) require: BTreeSet<ControlId>,
    pub(super) refuse_vulnerable_engines: bool,
    pub(super) service: ServiceRules,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ImageRule {
    Pattern(glob::Pattern),
    Digest(Sha256Digest),
}

impl Rules {
    pub(super) fn parse(source: &Arc<Source>) -> Result<Rules, SpecError> {
        let root = raw::tree(source)?;
        let at = |key: &str| Place::value(source, KeyPath::root().keys(key));
        if root.is_null() {
            let place = Place::value(source, KeyPath::root());
            return Err(SpecError::invalid_help(
                &place,
                "empty",
                "write at least `minimum-isolation: container`, or remove the file",
            ));
        }
        let raw: RawPolicy = raw::read(source, &root, KeyPath::root())?;
        if let Some(version) = raw.version.filter(|version| version.0 != "1") {
            let reason = format!("version `{}` is not known to this plimsoll", shown(&version.0));
            return Err(SpecError::invalid_help(&at("version"), reason, "the only version is 1"));
        }
        if let Some(network) = &raw.network {
            one_of(&at("network"), &network.0, &[Network::None], |Network::None| "none")?;
        }
        let tier = raw.minimum_isolation.map(|tier| one_of(&at("minimum-isolation"), &tier.0, &Tier::ALL, Tier::name));
        let grant = raw.grants.and_then(|grants| grants.filesystem);
        let grant =
            grant.map(|grant| one_of(&at("grants.filesystem"), &grant.0, &FilesystemGrant::ALL, FilesystemGrant::name));
        let vulnerable =
            raw.vulnerable_engines.map(|word| one_of(&at("vulnerable-engines"), &word.0, &["warn", "refuse"], |w| w));
        Ok(Rules {
            minimum_isolation: tier.transpose()?,
            backends: list(raw.backends, &at("backends"), |place, word| {
                one_of(place, word, &Backend::ALL, Backend::name)
            })?,
            engines: list(raw.engines, &at("engines"), digest)?.unwrap_or_default(),
            kernels: list(raw.kernels, &at("kernels"), digest)?.unwrap_or_default(),
            images: list(raw.images, &at("images"), image_rule)?,
            maxima: maxima(&raw.maxima.unwrap_or_default(), &at("maxima"))?,
            mounts: list(raw.mounts, &at("mounts"), |place, text| {
                let path = PathBuf::from(text);
                if path.is_absolute() { Ok(path) } else { Err(SpecError::invalid(place, "not an absolute path")) }
            })?,
            filesystem_grant: grant.transpose()?,
            require: list(raw.require, &at("require"), |place, word| {
                one_of(place, word, ControlId::ALL, ControlId::name)
            })?
            .unwrap_or_default(),
            refuse_vulnerable_engines: vulnerable.transpose()? == Some("refuse"),
            service: ServiceRules::parse(raw.service.unwrap_or_default(), &at("service"))?,
        })
    }
}

fn list<T, C: FromIterator<T>>(
    texts: Option<Vec<Text>>,
    place: &Place,
    parse: impl Fn(&Place, &str) -> Result<T, SpecError>,
) -> Result<Option<C>, SpecError> {
    let parsed =
        texts.map(|texts| texts.iter().enumerate().map(|(index, text)| parse(&place.item(index), &text.0)).collect());
    parsed.transpose()
}

fn image_rule(place: &Place, text: &str) -> Result<ImageRule, SpecError> {
    if text.starts_with("sha256:") {
        return digest(place, text).map(ImageRule::Digest);
    }
    glob::Pattern::new(text)
        .map(ImageRule::Pattern)
        .map_err(|error| SpecError::invalid(place, format!("not a pattern: {}", error.msg)))
}

fn maxima(raw: &RawMaxima, place: &Place) -> Result<Vec<(Limit, u64)>, SpecError> {
    let mut maxima = Vec::new();
    for limit in Limit::ALL {
        let text = match limit {
            Limit::Cpus => &raw.cpus,
            Limit::Memory => &raw.memory,
            Limit::Disk => &raw.disk,
            Limit::Pids => &raw.pids,
            Limit::Output => &raw.output,
            Limit::Timeout => &raw.timeout_minutes,
        };
        let Some(text) = text else { continue };
        let amount = limit.parse(&text.0).map_err(|bad| {
            SpecError::invalid_help(
                &place.below(limit.key()),
                format!("`{}` is {}", shown(&text.0), bad.reason),
                bad.help,
            )
        })?;
        maxima.push((limit, amount));
    }
    Ok(maxima)
}
