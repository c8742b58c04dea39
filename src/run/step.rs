//! One step on its way: policy, artifact, image, gate, report.

use std::fs::{DirBuilder, File};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use plimsoll_guest::Dispatch;
use rustix::fs::{Mode, OFlags};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::machine;
use super::parts::{Parts, Why};
use super::payload::{self, OUTPUT_BUDGET};
use super::record::{self, refusal, refuse};
use super::task::Task;
use super::{Context, Event, fetching, unpacker};
use crate::artifact::beneath::confined;
use crate::artifact::fetch::Fetched;
use crate::artifact::helper::make_destination;
use crate::artifact::{Acquire, Budget, Error as ArtifactError, FileId, Purpose, Summary, acquire};
use crate::backend::channel::Cancel;
use crate::backend::wasm::{ModuleFile, runtimes};
use crate::backend::{Backend, Engines, MachineParts, Output, Plan, PrepareError, Standby, firecracker};
use crate::env::Env;
use crate::exit::Exit;
use crate::gate::{Dispatched, End, Passage, Request, pass};
use crate::report::guest_junit;
use crate::report::{ArtifactRecord, RefusalRecord, StepReport};
use crate::spec::{ArtifactSource, BackendChoice, ImageSource, Sha256Digest, Step};
use crate::time::millis;

/// How long bringing in an artifact may take.
const ARTIFACT_DEADLINE: Duration = Duration::from_secs(600);
/// What to do about a fault that nobody but the host's owner or we can mend.
const INTERNAL: &str = "this is a fault of the host or of plimsoll; run again with --verbose";

/// Takes one step all the way. Whatever happens, the report says so.
pub async fn run(context: &Context, step: &Step, mut cancel: Cancel) -> StepReport {
    let began = Instant::now();
    let mut report = record::blank(step);
    if let Some(signal) = *cancel.borrow() {
        record::cancel(&mut report, signal);
        return report;
    }
    let attempt = Attempt { context, step, report: &mut report };
    attempt.go(&mut cancel).await;
    let total = millis(began.elapsed());
    report.resources.total_ms = total;
    report
}

/// A path that leads to the same from every directory: boundaries are set up by processes that stand elsewhere.
fn from_anywhere(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

struct Attempt<'a> {
    context: &'a Context,
    step: &'a Step,
    report: &'a mut StepReport,
}

/// A backend that is being made ready for.
struct Begun {
    backend: Backend,
    /// A private directory for what is made for it.
    scratch: PathBuf,
    parts: Task<Result<Parts, Why>>,
    standby: Option<Standby>,
}

/// What a step needs of its artifact before it can go to the gate.
struct Ready {
    workspace: PathBuf,
    dispatch: Dispatch,
    module: Option<ModuleFile>,
}

