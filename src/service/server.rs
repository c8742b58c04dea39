//! The service: accepts, asks who it is, reads the request, queues it, and gives it to a worker.
//!
//! Main function: [`serve`]. What a client can make this process hold is bounded: connections in all and for each user
//! ([`MAX_CONNECTIONS`], [`MAX_USER_CONNECTIONS`]), a request's bytes ([`super::protocol::MAX_REQUEST`]) and descriptors for
//! each of them, and time for everything that is waited for before a request is queued. Nothing of a request is opened
//! or run here.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::task::JoinSet;

use super::admission::{Admission, Capacity, Demand, Place, Standing};
use super::journal::Journal;
use super::link::{Frame, Link, LinkError};
use super::listen::{self, ListenError};
use super::peer::Peer;
use super::protocol::{Declined, Hello, Queued, ToClient, ToService, VERSION};
use super::request::Request;
use super::worker;
use crate::backend::channel::{Cancel, cancelled};
use crate::backend::{process, sys};
use crate::env::{Env, Var};
use crate::exit::Exit;
use crate::report::sign::SigningKey;
use crate::run;
use crate::run::scratch::ScratchError;
use crate::spec::{Kernel, Policy, PolicyRefusal, Step};

/// Connections at the same time. With [`super::protocol::MAX_REQUEST`] this bounds what waits here to 512 MiB.
pub const MAX_CONNECTIONS: usize = 128;
/// Connections of one user at the same time.
pub const MAX_USER_CONNECTIONS: usize = 16;
/// How long a client may take to say hello.
const HELLO: Duration = Duration::from_secs(10);
/// How long it may take to send its request, once it was welcomed: it packs directories meanwhile.
const REQUEST: Duration = Duration::from_secs(600);
/// How long it may take to take a message of ours.
const TAKE: Duration = Duration::from_secs(10);
/// How long workers may take to clean up when the service ends. Below systemd's 90 s.
const ENDING: Duration = Duration::from_secs(20);
/// What a run may take beside its steps' own time.
const SPARE: Duration = Duration::from_secs(45 * 60);

/// Why the service can't serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// No socket.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The state directory.
    #[error(transparent)]
    State(#[from] ScratchError),
    /// The runtime.
    #[error("failed to serve")]
    Io(#[from] io::Error),
}

struct Service {
    admission: Admission,
    tally: Arc<Mutex<HashMap<u32, usize>>>,
    journal: Journal,
    uid: u32,
    key: PathBuf,
    stop: Cancel,
    env: Env,
}

/// Serves until `stop`, then ends every run.
///
/// # Errors
/// If there is no socket to serve on, or no state directory.
pub async fn serve(socket: &Path, key: &Path, env: &Env, stop: Cancel) -> Result<(), ServeError> {
    let listening = listen::listen(socket, env)?;
    listen::raise_descriptor_limit();
    let swept = run::clean(&run::state_dir(env))?;
    for removed in &swept.removed {
        tracing::info!("removed what a killed run left: {removed}");
    }
    for failed in &swept.failed {
        tracing::warn!("a killed run left something that could not be removed: {failed}");
    }
    listening.listener.set_nonblocking(true)?;
    let listener = UnixListener::from_std(listening.listener.try_clone()?)?;
    let service = Arc::new(Service {
        admission: Admission::default(),
        tally: Arc::default(),
        journal: Journal::default(),
        uid: rustix::process::geteuid().as_raw(),
        key: key.to_owned(),
        stop: stop.clone(),
        env: env.clone(),
    });
    if let Err(refusal) = Policy::load() {
        tracing::warn!("every run will be refused: {}", crate::text::chain(&refusal));
    }
    match SigningKey::load(key) {
        Ok(key) => tracing::info!("reports are signed with the key {}", key.public().id()),
        Err(error) => tracing::warn!("reports are not signed: {}", crate::text::chain(&error)),
    }
    listen::notify(env, "READY=1");
    tracing::info!("serving on {}", socket.display());
    let mut connections = JoinSet::new();
    let mut ending = stop.clone();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => service.welcome(Link::of(stream), &mut connections),
                // Out of descriptors or memory, or a client that was gone at once.
                Err(error) => {
                    tracing::warn!("a connection could not be accepted: {error}");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
            Some(done) = connections.join_next(), if !connections.is_empty() => {
                if let Err(error) = done {
                    tracing::error!("a connection's task broke: {error}");
                }
            }
            _ = cancelled(&mut ending) => break,
        }
    }
    drop((listener, listening));
    listen::notify(env, "STOPPING=1");
    tracing::info!("ending {} connections", connections.len());
    let _ = tokio::time::timeout(ENDING + TAKE, async { while connections.join_next().await.is_some() {} }).await;
    Ok(())
}

