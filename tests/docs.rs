//! The documentation against the code: tables, keys, examples, messages and links.
//!
//! A page that lists what the code has is compared with the code's own list, so that neither can move alone. What no test
//! can compare (what a fact is worth, what a page promises) is prose, and stays a reader's to judge.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use plimsoll::backend::{Backend, fix};
use plimsoll::env::Var;
use plimsoll::evidence::advisory::ADVISORIES;
use plimsoll::evidence::identity::{RELEASES, Release};
use plimsoll::evidence::{ControlId, Tier};
use plimsoll::exit::Exit;
use plimsoll::publish::Target;
use plimsoll::spec::place::{KeyPath, Source};
use plimsoll::spec::{Overrides, SpecFile, Surroundings, load, policy_schema, raw, step_schema};
use serde::Deserialize;
use serde_json::Value;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn page(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Every Markdown page of the repository that is for readers.
fn pages() -> Vec<PathBuf> {
    let mut pages: Vec<PathBuf> =
        ["README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"].iter().map(|p| root().join(p)).collect();
    for entry in fs::read_dir(root().join("docs")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "md") {
            pages.push(path);
        }
    }
    pages
}

/// The rows of the table under a heading: cells, without the head. Cells lose their backticks and links.
fn table(page: &str, heading: &str) -> Vec<Vec<String>> {
    let mut lines = page.lines().skip_while(|line| *line != heading);
    assert!(lines.next().is_some(), "there is no heading {heading:?}");
    let rows = lines.take_while(|line| !line.starts_with('#')).skip_while(|line| !line.starts_with('|'));
    let cell = |text: &str| text.trim().replace('`', "");
    rows.take_while(|line| line.starts_with('|'))
        .skip(2)
        .map(|line| line.trim_matches('|').split('|').map(cell).collect())
        .collect()
}

/// A fenced block: what stands after its fence, the line it begins at, its text.
struct Block {
    info: String,
    line: usize,
    text: String,
}

fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<Block> = None;
    for (index, line) in page.lines().enumerate() {
        match (&mut open, line.trim_start().strip_prefix("```")) {
            (None, Some(info)) => {
                open = Some(Block { info: info.trim().to_owned(), line: index + 1, text: String::new() });
            }
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (Some(block), None) => {
                block.text.push_str(line);
                block.text.push('\n');
            }
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "a fence is left open");
    blocks
}

