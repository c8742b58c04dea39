//! One run of the service's, in a process of its own: the program again, with the client's socket and one to the service.
//!
//! A crash of it ends one run. The client sees that at once, since nobody else holds its socket; so does the service. The
//! other way round, the end of the service closes the second socket, and the run is cancelled and cleaned up.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};

use super::KEY;
use super::delivery::{self, DeliveryError};
use super::inbox::{self, Received, Unusable};
use super::link::{Frame, Link, LinkError};
use super::peer::Peer;
use super::protocol::{Declined, Done, ToClient, ToService, Tree};
use super::request::Request;
use super::server::{self, declined};
use super::stream::{Item, pump};
use crate::backend::channel::{CancelSignal, cancelled};
use crate::backend::{Engines, sys};
use crate::env::Env;
use crate::exit::Exit;
use crate::report::json_v1::ReportV1;
use crate::report::sign::{self, KeyError, REPORT_DSSE, SignError, SigningKey};
use crate::report::write::{ClaimError, OutputsDir, REPORT_JSON, ReportDir, WriteError};
use crate::report::{Report, ReportOrigin, Staging};
use crate::run::scratch::{Scratch, ScratchError};
use crate::run::{self, Announce, Job, RunError};
use crate::spec::{Policy, Step};

/// Internal word that the worker is started under.
pub const ENTRY: &str = "__serve-run";
/// The client's socket.
pub const CLIENT: u32 = 3;
/// The service's.
pub const SERVICE: u32 = 4;

/// How long the service may take to hand the request over.
const HANDOVER: Duration = Duration::from_secs(20);
/// How long a client may take to take note that a step's code is about to be started.
const NOTE: Duration = Duration::from_secs(60);

