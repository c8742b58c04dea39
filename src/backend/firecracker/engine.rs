//! The engine's executables: the VMM and, for root, the jailer that goes with it.

use std::path::PathBuf;

use crate::backend::executable::{Executable, OpenError};
use crate::backend::{Backend, Engines, PrepareError};

/// What to do without Firecracker.
const INSTALL: &str = "install Firecracker and its jailer (`plimsoll setup firecracker`), or name them with --firecracker or PLIMSOLL_FIRECRACKER, and PLIMSOLL_JAILER";
/// What stands before the version in what the VMM says of itself.
pub const VERSION_PREFIX: &str = "Firecracker v";
/// The same for the jailer.
pub const JAILER_PREFIX: &str = "Jailer v";

/// What a microVM is started with.
#[derive(Debug)]
pub struct Vmm {
    /// Firecracker.
    pub firecracker: Executable,
    /// Its jailer, which only root can use.
    pub jailer: Option<Executable>,
}

impl Vmm {
    /// Opens what the plan names, else what is in `PATH`.
    ///
    /// # Errors
    /// [`PrepareError::Unavailable`] if something is missing.
    pub fn open(engines: &Engines, root: bool) -> Result<Self, PrepareError> {
        let firecracker = Executable::open("firecracker", engines.firecracker.as_deref()).map_err(unavailable)?;
        if !root {
            return Ok(Self { firecracker, jailer: None });
        }
        let beside: Option<PathBuf> =
            firecracker.path().parent().map(|p| p.join("jailer")).filter(|path| path.is_file());
        let path = engines.jailer.clone().or(beside);
        let jailer = Executable::open("jailer", path.as_deref()).map_err(unavailable)?;
        Ok(Self { firecracker, jailer: Some(jailer) })
    }
}

fn unavailable(error: OpenError) -> PrepareError {
    PrepareError::Unavailable {
        backend: Backend::Firecracker,
        help: match error {
            OpenError::NoProgram(_) => {
                "name the executable itself with --firecracker or PLIMSOLL_FIRECRACKER, and PLIMSOLL_JAILER".to_owned()
            }
            _ => INSTALL.to_owned(),
        },
        blocker: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn root_needs_the_jailer_and_a_plain_user_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let firecracker = dir.path().join("firecracker");
        std::fs::copy("/bin/sh", &firecracker).unwrap();
        let jailer = Some(Path::new("/nonexistent/jailer").to_owned());
        let engines = Engines { firecracker: Some(firecracker), jailer, ..Engines::default() };
        assert!(Vmm::open(&engines, false).unwrap().jailer.is_none());
        let Err(PrepareError::Unavailable { blocker, help, .. }) = Vmm::open(&engines, true) else { panic!() };
        assert!(blocker.contains("/nonexistent/jailer") && help.contains("PLIMSOLL_JAILER"));
        // Beside the VMM it is found without being named.
        std::fs::copy("/bin/sh", dir.path().join("jailer")).unwrap();
        let engines = Engines { jailer: None, ..engines };
        assert_eq!(Vmm::open(&engines, true).unwrap().jailer.unwrap().path(), dir.path().join("jailer"));
    }
}
