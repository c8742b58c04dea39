//! A run's events, as they come, for whoever watches.
//!
//! Every line of a guest's begins with a bar, so that it is never mistaken for one of ours, and went through a
//! [`LogFilter`], so that it means nothing to a terminal or a forge. On GitHub the runner is told, with a random token,
//! to obey nothing between the two guards; on GitLab each step is a section. Steps that run at the same time are told
//! apart by their number in front of the bar, and get neither groups nor sections, which can't interleave.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use plimsoll_guest::Stream;

use super::{Log, Style, style};
use crate::report::StepReport;
use crate::run::Event;
use crate::text::{LogFilter, LogTarget, StopCommands, Untrusted};

/// Longest name of a step shown, bytes.
const MAX_NAME: usize = 120;

/// How a run is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Not at all.
    Quiet,
    /// Lines.
    Plain,
    /// Lines, and a progress line below them.
    Terminal,
    /// One JSON object per line.
    Json,
}

/// How many steps there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// One; the result lines tell its verdict.
    One,
    /// Several, one after the other.
    Serial,
    /// Several at the same time.
    Parallel,
}

/// Shows a run.
pub struct Live {
    log: Log,
    mode: Mode,
    target: LogTarget,
    style: Style,
    /// How many steps at most run at the same time, of how many.
    shape: Shape,
    /// Seconds since the epoch, for GitLab's sections.
    clock: fn() -> u64,
    steps: BTreeMap<u32, Step>,
    /// Guards the whole run, where steps run at the same time.
    guard: Option<StopCommands>,
    bars: Option<MultiProgress>,
}

struct Step {
    name: String,
    stdout: LogFilter,
    stderr: LogFilter,
    guard: Option<StopCommands>,
    bar: Option<ProgressBar>,
}

impl Live {
    /// Shows a run on a log.
    #[must_use]
    pub fn new(log: Log, mode: Mode, target: LogTarget, style: Style, shape: Shape) -> Self {
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let bars = (mode == Mode::Terminal).then(MultiProgress::new);
        Self { log, mode, target, style, shape, clock: now, steps: BTreeMap::new(), guard: None, bars }
    }

    /// One event.
    pub fn event(&mut self, event: Event) {
        match (self.mode, event) {
            (Mode::Quiet, _) => {}
            (Mode::Json, event) => self.json(event),
            (_, Event::Started { index, name }) => self.started(index, &name),
            (_, Event::Progress { index, what }) => self.progress(index, &what),
            (_, Event::Output { index, stream, bytes }) => self.output(index, stream, &bytes),
            (_, Event::Ended { step }) => self.ended(&step),
        }
    }

    /// The run is over: closes what is still open.
    pub fn finish(&mut self) {
        for index in self.steps.keys().copied().collect::<Vec<_>>() {
            self.close(index);
        }
        if let Some(guard) = self.guard.take() {
            self.print(&[guard.end()]);
        }
    }

    fn started(&mut self, index: u32, name: &str) {
        let name = Untrusted::new(name).for_log_line(self.target, MAX_NAME);
        let mut step = Step {
            name: name.clone(),
            stdout: LogFilter::new(self.target),
            stderr: LogFilter::new(self.target),
            guard: None,
            bar: None,
        };
        let title = format!("{index:02} {name}");
        let mut lines = Vec::new();
        match self.target {
            LogTarget::GitHub if self.is_parallel() => {
                if self.guard.is_none() {
                    self.guard = StopCommands::new().ok();
                    lines.extend(self.guard.as_ref().map(StopCommands::begin));
                }
                lines.push(title.clone());
            }
            LogTarget::GitHub => {
                step.guard = StopCommands::new().ok();
                lines.push(format!("::group::{}", Untrusted::new(&title).for_workflow_command(MAX_NAME)));
                lines.extend(step.guard.as_ref().map(StopCommands::begin));
            }
            LogTarget::GitLab if !self.is_parallel() => {
                lines.push(format!("section_start:{}:plimsoll_{index:02}\r\x1b[0K{title}", (self.clock)()));
            }
            LogTarget::GitLab | LogTarget::Plain => lines.push(self.style.bold(&title)),
        }
        if let Some(bars) = &self.bars {
            let template = ProgressStyle::with_template("{spinner} {prefix} {wide_msg} {elapsed}");
            let bar = bars.add(ProgressBar::new_spinner().with_prefix(title));
            if let Ok(template) = template {
                bar.set_style(template);
            }
            bar.enable_steady_tick(Duration::from_millis(120));
            step.bar = Some(bar);
        }
        self.steps.insert(index, step);
        self.print(&lines);
    }

    fn progress(&mut self, index: u32, what: &str) {
        let what = Untrusted::new(what).for_log_line(self.target, MAX_NAME);
        match self.steps.get(&index).and_then(|s| s.bar.as_ref()) {
            Some(bar) => bar.set_message(what),
            None => {
                let line = format!("{}· {what}", self.margin(index));
                self.print(&[self.style.dim(&line)]);
            }
        }
    }