impl Attempt<'_> {
    fn progress(&self, what: impl Into<String>) {
        let _ = self.context.events.send(Event::Progress { index: self.report.index, what: what.into() });
    }

    async fn go(mut self, cancel: &mut Cancel) {
        let began = Instant::now();
        let floor = self.step.floor();
        // A microVM has nothing of the runner's own tree to show.
        let own_image = !matches!(self.step.image, None | Some(ImageSource::Host));
        let there = |backend: &Backend| {
            *backend != Backend::Firecracker || own_image || self.step.backend == BackendChoice::Firecracker
        };
        let known: Vec<Backend> = self.step.candidates().into_iter().filter(there).collect();
        let candidates: Vec<Backend> = known.iter().copied().filter(|b| b.reaches() >= floor).collect();
        let Some(first) = candidates.first() else {
            return refuse(self.report, Exit::Refused, record::out_of_reach(&known, floor));
        };
        let scratch = self.context.scratch.join(self.step.directory());
        if let Err(e) = DirBuilder::new().mode(0o700).create(&scratch) {
            return self.internal("prepare", format!("failed to make {}: {e}", scratch.display()));
        }
        let last = candidates.len() - 1;
        let mut ahead = Some(self.begin(*first, &scratch, last > 0));
        let Some(ready) = self.ready(&scratch, cancel).await else {
            if let Some(Ok(begun)) = ahead {
                begun.parts.abandon().await;
            }
            return;
        };
        tracing::debug!("the artifact is unpacked");
        for (position, backend) in candidates.into_iter().enumerate() {
            self.report.backend = Some(backend.name().to_owned());
            let more = position < last;
            let begun = ahead.take().unwrap_or_else(|| self.begin(backend, &scratch, more));
            let settled = match begun {
                Ok(begun) => self.through_the_gate(begun, &ready, began, cancel, more).await,
                Err(why) => self.passed_over(more, *why),
            };
            if settled {
                break;
            }
        }
    }

    /// Begins with what a backend needs and the artifact is not needed for.
    fn begin(&self, backend: Backend, scratch: &Path, more: bool) -> Result<Begun, Why> {
        if backend == Backend::Firecracker {
            self.promising(more)?;
        }
        let scratch = scratch.join(backend.name());
        DirBuilder::new().mode(0o700).create(&scratch).map_err(|e| {
            let message = format!("failed to make {}: {e}", scratch.display());
            Box::new((Exit::Internal, refusal("prepare", "internal", message, INTERNAL)))
        })?;
        // Where it can't be started, the gate tries again and says why.
        let standby = (backend != Backend::Wasm).then(Standby::start).and_then(Result::ok);
        let parts = Parts::begin(self.context, self.step, self.report.index, backend, &scratch);
        Ok(Begun { backend, scratch, parts, standby })
    }

    /// Brings in the artifact and reads the program out of it.
    async fn ready(&mut self, scratch: &Path, cancel: &mut Cancel) -> Option<Ready> {
        let workspace = scratch.join("workspace");
        if let Err(e) = make_destination(&workspace) {
            self.internal("prepare", format!("failed to make {}: {e}", workspace.display()));
            return None;
        }
        self.progress("unpacking");
        if !self.unpack(&workspace, cancel).await {
            return None;
        }
        match payload::dispatch(self.step, &workspace, runtimes::open) {
            Ok((dispatch, module)) => Some(Ready { workspace, dispatch, module }),
            Err(e) => {
                let help = e.help().to_owned();
                let exit = match e {
                    payload::PayloadError::Runtime { .. } => Exit::Unavailable,
                    payload::PayloadError::Entropy => Exit::Internal,
                    _ => Exit::Rejected,
                };
                refuse(self.report, exit, refusal("artifact", "no-program", crate::text::chain(&e), &help));
                None
            }
        }
    }

    /// Brings in the artifact; says whether it is there.
    async fn unpack(&mut self, workspace: &Path, cancel: &mut Cancel) -> bool {
        let (path, sha256) = match &self.step.artifact {
            ArtifactSource::Path(path) => (path.clone(), None),
            ArtifactSource::PathWithDigest { path, sha256 } => (path.clone(), Some(*sha256)),
            ArtifactSource::GitHub { .. } | ArtifactSource::GitLab { .. } => {
                match self.fetch(workspace, cancel).await {
                    // What came is what is unpacked.
                    Ok(fetched) => (fetched.path, Some(fetched.sha256)),
                    Err(Settled) => return false,
                }
            }
        };
        let what = Bring { path, purpose: Purpose::Artifact, sha256, exclude: self.context.exclude.clone() };
        let source = self.step.artifact.to_string();
        let Some(summary) = self.bring("artifact", &source, what, workspace, cancel).await else { return false };
        self.report.artifact = Some(ArtifactRecord {
            source,
            format: summary.packing(),
            sha256: summary.sha256.to_string(),
            files: summary.files,
            bytes: summary.bytes,
        });
        true
    }

    /// Downloads an artifact that a forge keeps, into the directory that the workspace is in. After an `Err` the report says
    /// why not.
    async fn fetch(&mut self, workspace: &Path, cancel: &mut Cancel) -> Result<Fetched, Settled> {
        let (events, index) = (self.context.events.clone(), self.report.index);
        let (env, directory) = (Env::process(), workspace.parent().unwrap_or(workspace));
        let progress = |what: String| {
            let _ = events.send(Event::Progress { index, what });
        };
        tokio::select! {
            done = fetching::artifact(&self.step.artifact, &env, directory, &progress) => done.map_err(|failed| {
                let fetching::NotFetched { reason, message, help } = failed;
                refuse(self.report, Exit::Rejected, refusal("artifact", reason, message, help));
                Settled
            }),
            signal = crate::backend::channel::cancelled(cancel) => {
                record::cancel(self.report, signal);
                Err(Settled)
            }
        }
    }

    /// Unpacks or copies something into an empty directory; `None` after the report says why not.
    async fn bring(
        &mut self,
        stage: &str,
        source: &str,
        what: Bring,
        into: &Path,
        cancel: &mut Cancel,
    ) -> Option<Summary> {
        let into = into.to_owned();
        let bringing = Task::start(move |stop| what.into_directory(&into, stop));
        match self.finished(stage, bringing, cancel).await.ok()? {
            Ok(summary) => return Some(summary),
            Err(ArtifactError::Rejected(rejection)) => {
                let message = format!("{stage} {source}: {rejection}");
                let reason = rejection.rule.id();
                refuse(
                    self.report,
                    Exit::Rejected,
                    refusal(stage, reason, message, rejection.rule.help().unwrap_or_default()),
                );
            }
            Err(error) => self.internal(stage, format!("{stage} {source}: {}", crate::text::chain(&error))),
        }
        None
    }

    /// Tries one backend; says whether that settles the step. With `more` backends to try, one that this host lacks or
    /// that does not prove the floor settles nothing, since nothing ran.
    async fn through_the_gate(
        &mut self,
        begun: Begun,
        ready: &Ready,
        began: Instant,
        cancel: &mut Cancel,
        more: bool,
    ) -> bool {
        let Begun { backend, scratch, parts, standby } = begun;
        // Held until the boundary is gone.
        let parts = match self.finished("image", parts, cancel).await {
            Ok(Ok(parts)) => parts,
            Ok(Err(why)) => return self.passed_over(more, *why),
            Err(Settled) => return true,
        };
        tracing::debug!("image and kernel are there");
        let mut dispatch = ready.dispatch.clone();
        if let Some(image) = &parts.image {
            payload::adopt(&mut dispatch, self.step, &image.env, image.user);
            self.report.image = Some(image.record.clone());
            self.notices(&image.notices);
        }
        let machine = match &parts.ground {
            Some(ground) => {
                self.notices(ground.notice.as_slice());
                let (ground, workspace, scratch) = (Arc::clone(ground), ready.workspace.clone(), scratch.clone());
                let packing = Task::start(move |_| ground.with(&workspace, &scratch));
                match self.finished("image", packing, cancel).await {
                    Ok(Ok(machine)) => Some(machine),
                    Ok(Err(why)) => return self.passed_over(more, *why),
                    Err(Settled) => return true,
                }
            }
            None => None,
        };
        tracing::debug!("the boundary's parts are there");
        let rootfs = parts.image.as_ref().and_then(|image| image.root.clone());
        let plan = self.plan(ready, scratch, rootfs, machine);
        let (output, shown) = match self.output() {
            Ok(both) => both,
            Err(e) => {
                self.internal("collect", format!("failed to make the step's log files: {e}"));
                return true;
            }
        };
        self.progress(format!("preparing {backend}"));
        self.report.resources.prepare_ms = millis(began.elapsed());
        let request = Request {
            backend,
            plan: &plan,
            standby,
            floor: self.step.floor(),
            required: &self.step.required(),
            on_dispatch: &|| {
                self.context.announce(self.report.index);
                self.progress("running");
            },
        };
        let (passage, written) = {
            let mut output = output;
            let passage = pass(request, dispatch, &mut output, cancel).await;
            (passage, output.finish())
        };
        // What the guest printed is told before the step's end is, or whoever shows it live would lose it.
        let _ = shown.await;
        if backend == Backend::Firecracker {
            let unfit = matches!(passage.end, End::NotPrepared(PrepareError::Unfit { .. }));
            if unfit || !matches!(passage.end, End::NotPrepared(_)) {
                machine::remember(unfit);
            }
        }
        if more && passage.dispatched == Dispatched::No && turned_away(&passage) {
            self.report.notices.push(format!("{backend} was passed over: {}", why(&passage)));
            self.discard_logs();
            return false;
        }
        record::passage(self.report, self.step, passage, written);
        self.merge_guest_tests();
        true
    }

    /// Whether it is worth making ready for a microVM; with `more` backends to try, only where none was waited for in vain.
    fn promising(&self, more: bool) -> Result<(), Why> {
        firecracker::available(&self.context.engines).map_err(|e| Box::new(record::not_prepared(&e)))?;
        if more && machine::known_unfit() {
            let message = "a microVM did not boot on this host since it was started".to_owned();
            let help = "`plimsoll doctor --backend firecracker --fresh` tries again";
            return Err(Box::new((Exit::Unavailable, refusal("prepare", "backend-unavailable", message, help))));
        }
        Ok(())
    }

    /// A backend that cannot be used: a notice where there are `more`, else the step's outcome. Says whether the step is
    /// settled.
    fn passed_over(&mut self, more: bool, (exit, why): (Exit, RefusalRecord)) -> bool {
        if more && exit == Exit::Unavailable {
            let backend = self.report.backend.clone().unwrap_or_default();
            self.report.notices.push(format!("{backend} was passed over: {}", why.message));
            return false;
        }
        refuse(self.report, exit, why);
        true
    }

    /// What came of work for that stage; after an `Err` the report says why nothing did.
    async fn finished<T: Send + 'static>(
        &mut self,
        stage: &str,
        task: Task<T>,
        cancel: &mut Cancel,
    ) -> Result<T, Settled> {
        match task.finish(cancel).await {
            Ok(Ok(done)) => return Ok(done),
            Ok(Err(panic)) => self.internal(stage, format!("making it ready broke: {panic}")),
            Err(signal) => record::cancel(self.report, signal),
        }
        Err(Settled)
    }

    fn plan(&self, ready: &Ready, scratch: PathBuf, rootfs: Option<PathBuf>, machine: Option<MachineParts>) -> Plan {
        Plan {
            id: format!("{}-{:02}", self.context.id, self.step.index),
            scratch,
            bounds: payload::bounds(self.step),
            workspace: Some(ready.workspace.clone()),
            rootfs: rootfs.map(from_anywhere),
            mounts: self
                .step
                .mounts
                .iter()
                .map(|m| (from_anywhere(m.path.clone()), m.at.display().to_string()))
                .collect(),
            machine,
            module: ready.module.clone(),
            filesystem: payload::filesystem(self.step),
            deterministic: self.step.deterministic,
            engines: Engines { refuse_vulnerable: self.step.refuse_vulnerable_engines, ..self.context.engines.clone() },
        }
    }

    fn logs(&self) -> PathBuf {
        self.context.logs.join(self.report.directory())
    }

    /// Where the guest's output goes, and the task that hands it on as it comes; that ends with the output.
    fn output(&self) -> std::io::Result<(Output, JoinHandle<()>)> {
        let logs = self.logs();
        DirBuilder::new().recursive(true).mode(0o755).create(&logs)?;
        let wanted = !self.step.outputs.is_empty() || self.step.junit.is_some();
        let directory = if wanted {
            let path = self.context.outputs.join(self.report.directory());
            match std::fs::create_dir(&path) {
                Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(e),
                _ => {}
            }
            Some(OwnedFd::from(File::open(&path)?))
        } else {
            None
        };
        let (live, mut pieces) = mpsc::unbounded_channel();
        let (events, index) = (self.context.events.clone(), self.report.index);
        let shown = tokio::spawn(async move {
            while let Some(crate::backend::output::Piece { stream, bytes }) = pieces.recv().await {
                let _ = events.send(Event::Output { index, stream, bytes });
            }
        });
        let output = Output::create(&logs, directory, self.step.limits.output, OUTPUT_BUDGET, Some(live))?;
        Ok((output, shown))
    }

    /// Empty log files of a backend that was passed over make room for the next one's.
    fn discard_logs(&self) {
        for name in ["stdout.log", "stderr.log"] {
            let _ = std::fs::remove_file(self.logs().join(name));
        }
    }

    /// Reads the guest's own JUnit report out of the outputs: hostile, unverified, and no reason to fail.
    fn merge_guest_tests(&mut self) {
        let Some(junit) = &self.step.junit else { return };
        if self.report.result.is_none() {
            return;
        }
        let path = junit.to_string_lossy();
        let Some(stored) = self.report.outputs.iter().find(|f| f.path == path).map(|f| f.path.clone()) else {
            self.report.notices.push(format!("the guest wrote no JUnit report at {path:?}"));
            return;
        };
        let root = self.context.outputs.join(self.report.directory());
        let read = || -> std::io::Result<Vec<u8>> {
            let root = OwnedFd::from(File::open(&root)?);
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            let file = confined(root.as_fd(), stored.as_str(), flags, Mode::empty())?;
            let mut bytes = Vec::new();
            File::from(file).take(guest_junit::MAX_BYTES + 1).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        match read().map_err(|e| e.to_string()).and_then(|bytes| guest_junit::parse(&bytes).map_err(|e| e.to_string()))
        {
            Ok(cases) => {
                self.report.guest_tests = Some(cases.counts());
                self.report.guest_cases = cases;
            }
            Err(why) => self.report.notices.push(format!("the guest's JUnit report was left out: {why}")),
        }
    }

    fn notices(&mut self, more: &[String]) {
        for notice in more {
            if !self.report.notices.contains(notice) {
                self.report.notices.push(notice.clone());
            }
        }
    }

    fn internal(&mut self, stage: &str, message: String) {
        refuse(self.report, Exit::Internal, refusal(stage, "internal", message, INTERNAL));
    }
}

