//! The engine executable.

use crate::backend::executable::{Executable, OpenError};
use crate::backend::{Backend, Engines, PrepareError};

/// What to do without gVisor.
const INSTALL: &str = "install gVisor (`plimsoll setup gvisor`; or on Debian and Ubuntu `apt-get install runsc`, on Debian 12 \
                       from bookworm-backports), or name it with --runsc or PLIMSOLL_RUNSC";
/// What stands before the version in what it says of itself.
pub const VERSION_PREFIX: &str = "runsc version ";

/// The executable that the plan names, else the first in `PATH`.
///
/// # Errors
/// [`PrepareError::Unavailable`] if there is none, or it is no program.
pub fn open(engines: &Engines) -> Result<Executable, PrepareError> {
    Executable::open("runsc", engines.runsc.as_deref()).map_err(|e| PrepareError::Unavailable {
        backend: Backend::Gvisor,
        help: match e {
            OpenError::NoProgram(_) => "name the runsc executable itself with --runsc or PLIMSOLL_RUNSC".to_owned(),
            _ => INSTALL.to_owned(),
        },
        blocker: e.to_string(),
    })
}

/// A flag that the engine does not know, if that is what its error says.
#[must_use]
pub fn unknown_flag(log: &str) -> Option<String> {
    let rest = log.split("flag provided but not defined: -").nth(1)?;
    let flag: String =
        rest.trim_start_matches('-').chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
    if flag.is_empty() { None } else { Some(flag) }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn an_unknown_flag_is_recognised() {
        assert_eq!(unknown_flag("flag provided but not defined: -directfs\nUsage:").as_deref(), Some("directfs"));
        assert_eq!(unknown_flag("creating container: no such file"), None);
    }

    #[test]
    fn an_engine_that_is_not_there_has_a_fix() {
        let engines = Engines { runsc: Some(Path::new("/nonexistent/runsc").to_owned()), ..Engines::default() };
        let Err(PrepareError::Unavailable { help, .. }) = open(&engines) else { panic!("it was opened") };
        assert!(help.contains("--runsc"));
    }
}