/// Every key that a JSON Schema knows, wherever it stands.
fn keys(schema: &Value, into: &mut BTreeSet<String>) {
    match schema {
        Value::Object(members) => {
            for (name, value) in members {
                if name == "properties" {
                    into.extend(value.as_object().unwrap().keys().cloned());
                }
                keys(value, into);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| keys(item, into)),
        _ => {}
    }
}

#[test]
fn the_controls_table_is_the_codes() {
    let rows = table(&page("docs/evidence.md"), "## Controls");
    let ids: Vec<&str> = rows.iter().map(|row| row[0].as_str()).collect();
    assert_eq!(ids, ControlId::ALL.iter().map(|c| c.name()).collect::<Vec<_>>());
    for (row, control) in rows.iter().zip(ControlId::ALL) {
        assert_eq!(format!("{}.", row[1].trim_end_matches('.')), control.describe(), "{control}");
    }
}

#[test]
fn the_tiers_table_is_the_codes() {
    let rows = table(&page("docs/evidence.md"), "## Tiers");
    let names: Vec<&str> = rows.iter().map(|row| row[0].as_str()).collect();
    assert_eq!(names, Tier::ALL.map(Tier::name));
}

#[test]
fn the_releases_table_is_the_codes() {
    let engine = |release: &Release| release.engine.name();
    let real: Vec<Vec<String>> =
        RELEASES.iter().map(|r| [engine(r), r.version, r.sha256, r.source].map(str::to_owned).into()).collect();
    assert_eq!(table(&page("docs/evidence.md"), "### Built-in releases"), real);
}

#[test]
fn every_key_is_documented() {
    for (path, schema) in [("docs/step-file.md", step_schema()), ("docs/policy.md", policy_schema())] {
        let text = page(path);
        let mut known = BTreeSet::new();
        keys(&serde_json::to_value(schema).unwrap(), &mut known);
        assert!(known.len() > 10, "{path}: {known:?}");
        let missing: Vec<_> = known
            .iter()
            .filter(|key| !text.contains(&format!("`{key}`")) && !text.contains(&format!("`{key}:")))
            .filter(|key| !text.contains(&format!(" {key}: ")))
            .collect();
        assert!(missing.is_empty(), "{path} does not name {missing:?}");
    }
}

#[test]
fn the_publish_targets_tables_are_the_codes() {
    let real: Vec<Vec<String>> =
        Target::ALL.iter().map(|t| [t.name(), t.describe(), t.permission()].map(str::to_owned).into()).collect();
    assert_eq!(table(&page("README.md"), "## Permissions"), real);
    assert_eq!(table(&page("docs/publishing.md"), "# Publishing"), real);
}

#[test]
fn the_exit_codes_table_is_the_codes() {
    let rows = table(&page("README.md"), "## Exit codes");
    let documented: Vec<(String, String)> = rows.into_iter().map(|row| (row[0].clone(), row[1].clone())).collect();
    let real: Vec<_> = Exit::ALL.iter().map(|e| (e.code().to_string(), e.describe().to_owned())).collect();
    assert_eq!(documented, real);
}

/// The variables that people set, with the words of the code. Those of CI systems are left to the code.
#[test]
fn the_variables_table_is_the_codes() {
    let of_ci = |name: &str| ["CI", "GITHUB", "GITLAB", "RUNNER"].iter().any(|prefix| name.starts_with(prefix));
    let real: Vec<Vec<String>> = Var::ALL
        .iter()
        .filter(|var| !of_ci(var.name()))
        .map(|var| vec![var.name().to_owned(), var.describe().replace('`', "")])
        .collect();
    assert_eq!(table(&page("docs/backends.md"), "## Environment variables"), real);
}

/// The inputs and outputs of the action and the component, names and defaults, in the order of their files.
#[test]
fn the_inputs_tables_are_those_of_the_action_and_the_component() {
    let yaml =
        |path: &str| serde_yaml::Deserializer::from_str(&page(path)).next().map(Value::deserialize).unwrap().unwrap();
    let (action, component) = (yaml("action.yml"), yaml("templates/run.yml"));
    for (path, inputs) in [("docs/github.md", &action["inputs"]), ("docs/gitlab.md", &component["spec"]["inputs"])] {
        let text = page(path);
        let documented: BTreeSet<(String, String)> =
            table(&text, if path.contains("github") { "## The action" } else { "## The component" })
                .into_iter()
                .map(|row| (row[0].clone(), row[1].clone()))
                .collect();
        let default = |input: &Value| match &input["default"] {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let real = inputs.as_object().unwrap().iter().map(|(name, input)| (name.clone(), default(input))).collect();
        assert_eq!(documented, real, "{path}");
    }
    let text = page("docs/github.md");
    for name in action["outputs"].as_object().unwrap().keys() {
        assert!(text.contains(&format!("| `{name}` | ")), "docs/github.md has no output {name}");
    }
}

/// A whole step file in the documentation parses, and what is shown as a mistake is one, with the message that is shown.
#[test]
fn step_files_in_the_documentation_are_what_they_are_shown_as() {
    let (mut good, mut wrong) = (0, 0);
    for path in pages() {
        let blocks = blocks(&fs::read_to_string(&path).unwrap());
        for (index, block) in blocks.iter().enumerate() {
            let place = format!("{}:{}", path.display(), block.line);
            let is_steps = block.text.lines().any(|l| l == "version: 1") && block.text.contains("\nsteps:");
            if block.info == "yaml wrong" {
                wrong += 1;
                let shown = &blocks.get(index + 1).filter(|b| b.info == "text").expect("the message follows").text;
                assert_eq!(message(&block.text), *shown, "{place}");
            } else if is_steps {
                good += 1;
                assert_eq!(block.info, "yaml", "{place}");
                assert_eq!(message(&block.text), "", "{place}");
            }
        }
    }
    assert!(good >= 2 && wrong >= 8, "{good} examples and {wrong} mistakes: are they still found?");
}

/// The policy that the documentation shows has the shape of one.
#[test]
fn the_policy_in_the_documentation_is_one() {
    let mut seen = 0;
    for block in blocks(&page("docs/policy.md")).into_iter().filter(|block| block.info == "yaml") {
        let source = Source::from_bytes(Path::new("policy.yml"), block.text.into_bytes()).unwrap();
        let tree = raw::tree(&source).unwrap();
        raw::read::<raw::RawPolicy>(&source, &tree, KeyPath::root()).unwrap_or_else(|e| panic!("{e}"));
        seen += 1;
    }
    assert!(seen > 0);
}

/// What is said of a step file called `plimsoll.yml`: nothing, or its error and the help for it.
fn message(text: &str) -> String {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("plimsoll.yml");
    fs::write(&file, text).unwrap();
    let around = Surroundings { home: Some("/home/me".into()) };
    let Err(error) = load(&[file], &Overrides::default(), &around) else { return String::new() };
    let said = match error.help() {
        Some(help) => format!("{error}\nhelp: {help}\n"),
        None => format!("{error}\n"),
    };
    said.replace(&format!("{}/", directory.path().display()), "")
}

/// A link to a file of the repository leads to one, and a fragment to a heading of it.
#[test]
fn links_lead_somewhere() {
    let mut seen = 0;
    for path in pages() {
        let text = fs::read_to_string(&path).unwrap();
        for target in links(&text) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            seen += 1;
            let (file, fragment) = target.split_once('#').unwrap_or((&target, ""));
            let linked = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            assert!(linked.exists(), "{}: {target} leads nowhere", path.display());
            if !fragment.is_empty() {
                let anchors = anchors(&fs::read_to_string(&linked).unwrap());
                assert!(anchors.contains(fragment), "{}: {target}: no such heading", path.display());
            }
        }
    }
    assert!(seen > 20, "{seen} links: are they still found?");
}

/// Targets of inline links and images, outside code.
fn links(page: &str) -> Vec<String> {
    let mut fenced = false;
    let mut links = Vec::new();
    for line in page.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced {
            continue;
        }
        let prose: String = line.split('`').step_by(2).collect::<Vec<_>>().join("code");
        for part in prose.split("](").skip(1) {
            links.extend(part.split_once(')').map(|(target, _)| target.to_owned()));
        }
    }
    links
}

