//! The caller's side of the service: finds it, sends the steps with what they read, shows what comes, writes the result.
//!
//! [`find`] connects only to a socket that root alone can have put there, and asks the kernel who listens; then [`greet`],
//! then [`ask`]. Everything that a step names is opened here, with the caller's own rights. Whatever becomes of the
//! service, [`Answer`] says what is known of each step.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::net::UnixStream;
use tokio::sync::mpsc::UnboundedSender;

use super::gather::Gathered;
use super::link::{Link, LinkError};
use super::parcel::{Parcel, SendError};
use super::peer;
use super::protocol::{Declined, Ended, Hello, Index, MAX_REQUEST, Named, ToClient, ToService};
use super::receipt::{Receipt, ReceiptError};
use crate::backend::channel::{Cancel, CancelSignal, cancelled};
use crate::env::Env;
use crate::gate::Dispatched;
use crate::report::json_v1::ReportV1;
use crate::report::{Ci, ReportOrigin, StepReport};
use crate::run::Event;
use crate::run::task::Task;
use crate::spec::Step;

/// How long a service may take to answer before anything was asked of it.
const GREETING: Duration = Duration::from_secs(20);

/// Why a socket is not used.
#[derive(Debug, thiserror::Error)]
pub enum Unfit {
    /// Somebody else may be behind it.
    #[error("the socket {path} is not used: {why}")]
    Untrusted {
        /// Where.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// Nobody answers.
    #[error("the service at {path} does not answer")]
    Silent {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Connects to the service; `None` if there is no socket. One that the caller chose may be the caller's own.
///
/// # Errors
/// As [`Unfit`] says.
pub async fn find(socket: &Path, chosen: bool) -> Result<Option<Link>, Unfit> {
    let untrusted = |why: String| Unfit::Untrusted { path: socket.to_owned(), why };
    let silent = |source| Unfit::Silent { path: socket.to_owned(), source };
    let meta = match fs::symlink_metadata(socket) {
        Ok(meta) => meta,
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(None),
        Err(e) => return Err(silent(e)),
    };
    if !meta.file_type().is_socket() {
        return Err(untrusted("it is no socket".to_owned()));
    }
    let own = chosen.then(|| rustix::process::geteuid().as_raw());
    let trusted = |uid: u32| uid == 0 || Some(uid) == own;
    if !trusted(meta.uid()) {
        return Err(untrusted(format!("it belongs to uid {}, not to root", meta.uid())));
    }
    let above = socket.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let above = above.canonicalize().map_err(silent)?;
    for directory in above.ancestors() {
        let meta = fs::symlink_metadata(directory).map_err(silent)?;
        if !trusted(meta.uid()) {
            return Err(untrusted(format!("{} belongs to uid {}, not to root", directory.display(), meta.uid())));
        }
        // In a sticky directory others can't replace what is not theirs.
        if meta.mode() & 0o022 != 0 && meta.mode() & 0o1000 == 0 {
            return Err(untrusted(format!("{} can be written by others", directory.display())));
        }
    }
    let stream = connect(socket).await.map_err(silent)?;
    let link = Link::of(stream);
    let (uid, _) = peer::ids(&link).map_err(silent)?;
    if !trusted(uid) {
        return Err(untrusted(format!("uid {uid} listens on it, not root")));
    }
    Ok(Some(link))
}

async fn connect(socket: &Path) -> io::Result<UnixStream> {
    let until = Instant::now() + GREETING;
    loop {
        match UnixStream::connect(socket).await {
            // Its queue is full for the moment.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            done => return done,
        }
    }
}

/// Why a service is not asked.
#[derive(Debug, thiserror::Error)]
pub enum Unwelcome {
    /// It said so.
    #[error("{}", .0.message)]
    Declined(Declined),
    /// It said nothing that can be understood.
    #[error("the service does not answer")]
    Silent(#[source] LinkError),
}

/// Says hello.
///
/// # Errors
/// As [`Unwelcome`] says. Nothing was asked then.
pub async fn greet(link: &mut Link) -> Result<(), Unwelcome> {
    let late = || Unwelcome::Silent(LinkError::Io(io::ErrorKind::TimedOut.into()));
    let hello = ToService::Hello(Hello::ours()).encode();
    let talk = async {
        // A service that turns somebody away may have closed already; what it said can be read all the same.
        let sent = link.send(&hello, &[]).await;
        let frame = link.receive().await.map_err(|error| sent.err().unwrap_or(error)).map_err(Unwelcome::Silent)?;
        match ToClient::decode(frame.kind, &frame.body) {
            Ok(ToClient::Welcome(_)) => Ok(()),
            Ok(ToClient::Declined(declined)) => Err(Unwelcome::Declined(declined)),
            Ok(_) => Err(Unwelcome::Silent(super::protocol::ProtocolError::Kind(frame.kind).into())),
            Err(error) => Err(Unwelcome::Silent(error.into())),
        }
    };
    tokio::time::timeout(GREETING, talk).await.map_err(|_| late())?
}

/// What to run, and where the result goes.
#[derive(Debug)]
pub struct Ask {
    /// The steps.
    pub steps: Vec<Step>,
    /// How many at the same time.
    pub jobs: usize,
    /// How gVisor intercepts system calls.
    pub platform: Option<String>,
    /// The CI job.
    pub ci: Option<Ci>,
    /// The machine's name, as CI gives it.
    pub runner: Option<String>,
    /// Directories that no artifact carries.
    pub exclude: Vec<PathBuf>,
    /// Where temporary files are made.
    pub temp: PathBuf,
    /// The report's directory, being built.
    pub report: PathBuf,
    /// The outputs', being built.
    pub outputs: PathBuf,
    /// Registries that may be asked without TLS.
    pub insecure_registries: Vec<String>,
    /// Where tokens, logins, proxies and the cache are.
    pub env: Env,
}

/// What came of it.
#[derive(Debug)]
pub enum Answer {
    /// A report; its files are written.
    Report(Box<ReportV1>),
    /// The service runs none of it.
    Declined(Declined),
    /// The caller cancelled before anything was sent.
    Cancelled(CancelSignal),
    /// Something that a step names can't be sent.
    Unsent(SendError),
    /// The service, or the connection to it, broke.
    Lost {
        /// How.
        why: String,
        /// Steps that had been started, or were about to be: what is known of each.
        dispatched: BTreeMap<u32, Dispatched>,
    },
}

/// Asks for a run and sees it through.
pub async fn ask(mut link: Link, ask: Ask, events: UnboundedSender<Event>, mut cancel: Cancel) -> Answer {
    let (report, outputs) = (ask.report.clone(), ask.outputs.clone());
    let first = ask.steps.first().map_or(1, |step| u32::try_from(step.index).unwrap_or(u32::MAX));
    let gathered = tokio::select! {
        gathered = Gathered::of(&ask, &events) => match gathered {
            Ok(gathered) => gathered,
            Err(error) => return Answer::Unsent(error),
        },
        signal = cancelled(&mut cancel) => return Answer::Cancelled(signal),
    };
    let packing = Task::start(move |stop| Parcel::of(&ask, &gathered, stop));
    let (request, fds) = match packing.finish(&mut cancel).await {
        Ok(Ok(Ok(packed))) => packed,
        Ok(Ok(Err(error))) => return Answer::Unsent(error),
        Ok(Err(panic)) => return Answer::Lost { why: panic.to_string(), dispatched: BTreeMap::new() },
        Err(signal) => return Answer::Cancelled(signal),
    };
    let mut talk = Talk { events, receipt: Receipt::new(report.clone(), outputs), known: BTreeMap::new(), first };
    let frame = ToService::Request(Box::new(request)).encode();
    if frame.len() > MAX_REQUEST {
        return Answer::Unsent(SendError::TooMuch);
    }
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    // A service that refuses early has closed by now, and its reason can be read all the same.
    let sent = link.send(&frame, &borrowed).await;
    drop(borrowed);
    drop(fds);
    let mut told = false;
    loop {
        let frame = tokio::select! {
            frame = link.receive() => frame,
            signal = cancelled(&mut cancel), if !told => {
                told = true;
                // If that fails, the next frame does as well.
                let _ = link.send(&ToService::Cancel(signal.into()).encode(), &[]).await;
                continue;
            }
        };
        let message = match frame.and_then(|frame| Ok(ToClient::decode(frame.kind, &frame.body)?)) {
            Ok(message) => message,
            Err(error) => return talk.lost(sent.err().unwrap_or(error).to_string()),
        };
        match talk.hear(message) {
            Ok(None) => {}
            Ok(Some(Last::Declined(declined))) => return Answer::Declined(declined),
            Ok(Some(Last::Done)) => {
                return match talk.receipt.report(&report) {
                    Ok(record) => {
                        if record.origin != ReportOrigin::Service {
                            tracing::warn!("the service has no key, so its report is not signed");
                        }
                        Answer::Report(Box::new(record))
                    }
                    Err(error) => talk.lost(crate::text::chain(&error)),
                };
            }
            Err(error) => return talk.lost(crate::text::chain(&error)),
        }
    }
}

enum Last {
    Declined(Declined),
    Done,
}

/// What was heard so far.
struct Talk {
    events: UnboundedSender<Event>,
    receipt: Receipt,
    known: BTreeMap<u32, Dispatched>,
    /// The step that stands for all of them while they wait.
    first: u32,
}

impl Talk {
    fn hear(&mut self, message: ToClient) -> Result<Option<Last>, ReceiptError> {
        let event = match message {
            ToClient::Declined(declined) => return Ok(Some(Last::Declined(declined))),
            ToClient::Done(_) => {
                self.receipt.end()?;
                return Ok(Some(Last::Done));
            }
            ToClient::File(file) => {
                self.receipt.begin(&file)?;
                return Ok(None);
            }
            ToClient::Data(bytes) => {
                self.receipt.data(&bytes)?;
                return Ok(None);
            }
            ToClient::Dispatch(Index { index }) => {
                self.known.insert(index, Dispatched::Unknown);
                return Ok(None);
            }
            ToClient::Welcome(_) => return Ok(None),
            ToClient::Queued(queued) => Event::Progress {
                index: self.first,
                what: format!("waiting for the service: number {} of {} in the queue", queued.position, queued.waiting),
            },
            ToClient::Started(Named { index, text: name }) => Event::Started { index, name },
            ToClient::Progress(Named { index, text: what }) => Event::Progress { index, what },
            ToClient::Output { index, stream, bytes } => Event::Output { index, stream, bytes },
            ToClient::Omitted(omitted) => Event::Progress {
                index: omitted.index,
                what: format!("{} bytes of output not shown; the log file has them", omitted.bytes),
            },
            ToClient::Ended(ended) => {
                self.known.insert(ended.index, ended.dispatched);
                Event::Ended { step: Box::new(step_of(&ended)) }
            }
        };
        // Whoever shows it may be gone.
        let _ = self.events.send(event);
        Ok(None)
    }

    fn lost(self, why: String) -> Answer {
        Answer::Lost { why, dispatched: self.known }
    }
}

/// As much of a step's report as is shown before the report is there.
fn step_of(ended: &Ended) -> StepReport {
    StepReport {
        exit: ended.exit,
        verdict: crate::report::Verdict::of(ended.exit),
        tier: ended.tier,
        dispatched: ended.dispatched,
        ..StepReport::untried(ended.index, &ended.name, &crate::spec::slug(&ended.name), ended.floor)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    use super::*;

    fn block_on<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
    }

    #[test]
    fn a_socket_that_somebody_else_can_have_put_there_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("plimsoll.sock");
        let found = |chosen| block_on(find(&socket, chosen));
        assert!(matches!(found(true), Ok(None)));
        let listener = UnixListener::bind(&socket).unwrap();
        assert!(matches!(found(true), Ok(Some(_))), "the caller's own, where the caller chose it");
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(found(true), Err(Unfit::Untrusted { why, .. }) if why.contains("written by others")));
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
        drop(listener);
        assert!(matches!(found(true), Err(Unfit::Silent { .. })), "nobody listens any more");
        fs::remove_file(&socket).unwrap();
        fs::write(&socket, "").unwrap();
        assert!(matches!(found(true), Err(Unfit::Untrusted { .. })));
        fs::remove_file(&socket).unwrap();
        symlink("/run/x", &socket).unwrap();
        assert!(matches!(found(true), Err(Unfit::Untrusted { .. })));
        if rustix::process::geteuid().is_root() {
            fs::remove_file(&socket).unwrap();
            let _listener = UnixListener::bind(&socket).unwrap();
            std::os::unix::fs::chown(&socket, Some(12345), None).unwrap();
            assert!(matches!(found(true), Err(Unfit::Untrusted { why, .. }) if why.contains("12345")));
        }
    }
}
