//! One end of a connection: whole frames and their descriptors over a Unix stream socket.
//!
//! Main type: [`Link`]. What was received of a frame is kept in it, so a receive that is given up and begun again loses
//! nothing. It holds one frame at most, whose size its kind bounds, and allocates only what has arrived, a piece at a time.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use tokio::io::Interest;
use tokio::net::UnixStream;

use super::protocol::{HEAD, MAX_FDS, ProtocolError, carries_descriptors, head};

/// Read at a time, bytes.
const CHUNK: usize = 64 << 10;

/// A frame as it came.
#[derive(Debug)]
pub struct Frame {
    /// Its kind.
    pub kind: u8,
    /// Its body.
    pub body: Vec<u8>,
    /// The descriptors that came with it; empty for every kind that has none.
    pub fds: Vec<OwnedFd>,
}

/// Why no frame came, or could be sent.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The other side closed the connection, or is gone.
    #[error("the connection was closed")]
    Closed,
    /// The socket failed.
    #[error("the connection failed")]
    Io(#[source] io::Error),
    /// What came is no frame.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    /// Descriptors that may not come, or too many.
    #[error("descriptors came that were not asked for")]
    Descriptors,
}

impl From<io::Error> for LinkError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof => {
                LinkError::Closed
            }
            _ => LinkError::Io(error),
        }
    }
}

/// One end of a connection.
#[derive(Debug)]
pub struct Link {
    stream: UnixStream,
    /// What came of the frame that is being received.
    head: Vec<u8>,
    body: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Link {
    /// An end of a connected socket. To be called in a runtime.
    ///
    /// # Errors
    /// If the runtime can't watch it.
    pub fn new(stream: StdStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self::of(UnixStream::from_std(stream)?))
    }

    /// The same for a stream of the runtime's.
    #[must_use]
    pub const fn of(stream: UnixStream) -> Self {
        Self { stream, head: Vec::new(), body: Vec::new(), fds: Vec::new() }
    }

    /// The socket. What this end had received of a frame is lost.
    ///
    /// # Errors
    /// If the runtime can't let go of it.
    pub fn into_stream(self) -> io::Result<StdStream> {
        self.stream.into_std()
    }

    /// The next frame. Can be given up and begun again.
    ///
    /// # Errors
    /// [`LinkError::Closed`] at the end; anything else is a fault of the other side, after which nothing more can be read.
    pub async fn receive(&mut self) -> Result<Frame, LinkError> {
        while self.head.len() < HEAD {
            let want = HEAD - self.head.len();
            let (bytes, fds) = self.read(want).await?;
            self.head.extend_from_slice(&bytes);
            self.fds.extend(fds);
            self.bounded()?;
        }
        let mut first = [0; HEAD];
        first.copy_from_slice(&self.head);
        let (kind, length) = head(first)?;
        if !carries_descriptors(kind) && !self.fds.is_empty() {
            return Err(LinkError::Descriptors);
        }
        while self.body.len() < length {
            let (bytes, fds) = self.read((length - self.body.len()).min(CHUNK)).await?;
            self.body.extend_from_slice(&bytes);
            self.fds.extend(fds);
            self.bounded()?;
            if !carries_descriptors(kind) && !self.fds.is_empty() {
                return Err(LinkError::Descriptors);
            }
        }
        self.head.clear();
        Ok(Frame { kind, body: std::mem::take(&mut self.body), fds: std::mem::take(&mut self.fds) })
    }

    /// How many bytes the frame takes whose head has come; none before.
    #[must_use]
    pub fn expected(&self) -> Option<usize> {
        head(*self.head.first_chunk::<HEAD>()?).ok().map(|(_, length)| length)
    }

    /// Waits until something has come, or the other side is gone, without taking any of it.
    ///
    /// # Errors
    /// If the socket failed.
    pub async fn readable(&self) -> io::Result<()> {
        self.stream.readable().await
    }

    fn bounded(&self) -> Result<(), LinkError> {
        if self.fds.len() > MAX_FDS { Err(LinkError::Descriptors) } else { Ok(()) }
    }

    /// Something, at most `most` bytes, so that no byte of a later frame is taken.
    async fn read(&mut self, most: usize) -> Result<(Vec<u8>, Vec<OwnedFd>), LinkError> {
        let stream = &self.stream;
        let (bytes, fds, cut) = stream.async_io(Interest::READABLE, || receive(stream.as_fd(), most)).await?;
        if cut {
            return Err(LinkError::Descriptors);
        }
        if bytes.is_empty() { Err(LinkError::Closed) } else { Ok((bytes, fds)) }
    }

    /// Sends a frame with its descriptors. Can't be given up: half a frame would be left.
    ///
    /// # Errors
    /// If the other side is gone.
    pub async fn send(&mut self, frame: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), LinkError> {
        let mut rest = frame;
        let mut with = fds;
        while !rest.is_empty() {
            let stream = &self.stream;
            let sent = stream.async_io(Interest::WRITABLE, || send(stream.as_fd(), rest, with)).await?;
            rest = rest.get(sent..).unwrap_or_default();
            with = &[];
        }
        Ok(())
    }