/// The report says why, and nothing more is to be tried.
struct Settled;

/// Something to bring into a directory.
struct Bring {
    path: PathBuf,
    purpose: Purpose,
    sha256: Option<Sha256Digest>,
    exclude: Vec<FileId>,
}

impl Bring {
    fn into_directory(self, into: &Path, stop: &AtomicBool) -> Result<Summary, ArtifactError> {
        let destination = File::open(into).map_err(|e| ArtifactError::failed("open the destination", e))?;
        let what = Acquire {
            path: &self.path,
            purpose: self.purpose,
            sha256: self.sha256,
            budget: Budget::default(),
            deadline: ARTIFACT_DEADLINE,
            exclude: &self.exclude,
        };
        acquire(&what, destination.as_fd(), stop, unpacker::start)
    }
}

/// Whether a backend that is not here, or that did not prove the floor, leaves room for the next.
fn turned_away(passage: &Passage) -> bool {
    matches!(
        &passage.end,
        End::NotPrepared(PrepareError::Unavailable { .. } | PrepareError::Unfit { .. })
            | End::NotProven(_)
            | End::Refused(_)
    )
}

fn why(passage: &Passage) -> String {
    match &passage.end {
        End::NotPrepared(e) => crate::text::chain(e),
        End::NotProven(why) => why.clone(),
        End::Refused(refusal) => refusal.to_string(),
        _ => String::new(),
    }
}
