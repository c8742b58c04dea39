//! Who an image's program is.
//!
//! Main function: [`resolve`]. `USER` of an image is a name or number, with or without a group; names are looked up in the
//! image's own `/etc/passwd` and `/etc/group`, which are hostile: bounded, and opened through no link. Guest code never
//! runs as root, so root becomes the user that guests otherwise have.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use super::rootfs::GUEST_USER;
use crate::artifact::beneath::confined;
use crate::artifact::rejection::shown;

/// Most of such a file that is read, bytes.
const MAX_FILE: u64 = 1 << 20;

/// Uid and gid for guest code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Neither is 0.
    pub ids: (u32, u32),
    /// What a report should say, if it is not who the image means.
    pub notice: Option<String>,
}

/// Why there is no such user.
#[derive(Debug, thiserror::Error)]
pub enum UserError {
    /// It is in no list.
    #[error("the image's {file} has no `{}`, which the image is to run as", shown(name.as_bytes()))]
    Unknown {
        /// Which list.
        file: &'static str,
        /// Who.
        name: String,
    },
    /// The list can't be read.
    #[error("the image's {file} can't be read")]
    Io {
        /// Which list.
        file: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Uid and gid that `user` (`USER` of the image, may be empty) means in the unpacked tree `root`.
///
/// # Errors
/// If a name is not in the image's lists.
pub fn resolve(root: &Path, user: &str) -> Result<User, UserError> {
    let (name, group) = match user.split_once(':') {
        Some((name, group)) => (name, Some(group).filter(|g| !g.is_empty())),
        None => (user, None),
    };
    let known =
        |named: &[&str]| -> Option<(u32, u32)> { Some((named.get(2)?.parse().ok()?, named.get(3)?.parse().ok()?)) };
    let (uid, own) = match name.parse::<u32>() {
        // Also where an image has no lists, which one made from scratch does not.
        _ if matches!(name, "" | "root") => (0, 0),
        // A number needs no entry, and has no group then.
        Ok(uid) => {
            let entry = lookup(root, "etc/passwd", |fields| known(fields).filter(|ids| ids.0 == uid)).ok().flatten();
            entry.unwrap_or((uid, 0))
        }
        Err(_) => lookup(root, "etc/passwd", |fields| known(fields).filter(|_| fields[0] == name))?
            .ok_or_else(|| UserError::Unknown { file: "/etc/passwd", name: name.to_owned() })?,
    };
    let gid = match group.map(|group| (group, group.parse::<u32>())) {
        None => own,
        Some((_, Ok(gid))) => gid,
        Some(("root", _)) => 0,
        Some((group, Err(_))) => {
            lookup(root, "etc/group", |fields| fields.get(2)?.parse().ok().filter(|_| fields[0] == group))?
                .ok_or_else(|| UserError::Unknown { file: "/etc/group", name: group.to_owned() })?
        }
    };
    let usable = |id: u32| id != 0 && id != u32::MAX;
    let ids = (if usable(uid) { uid } else { GUEST_USER.0 }, if usable(gid) { gid } else { GUEST_USER.1 });
    let notice = (ids != (uid, gid)).then(|| {
        let who = if user.is_empty() { "root".to_owned() } else { format!("`{}`", shown(user.as_bytes())) };
        format!(
            "the image's user is {who} ({uid}:{gid}); guest code never runs as root, so it runs as {}:{}",
            ids.0, ids.1
        )
    });
    Ok(User { ids, notice })
}

/// The first line of a list that `fits` makes something of.
fn lookup<T>(root: &Path, file: &'static str, fits: impl Fn(&[&str]) -> Option<T>) -> Result<Option<T>, UserError> {
    let read = || -> io::Result<Vec<u8>> {
        let root = OwnedFd::from(File::open(root)?);
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = File::from(confined(root.as_fd(), file, flags, Mode::empty())?);
        if !opened.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
        }
        let mut bytes = Vec::new();
        opened.take(MAX_FILE).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|source| UserError::Io { file, source })?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(text.lines().find_map(|line| fits(&line.split(':').collect::<Vec<_>>())))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    fn image() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("etc")).unwrap();
        let passwd = "root:x:0:0::/root:/bin/sh\nbroken\napp:x:1000:1001::/:/bin/sh\nlow:x:33:0::/:/bin/sh\n";
        fs::write(dir.path().join("etc/passwd"), passwd).unwrap();
        fs::write(dir.path().join("etc/group"), "root:x:0:\nstaff:x:50:app\n").unwrap();
        dir
    }

    #[test]
    fn names_and_numbers_are_who_they_are_in_the_image() {
        let image = image();
        let ids = |user: &str| resolve(image.path(), user).unwrap();
        for (user, expected) in [
            ("app", (1000, 1001)),
            ("1000", (1000, 1001)),
            ("app:staff", (1000, 50)),
            ("5:6", (5, 6)),
            ("app:7", (1000, 7)),
            ("app:", (1000, 1001)),
        ] {
            assert_eq!(ids(user), User { ids: expected, notice: None }, "{user}");
        }
    }

    #[test]
    fn root_becomes_the_usual_guest_and_that_is_said() {
        let image = image();
        let usual = GUEST_USER;
        for (user, expected) in [
            ("", usual),
            ("root", usual),
            ("0", usual),
            ("0:0", usual),
            ("root:staff", (usual.0, 50)),
            ("app:root", (1000, usual.1)),
            ("77", (77, usual.1)),
            ("low", (33, usual.1)),
            ("4294967295:5", (usual.0, 5)),
        ] {
            let found = resolve(image.path(), user).unwrap();
            assert_eq!(found.ids, expected, "{user}");
            assert!(found.notice.unwrap().contains("never runs as root"), "{user}");
        }
    }

    #[test]
    fn who_is_not_there_is_an_error_and_lists_are_not_links() {
        let image = image();
        assert!(matches!(resolve(image.path(), "nobody"), Err(UserError::Unknown { .. })));
        assert!(matches!(resolve(image.path(), "app:nobody"), Err(UserError::Unknown { .. })));
        assert!(matches!(resolve(image.path(), "-1"), Err(UserError::Unknown { .. })));
        fs::remove_file(image.path().join("etc/passwd")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", image.path().join("etc/passwd")).unwrap();
        assert!(matches!(resolve(image.path(), "daemon"), Err(UserError::Io { .. })));
        for (user, ids) in [("5:6", (5, 6)), ("root:root", GUEST_USER)] {
            assert_eq!(resolve(image.path(), user).unwrap().ids, ids, "{user} needs no list");
        }
    }

    proptest! {
        #[test]
        fn no_user_is_ever_root(user in "(root|app|low|0|1000|[0-9]{1,11}|)(:(root|staff|0|[0-9]{1,11}))?") {
            if let Ok(found) = resolve(image().path(), &user) {
                prop_assert!(found.ids.0 != 0 && found.ids.1 != 0);
            }
        }
    }
}
