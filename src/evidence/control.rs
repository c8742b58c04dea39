//! Controls and their grades.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

macro_rules! controls {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal,)+) => {
        /// A control: one thing that a boundary does. Ids are stable; reports and policies name them.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
        #[serde(rename_all = "kebab-case")]
        pub enum ControlId {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl ControlId {
            /// Every control, in the order reports show them.
            pub const ALL: &'static [ControlId] = &[$(ControlId::$variant),+];

            /// The id used in step files, policies and reports.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(ControlId::$variant => $name),+ }
            }

            /// What the control means, in one sentence.
            #[must_use]
            pub const fn describe(self) -> &'static str {
                match self { $(ControlId::$variant => concat!($($doc),+).trim_ascii_start()),+ }
            }
        }
    };
}

controls! {
    /// A virtual machine monitor runs the code on virtual CPUs of its own.
    Hypervisor = "hypervisor",
    /// A guest kernel stands between the code and the host's kernel.
    GuestKernel = "guest-kernel",
    /// Every thread of the boundary is confined by a seccomp filter.
    Seccomp = "seccomp",
    /// The boundary has namespaces of its own.
    Namespaces = "namespaces",
    /// No thread can gain privileges by executing a file.
    NoNewPrivs = "no-new-privs",
    /// No capability is held outside the boundary's own user namespace.
    Capabilities = "capabilities",
    /// The boundary's uid on the host is not 0.
    NonRoot = "non-root",
    /// The boundary's root directory is not the host's.
    RootIsolated = "root-isolated",
    /// The boundary has no network interface but its own loopback.
    Network = "network",
    /// No file of the host is reachable but what was planned, read-only.
    Filesystem = "filesystem",
    /// Memory is limited.
    MemoryLimit = "memory-limit",
    /// CPU time per second is limited.
    CpuLimit = "cpu-limit",
    /// The number of processes is limited.
    PidsLimit = "pids-limit",
    /// What can be written is limited.
    DiskLimit = "disk-limit",
    /// The host ends the boundary at a deadline.
    TimeLimit = "time-limit",
    /// Output beyond a cap is counted, not kept.
    OutputLimit = "output-limit",
    /// The boundary's process holds nothing of the job's environment.
    Secrets = "secrets",
    /// The engine's executable is a known one.
    BinaryIdentity = "binary-identity",
    /// A fresh nonce was answered over a channel that only this boundary holds.
    Challenge = "challenge",
    /// The boundary draws fresh randomness of its own.
    Entropy = "entropy",
    /// Nothing was left on the host after the run.
    Teardown = "teardown",
}

impl std::fmt::Display for ControlId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// A word that names no control.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no control")]
pub struct UnknownControl(pub String);

impl std::str::FromStr for ControlId {
    type Err = UnknownControl;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        ControlId::ALL.iter().copied().find(|c| c.name() == word).ok_or_else(|| UnknownControl(word.to_owned()))
    }
}

/// A grade: how far a control is in force, as seen. Weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// Nothing was seen that says either way.
    Unknown,
    /// Seen not to be in force.
    NotEnforced,
    /// Seen to be in force in part.
    Partial,
    /// Seen to be in force.
    Enforced,
}

impl Status {
    /// The word used in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Status::Unknown => "unknown",
            Status::NotEnforced => "not-enforced",
            Status::Partial => "partial",
            Status::Enforced => "enforced",
        }
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_agree_with_serde() {
        for &control in ControlId::ALL {
            assert_eq!(control.name().parse(), Ok(control));
            assert_eq!(serde_json::to_value(control).unwrap(), control.name());
        }
        assert_eq!(ControlId::ALL.len(), 21);
    }
}
