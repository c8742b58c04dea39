//! Handing open descriptors to the launcher over its control socket.
//!
//! They travel with one byte (unix(7), `SCM_RIGHTS`), so no descriptor of the runner is ever inheritable: another child
//! that happens to be started at the same moment cannot end up holding a boundary's channel.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

/// Most descriptors that one request comes with.
const MOST: usize = 8;

/// Sends descriptors, at most eight.
///
/// # Errors
/// As sendmsg(2).
pub fn send(socket: impl AsFd, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors"));
    }
    sendmsg(socket, &[IoSlice::new(b"f")], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives the descriptors of a request, which close on exec.
///
/// # Errors
/// As recvmsg(2), or if none came.
pub fn receive(socket: impl AsFd) -> io::Result<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0u8; 1];
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let descriptors: Vec<OwnedFd> = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        })
        .flatten()
        .collect();
    if descriptors.is_empty() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the descriptors did not come"));
    }
    Ok(descriptors)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn descriptors_arrive_and_close_on_exec() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (reader, writer) = io::pipe().unwrap();
        send(&ours, &[reader.as_fd(), writer.as_fd(), ours.as_fd()]).unwrap();
        let [first, second, _] = receive(&theirs).unwrap().try_into().unwrap();
        let inode = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).unwrap().st_ino;
        assert_eq!(inode(first.as_fd()), inode(reader.as_fd()));
        assert!(rustix::io::fcntl_getfd(&second).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }

    #[test]
    fn a_closed_socket_brings_none() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(ours);
        assert!(receive(&theirs).is_err());
    }
}