/// A connection that counts, until it is dropped.
struct Counted {
    tally: Arc<Mutex<HashMap<u32, usize>>>,
    uid: u32,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut tally = self.tally.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = tally.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                tally.remove(&self.uid);
            }
        }
    }
}

/// How a connection ended that no worker got.
enum End {
    /// The client is told why.
    Declined(Box<Declined>),
    /// The client is gone, or was no client.
    Lost(LinkError),
    /// The client did not say in time what it had to.
    Slow(&'static str),
}

impl From<Declined> for End {
    fn from(declined: Declined) -> Self {
        Self::Declined(Box::new(declined))
    }
}

/// Why there will be no run.
#[must_use]
pub fn declined(
    exit: Exit,
    stage: &str,
    reason: &str,
    message: impl Into<String>,
    help: impl Into<String>,
) -> Declined {
    let mut message = message.into();
    message.truncate(message.floor_char_boundary(8192));
    Declined { exit, stage: stage.to_owned(), reason: reason.to_owned(), message, help: help.into() }
}

fn by_policy(refusal: &PolicyRefusal) -> Declined {
    let help = refusal.help().unwrap_or_default();
    declined(Exit::Refused, "policy", refusal.reason(), crate::text::chain(refusal), help)
}

/// The request's steps, checked, under a policy that holds. Their paths are names that nobody opens.
///
/// # Errors
/// What the client is told.
pub fn checked(
    request: &Request,
    descriptors: usize,
    policy: &Result<Policy, PolicyRefusal>,
) -> Result<Vec<Step>, Declined> {
    let policy = policy.as_ref().map_err(by_policy)?;
    let steps = request.steps(descriptors).map_err(|error| {
        let help = error.help();
        declined(Exit::Usage, "spec", "malformed", crate::text::chain(&error), help)
    })?;
    // With a policy, its own list decides; without one nobody vouches for a kernel, which runs before any code of ours.
    if policy.sha256().is_none() && steps.iter().any(|step| matches!(step.kernel, Kernel::Path { .. })) {
        let help = "leave `sandbox.kernel` out, or have its SHA-256 listed under `kernels` in /etc/plimsoll/policy.yml";
        let message = "the service boots no kernel that its policy does not list";
        return Err(declined(Exit::Refused, "policy", "not-allowed", message, help));
    }
    Ok(steps)
}

/// What the steps take, under the policy. A step that it refuses takes nothing, but here that is not known for sure:
/// what it says of images is about files that were not looked at yet.
fn demand(steps: &[Step], policy: &Policy, jobs: u16) -> Demand {
    let limited: Vec<Step> = steps
        .iter()
        .map(|step| {
            let mut bare = step.clone();
            (bare.image, bare.kernel) = (None, Kernel::Distro);
            policy.apply(&bare).unwrap_or(bare)
        })
        .collect();
    Demand::of(&limited, usize::from(jobs))
}

impl Service {
    /// Takes a connection on, if there is room for it.
    fn welcome(self: &Arc<Self>, link: Link, connections: &mut JoinSet<()>) {
        let peer = match Peer::of(&link) {
            Ok(peer) => peer,
            Err(error) => return tracing::warn!("a connection whose other end is not known: {error}"),
        };
        let Some(counted) = self.count(peer.uid, connections.len()) else {
            let help = "wait until some of the runs have ended";
            let refusal = declined(Exit::Unavailable, "service", "busy", "the service has too many connections", help);
            link.send_now(&ToClient::Declined(refusal).encode());
            if self.journal.admits(peer.uid) {
                tracing::warn!(uid = peer.uid, "refused: too many connections");
            }
            return;
        };
        let service = Arc::clone(self);
        connections.spawn(async move {
            service.attend(link, &peer).await;
            drop(counted);
        });
    }

