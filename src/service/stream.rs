//! A run's events on their way to the client, however slowly it reads.
//!
//! The run is never held up: what the client doesn't take waits here, up to [`WAITING`] bytes of guest output; more is
//! counted and left out, since the log files have it anyway. Everything else is small, and there is a bounded amount of it
//! for each step. One thing does wait for the client: the word that a step's code is about to be started must be with the
//! kernel before it is, so that a client whose service dies knows what it doesn't know.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;

use super::link::Link;
use super::protocol::{Ended, Index, Named, Omitted, PIECE, ToClient};
use crate::run::Event;

/// Guest output that waits, bytes, with what keeping it costs.
const WAITING: usize = 1 << 20;
/// What keeping a piece costs beside its bytes: a guest may print one at a time.
const COST: usize = 256;
/// How long a client may take nothing once the run is over.
pub const STALL: Duration = Duration::from_secs(60);
/// Longest text of a step's progress, bytes.
const MAX_TEXT: usize = 1000;

/// What happens.
pub enum Item {
    /// In the run.
    Event(Event),
    /// A step's code is about to be started; an answer comes when the client has been told, or is gone.
    Dispatch(u32, SyncSender<()>),
}

struct Waiting {
    frame: Vec<u8>,
    output: usize,
    told: Option<SyncSender<()>>,
}

#[derive(Default)]
struct Queue {
    frames: VecDeque<Waiting>,
    output: usize,
    omitted: BTreeMap<u32, u64>,
}

impl Queue {
    fn push(&mut self, item: Item) {
        match item {
            Item::Dispatch(index, told) => self.add(&ToClient::Dispatch(Index { index }), 0, Some(told)),
            Item::Event(Event::Started { index, name }) => {
                self.add(&ToClient::Started(Named { index, text: name }), 0, None);
            }
            Item::Event(Event::Progress { index, mut what }) => {
                what.truncate(what.floor_char_boundary(MAX_TEXT));
                self.add(&ToClient::Progress(Named { index, text: what }), 0, None);
            }
            Item::Event(Event::Output { index, stream, bytes }) => {
                for piece in bytes.chunks(PIECE) {
                    let cost = piece.len() + COST;
                    // Once some is left out, all is until there is room again, or the log would be full of holes.
                    let most = if self.omitted.contains_key(&index) { WAITING / 2 } else { WAITING };
                    if self.output + cost > most {
                        *self.omitted.entry(index).or_default() += piece.len() as u64;
                        continue;
                    }
                    self.tell_omitted(index);
                    self.output += cost;
                    self.add(&ToClient::Output { index, stream, bytes: piece.to_vec() }, cost, None);
                }
            }
            Item::Event(Event::Ended { step }) => {
                self.tell_omitted(step.index);
                let ended = Ended {
                    index: step.index,
                    name: step.name.clone(),
                    exit: step.exit,
                    floor: step.floor,
                    tier: step.tier,
                    dispatched: step.dispatched,
                };
                self.add(&ToClient::Ended(ended), 0, None);
            }
        }
    }

    fn tell_omitted(&mut self, index: u32) {
        if let Some(bytes) = self.omitted.remove(&index) {
            self.add(&ToClient::Omitted(Omitted { index, bytes }), 0, None);
        }
    }

    fn add(&mut self, message: &ToClient, output: usize, told: Option<SyncSender<()>>) {
        self.frames.push_back(Waiting { frame: message.encode(), output, told });
    }
}

