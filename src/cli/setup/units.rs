//! The systemd units, as `packaging/systemd` has them, with this host's paths and group in them.

use std::path::Path;

use crate::cli::failure::Failure;
use crate::exit::Exit;

/// The service.
const SERVICE: &str = include_str!("../../../packaging/systemd/plimsoll.service");
/// Its socket.
const SOCKET: &str = include_str!("../../../packaging/systemd/plimsoll.socket");
/// What the first line of ours begins with.
const MARK: &str = "# Made by `plimsoll setup service`";
const EXEC: &str = "ExecStart=/usr/local/bin/plimsoll serve\n";
const MODE: &str = "SocketMode=0666\n";
const GROUP: &str = "SocketGroup=";

/// The service's unit, starting `exec`.
pub(super) fn service(exec: &str) -> Result<String, Failure> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._+-".contains(c);
    if !exec.starts_with('/') || !exec.chars().all(plain) {
        return Err(Failure::usage(format!("`{exec}` is no path that a unit can start")).with_help(
            "install plimsoll as /usr/local/bin/plimsoll, or name an absolute path of plain characters with --exec",
        ));
    }
    Ok(SERVICE.replacen(EXEC, &format!("ExecStart={exec} serve\n"), 1))
}

/// The socket's unit, for everybody or a group.
pub(super) fn socket(group: Option<&str>) -> Result<String, Failure> {
    let Some(group) = group else { return Ok(SOCKET.to_owned()) };
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let begins = group.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    if !begins || group.len() > 32 || !group.chars().all(plain) {
        return Err(Failure::usage(format!("--group: `{group}` is no group's name")));
    }
    Ok(SOCKET.replacen(MODE, &format!("SocketMode=0660\n{GROUP}{group}\n"), 1))
}

/// The group that a socket's unit names: setting up again without `--group` must not open it to everybody.
pub(super) fn group_of(unit: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(unit);
    text.lines()
        .find_map(|line| line.strip_prefix(GROUP))
        .map(|group| group.trim().to_owned())
        .filter(|g| !g.is_empty())
}

/// Whether a unit is one that may be replaced.
pub(super) fn ours(unit: &[u8], path: &Path) -> Result<(), Failure> {
    if unit.starts_with(MARK.as_bytes()) {
        return Ok(());
    }
    let path = path.display();
    Err(Failure::new(Exit::Internal, format!("{path} was not made by `plimsoll setup service`; it is left alone"))
        .with_help(format!("move it away, and put what you want of it into a drop-in: mv {path} {path}.old")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_replaced_is_in_the_files() {
        assert!(SERVICE.contains(EXEC) && SOCKET.contains(MODE));
        assert!(SERVICE.starts_with(MARK) && SOCKET.starts_with(MARK));
        assert!(service("/opt/plimsoll").unwrap().contains("\nExecStart=/opt/plimsoll serve\n"));
        let unit = socket(Some("ci")).unwrap();
        assert!(unit.contains("\nSocketMode=0660\nSocketGroup=ci\n"), "{unit}");
        assert_eq!(group_of(unit.as_bytes()).as_deref(), Some("ci"));
        assert_eq!(group_of(SOCKET.as_bytes()), None);
    }

    #[test]
    fn nothing_is_smuggled_into_a_unit() {
        for exec in ["plimsoll", "/opt/a b", "/opt/%h", "/opt/x\nExecStartPre=/bin/sh", "/opt/$HOME", ""] {
            assert!(service(exec).is_err(), "{exec}");
        }
        for group in ["", "-x", "a b", "a\nSocketMode=0777", "0x", &"a".repeat(33)] {
            assert!(socket(Some(group)).is_err(), "{group}");
        }
    }

    /// Each of these would make engines inherit what the evidence takes for their own doing.
    #[test]
    fn the_service_gives_its_children_neither_a_filter_nor_no_new_privs() {
        let set = |directive: &str| SERVICE.lines().any(|line| line.starts_with(directive));
        for directive in [
            "NoNewPrivileges=",
            "SystemCallFilter=",
            "SystemCallArchitectures=",
            "RestrictNamespaces=",
            "RestrictAddressFamilies=",
            "RestrictRealtime=",
            "RestrictSUIDSGID=",
            "MemoryDenyWriteExecute=",
            "LockPersonality=",
            "ProtectClock=",
            "ProtectHostname=",
            "ProtectKernelLogs=",
            "ProtectKernelModules=",
            "ProtectKernelTunables=",
            "PrivateDevices=",
        ] {
            assert!(!set(directive), "{directive}");
            assert!(SERVICE.contains(directive), "{directive} is not explained");
        }
    }

    #[test]
    fn the_socket_is_where_clients_look_for_it() {
        assert!(SOCKET.contains("\nListenStream=/run/plimsoll/plimsoll.sock\n"));
    }
}