    fn count(&self, uid: u32, all: usize) -> Option<Counted> {
        let mut tally = self.tally.lock().unwrap_or_else(PoisonError::into_inner);
        let count = tally.entry(uid).or_default();
        if all >= MAX_CONNECTIONS || *count >= MAX_USER_CONNECTIONS {
            if *count == 0 {
                tally.remove(&uid);
            }
            return None;
        }
        *count += 1;
        Some(Counted { tally: Arc::clone(&self.tally), uid })
    }

    async fn attend(&self, mut link: Link, peer: &Peer) {
        let end = match self.converse(&mut link, peer).await {
            Ok((request, body, fds, place)) => {
                self.hand_over(link, peer, &request, &body, fds, place).await;
                return;
            }
            Err(end) => end,
        };
        if self.journal.admits(peer.uid) {
            match &end {
                End::Declined(refusal) => {
                    tracing::warn!(uid = peer.uid, reason = %refusal.reason, "refused: {}", refusal.for_journal());
                }
                End::Lost(LinkError::Closed) => {
                    tracing::info!(uid = peer.uid, "a client left before it ran anything");
                }
                End::Lost(error) => tracing::warn!(uid = peer.uid, "dropped: {}", crate::text::chain(error)),
                End::Slow(what) => tracing::warn!(uid = peer.uid, "dropped: the client took too long to {what}"),
            }
        }
        if let End::Declined(refusal) = end {
            let frame = ToClient::Declined(*refusal).encode();
            if let Ok(Ok(())) = tokio::time::timeout(TAKE, link.send(&frame, &[])).await {
                link.end_writing();
                // What the client still sends would make the kernel throw the answer away.
                let _ = tokio::time::timeout(TAKE, drain(&mut link)).await;
            }
        }
    }

    /// Everything before the run: hello, whether the client may ask, its request, its turn.
    async fn converse(
        &self,
        link: &mut Link,
        peer: &Peer,
    ) -> Result<(Box<Request>, Vec<u8>, Vec<OwnedFd>, Place), End> {
        let frame = within(HELLO, "say hello", link.receive()).await?;
        match ToService::decode(frame.kind, &frame.body) {
            Ok(ToService::Hello(hello)) if hello.protocol == VERSION => {}
            Ok(ToService::Hello(_)) => {
                let message = format!(
                    "this service speaks another protocol ({VERSION}), that of plimsoll {}",
                    env!("CARGO_PKG_VERSION")
                );
                let help = "use the same release of plimsoll on both sides";
                return Err(declined(Exit::Unavailable, "service", "other-version", message, help).into());
            }
            Ok(_) => return Err(End::Lost(super::protocol::ProtocolError::Kind(frame.kind).into())),
            Err(error) => return Err(End::Lost(error.into())),
        }
        let policy = Policy::load();
        let rules = policy.as_ref().map_err(|refusal| End::from(by_policy(refusal)))?.service();
        if !peer.may_ask(&rules, self.uid) {
            let message = format!("uid {} may not use the service of this machine", peer.uid);
            let help =
                "ask its owner to name this user, or a group of theirs, under `service` in /etc/plimsoll/policy.yml";
            return Err(declined(Exit::Unavailable, "service", "not-allowed", message, help).into());
        }
        tell(link, &ToClient::Welcome(Hello::ours())).await?;

        let Frame { kind, body, fds } = within(REQUEST, "send its request", link.receive()).await?;
        let request = match ToService::decode(kind, &body) {
            Ok(ToService::Request(request)) => request,
            Ok(_) => return Err(End::Lost(super::protocol::ProtocolError::Kind(kind).into())),
            Err(error) => {
                let help = "use the same release of plimsoll on both sides";
                return Err(declined(Exit::Usage, "spec", "malformed", error.to_string(), help).into());
            }
        };
        let steps = checked(&request, fds.len(), &policy)?;
        let capacity = Capacity::of(&rules);
        let demand = policy.as_ref().map_or_else(|_| Demand::default(), |policy| demand(&steps, policy, request.jobs));
        if let Some(excess) = capacity.excess(demand) {
            let message = format!("the steps ask for {excess}");
            let help = "write smaller limits into the steps, or run fewer at the same time (`--jobs`)";
            return Err(declined(Exit::Refused, "policy", "over-ceiling", message, help).into());
        }
        let place = self.queue(link, peer, demand, capacity).await?;
        Ok((request, body, fds, place))
    }

