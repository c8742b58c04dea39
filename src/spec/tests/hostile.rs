//! Files that are out to hang, crash, exhaust or mislead.

use std::fmt::Write as _;
use std::path::Path;

use proptest::prelude::*;

use super::{message, steps};
use crate::spec::place::{KeyPath, Source, Spot};
use crate::spec::raw::{self, yaml};

fn fault(text: &str) -> yaml::Fault {
    yaml::parse(text).unwrap_err()
}

#[test]
fn a_leftover_expression_is_named_with_its_line() {
    for (text, expected) in [
        (
            "version: 1\nsteps:\n  - run: |\n      echo one\n      echo ${{ github.head_ref }} two\n",
            "ci/plimsoll.yml:5: steps[0].run: the expression `${{ github.head_ref }}` is left over",
        ),
        (
            "version: 1\nsteps:\n  - { name: \"${{ a }}\", run: x }\n",
            "ci/plimsoll.yml:3: steps[0].name: the expression `${{ a }}` is left over",
        ),
        (
            "version: 1\nsteps:\n  - run: x\n    env: { \"${{ a }}\": y }\n",
            "ci/plimsoll.yml:4: steps[0].env.${{ a }}: the expression `${{ a }}` is left over",
        ),
        (
            "version: 1\nsteps:\n  - run: x\n    unknown: [1, '${{ open']\n",
            "ci/plimsoll.yml:4: steps[0].unknown[1]: the expression `${{ open` is left over",
        ),
        (
            "version: 1\nsteps:\n  - run: \"\\x24{{ hidden }}\"\n",
            "ci/plimsoll.yml:3: steps[0].run: the expression `${{ hidden }}` is left over",
        ),
    ] {
        assert_eq!(message(steps(text)), expected);
    }
    assert!(steps("version: 1 # ${{ a comment is no value }}\nsteps: [{ run: 'echo ${HOME} $(x) {{y}}' }]").is_ok());
}

#[test]
fn a_key_given_twice_is_refused_where_it_stands() {
    let text = "version: 1\nsteps:\n  - run: harmless\n    name: x\n    run: rm -rf /\n";
    assert_eq!(
        message(steps(text)),
        "ci/plimsoll.yml:5:5: steps[0].run: this key was given before, in the same mapping"
    );
    assert!(message(steps("version: 1\n\"version\": 1\n")).contains("given before"));
}

#[test]
fn a_second_document_is_refused() {
    assert!(message(steps("version: 1\nsteps: [{ run: x }]\n---\nversion: 1\n")).contains("more than one document"));
    assert!(steps("---\nversion: 1\nsteps: [{ run: x }]\n...\n").is_ok());
}

#[test]
fn merge_keys_tags_and_directives_are_refused() {
    let merge = "version: 1\ndefaults: &d { shell: sh }\nsteps:\n  - <<: *d\n    run: x\n";
    assert!(message(steps(merge)).starts_with("ci/plimsoll.yml:4:5: steps[0].<<: merge keys"));
    assert!(message(steps("version: 1\nsteps: [{ run: !shell x }]\n")).contains("tags"));
    assert!(message(steps("%YAML 1.2\n---\nversion: 1\n")).contains("directives"));
    assert!(message(steps("version: 1\n? [a, b]\n: c\n")).contains("a key that is one word or text"));
}

#[test]
fn an_alias_is_its_anchor() {
    let text = "version: 1\nsteps:\n  - run: x\n    env: &e { A: b }\n  - run: y\n    env: *e\n";
    assert_eq!(steps(text).unwrap()[1].env["A"], "b");
    assert!(message(steps("version: 1\nsteps: *missing\n")).contains("unknown anchor"));
    assert!(message(steps("version: 1\nsteps: &loop [*loop]\n")).contains("recursion limit"));
}

#[test]
fn billion_laughs_stop_at_the_budget() {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..10 {
        let _ = writeln!(text, "a{level}: &a{level} [{}]", vec![format!("*a{}", level - 1); 10].join(", "));
    }
    assert!(fault(&text).reason.contains("aliases expanded") || fault(&text).reason.contains("repetition limit"));

    let fat = format!("a: &a {}\nb: [{}]\n", "x".repeat(500_000), vec!["*a"; 100].join(", "));
    assert!(fault(&fat).reason.contains("bytes of text"));
    let lean = format!("a: &a {}\nb: [{}]\n", "x".repeat(500), vec!["*a"; 100].join(", "));
    assert!(yaml::parse(&lean).is_ok());
}

