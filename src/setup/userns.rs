//! User namespaces for a plain user's plimsoll where AppArmor denies them: Ubuntu since 23.10
//! (<https://ubuntu.com/blog/ubuntu-23-10-restricted-unprivileged-user-namespaces>) grants them by profile. The profile names
//! the path of plimsoll and grants that one thing; nothing else about the program changes.

use std::fs;
use std::path::Path;

use super::{Place, Plan, Put, SetupError};

/// Where the profile goes.
const PROFILE: &str = "/etc/apparmor.d/plimsoll";
/// Whether the kernel asks for one.
const SWITCH: &str = "proc/sys/kernel/apparmor_restrict_unprivileged_userns";

/// What is to be written for the plimsoll at `program`; nothing where the kernel doesn't ask for it.
///
/// # Errors
/// If it takes root, or the path can't stand in a profile.
pub fn plan(place: &Place, program: &Path) -> Result<Plan, SetupError> {
    if place.user.is_some() {
        return Err(SetupError::Root("an AppArmor profile"));
    }
    let path = program.to_str().filter(|path| {
        path.starts_with('/') && path.bytes().all(|b| b.is_ascii_alphanumeric() || b"/._-+".contains(&b))
    });
    let Some(path) = path else {
        return Err(SetupError::Unfit(format!("the path {} can't stand in a profile", program.display())));
    };
    // What is being built for another machine can't be asked.
    let building = place.root != Path::new("/");
    if !building && fs::read_to_string(Path::new("/").join(SWITCH)).map_or(true, |text| text.trim() == "0") {
        let note = "AppArmor denies no user namespaces here: nothing to do".to_owned();
        return Ok(Plan { files: Vec::new(), notes: vec![note] });
    }
    let content = format!(
        "# Written by `plimsoll setup userns`.\nabi <abi/4.0>,\ninclude <tunables/global>\n\n\
         profile plimsoll {path} flags=(unconfined) {{\n  userns,\n\n  include if exists <local/plimsoll>\n}}\n"
    );
    let file = Put { to: place.at(PROFILE), mode: 0o644, content: content.into_bytes(), engine: None };
    Ok(Plan { files: vec![file], notes: Vec::new() })
}

/// What loads the profile, once it is written.
#[must_use]
pub fn load(place: &Place) -> Option<(&'static str, Vec<std::path::PathBuf>)> {
    let file = place.at(PROFILE);
    (place.root == Path::new("/") && file.exists()).then(|| ("apparmor_parser", vec!["-r".into(), file]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_profile_names_the_program_and_grants_one_thing() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place { root: dir.path().to_owned(), user: None };
        let plan = plan(&place, Path::new("/usr/local/bin/plimsoll")).unwrap();
        let text = String::from_utf8(plan.files[0].content.clone()).unwrap();
        assert!(text.contains("profile plimsoll /usr/local/bin/plimsoll flags=(unconfined) {\n  userns,\n"), "{text}");
        for hostile in ["/a b", "/a{b}", "relative", "/x\n}", "/**"] {
            assert!(super::plan(&place, Path::new(hostile)).is_err(), "{hostile}");
        }
    }
}