/// The fragments that GitHub makes of a page's headings: lowercase, no punctuation, hyphens for spaces.
fn anchors(page: &str) -> BTreeSet<String> {
    let kept = |c: char| c.is_alphanumeric() || c == '-' || c == '_' || c == ' ';
    page.lines()
        .filter(|line| line.starts_with('#'))
        .map(|line| line.trim_start_matches('#').trim().to_lowercase().chars().filter(|&c| kept(c)).collect::<String>())
        .map(|heading| heading.replace(' ', "-"))
        .collect()
}

/// A step file of the examples parses.
#[test]
fn examples_parse() {
    let mut files = Vec::new();
    let mut directories = vec![root().join("examples")];
    while let Some(directory) = directories.pop() {
        let Ok(entries) = fs::read_dir(&directory) else { continue };
        for entry in entries {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else if path.file_name().is_some_and(|n| n == "plimsoll.yml") {
                files.push(path);
            }
        }
    }
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let source = Source::from_bytes(&file, text.clone().into_bytes()).unwrap();
        SpecFile::parse(&source).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(message(&text), "", "{}", file.display());
        let header = text.lines().next().and_then(|l| l.strip_prefix("# yaml-language-server: $schema="));
        let schema = header.unwrap_or_else(|| panic!("{}: no schema header", file.display()));
        assert!(file.parent().unwrap().join(schema).exists(), "{}: {schema} leads nowhere", file.display());
    }
}

/// What a run says with exit 12 is what the page says.
#[test]
fn the_fixes_of_exit_12_are_the_codes() {
    let real: Vec<Vec<String>> =
        fix::ALL.iter().map(|(blocker, fix)| [blocker, fix].map(|text| text.replace('`', "")).into()).collect();
    assert_eq!(table(&page("docs/hosts.md"), "## What exit 12 says"), real);
}

/// Every cell is a tier that the backend can reach, or says where to look; and says where it is from.
#[test]
fn no_host_reaches_more_than_its_backend() {
    let page = page("docs/hosts.md");
    let head = page.lines().find(|line| line.starts_with("| host |")).unwrap();
    let rows = table(&page, "## What each reaches");
    for (index, backend) in Backend::ALL.into_iter().enumerate() {
        assert_eq!(head.split('|').nth(index + 2).unwrap().trim(), format!("`{}`", backend.name()));
        for row in &rows {
            let cell = &row[index + 1];
            match cell.split_once(' ').unwrap_or((cell, "")) {
                ("as", _) | ("—", "m" | "s" | "d") => {}
                (word, "m" | "s" | "d") => {
                    assert!(word.parse::<Tier>().unwrap() <= backend.reaches(), "{}: {cell}", row[0])
                }
                _ => panic!("{}: {cell:?} does not say whether it was measured", row[0]),
            }
        }
    }
    assert!(rows.len() > 12 && rows.iter().all(|row| !row[4].is_empty()), "{rows:?}");
}

#[test]
fn every_known_vulnerability_is_documented() {
    let rows = table(&page("docs/evidence.md"), "### Known vulnerabilities");
    for (row, advisory) in rows.iter().zip(ADVISORIES) {
        assert_eq!(row[..2], [advisory.id, advisory.engine.name()]);
        assert!(row[3].starts_with(advisory.what), "{}", advisory.id);
    }
    assert_eq!(rows.len(), ADVISORIES.len());
}