    /// Sends what the kernel takes now; says how much that was.
    ///
    /// # Errors
    /// If the other side is gone.
    pub async fn send_some(&self, bytes: &[u8]) -> Result<usize, LinkError> {
        let stream = &self.stream;
        Ok(stream.async_io(Interest::WRITABLE, || send(stream.as_fd(), bytes, &[])).await?)
    }

    /// Sends what the kernel takes at once, without waiting; for a last word to somebody who may not listen.
    pub fn send_now(&self, frame: &[u8]) {
        let _ = send(self.stream.as_fd(), frame, &[]);
    }

    /// Says that nothing more comes from this end.
    pub fn end_writing(&self) {
        let _ = rustix::net::shutdown(&self.stream, rustix::net::Shutdown::Write);
    }

    /// Ends both directions, also for copies of the socket that something else may hold.
    pub fn shut_down(&self) {
        let _ = rustix::net::shutdown(&self.stream, rustix::net::Shutdown::Both);
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Bytes, descriptors, and whether some of the latter were cut off.
type Piece = (Vec<u8>, Vec<OwnedFd>, bool);

fn receive(socket: BorrowedFd<'_>, most: usize) -> io::Result<Piece> {
    let mut bytes = vec![0; most];
    // One more than allowed, so that too many are seen to be that; what does not fit the kernel closes.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS + 1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags)?;
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    bytes.truncate(received.bytes);
    Ok((bytes, fds, received.flags.contains(ReturnFlags::CTRUNC)))
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for one message"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags)?)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::Duration;

    use super::super::protocol::{Cancelled, Hello, ToClient, ToService, frame};
    use super::*;

    fn pair() -> (Link, Link) {
        let (a, b) = StdStream::pair().unwrap();
        (Link::new(a).unwrap(), Link::new(b).unwrap())
    }

    fn nulls(count: usize) -> Vec<File> {
        (0..count).map(|_| File::open("/dev/null").unwrap()).collect()
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn a_frame_and_its_descriptors_arrive_together_whatever_follows() {
        runtime().block_on(async {
            let (mut a, mut b) = pair();
            let files = nulls(2);
            let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            let body = vec![b' '; 70_000];
            a.send(&frame(2, &body), &fds).await.unwrap();
            a.send(&ToService::Cancel(Cancelled { interrupt: true }).encode(), &[]).await.unwrap();
            let first = b.receive().await.unwrap();
            assert_eq!((first.kind, first.body.len(), first.fds.len()), (2, body.len(), 2));
            let second = b.receive().await.unwrap();
            assert_eq!((second.kind, second.fds.len()), (3, 0));
            drop(a);
            assert!(matches!(b.receive().await, Err(LinkError::Closed)));
        });
    }

    #[test]
    fn a_receive_that_was_given_up_loses_nothing() {
        runtime().block_on(async {
            let (mut a, mut b) = pair();
            let bytes = ToClient::Welcome(Hello::ours()).encode();
            for byte in &bytes {
                assert!(tokio::time::timeout(Duration::from_millis(1), b.receive()).await.is_err());
                a.send(&[*byte], &[]).await.unwrap();
            }
            assert_eq!(b.receive().await.unwrap().body, bytes[HEAD..]);
        });
    }

    #[test]
    fn descriptors_with_the_wrong_frame_or_too_many_are_refused() {
        runtime().block_on(async {
            let files = nulls(MAX_FDS);
            let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            let (mut a, mut b) = pair();
            a.send(&ToService::Hello(Hello::ours()).encode(), &fds[..1]).await.unwrap();
            assert!(matches!(b.receive().await, Err(LinkError::Descriptors)));
            // As many as allowed, twice: each byte of a frame may carry some.
            let (mut a, mut b) = pair();
            let request = frame(2, b"{}");
            a.send(&request[..1], &fds).await.unwrap();
            a.send(&request[1..], &fds).await.unwrap();
            assert!(matches!(b.receive().await, Err(LinkError::Descriptors)));
            let (mut a, mut b) = pair();
            a.send(&request, &fds).await.unwrap();
            assert_eq!(b.receive().await.unwrap().fds.len(), MAX_FDS, "the harmless one");
        });
    }

    #[test]
    fn a_length_is_believed_only_as_far_as_its_kind_allows() {
        runtime().block_on(async {
            let (mut a, mut b) = pair();
            a.send(&[0xff, 0xff, 0xff, 0xff, 2], &[]).await.unwrap();
            assert!(matches!(b.receive().await, Err(LinkError::Protocol(ProtocolError::TooLong { .. }))));
            let (mut a, mut b) = pair();
            a.send(&[0, 0, 0, 0, 200], &[]).await.unwrap();
            assert!(matches!(b.receive().await, Err(LinkError::Protocol(ProtocolError::Kind(200)))));
        });
    }
}