    fn output(&mut self, index: u32, stream: Stream, bytes: &[u8]) {
        let Some(step) = self.steps.get_mut(&index) else { return };
        // Without a guard under GitHub there was no randomness for its token: better show nothing.
        if self.target == LogTarget::GitHub && step.guard.is_none() && self.guard.is_none() {
            return;
        }
        let filter = match stream {
            Stream::Stdout => &mut step.stdout,
            Stream::Stderr => &mut step.stderr,
        };
        let lines = filter.push(bytes);
        if let Some(bar) = &step.bar {
            bar.set_message("running");
        }
        let lines: Vec<_> = lines.iter().map(|line| self.guest_line(index, stream, line)).collect();
        self.print(&lines);
    }

    fn ended(&mut self, report: &StepReport) {
        self.close(report.index);
        if self.shape == Shape::One {
            return;
        }
        let name = Untrusted::new(&report.name).for_log_line(self.target, MAX_NAME);
        let verdict = format!("{} {:02} {name}: {}", style::sign(report.verdict), report.index, report.verdict);
        self.print(&[self.style.verdict(report.verdict, &verdict)]);
    }

    /// Prints what is left of a step's output, and ends its group or section.
    fn close(&mut self, index: u32) {
        let Some(mut step) = self.steps.remove(&index) else { return };
        let mut lines = Vec::new();
        for (stream, filter) in [(Stream::Stdout, &mut step.stdout), (Stream::Stderr, &mut step.stderr)] {
            lines.extend(filter.finish().map(|line| self.guest_line(index, stream, &line)));
        }
        match self.target {
            LogTarget::GitHub if !self.is_parallel() => {
                lines.extend(step.guard.take().map(StopCommands::end));
                lines.push("::endgroup::".to_owned());
            }
            LogTarget::GitLab if !self.is_parallel() => {
                lines.push(format!("section_end:{}:plimsoll_{index:02}\r\x1b[0K", (self.clock)()));
            }
            _ => {}
        }
        if let (Some(bar), Some(bars)) = (step.bar.take(), &self.bars) {
            bar.finish_and_clear();
            bars.remove(&bar);
        }
        self.print(&lines);
    }

    fn is_parallel(&self) -> bool {
        self.shape == Shape::Parallel
    }

    fn margin(&self, index: u32) -> String {
        if self.is_parallel() { format!("{index:02}") } else { "  ".to_owned() }
    }

    fn guest_line(&self, index: u32, stream: Stream, line: &str) -> String {
        let bar = match stream {
            Stream::Stdout => self.style.dim("│"),
            Stream::Stderr => self.style.warn("│"),
        };
        format!("{}{bar} {line}", self.margin(index))
    }

    fn print(&mut self, lines: &[String]) {
        if lines.is_empty() {
            return;
        }
        let text = lines.join("\n") + "\n";
        match &self.bars {
            Some(bars) => bars.suspend(|| self.log.text(&text)),
            None => self.log.text(&text),
        }
    }

    fn json(&mut self, event: Event) {
        let value = match event {
            Event::Started { index, name } => {
                self.steps.insert(
                    index,
                    Step {
                        name: name.clone(),
                        stdout: LogFilter::default(),
                        stderr: LogFilter::default(),
                        guard: None,
                        bar: None,
                    },
                );
                serde_json::json!({"event": "started", "step": index, "name": name})
            }
            Event::Progress { index, what } => serde_json::json!({"event": "progress", "step": index, "what": what}),
            Event::Output { index, stream, bytes } => return self.json_output(index, stream, Some(&bytes)),
            Event::Ended { step } => {
                for stream in [Stream::Stdout, Stream::Stderr] {
                    self.json_output(step.index, stream, None);
                }
                self.steps.remove(&step.index);
                serde_json::json!({
                    "event": "ended", "step": step.index, "name": step.name, "verdict": step.verdict,
                    "exit_code": step.exit.code(), "floor": step.floor, "tier": step.tier, "dispatched": step.dispatched,
                })
            }
        };
        self.log.line(&value.to_string());
    }

    /// Lines that are complete with these bytes; without bytes, what is left.
    fn json_output(&mut self, index: u32, stream: Stream, bytes: Option<&[u8]>) {
        let Some(step) = self.steps.get_mut(&index) else { return };
        let (name, filter) = match stream {
            Stream::Stdout => ("stdout", &mut step.stdout),
            Stream::Stderr => ("stderr", &mut step.stderr),
        };
        let lines = match bytes {
            Some(bytes) => filter.push(bytes),
            None => filter.finish().into_iter().collect(),
        };
        for line in lines {
            let value = serde_json::json!({"event": "output", "step": index, "stream": name, "line": line});
            self.log.line(&value.to_string());
        }
    }
}

impl std::fmt::Debug for Live {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.steps.values().map(|s| s.name.as_str()).collect();
        f.debug_struct("Live").field("mode", &self.mode).field("steps", &names).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
