//! The isolation tiers, weakest first.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How strong a boundary is. The order is the order of strength.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Tier {
    /// A process of ours, nothing more.
    Process,
    /// A process with its own namespaces, no privilege and a seccomp filter.
    Container,
    /// A guest kernel in user space (gVisor's sentry) between the code and the host's kernel.
    Kernel,
    /// A virtual machine with its own kernel, behind hardware virtualisation.
    Vm,
}

impl Tier {
    /// All tiers, weakest first.
    pub const ALL: [Tier; 4] = [Tier::Process, Tier::Container, Tier::Kernel, Tier::Vm];

    /// The word used in step files and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Tier::Process => "process",
            Tier::Container => "container",
            Tier::Kernel => "kernel",
            Tier::Vm => "vm",
        }
    }
}

impl std::fmt::Display for Tier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// A word that names no tier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no isolation tier; the tiers are process, container, kernel, vm")]
pub struct UnknownTier(pub String);

impl std::str::FromStr for Tier {
    type Err = UnknownTier;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        Tier::ALL.into_iter().find(|t| t.name() == word).ok_or_else(|| UnknownTier(word.to_owned()))
    }
}