    /// Waits for the request's turn.
    async fn queue(&self, link: &mut Link, peer: &Peer, demand: Demand, capacity: Capacity) -> Result<Place, End> {
        let mut place = self.admission.enter(peer.uid, demand, capacity);
        let mut told = None;
        let mut stop = self.stop.clone();
        loop {
            let standing = place.standing();
            let Standing::Waiting { position, waiting } = standing else { return Ok(place) };
            if told != Some(standing) {
                tell(link, &ToClient::Queued(Queued { position, waiting })).await?;
                told = Some(standing);
            }
            tokio::select! {
                () = place.moved() => {}
                frame = link.receive() => {
                    // A word now can only be that it need not run any more.
                    let frame = frame.map_err(End::Lost)?;
                    let exit = match ToService::decode(frame.kind, &frame.body) {
                        Ok(ToService::Cancel(cancelled)) if cancelled.interrupt => Exit::Interrupted,
                        Ok(ToService::Cancel(_)) => Exit::Terminated,
                        _ => return Err(End::Lost(super::protocol::ProtocolError::Kind(frame.kind).into())),
                    };
                    return Err(declined(exit, "service", "cancelled", "cancelled while it waited", "").into());
                }
                _ = cancelled(&mut stop) => {
                    let help = "run again once it is back";
                    return Err(declined(Exit::Internal, "service", "stopping", "the service is ending", help).into());
                }
            }
        }
    }

    /// Gives the client's socket and request to a worker, and waits for its end.
    async fn hand_over(
        &self,
        link: Link,
        peer: &Peer,
        request: &Request,
        body: &[u8],
        fds: Vec<OwnedFd>,
        place: Place,
    ) {
        let started = match self.start(link) {
            Ok(started) => started,
            Err(error) => return tracing::error!(uid = peer.uid, "a run could not be started: {error}"),
        };
        let (mut child, mut control) = started;
        tracing::info!(uid = peer.uid, worker = child.pid(), steps = request.steps.len(), "run begins");
        let frame = super::protocol::frame(REQUEST_KIND, body);
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let sent = tokio::time::timeout(TAKE, control.send(&frame, &borrowed)).await;
        drop(borrowed);
        drop(fds);
        if !matches!(sent, Ok(Ok(()))) {
            tracing::error!(uid = peer.uid, "a worker did not take its request");
            child.kill_tree();
        }
        let minutes = request.steps.len() as u64;
        let patience = SPARE.saturating_mul(1 + u32::try_from(minutes).unwrap_or(u32::MAX)) + longest(request);
        let mut stop = self.stop.clone();
        let mut place = Some(place);
        let overdue = tokio::time::sleep(patience);
        tokio::pin!(overdue);
        let ended = loop {
            tokio::select! {
                exit = child.wait() => break exit,
                // The run is over, and only its result is still on its way; or the worker is ending.
                _ = control.receive(), if place.is_some() => place = None,
                _ = cancelled(&mut stop) => {
                    control.shut_down();
                    break match tokio::time::timeout(ENDING, child.wait()).await {
                        Ok(exit) => exit,
                        Err(_) => {
                            child.kill_tree();
                            child.wait().await
                        }
                    };
                }
                () = &mut overdue => {
                    tracing::error!(uid = peer.uid, worker = child.pid(), "a run took far too long and is killed");
                    child.kill_tree();
                    break child.wait().await;
                }
            }
        };
        drop(place);
        match ended {
            Ok(exit) if exit.status.success() => {}
            Ok(exit) => tracing::error!(uid = peer.uid, "a run's process broke: {}", exit.status),
            Err(error) => tracing::error!(uid = peer.uid, "a run's process was lost: {error}"),
        }
    }