/// Sends what happens until no more can happen and all of it is sent. Gives the link back if the client is still there.
pub async fn pump(link: Link, mut items: UnboundedReceiver<Item>) -> Option<Link> {
    let mut queue = Queue::default();
    let mut first: Option<Waiting> = None;
    let mut sent = 0;
    let mut open = true;
    let mut gone = false;
    loop {
        if gone {
            // Nobody is told any more, and nobody waits for that.
            items.recv().await?;
            continue;
        }
        if first.is_none() {
            first = queue.frames.pop_front();
            sent = 0;
        }
        let rest = first.as_ref().map_or(&[][..], |waiting| waiting.frame.get(sent..).unwrap_or_default());
        if rest.is_empty() && !open {
            return Some(link);
        }
        let stall = async { if open { std::future::pending().await } else { tokio::time::sleep(STALL).await } };
        tokio::select! {
            item = items.recv(), if open => match item {
                Some(item) => queue.push(item),
                None => open = false,
            },
            taken = link.send_some(rest), if !rest.is_empty() => match taken {
                Ok(taken) => {
                    sent += taken;
                    if first.as_ref().is_some_and(|waiting| sent >= waiting.frame.len())
                        && let Some(done) = first.take()
                    {
                        queue.output -= done.output;
                        // Who waited for it may have given up.
                        let _ = done.told.map(|told| told.send(()));
                    }
                }
                Err(_) => {
                    // Those who wait to have told are let go.
                    (queue, first, gone) = (Queue::default(), None, true);
                }
            },
            () = stall => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use plimsoll_guest::Stream;
    use tokio::sync::mpsc;

    use super::*;

    fn output(bytes: usize) -> Item {
        Item::Event(Event::Output { index: 1, stream: Stream::Stdout, bytes: vec![b'x'; bytes] })
    }

    #[test]
    fn a_client_that_does_not_read_costs_a_bounded_amount() {
        let mut queue = Queue::default();
        for _ in 0..100 {
            queue.push(output(300_000));
        }
        let held: usize = queue.frames.iter().map(|waiting| waiting.frame.len()).sum();
        assert!(held <= WAITING + 64 * 1024, "{held}");
        let omitted = queue.omitted[&1] as usize;
        let kept: usize = queue.frames.iter().map(|waiting| waiting.output - COST).sum();
        assert_eq!(omitted + kept, 30_000_000, "what is left out is counted");
        let mut dribble = Queue::default();
        for _ in 0..100_000 {
            dribble.push(output(1));
        }
        assert!(dribble.frames.len() <= WAITING / COST, "{} pieces wait", dribble.frames.len());
        queue.output = 0;
        queue.push(output(1));
        let last: Vec<_> = queue.frames.iter().rev().take(2).map(|waiting| waiting.frame[4]).collect();
        assert_eq!(last.len(), 2);
        assert!(queue.omitted.is_empty(), "and told before what follows");
    }

    #[test]
    fn a_run_goes_on_while_nobody_reads_and_all_of_it_arrives_once_somebody_does() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let (link, mut client) = (Link::new(ours).unwrap(), Link::new(theirs).unwrap());
            let (items, receiver) = mpsc::unbounded_channel();
            let pump = tokio::spawn(pump(link, receiver));
            for _ in 0..20 {
                items.send(output(200_000)).unwrap_or_default();
            }
            let (told, heard) = std::sync::mpsc::sync_channel(1);
            items.send(Item::Dispatch(1, told)).unwrap_or_default();
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert!(heard.try_recv().is_err(), "the client has not been told yet");
            drop(items);
            let mut shown = 0;
            loop {
                let frame = client.receive().await.unwrap();
                match ToClient::decode(frame.kind, &frame.body).unwrap() {
                    ToClient::Output { bytes, .. } => shown += bytes.len(),
                    ToClient::Omitted(_) => {}
                    ToClient::Dispatch(Index { index: 1 }) => break,
                    other => panic!("{other:?}"),
                }
            }
            assert!(shown >= WAITING - 2 * PIECE, "{shown}");
            assert!(pump.await.unwrap().is_some());
            heard.recv().unwrap();
        });
    }

    #[test]
    fn a_client_that_is_gone_holds_nobody_up() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let link = Link::new(ours).unwrap();
            drop(theirs);
            let (items, receiver) = mpsc::unbounded_channel();
            let (told, heard) = std::sync::mpsc::sync_channel(1);
            items.send(output(10)).unwrap_or_default();
            items.send(Item::Dispatch(1, told)).unwrap_or_default();
            items.send(output(10)).unwrap_or_default();
            drop(items);
            assert!(pump(link, receiver).await.is_none());
            assert!(heard.recv().is_err());
        });
    }
}
