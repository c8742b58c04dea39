//! The command line: what can be asked, and how it is answered. Wiring only; the work is done by the modules below it.
//!
//! [`main`] is the program. Commands give an [`Exit`] or a [`Failure`]; only [`failure`] prints errors.

use std::ffi::OsString;
use std::io::{self, Write as _};

use clap::builder::styling::{AnsiColor, Styles};
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};

use crate::env::Env;
use crate::exit::Exit;
use crate::text::{LogTarget, Untrusted};

pub mod args;
pub mod check;
pub mod clean;
pub mod completions;
pub mod doctor;
pub mod failure;
pub mod image;
pub mod logging;
pub mod output;
pub mod publish;
pub mod run;
pub mod schema;
pub mod serve;
pub mod served;
pub mod session;
pub mod setup;
pub mod shell;
pub mod signals;
pub mod trial;
pub mod unread;
pub mod verify;

use failure::Failure;

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

const ABOUT: &str = "Runs untrusted code behind an isolation boundary that it proves before anything starts";

const LONG_ABOUT: &str = "\
Runs untrusted code behind an isolation boundary that it proves before anything starts.

A step's artifact is unpacked, a boundary is built around nothing, observed from the host and judged against the step's \
floor; only then is the code sent in, and the report says what was seen. If the floor is not proven, nothing runs: there \
is no fallback to a weaker boundary.";

const CODES: &str = "Exit codes: plimsoll --help";

const EXAMPLES: &str = "\
Examples:
  plimsoll run                                   # the steps of ./plimsoll.yml
  plimsoll run --artifact dist --run 'sh test.sh'
  plimsoll run --run 'app.wasm input.txt' --grant filesystem=read-only
  plimsoll check ci/plimsoll.yml                 # would it run here? nothing is run
  plimsoll doctor                                # what this host can prove, and what is missing
  plimsoll verify plimsoll-report                # does a report hold together?";

/// The command line.
#[derive(Debug, Parser)]
#[command(
    name = "plimsoll",
    version,
    about = ABOUT,
    long_about = LONG_ABOUT,
    styles = STYLES,
    max_term_width = 100,
    disable_help_subcommand = true,
    subcommand_required = true,
    arg_required_else_help = true
)]
pub struct Cli {
    /// Options of every command.
    #[command(flatten)]
    pub common: CommonArgs,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Debug, Args)]
#[command(next_help_heading = "Messages")]
pub struct CommonArgs {
    /// Only errors and a line per step
    #[arg(long, short, global = true, conflicts_with = "verbose")]
    pub quiet: bool,

    /// Every fact that was seen, and diagnostic messages
    #[arg(long, short, global = true)]
    pub verbose: bool,

    /// How the log on standard error is written
    #[arg(long, value_name = "FORMAT", global = true, default_value = "text")]
    pub log_format: LogFormat,
}

/// How the log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// One JSON object per line.
    Json,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run steps behind proven boundaries
    #[command(after_help = CODES)]
    Run(run::RunArgs),
    /// Read steps, apply the policy and try this host's boundaries; run nothing of yours
    Check(check::CheckArgs),
    /// Run a script as one step; for `shell:` of a GitHub workflow
    #[command(after_help = CODES)]
    Shell(shell::ShellArgs),
    /// Publish another job's report, such as a fork's; only what is proven is shown green
    #[command(after_help = CODES)]
    Publish(publish::PublishArgs),
    /// Recompute a report's digests and judge its facts again
    Verify(verify::VerifyArgs),
    /// Say what this host can prove, why not, and the fix
    Doctor(doctor::DoctorArgs),
    /// Run steps for other users of this machine, under its policy; for systemd
    Serve(serve::ServeArgs),
    /// Pull, import, list and remove images
    Image(image::ImageArgs),
    /// Remove what a killed run left behind; for a runner's hooks
    Clean(clean::CleanArgs),
    /// Set up what a host needs: the service, engines, a guest kernel, user namespaces, Python
    Setup(setup::SetupArgs),
    /// Print the JSON Schema of step files, reports, policies or what a service signs
    Schema(schema::SchemaArgs),
    /// Print completions for a shell
    Completions(completions::CompletionsArgs),
}

