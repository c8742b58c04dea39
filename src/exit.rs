//! Exit codes: one enum, one table.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How `plimsoll` exits. The numbers are part of the contract; those not listed are reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(into = "u8", try_from = "u8")]
#[schemars(with = "u8")]
pub enum Exit {
    /// Every step passed behind a proven boundary.
    Passed,
    /// Internal error.
    Internal,
    /// Usage, step file, or no step selected.
    Usage,
    /// Guest code failed: non-zero exit, timeout, limit, a boundary that ended by itself.
    GuestFailed,
    /// Refused: floor, required control, policy, grant; or the boundary changed while running.
    Refused,
    /// The backend is not available on this host.
    Unavailable,
    /// Artifact or image rejected.
    Rejected,
    /// Publishing failed (only with `--publish-required`).
    PublishFailed,
    /// `verify` or `audit` found a fault.
    FaultFound,
    /// Cancelled by SIGINT.
    Interrupted,
    /// Cancelled by SIGTERM.
    Terminated,
}

impl Exit {
    /// All of them, in the order of their numbers.
    pub const ALL: [Exit; 11] = [
        Exit::Passed,
        Exit::Internal,
        Exit::Usage,
        Exit::GuestFailed,
        Exit::Refused,
        Exit::Unavailable,
        Exit::Rejected,
        Exit::PublishFailed,
        Exit::FaultFound,
        Exit::Interrupted,
        Exit::Terminated,
    ];

    /// The process's exit code.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Exit::Passed => 0,
            Exit::Internal => 1,
            Exit::Usage => 2,
            Exit::GuestFailed => 10,
            Exit::Refused => 11,
            Exit::Unavailable => 12,
            Exit::Rejected => 13,
            Exit::PublishFailed => 14,
            Exit::FaultFound => 15,
            Exit::Interrupted => 130,
            Exit::Terminated => 143,
        }
    }

    /// What it means, for `--help` and the README.
    #[must_use]
    pub const fn describe(self) -> &'static str {
        match self {
            Exit::Passed => "every step passed behind a proven boundary",
            Exit::Internal => "internal error",
            Exit::Usage => "usage, step file, or no step selected",
            Exit::GuestFailed => "guest code failed (non-zero exit, timeout, limit, boundary ended by itself)",
            Exit::Refused => "refused: floor, required control, policy, grant; or the boundary changed while running",
            Exit::Unavailable => "backend not available on this host (names the blocker and the fix)",
            Exit::Rejected => "artifact or image rejected",
            Exit::PublishFailed => "publishing failed (only with --publish-required)",
            Exit::FaultFound => "verify or audit found a fault",
            Exit::Interrupted => "cancelled by SIGINT, after cleaning up",
            Exit::Terminated => "cancelled by SIGTERM, after cleaning up",
        }
    }

    /// Which of several outcomes decides: the first of 130/143, 1, 11, 12, 13, 10 wins, then 0.
    #[must_use]
    pub fn of_many(all: impl IntoIterator<Item = Exit>) -> Exit {
        all.into_iter().min_by_key(|e| e.rank()).unwrap_or(Exit::Passed)
    }

    const fn rank(self) -> u8 {
        match self {
            Exit::Interrupted | Exit::Terminated => 0,
            Exit::Internal => 1,
            Exit::Usage => 2,
            Exit::Refused => 3,
            Exit::Unavailable => 4,
            Exit::Rejected => 5,
            Exit::GuestFailed => 6,
            Exit::FaultFound => 7,
            Exit::PublishFailed => 8,
            Exit::Passed => 9,
        }
    }
}

impl From<Exit> for u8 {
    fn from(exit: Exit) -> u8 {
        exit.code()
    }
}

/// A number that is no exit code of ours.
#[derive(Debug, thiserror::Error)]
#[error("{0} is no exit code of plimsoll's")]
pub struct UnknownExit(pub u8);

impl TryFrom<u8> for Exit {
    type Error = UnknownExit;

    fn try_from(code: u8) -> Result<Self, Self::Error> {
        Exit::ALL.into_iter().find(|e| e.code() == code).ok_or(UnknownExit(code))
    }
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        exit.code().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_graver_outcome_decides() {
        assert_eq!(Exit::of_many([Exit::Passed, Exit::GuestFailed, Exit::Refused]), Exit::Refused);
        assert_eq!(Exit::of_many([Exit::Refused, Exit::Internal, Exit::Terminated]), Exit::Terminated);
        assert_eq!(Exit::of_many([Exit::Rejected, Exit::Unavailable]), Exit::Unavailable);
        assert_eq!(Exit::of_many([]), Exit::Passed);
    }

    #[test]
    fn codes_are_distinct_and_round_trip() {
        for exit in Exit::ALL {
            assert_eq!(Exit::try_from(exit.code()).unwrap(), exit);
        }
        assert!(Exit::try_from(3).is_err());
    }
}
