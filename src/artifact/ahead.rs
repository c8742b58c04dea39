//! Reads ahead on a second thread: decompressing and writing are each about half of the work.
//!
//! Main type: [`Ahead`]. A few buffers go round between the two threads, so memory is bounded and a slow writer holds
//! the reader back. Nothing is decided on the second thread: budget and parsing are the consumer's.

use std::io::{self, BufRead, Read};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, Scope};

use super::stream::CHUNK;

/// Buffers that go round.
const BUFFERS: usize = 6;

/// The consumer's end.
pub struct Ahead {
    full: Receiver<io::Result<Vec<u8>>>,
    free: SyncSender<Vec<u8>>,
    current: Vec<u8>,
    used: usize,
    ended: bool,
}

/// Reads `reader` on a thread of its own; gives it back when no thread can be started.
pub fn ahead<'scope, 'env, R>(scope: &'scope Scope<'scope, 'env>, reader: R) -> Result<Ahead, R>
where
    R: Read + Send + 'scope,
{
    let (fill, full) = sync_channel(BUFFERS);
    let (free, empty) = sync_channel(BUFFERS);
    let (hand_over, take_over) = sync_channel::<R>(1);
    // Without a name: setting one is a system call that the jail doesn't allow.
    let started = Builder::new().spawn_scoped(scope, move || {
        if let Ok(reader) = take_over.recv() {
            produce(reader, &empty, &fill);
        }
    });
    if started.is_err() {
        return Err(reader);
    }
    for _ in 0..BUFFERS {
        // There is room for all of them.
        let _ = free.try_send(Vec::new());
    }
    match hand_over.send(reader) {
        Ok(()) => Ok(Ahead { full, free, current: Vec::new(), used: 0, ended: false }),
        Err(unsent) => Err(unsent.0),
    }
}

/// Fills buffers until the end, an error, or nobody wants them any more.
fn produce(mut reader: impl Read, empty: &Receiver<Vec<u8>>, fill: &SyncSender<io::Result<Vec<u8>>>) {
    while let Ok(mut buffer) = empty.recv() {
        buffer.resize(CHUNK, 0);
        let mut length = 0;
        // Decoders give little at a time; a whole buffer costs the other thread one wake.
        let failed = loop {
            match reader.read(&mut buffer[length..]) {
                Ok(0) => break None,
                Ok(n) => length += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => break Some(e),
            }
            if length == CHUNK {
                break None;
            }
        };
        let ended = length < CHUNK;
        buffer.truncate(length);
        if fill.send(Ok(buffer)).is_err() {
            return;
        }
        if let Some(error) = failed {
            let _ = fill.send(Err(error));
            return;
        }
        if ended {
            return;
        }
    }
}

impl BufRead for Ahead {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        while self.used == self.current.len() && !self.ended {
            match self.full.recv() {
                Ok(next) => {
                    let done = std::mem::replace(&mut self.current, next?);
                    self.used = 0;
                    // Fails once the producer is through, which needs no more.
                    let _ = self.free.try_send(done);
                }
                Err(_) => self.ended = true,
            }
        }
        Ok(&self.current[self.used..])
    }

    fn consume(&mut self, amount: usize) {
        self.used += amount;
    }
}

impl Read for Ahead {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.fill_buf()?.read(buffer)?;
        self.consume(n);
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Dribble(u64, Option<io::ErrorKind>);

    impl Read for Dribble {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let n = buffer.len().min(1000).min(self.0 as usize);
            buffer[..n].fill(7);
            self.0 -= n as u64;
            match self.1 {
                Some(kind) if n == 0 => Err(kind.into()),
                _ => Ok(n),
            }
        }
    }

    #[test]
    fn all_bytes_arrive_then_the_end_or_the_error() {
        for size in [0, 1, CHUNK as u64, 10 * CHUNK as u64, 10 * CHUNK as u64 + 1] {
            for error in [None, Some(io::ErrorKind::UnexpectedEof)] {
                let mut found = Vec::new();
                let result = std::thread::scope(|scope| {
                    let Ok(mut reader) = ahead(scope, Dribble(size, error)) else { panic!("no thread") };
                    reader.read_to_end(&mut found).map_err(|e| e.kind())
                });
                assert_eq!((found.len() as u64, result.err()), (size, error));
            }
        }
    }

    #[test]
    fn a_consumer_that_stops_stops_the_producer() {
        std::thread::scope(|scope| {
            let Ok(mut reader) = ahead(scope, io::repeat(1)) else { panic!("no thread") };
            reader.read_exact(&mut [0; 10]).unwrap();
        });
    }
}