    fn start(&self, link: Link) -> io::Result<(process::Child, Link)> {
        let (ours, theirs) = UnixStream::pair()?;
        let (client, theirs) = (OwnedFd::from(link.into_stream()?), OwnedFd::from(theirs));
        let mut command = Command::new("/proc/self/exe");
        command.arg(worker::ENTRY).arg(&self.key).stdin(Stdio::null()).stdout(Stdio::null());
        for var in [Var::NotifySocket, Var::ListenFds, Var::ListenPid] {
            command.env_remove(var.name());
        }
        // systemd gives a service of root's no home; what is unpacked for one run serves the next.
        if self.uid == 0 && self.env.cache_dir().is_none() {
            command.env(Var::XdgCacheHome.name(), "/var/cache");
        }
        sys::hand_over(&mut command, [(worker::CLIENT, &client), (worker::SERVICE, &theirs)].into_iter())?;
        Ok((process::start(command)?, Link::new(ours)?))
    }
}

/// The kind of a request's frame.
const REQUEST_KIND: u8 = 2;

/// The steps' own time, one after the other.
fn longest(request: &Request) -> Duration {
    let steps = request.steps(usize::MAX).unwrap_or_default();
    steps.iter().map(|step| step.limits.timeout).fold(Duration::ZERO, Duration::saturating_add)
}

async fn within<T>(
    time: Duration,
    what: &'static str,
    work: impl Future<Output = Result<T, LinkError>>,
) -> Result<T, End> {
    match tokio::time::timeout(time, work).await {
        Ok(done) => done.map_err(End::Lost),
        Err(_) => Err(End::Slow(what)),
    }
}

async fn tell(link: &mut Link, message: &ToClient) -> Result<(), End> {
    within(TAKE, "take a message", link.send(&message.encode(), &[])).await
}

/// Reads until the client closes.
async fn drain(link: &mut Link) {
    while link.receive().await.is_ok() {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(step: &str) -> Request {
        let json = format!(
            r#"{{"steps":[{{"index":1,"step":{step},"artifact":{{"fd":0,"kind":"tree","name":"x"}},"kernel":{{"fd":1,"kind":"file","name":"vmlinuz"}}}}],"jobs":1}}"#
        );
        serde_json::from_str(&json).unwrap()
    }

    #[test]
    fn a_kernel_needs_a_policy_that_lists_it() {
        let step = r#"{"run":"make","sandbox":{"backend":"firecracker","image":"host","kernel":"/boot/vmlinuz"}}"#;
        let refusal = checked(&request(step), 2, &Ok(Policy::absent())).unwrap_err();
        assert_eq!((refusal.exit, refusal.stage.as_str()), (Exit::Refused, "policy"));
        let digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
        let policy = Policy::of_text(&format!("kernels: [\"sha256:{digest}\"]\n"));
        assert!(checked(&request(step), 2, &Ok(policy)).is_ok(), "what is booted is hashed then");
        assert!(checked(&request(r#"{"run":"make"}"#), 2, &Ok(Policy::absent())).is_ok());
    }

    #[test]
    fn a_policy_that_does_not_hold_refuses_everything() {
        let broken = Err(PolicyRefusal::Unreadable { file: "x".into(), source: io::ErrorKind::Other.into() });
        let refusal = checked(&request(r#"{"run":"make"}"#), 2, &broken).unwrap_err();
        assert_eq!((refusal.exit, refusal.reason.as_str()), (Exit::Refused, "policy-unreadable"));
    }

    #[test]
    fn what_runs_takes_is_what_the_policy_leaves_it() {
        let steps = checked(&request(r#"{"run":"make"}"#), 2, &Ok(Policy::absent())).unwrap();
        let all = demand(&steps, &Policy::absent(), 1);
        assert_eq!(all.memory, steps[0].limits.memory);
        let small = demand(&steps, &Policy::of_text("maxima: { memory: 64MiB }\nimages: []\n"), 1);
        assert!(small.memory <= all.memory);
        let capped = demand(&steps, &Policy::of_text("maxima: { memory: 64MiB }\n"), 1);
        assert_eq!(capped.memory, 64 << 20);
    }
}