/// Why a worker ends without a result.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The sockets or the runtime.
    #[error("failed to start")]
    Start(#[source] io::Error),
    /// The service.
    #[error("failed to take over the request")]
    Handover(#[source] LinkError),
    /// It will not be run, which the client is told.
    #[error("{}", .0.message)]
    Declined(Declined),
    /// No place to work in.
    #[error(transparent)]
    Scratch(#[from] ScratchError),
    /// No place for the report.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// No report.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A report that can't be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// A signature that can't be made.
    #[error(transparent)]
    Sign(#[from] SignError),
    /// A directory or file of ours.
    #[error("failed to prepare the run's directories")]
    Io(#[from] io::Error),
    /// A result that did not arrive.
    #[error(transparent)]
    Delivery(#[from] DeliveryError),
}

/// The worker, in a process that was started for it.
#[must_use]
pub fn main() -> ExitCode {
    let done = start();
    match &done {
        Ok(()) => ExitCode::SUCCESS,
        // Told where it happened; the service counts what breaks.
        Err(WorkerError::Declined(_) | WorkerError::Delivery(_)) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("a run broke: {}", crate::text::chain(error));
            ExitCode::FAILURE
        }
    }
}

fn start() -> Result<(), WorkerError> {
    let key = std::env::args_os().nth(2).map_or_else(|| KEY.into(), PathBuf::from);
    let take = |number| {
        let fd = sys::take_descriptor(number)?;
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
        Ok(UnixStream::from(fd))
    };
    let (client, service) = take(CLIENT).and_then(|c| Ok((c, take(SERVICE)?))).map_err(WorkerError::Start)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(WorkerError::Start)?;
    let done = runtime.block_on(attend(client, service, key));
    // A read that hangs in a file system must not keep the process.
    runtime.shutdown_timeout(Duration::from_secs(1));
    done
}

async fn attend(client: UnixStream, service: UnixStream, key: PathBuf) -> Result<(), WorkerError> {
    let link = |stream: &UnixStream| stream.try_clone().and_then(Link::new);
    let (writer, reader) = link(&client).and_then(|w| Ok((w, link(&client)?))).map_err(WorkerError::Start)?;
    let mut service = Link::new(service).map_err(WorkerError::Start)?;
    let handed = tokio::time::timeout(HANDOVER, service.receive()).await;
    let Frame { kind, body, fds } = handed
        .map_err(|_| WorkerError::Handover(LinkError::Io(io::ErrorKind::TimedOut.into())))?
        .map_err(WorkerError::Handover)?;
    let request = match ToService::decode(kind, &body) {
        Ok(ToService::Request(request)) => *request,
        Ok(_) => return Err(WorkerError::Handover(LinkError::Descriptors)),
        Err(error) => return Err(WorkerError::Handover(error.into())),
    };
    let peer = Peer::of(&client)?;
    drop(client);
    let (tell, cancel) = watch::channel(None);
    let tell = Arc::new(tell);
    let (released, release) = tokio::sync::oneshot::channel();
    let listening = tokio::spawn(listen(reader, service, Arc::clone(&tell), release));
    let order = Order { request, fds, uid: peer.uid, key };
    let mut writer = Some(writer);
    let done = order.run(&mut writer, &tell, cancel, released).await;
    if let (Err(WorkerError::Declined(declined)), Some(mut link)) = (&done, writer.take()) {
        tracing::warn!(uid = peer.uid, reason = %declined.reason, "refused: {}", declined.for_journal());
        // A client that is gone needs no answer.
        let _ = delivery::send(&mut link, &ToClient::Declined(declined.clone())).await;
    }
    listening.abort();
    done
}

/// Ends the run when the client says so or is gone, when the service is, or on SIGTERM. Tells the service when the run is over.
async fn listen(
    mut client: Link,
    mut service: Link,
    tell: Arc<watch::Sender<Option<CancelSignal>>>,
    release: tokio::sync::oneshot::Receiver<Exit>,
) {
    let first = |signal: CancelSignal| {
        tell.send_if_modified(|told| {
            let is_first = told.is_none();
            told.get_or_insert(signal);
            is_first
        });
    };
    let Ok(mut terminate) = signal(SignalKind::terminate()) else { return first(CancelSignal::Terminate) };
    let mut release = Some(release);
    let mut asked = false;
    loop {
        let over = async {
            match &mut release {
                Some(release) => release.await.ok(),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            exit = over => {
                release = None;
                if let Some(exit) = exit {
                    let _ = service.send(&ToClient::Done(Done { exit }).encode(), &[]).await;
                }
            }
            frame = client.receive(), if !asked => {
                let said = frame.ok().and_then(|frame| match ToService::decode(frame.kind, &frame.body) {
                    Ok(ToService::Cancel(cancelled)) => Some(cancelled.into()),
                    _ => None,
                });
                // Gone, or talking nonsense: the run has nobody to be for.
                first(said.unwrap_or(CancelSignal::Terminate));
                asked = true;
            }
            _ = service.receive() => {
                first(CancelSignal::Terminate);
                return;
            }
            _ = terminate.recv() => first(CancelSignal::Terminate),
        }
    }
}

/// What is to be done, and for whom.
struct Order {
    request: Request,
    fds: Vec<OwnedFd>,
    uid: u32,
    key: PathBuf,
}

/// The directories that a run builds.
struct Directories {
    report: ReportDir,
    outputs: OutputsDir,
}

impl Order {
    async fn run(
        self,
        writer: &mut Option<Link>,
        tell: &Arc<watch::Sender<Option<CancelSignal>>>,
        cancel: watch::Receiver<Option<CancelSignal>>,
        released: tokio::sync::oneshot::Sender<Exit>,
    ) -> Result<(), WorkerError> {
        let env = Env::process();
        let state = run::state_dir(&env);
        let policy = Policy::load();
        // Before anything runs: a key that can't be used is no reason for an unsigned report.
        let key = key_of(&self.key)?;
        let steps = server::checked(&self.request, self.fds.len(), &policy).map_err(WorkerError::Declined)?;
        let private = Scratch::create(&state)?;
        let received = self.receive(&steps, private.path(), cancel.clone()).await?;
        let directories = Directories {
            report: ReportDir::claim(&private.path().join("plimsoll-report"))?,
            outputs: OutputsDir::claim(&private.path().join("plimsoll-outputs"))?,
        };
        let logs = directories.report.staging().join("steps");
        std::fs::create_dir(&logs)?;

        let (items, incoming) = mpsc::unbounded_channel();
        let Some(link) = writer.take() else { return Ok(()) };
        let pumping = tokio::spawn(pump(link, incoming));
        let (events, mut happened) = mpsc::unbounded_channel();
        let forward = items.clone();
        let forwarding = tokio::spawn(async move {
            while let Some(event) = happened.recv().await {
                let _ = forward.send(Item::Event(event));
            }
        });
        let request_sha256 = run::request_sha256(&steps, policy.as_ref().ok());
        let job = Job {
            insecure_registries: Vec::new(),
            steps: received.steps.clone(),
            policy,
            jobs: usize::from(self.request.jobs),
            engines: Engines { platform: self.request.platform.clone(), ..Engines::of_environment(&env) },
            state,
            logs,
            outputs: directories.outputs.staging().to_owned(),
            staging: staging(&directories)?,
            exclude: Vec::new(),
            ci: self.request.ci.clone(),
            runner: self.request.runner.clone(),
            announce: Some(announce(items.clone(), Arc::clone(tell))),
        };
        drop(items);
        let report = run::run(job, events, cancel).await;
        let _ = forwarding.await;
        let mut report = report?;
        // A report says that it is a service's only where it is signed.
        if key.is_some() {
            report.origin = ReportOrigin::Service;
        }
        report.request_sha256 = request_sha256;
        rename(&mut report, &steps, &received.names);
        let exit = report.exit_code;
        let _ = released.send(exit);

        let (path, outputs) = (directories.report.path().to_owned(), directories.outputs.path().to_owned());
        let record = directories.report.commit(&report)?;
        let any = directories.outputs.commit()?;
        if let Some(key) = &key {
            let bytes = std::fs::read(path.join(REPORT_JSON))?;
            std::fs::write(path.join(REPORT_DSSE), sign::envelope(key, &bytes, &claims(&record))?)?;
        }
        drop(key);
        tracing::info!(
            uid = self.uid,
            run = %private.path().file_name().unwrap_or_default().display(),
            verdict = %report.verdict,
            exit = exit.code(),
            steps = report.steps.len(),
            record_sha256 = %record.digests.record_sha256,
            signed = report.origin == ReportOrigin::Service,
            "run ended"
        );
        let Ok(Some(mut link)) = pumping.await else { return Ok(()) };
        delivery::send_tree(&mut link, Tree::Report, &path).await?;
        if any {
            delivery::send_tree(&mut link, Tree::Outputs, &outputs).await?;
        }
        Ok(delivery::send(&mut link, &ToClient::Done(Done { exit })).await?)
    }

    /// Copies what was sent; a cancelled run ends it.
    async fn receive(
        &self,
        steps: &[Step],
        private: &Path,
        mut cancel: watch::Receiver<Option<CancelSignal>>,
    ) -> Result<Received, WorkerError> {
        let into = private.join("in");
        std::fs::create_dir(&into)?;
        let stop = Arc::new(AtomicBool::new(false));
        let fds = self.fds.iter().map(|fd| fd.as_fd().try_clone_to_owned()).collect::<io::Result<Vec<_>>>()?;
        let mut work = {
            let (request, steps, stop) = (self.request.clone(), steps.to_vec(), Arc::clone(&stop));
            tokio::task::spawn_blocking(move || inbox::receive(&request, &steps, &fds, &into, &stop))
        };
        let done = tokio::select! {
            done = &mut work => done,
            signal = cancelled(&mut cancel) => {
                stop.store(true, Ordering::Relaxed);
                // A read that hangs ends when the process does.
                let _ = tokio::time::timeout(Duration::from_secs(5), work).await;
                let exit = match signal {
                    CancelSignal::Interrupt => Exit::Interrupted,
                    CancelSignal::Terminate => Exit::Terminated,
                };
                return Err(WorkerError::Declined(declined(exit, "service", "cancelled", "the run was cancelled", "")));
            }
        };
        match done {
            Ok(Ok(received)) => Ok(received),
            Ok(Err(error)) => Err(WorkerError::Declined(unusable(&error))),
            Err(panic) => Err(WorkerError::Io(io::Error::other(panic.to_string()))),
        }
    }
}

/// The key that signs reports; none where there is no such file, and nowhere else.
fn key_of(path: &Path) -> Result<Option<SigningKey>, WorkerError> {
    match SigningKey::load(path) {
        Ok(key) => Ok(Some(key)),
        Err(KeyError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            tracing::error!("reports can't be signed: {}", crate::text::chain(&error));
            let message = "the service's key can't be used, so its report could not be signed";
            let help = "have the owner of this machine look at the service's journal";
            Err(WorkerError::Declined(declined(Exit::Internal, "service", "key", message, help)))
        }
    }
}

/// What the service was only told.
fn claims(record: &ReportV1) -> Vec<String> {
    let mut claims = sign::claims(record);
    claims.push("/host/runner".to_owned());
    let images = record.steps.iter().enumerate().filter(|(_, step)| step.image.is_some());
    claims.extend(images.map(|(i, _)| format!("/steps/{i}/image/reference")));
    for (i, step) in record.steps.iter().enumerate() {
        let mounts = step.grants.iter().enumerate().filter(|(_, words)| words.starts_with("mount: "));
        claims.extend(mounts.map(|(grant, _)| format!("/steps/{i}/grants/{grant}")));
    }
    claims.sort();
    claims
}

fn unusable(error: &Unusable) -> Declined {
    let message = crate::text::chain(error);
    if error.is_theirs() {
        let help = "the service takes regular files that the job can read, on an ordinary file system";
        declined(Exit::Rejected, "artifact", "not-usable", message, help)
    } else {
        declined(Exit::Internal, "artifact", "internal", message, "look at the service's journal")
    }
}

fn staging(directories: &Directories) -> io::Result<Vec<Staging>> {
    Ok(vec![directories.report.being_built()?, directories.outputs.being_built()?])
}

/// Tells the client, before it is done, that a step's code is about to be started. Waits for the kernel to take that; a
/// client that lets it wait too long loses its run.
fn announce(items: mpsc::UnboundedSender<Item>, tell: Arc<watch::Sender<Option<CancelSignal>>>) -> Announce {
    Announce::new(move |index| {
        let (told, heard) = std::sync::mpsc::sync_channel(1);
        if items.send(Item::Dispatch(index, told)).is_err() {
            return;
        }
        let waited = tokio::task::block_in_place(|| heard.recv_timeout(NOTE));
        if waited == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            tell.send_if_modified(|first| first.replace(CancelSignal::Terminate).is_none());
        }
    })
}

/// Puts the client's names in the place of ours, which say nothing to anybody.
fn rename(report: &mut Report, sent: &[Step], names: &[(String, String)]) {
    let theirs = |text: &mut String| {
        for (ours, theirs) in names {
            if text.contains(ours.as_str()) {
                *text = text.replace(ours.as_str(), theirs);
            }
        }
    };
    for (step, sent) in report.steps.iter_mut().zip(sent) {
        if let Some(artifact) = &mut step.artifact {
            artifact.source = sent.artifact.to_string();
        }
        if let (Some(record), Some(image)) = (&mut step.image, &sent.image) {
            record.reference = image.to_string();
        }
        if let Some(refusal) = &mut step.refusal {
            theirs(&mut refusal.message);
            refusal.help.iter_mut().for_each(theirs);
        }
        step.notices.iter_mut().for_each(theirs);
    }
}