#[test]
fn nesting_that_costs_the_scanner_its_time_is_refused() {
    for text in ["[".repeat(200_000), "{a: ".repeat(200_000), "[\"]\",".repeat(200_000)] {
        assert!(fault(&text).reason.contains("opening brackets"));
    }
    // 30 s in the scanner before the bound.
    let directives: String = (0..60_000).map(|i| format!("%TAG !a{i}! x\n")).chain(["--- a\n".into()]).collect();
    assert!(fault(&directives).reason.contains("directives"));
    assert!(fault(&"- ".repeat(1000)).reason.contains("recursion limit"));
    assert!(yaml::parse(&format!("a: {}{}", "[".repeat(100), "]".repeat(100))).is_ok());
}

#[test]
fn a_file_too_long_or_not_utf8_is_refused() {
    let read = |bytes: Vec<u8>| Source::from_bytes(Path::new("p.yml"), bytes);
    assert!(read(vec![b'#'; 1 << 20]).is_ok());
    assert!(message(read(vec![b'#'; (1 << 20) + 1])).contains("longer than 1048576 bytes"));
    assert_eq!(message(read(b"a: 1\nb: \xff\n".to_vec())), "p.yml:2: not UTF-8");
    assert!(message(steps("version: 1\nsteps: \"\u{0}\"")).contains("plimsoll.yml"));
}

#[test]
fn what_is_no_file_is_not_opened() {
    let directory = tempfile::tempdir().unwrap();
    assert!(message(Source::read(directory.path())).contains("not a regular file"));
    let pipe = directory.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    assert!(message(Source::read(&pipe)).contains("not a regular file"));
    assert!(message(Source::read(&directory.path().join("none.yml"))).contains("can't be read"));
}

#[test]
fn hostile_keys_and_values_cannot_write_to_the_terminal_or_the_log() {
    for text in [
        "version: 1\nsteps:\n  - { run: x, \"\\e[2Jx\\n::error::y\": 1 }\n",
        "version: 1\nsteps:\n  - { run: x, sandbox: { memory: \"\\e[2J\\n::set-output\" } }\n",
        "version: 1\nsteps:\n  - { run: x, sandbox: { backend: \"a\\u202Eb\\r\" } }\n",
        "version: 1\nsteps:\n  - { run: \"${{ \\e[2J\\n }}\" }\n",
        "version: 1\nsteps:\n  - { run: x, env: { A: b, \"A\\tB=\": c } }\n",
    ] {
        let error = steps(text).unwrap_err();
        let all = format!("{error}{}", error.help().unwrap_or_default());
        assert!(!all.chars().any(|c| c.is_control() || c == '\u{202e}'), "{all:?}");
    }
}

#[test]
fn keys_stay_text_and_scalars_stay_as_written() {
    let root = yaml::parse("on: push\n1: a\ntrue: b\nv: [3.10, 0x1F, yes, True, 1e3, ~, '', 007]\n").unwrap();
    for key in ["on", "1", "true"] {
        assert!(root.get(key).is_some(), "{key}");
    }
    let Some(yaml::Node::List(items)) = root.get("v") else { panic!("a list") };
    let texts: Vec<_> = items
        .iter()
        .map(|n| match n {
            yaml::Node::Scalar(s) => s.text.as_str(),
            _ => "?",
        })
        .collect();
    assert_eq!(texts, ["3.10", "0x1F", "yes", "True", "1e3", "", "", "007"]);
    assert!(items[5].is_null() && !items[6].is_null());
}

#[test]
fn a_file_of_another_systems_editor_reads_the_same() {
    let text = "\u{feff}version: 1\r\nsteps:\r\n  - run: |\r\n      a\r\n      b\r\n    bad: 1\r\n";
    assert_eq!(message(steps(text)), "ci/plimsoll.yml:6:5: steps[0].bad: unknown key");
    let step = steps(&text.replace("    bad: 1\r\n", "")).unwrap().remove(0);
    assert!(matches!(&step.command, crate::spec::Command::Script { text, .. } if text == "a\nb\n"));
}

