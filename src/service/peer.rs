//! Who is on the other end of a socket, as the kernel says, and whether the policy lets them ask.
//!
//! Names are looked up in `/etc/passwd` and `/etc/group` alone: a static program has no other name services. Whoever
//! comes from a directory service is named in the policy by number.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use crate::backend::sys;
use crate::spec::ServiceRules;
use crate::spec::policy::Account;

/// User and group of whoever is on the other end, alone.
///
/// # Errors
/// As [`Peer::of`].
pub fn ids(socket: impl AsFd) -> io::Result<(u32, u32)> {
    sys::peer_ids(socket)
}

/// A process on the other end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Its other groups.
    pub groups: Vec<u32>,
}

impl Peer {
    /// Asks the kernel. These are the ids that the process had when it connected.
    ///
    /// # Errors
    /// If the socket is none, or no Unix socket.
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        let (uid, gid) = sys::peer_ids(&socket)?;
        Ok(Self { uid, gid, groups: sys::peer_groups(socket)? })
    }

    /// Whether the policy lets this user ask. `service` is the user that the service runs as: unless that is root, it
    /// serves nobody else.
    #[must_use]
    pub fn may_ask(&self, rules: &ServiceRules, service: u32) -> bool {
        self.may_ask_by(rules, service, &Names::of_host())
    }

    fn may_ask_by(&self, rules: &ServiceRules, service: u32, names: &Names) -> bool {
        if service != 0 {
            return self.uid == service;
        }
        let is = |account: &Account, id: u32, file: &str| match account {
            Account::Id(known) => *known == id,
            Account::Name(name) => names.lookup(file, name) == Some(id),
        };
        let in_group = |account: &Account| {
            std::iter::once(&self.gid).chain(&self.groups).any(|gid| is(account, *gid, &names.group))
        };
        // Root could start the same run without asking.
        self.uid == 0
            || rules.is_open()
            || rules.users.iter().flatten().any(|account| is(account, self.uid, &names.passwd))
            || rules.groups.iter().flatten().any(in_group)
    }
}

struct Names {
    passwd: String,
    group: String,
}

impl Names {
    fn of_host() -> Self {
        let read = |path: &str| std::fs::read_to_string(Path::new(path)).unwrap_or_default();
        Self { passwd: read("/etc/passwd"), group: read("/etc/group") }
    }

    /// passwd(5) and group(5): name, password, number. The first line of a name counts.
    fn lookup(&self, file: &str, name: &str) -> Option<u32> {
        let mut fields = file.lines().map(|line| line.split(':')).find(|fields| fields.clone().next() == Some(name))?;
        fields.nth(2)?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Policy;

    fn names() -> Names {
        Names {
            passwd: "root:x:0:0::/:\nrunner:x:1001:100::/:\nodd:x:none\n".to_owned(),
            group: "ci:x:2000:other\nci:x:2001:\n".to_owned(),
        }
    }

    #[test]
    fn who_is_named_may_ask_and_nobody_else() {
        let rules = Policy::of_text("service: { users: [runner, odd, 7], groups: [ci] }\n").service();
        let peer = |uid, gid, groups: &[u32]| Peer { uid, gid, groups: groups.to_vec() };
        let may = |peer: Peer| peer.may_ask_by(&rules, 0, &names());
        assert!(
            may(peer(1001, 1, &[])) && may(peer(7, 1, &[])) && may(peer(5, 2000, &[])) && may(peer(5, 1, &[3, 2000]))
        );
        assert!(may(peer(0, 0, &[])));
        assert!(!may(peer(5, 1, &[])) && !may(peer(2000, 1, &[1001, 7])) && !may(peer(5, 2001, &[])));
        let nobody = Policy::of_text("service: { groups: [] }\n").service();
        assert!(!peer(1001, 1, &[]).may_ask_by(&nobody, 0, &names()));
        assert!(peer(1001, 1, &[]).may_ask_by(&ServiceRules::default(), 0, &names()));
    }

    #[test]
    fn a_service_that_is_not_root_serves_itself_alone() {
        let peer = |uid| Peer { uid, gid: 0, groups: vec![] };
        let open = ServiceRules::default();
        assert!(peer(1000).may_ask_by(&open, 1000, &names()));
        assert!(!peer(1001).may_ask_by(&open, 1000, &names()) && !peer(0).may_ask_by(&open, 1000, &names()));
    }

    #[test]
    fn the_kernel_says_who_it_is() {
        let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = Peer::of(&a).unwrap();
        assert_eq!(peer.uid, rustix::process::geteuid().as_raw());
        let mut own: Vec<u32> = rustix::process::getgroups().unwrap().iter().map(|g| g.as_raw()).collect();
        let mut groups = peer.groups;
        own.sort_unstable();
        groups.sort_unstable();
        assert_eq!(groups, own);
    }
}