/// The program: parses, does, and says how to exit.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> Exit {
    let env = Env::process();
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let matches = match command().try_get_matches_from(&arguments) {
        Ok(matches) => matches,
        Err(error) => return not_understood(&env, &error, &arguments),
    };
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => return not_understood(&env, &error, &arguments),
    };
    logging::init(&env, audience(&cli));
    let done = match &cli.command {
        Command::Run(args) => run::run(args, &cli.common, &env),
        Command::Check(args) => check::check(args, &cli.common, &env),
        Command::Shell(args) => shell::shell(args, &cli.common, &env),
        Command::Publish(args) => publish::publish(args, &cli.common, &env),
        Command::Verify(args) => verify::verify(args, &cli.common, &env),
        Command::Doctor(args) => doctor::doctor(args, &cli.common, &env),
        Command::Serve(args) => serve::serve(args, &env),
        Command::Image(args) => image::image(args, &cli.common, &env),
        Command::Clean(args) => clean::clean(args, &cli.common, &env),
        Command::Setup(args) => setup::setup(args, &cli.common, &env),
        Command::Schema(args) => schema::schema(args),
        Command::Completions(args) => completions::completions(args),
    };
    let done = done.and_then(|exit| match output::lost() {
        Some(error) if exit == Exit::Passed => Err(unwritten(&error)),
        _ => Ok(exit),
    });
    done.unwrap_or_else(|failure| {
        failure.print(&env);
        failure.exit
    })
}

/// What was to be on standard output is not there.
fn unwritten(error: &dyn std::fmt::Display) -> Failure {
    Failure::new(Exit::Internal, format!("failed to write to standard output: {error}"))
        .with_help("look at where it goes: its disk may be full")
}

/// Who reads the diagnostic messages.
fn audience(cli: &Cli) -> logging::Audience {
    match cli.command {
        Command::Serve(_) if !cli.common.verbose && cli.common.log_format == LogFormat::Text => {
            logging::Audience::Service
        }
        _ => logging::Audience::Person { verbose: cli.common.verbose, json: cli.common.log_format == LogFormat::Json },
    }
}

/// The parser, with the exit codes in its help.
#[must_use]
pub fn command() -> clap::Command {
    let codes: Vec<String> =
        Exit::ALL.iter().map(|exit| format!("  {:>3}  {}", exit.code(), exit.describe())).collect();
    Cli::command()
        .after_help("Exit codes, the flow and examples: plimsoll --help")
        .after_long_help(format!("{EXAMPLES}\n\nExit codes:\n{}", codes.join("\n")))
}

/// Help and the version go to standard output; anything else is a usage error.
fn not_understood(env: &Env, error: &clap::Error, arguments: &[OsString]) -> Exit {
    if !error.use_stderr() {
        return match error.print().and_then(|()| io::stdout().flush()) {
            Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
                unwritten(&e).print(env);
                Exit::Internal
            }
            // A reader that went away is no fault.
            _ => Exit::Passed,
        };
    }
    let target = output::log_target(env);
    if target == LogTarget::Plain {
        let _ = error.print();
    } else {
        // The message repeats arguments, and a forge obeys lines of its log.
        let message = error.to_string();
        let mut log = output::Log::for_target(target);
        for line in message.lines() {
            log.line(&Untrusted::new(line).for_log_line(target, 4096));
        }
        if target == LogTarget::GitHub {
            let first = message.lines().next().unwrap_or_default().trim_start_matches("error: ");
            log.line(&failure::annotation(first, None, None, None));
        }
    }
    discard_report(arguments);
    if arguments.iter().any(|a| a == "--github-output") {
        // The flags that name the directories were not understood either.
        let (report, outputs) = (session::REPORT_DIR.as_ref(), session::OUTPUTS_DIR.as_ref());
        let _ = output::github::Outputs::without_report(Exit::Usage, report, outputs).write(env);
    }
    Exit::Usage
}

/// An earlier run's report is none of a run that did not come about. The flag that names it is looked for as well as that goes.
fn discard_report(arguments: &[OsString]) {
    const FLAG: &str = "--report-dir";
    let mut words = arguments.iter().skip(1).map(|word| word.to_string_lossy());
    let command = words.find(|word| !word.starts_with('-'));
    if !command.is_some_and(|command| command == "run" || command == "shell") {
        return;
    }
    let mut directory = session::REPORT_DIR.to_owned();
    while let Some(word) = words.next() {
        match word.strip_prefix(FLAG) {
            Some("") => directory = words.next().map_or(directory, |value| value.into_owned()),
            Some(value) if value.starts_with('=') => directory = value[1..].to_owned(),
            _ => {}
        }
    }
    // Claimed it is emptied, if plimsoll wrote it; what others wrote is left alone.
    if std::path::Path::new(&directory).exists() {
        drop(crate::report::ReportDir::claim(directory.as_ref()));
    }
}

/// An async runtime for the commands that run boundaries.
fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|e: io::Error| Failure::from_error(Exit::Internal, &e))
}
