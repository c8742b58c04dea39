//! The socket that the service listens on, from systemd or its own, and what systemd is told.
//!
//! Sources: sd_listen_fds(3) and sd_notify(3), whose protocols are a few lines each.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::net::sockopt;
use rustix::net::{AddressFamily, SocketType};

use crate::backend::sys;
use crate::env::{Env, Var};

/// The first descriptor that is handed over (`SD_LISTEN_FDS_START`).
const FIRST: u32 = 3;

/// Why there is nothing to listen on.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// What was handed over is something else.
    #[error("what systemd handed over is {0}")]
    Activation(String),
    /// Another service is there.
    #[error("a service listens on {0} already")]
    Busy(PathBuf),
    /// Something other than a socket is there.
    #[error("{0} is there and is no socket")]
    NoSocket(PathBuf),
    /// It failed.
    #[error("failed to listen on {path}")]
    Io {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A socket that is listened on. One that this made is removed with it.
#[derive(Debug)]
pub struct Listening {
    /// The socket.
    pub listener: UnixListener,
    made: Option<(PathBuf, u64)>,
}

impl Drop for Listening {
    fn drop(&mut self) {
        if let Some((path, inode)) = &self.made
            && fs::symlink_metadata(path).is_ok_and(|meta| meta.ino() == *inode)
        {
            let _ = fs::remove_file(path);
        }
    }
}

/// The socket that systemd handed over, or one at `path`. For the start of the program, and once.
///
/// # Errors
/// As [`ListenError`] says.
pub fn listen(path: &Path, env: &Env) -> Result<Listening, ListenError> {
    match handed_over(env)? {
        Some(listener) => Ok(Listening { listener, made: None }),
        None => bind(path),
    }
}

fn handed_over(env: &Env) -> Result<Option<UnixListener>, ListenError> {
    let ours = env.number(Var::ListenPid) == Some(u64::from(std::process::id()));
    let count = match env.number(Var::ListenFds).filter(|_| ours) {
        None | Some(0) => return Ok(None),
        Some(count) => count,
    };
    if count > 1 {
        return Err(ListenError::Activation(format!("{count} sockets, where one is meant")));
    }
    let wrong = |e: io::Error| ListenError::Activation(format!("no usable descriptor: {e}"));
    let fd = sys::take_descriptor(FIRST).map_err(wrong)?;
    check(fd).map(Some)
}

/// Takes a descriptor that is a listening Unix stream socket.
fn check(fd: OwnedFd) -> Result<UnixListener, ListenError> {
    let wrong = |e: rustix::io::Errno| ListenError::Activation(format!("no socket: {e}"));
    let is = (
        sockopt::socket_domain(&fd).map_err(wrong)?,
        sockopt::socket_type(&fd).map_err(wrong)?,
        sockopt::socket_acceptconn(&fd).map_err(wrong)?,
    );
    if is != (AddressFamily::UNIX, SocketType::STREAM, true) {
        return Err(ListenError::Activation("no listening Unix stream socket".to_owned()));
    }
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).map_err(wrong)?;
    Ok(UnixListener::from(fd))
}

fn bind(path: &Path) -> Result<Listening, ListenError> {
    let io = |source| ListenError::Io { path: path.to_owned(), source };
    if let Some(above) = path.parent().filter(|above| !above.as_os_str().is_empty()) {
        fs::DirBuilder::new().recursive(true).mode(0o755).create(above).map_err(io)?;
    }
    match fs::symlink_metadata(path) {
        Ok(meta) if !meta.file_type().is_socket() => return Err(ListenError::NoSocket(path.to_owned())),
        // Left by a predecessor, if nobody answers.
        Ok(_) => match UnixStream::connect(path) {
            Ok(_) => return Err(ListenError::Busy(path.to_owned())),
            Err(_) => fs::remove_file(path).map_err(io)?,
        },
        Err(_) => {}
    }
    let listener = UnixListener::bind(path).map_err(io)?;
    // Who may ask is the policy's; a service that is not root serves its own user alone.
    let mode = if rustix::process::geteuid().is_root() { 0o666 } else { 0o600 };
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(io)?;
    let inode = fs::symlink_metadata(path).map_err(io)?.ino();
    Ok(Listening { listener, made: Some((path.to_owned(), inode)) })
}

/// Tells systemd, if it is there, a state such as `READY=1`.
pub fn notify(env: &Env, state: &str) {
    if let Err(error) = notified(env, state) {
        tracing::warn!("systemd could not be told {state}: {error}");
    }
}

fn notified(env: &Env, state: &str) -> io::Result<()> {
    let Some(socket) = env.os(Var::NotifySocket) else { return Ok(()) };
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let from = UnixDatagram::unbound()?;
    from.set_nonblocking(true)?;
    from.send_to_addr(state.as_bytes(), &address)?;
    Ok(())
}

/// Lets this process have as many descriptors as it is allowed to: each connection holds some.
pub fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!("the limit of open files stays low: {error}");
    }
}

impl AsFd for Listening {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_made_reclaimed_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("below/plimsoll.sock");
        let first = bind(&path).unwrap();
        assert!(matches!(bind(&path), Err(ListenError::Busy(_))));
        drop(first);
        assert!(!path.exists());
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "as a killed service leaves it");
        drop(bind(&path).unwrap());
        fs::write(&path, "mine").unwrap();
        assert!(matches!(bind(&path), Err(ListenError::NoSocket(_))));
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
    }

    #[test]
    fn only_a_listening_unix_stream_socket_is_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        assert!(check(OwnedFd::from(listener)).is_ok());
        let others: [OwnedFd; 4] = [
            fs::File::open("/dev/null").unwrap().into(),
            UnixStream::pair().unwrap().0.into(),
            UnixDatagram::bind(dir.path().join("d")).unwrap().into(),
            std::net::TcpListener::bind("127.0.0.1:0").unwrap().into(),
        ];
        for other in others {
            assert!(matches!(check(other), Err(ListenError::Activation(_))));
        }
    }

    #[test]
    fn systemd_is_told_by_path_and_by_abstract_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let receiver = UnixDatagram::bind(&path).unwrap();
        notified(&Env::from_iter([(Var::NotifySocket, path.as_os_str())]), "READY=1").unwrap();
        let mut buffer = [0; 64];
        let length = receiver.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"READY=1");
        let name = format!("plimsoll-test-{}", std::process::id());
        let receiver = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        notified(&Env::from_iter([(Var::NotifySocket, format!("@{name}"))]), "STOPPING=1").unwrap();
        assert_eq!(receiver.recv(&mut buffer).unwrap(), b"STOPPING=1".len());
        notified(&Env::default(), "READY=1").unwrap();
    }
}