#[test]
fn places_are_found_again() {
    let text = "a:\n  - b: 1\n    \"c.d\": { e: f }\n  - ü: [x,   y]\nz: &z {q: 1}\nalias: *z\n";
    let at = |path: KeyPath, spot| yaml::locate(text, &path, spot);
    let root = KeyPath::root;
    assert_eq!(at(root().key("a"), Spot::Key), Some((1, 1)));
    assert_eq!(at(root().key("a").item(0).key("b"), Spot::Value), Some((2, 8)));
    assert_eq!(at(root().key("a").item(0).key("c.d").key("e"), Spot::Value), Some((3, 17)));
    assert_eq!(at(root().key("a").item(1).key("ü").item(1), Spot::Value), Some((4, 14)));
    assert_eq!(at(root().keys("alias.q"), Spot::Value), Some((5, 11)));
    assert_eq!(at(root().key("none"), Spot::Key), None);
    assert_eq!(at(root().key("a").item(9), Spot::Value), None);
}

#[test]
fn the_list_of_sandbox_keys_is_the_structs() {
    let schema = raw::step_schema();
    let properties = schema["$defs"]["Sandbox"]["properties"].as_object().unwrap();
    for key in properties.keys() {
        let text = format!("version: 1\nsteps: [{{ run: x, {key}: 1 }}]");
        assert!(super::help(steps(&text)).contains("under `sandbox`"), "{key}");
    }
}

/// Text made of what YAML gives a meaning to, so that it gets far into the parser.
fn yamlish() -> impl Strategy<Value = String> {
    let tokens = prop::sample::select(vec![
        "version", "steps", "run", "sandbox", "env", "artifact", ": ", ":", "\n", "\n  ", "\n    ", "- ", "? ", "[",
        "]", "{", "}", ", ", "&a ", "*a", "!t ", "!!int ", "<<", "|", ">", "'", "\"", "#", "${{", "}}", "1", "0x",
        ".5", "~", "---", "...", "%", "\t", "\u{feff}", "\u{85}", "é", "\\", "@", "`", "\r",
    ]);
    prop::collection::vec(tokens, 0..60).prop_map(|tokens| tokens.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn arbitrary_text_never_panics(text in "(?s).{0,200}") {
        let _ = steps(&text).map_err(|error| (error.to_string(), error.help()));
    }

    #[test]
    fn text_of_yaml_tokens_never_panics(text in yamlish()) {
        let _ = steps(&text).map_err(|error| (error.to_string(), error.help()));
    }

    #[test]
    fn tokens_inside_a_step_never_panic(text in yamlish()) {
        let whole = format!("version: 1\nsteps:\n  - run: x\n    {text}\n");
        let _ = steps(&whole).map_err(|error| (error.to_string(), error.help()));
    }

    #[test]
    fn every_value_of_a_tree_is_found_again(text in yamlish()) {
        fn walk(text: &str, node: &yaml::Node, path: &KeyPath) -> Result<(), TestCaseError> {
            prop_assert!(yaml::locate(text, path, Spot::Value).is_some(), "{path}");
            match node {
                yaml::Node::Scalar(_) => Ok(()),
                yaml::Node::List(items) => items.iter().enumerate().try_for_each(|(i, n)| walk(text, n, &path.item(i))),
                yaml::Node::Map(entries) => entries.iter().try_for_each(|(key, n)| {
                    let path = path.key(key);
                    prop_assert!(yaml::locate(text, &path, Spot::Key).is_some(), "{path}");
                    walk(text, n, &path)
                }),
            }
        }
        if let Ok(root) = yaml::parse(&text) {
            walk(&text, &root, &KeyPath::root())?;
        }
    }
}

#[test]
fn a_step_file_that_is_a_link_is_refused_and_nothing_of_its_target_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let secret = dir.path().join("credentials");
    std::fs::write(&secret, "https://user:tok123@example.org\n").unwrap();
    let link = dir.path().join("plimsoll.yml");
    std::os::unix::fs::symlink(&secret, &link).unwrap();
    let error = Source::read(&link).unwrap_err();
    let said = format!("{error} {error:?}");
    assert!(said.contains("no link to one is followed") && !said.contains("tok123"), "{said}");
    // Through a directory that is one, a file is the file it is.
    std::fs::create_dir(dir.path().join("real")).unwrap();
    std::fs::write(dir.path().join("real/plimsoll.yml"), "version: 1\n").unwrap();
    std::os::unix::fs::symlink("real", dir.path().join("ci")).unwrap();
    assert!(Source::read(&dir.path().join("ci/plimsoll.yml")).is_ok());
}
