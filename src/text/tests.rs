use proptest::prelude::*;

use super::*;

fn plain(bytes: &[u8]) -> String {
    Untrusted::new(bytes).for_terminal(10_000)
}

#[test]
fn escape_sequences_are_gone_in_every_form() {
    for (attack, shown) in [
        (&b"a\x1b[31mred\x1b[0mb"[..], "aredb"),
        (b"a\x1b[38:2:1:2:3mb", "ab"),
        (b"a\x1b[?1049hb\x1b[?25lc", "abc"),
        (b"a\x1b]8;;http://x.example\x1b\\link\x1b]8;;\x07b", "alinkb"),
        (b"a\x1bP1;2q\x1b[31m#0~~\x1b\\b", "a#0~~b"),
        (b"a\x1b_apc\x9cb\xc2\x9bHc", "abc"),
        (b"a\x9b31mb", "ab"),
        ("a\u{9b}31mb".as_bytes(), "ab"),
        ("a\u{9d}0;title\u{9c}b".as_bytes(), "ab"),
        (b"a\x9d0;title\x9cb", "ab"),
        (b"a\x1b(0b\x1bcd\x1b7e", "abde"),
        (b"a\x1b[2Jb\x1b[1;1Hc", "abc"),
        (b"harmless [31m text", "harmless [31m text"),
    ] {
        assert_eq!(plain(attack), shown, "{attack:?}");
    }
}

#[test]
fn an_unfinished_sequence_takes_nothing_but_its_own_line() {
    assert_eq!(plain(b"a\x1b]0;never ended\nb"), "a\\nb");
    assert_eq!(plain(b"a\x1b[31\nb"), "a\\nb");
    assert_eq!(plain(b"a\x1b"), "a");
    let long = [b"\x1b]".as_slice(), &[b'x'; 10_000], b"end"].concat();
    assert!(plain(&long).ends_with("end"));
}

#[test]
fn controls_and_bytes_that_are_no_text_are_shown() {
    assert_eq!(plain(b"bell\x07 back\x08 nul\0 del\x7f"), "bell\\x07 back\\x08 nul\\x00 del\\x7f");
    assert_eq!(plain(b"caf\xe9 \x85"), "caf\\xe9 \\x85");
    assert_eq!(plain("nel\u{85} line\u{2028}".as_bytes()), "nel\\u{85} line\\u{2028}");
}

#[test]
fn a_carriage_return_overwrites_nothing() {
    assert_eq!(Untrusted::new("FAILED\rpassed\r\nnext").for_xml(100), "FAILED\npassed\nnext");
}

#[test]
fn invisible_and_bidirectional_characters_are_shown_as_escapes() {
    assert_eq!(plain("a\u{202e}b\u{2066}c\u{200b}d\u{feff}e".as_bytes()), "a\\u{202e}b\\u{2066}c\\u{200b}d\\u{feff}e");
    assert_eq!(plain("\u{e0041}\u{e0100}\u{ad}\u{3164}".as_bytes()), "\\u{e0041}\\u{e0100}\\u{ad}\\u{3164}");
    assert_eq!(plain("✔\u{fe0f} naïve café e\u{301} 日本語".as_bytes()), "✔\u{fe0f} naïve café e\u{301} 日本語");
    assert_eq!(plain("a\u{fe0f}".as_bytes()), "a\\u{fe0f}");
    assert!(plain("Z\u{301}\u{301}\u{301}\u{301}\u{301}".as_bytes()).ends_with("\\u{301}"));
}

#[test]
fn workflow_commands_are_taken_apart_wherever_the_runner_would_find_them() {
    let line = |text: &str| Untrusted::new(text).for_log_line(LogTarget::GitHub, 1000);
    assert_eq!(line("::add-mask::e"), "\\::add-mask::e");
    assert_eq!(line("  \u{a0}::error::x"), "  \u{a0}\\::error::x");
    assert_eq!(line("\x1b[0m::set-output name=a::b"), "\\::set-output name=a::b");
    assert_eq!(line("\u{feff}::debug::x"), "\\u{feff}::debug::x");
    assert_eq!(line("text ##[add-mask]e"), "text ##\\[add-mask]e");
    assert_eq!(line("std::vector and a::b"), "std::vector and a::b");
    let mut filter = LogFilter::new(LogTarget::GitHub);
    assert_eq!(filter.push(b"bar\r::stop-commands::x\r\n"), ["bar", "\\::stop-commands::x"]);
}

#[test]
fn gitlab_sections_are_neither_opened_nor_closed() {
    let mut filter = LogFilter::new(LogTarget::GitLab);
    let lines = filter.push(b"section_start:1700000000:step\r\x1b[0KHeader\nx section_end:17:step\r\x1b[0K\n");
    assert_eq!(lines, ["section_start\\:1700000000:step", "Header", "x section_end\\:17:step"]);
}

#[test]
fn what_is_cut_by_a_chunks_end_is_still_found() {
    let text = "a\x1b[31mr\u{9b}1m\x1b]8;;u\x1b\\é✔\r\n::error::x\n##[debug]".as_bytes();
    let whole = {
        let mut filter = LogFilter::new(LogTarget::GitHub);
        let mut lines = filter.push(text);
        lines.extend(filter.finish());
        lines
    };
    assert_eq!(whole, ["aré✔", "\\::error::x", "##\\[debug]"]);
    for size in 1..text.len() {
        let mut filter = LogFilter::new(LogTarget::GitHub);
        let mut lines: Vec<_> = text.chunks(size).flat_map(|c| filter.push(c)).collect();
        lines.extend(filter.finish());
        assert_eq!(lines, whole, "in chunks of {size}");
    }
}

#[test]
fn a_line_without_end_is_shown_in_parts() {
    let mut filter = LogFilter::new(LogTarget::Plain);
    let mut lines = Vec::new();
    for _ in 0..100 {
        lines.extend(filter.push(&[b'x'; 4096]));
        assert!(filter.finish().is_none_or(|l| l.len() <= 16 * 1024));
        filter = LogFilter::new(LogTarget::Plain);
    }
    lines.extend(filter.push("é".repeat(100_000).as_bytes()));
    lines.extend(filter.finish());
    assert_eq!(lines.concat().len(), 200_000);
    assert!(lines.iter().all(|l| l.len() <= 16 * 1024));
}

#[test]
fn command_values_survive_the_runners_unescaping() {
    assert_eq!(Untrusted::new("50% a\r\n::b").for_workflow_command(100), "50%25 a%0A::b");
    assert_eq!(Untrusted::new("a:b,c%\n").for_workflow_property(100), "a%3Ab%2Cc%25\\n");
}

#[test]
fn a_stop_token_is_fresh_and_not_shown_by_debug() {
    let (a, b) = (StopCommands::new().unwrap(), StopCommands::new().unwrap());
    assert_ne!(a.begin(), b.begin());
    let token = a.begin().strip_prefix("::stop-commands::").unwrap().to_owned();
    assert!(token.len() > 40 && !format!("{a:?}").contains(&token));
    assert_eq!(a.end(), format!("::{token}::"));
}

#[test]
fn markdown_is_a_code_span_longer_than_what_is_in_it() {
    let md = |text: &str| Untrusted::new(text).for_markdown(100);
    assert_eq!(md("@octocat fixes #1"), "`@octocat fixes #1`");
    assert_eq!(md("a `b` ``c"), "```a `b` ``c```");
    assert_eq!(md("`"), "`` ` ``");
    assert_eq!(md(""), "`(empty)`");
    assert_eq!(md("</td><!-- <details>\n/close"), "`</td><!-- <details>\\n/close`");
    assert_eq!(Untrusted::new("a|b\\|c").for_markdown_cell(100), "`a¦b\\¦c`");
}

#[test]
fn a_fence_is_longer_than_any_inside_and_quick_actions_start_no_line() {
    let fenced = Untrusted::new("x\n```\n/close\n/usr/bin/x\n````\n<details>").fenced(1000);
    assert_eq!(fenced, "`````text\nx\n```\n /close\n/usr/bin/x\n````\n<details>\n`````\n");
    assert_eq!(Untrusted::new("").fenced(10), "```text\n\n```\n");
}

#[test]
fn long_text_is_cut_visibly() {
    let text = (0..1000).map(|i| format!("line {i}\n")).collect::<String>();
    let cut = Untrusted::new(&text).for_xml(100);
    assert!(cut.len() < 140 && cut.starts_with("line 0\n") && cut.ends_with("line 999\n"), "{cut}");
    assert!(cut.contains("bytes cut …]\n"));
    assert_eq!(Untrusted::new("0123456789").for_terminal(4), "0123… (+6 bytes)");
    assert_eq!(Untrusted::new("ééé").for_terminal(3), "é… (+4 bytes)");
    assert!(format!("{:?}", Untrusted::new(&text)).len() < 300);
}

#[test]
fn xml_has_no_forbidden_character_and_no_end_of_cdata() {
    let xml = Untrusted::new(&b"a\x00\x0b]]>\xff \xef\xbf\xbe"[..]).for_xml(100);
    assert_eq!(xml, "a\\x00\\x0b]]\\>\\xff \\u{fffe}");
}

fn hostile() -> impl Strategy<Value = Vec<u8>> {
    let token = prop_oneof![
        any::<u8>().prop_map(|b| vec![b]),
        any::<char>().prop_map(|c| c.to_string().into_bytes()),
        prop::sample::select(vec![
            "\x1b[",
            "\x1b]8;;",
            "\x1b\\",
            "\u{9b}",
            "\x07",
            "\r",
            "\n",
            "::",
            "##[",
            "##",
            "[",
            "section_start:",
            "section_",
            "end:",
            "`",
            "```",
            "|",
            "]]>",
            "]]",
            ">",
            "<!--",
            "<details>",
            "@a",
            "#1",
            "/close",
            " ",
            "\t",
            "&",
            "\"",
            "'",
            "%0A",
            "\u{202e}",
            "\u{e0041}",
            "\u{fe0f}",
            "\u{3000}",
            "\u{301}",
        ])
        .prop_map(|s| s.as_bytes().to_vec()),
    ];
    prop::collection::vec(token, 0..60).prop_map(|tokens| tokens.concat())
}

/// No control character, nothing invisible but the presentation selectors.
fn powerless(text: &str, lines: bool) -> bool {
    text.chars().all(|c| match c {
        '\n' | '\t' => lines,
        '\u{fe0e}' | '\u{fe0f}' => true,
        c => !c.is_control() && !is_invisible(c),
    })
}

proptest! {
    #[test]
    fn whatever_comes_no_function_lets_through_what_its_place_obeys(bytes in hostile(), limit in 0usize..200) {
        let text = Untrusted::from(bytes.as_slice());
        let room = limit + 40;

        let line = text.for_terminal(limit);
        prop_assert!(powerless(&line, false) && line.len() <= room);

        let line = text.for_log_line(LogTarget::GitHub, limit);
        prop_assert!(!line.trim_start().starts_with("::") && !line.contains("##["));
        let line = text.for_log_line(LogTarget::GitLab, limit);
        prop_assert!(!line.contains("section_start:") && !line.contains("section_end:"));

        let data = text.for_workflow_command(limit);
        prop_assert!(powerless(&data, false) || data.contains('\t'));
        prop_assert!(!data.contains(['\n', '\r']) && !data.contains("##["));
        let value = text.for_workflow_property(limit);
        prop_assert!(!value.contains(['\n', '\r', ':', ',']));

        let xml = text.for_xml(limit);
        prop_assert!(powerless(&xml, true) && !xml.contains("]]>") && xml.len() <= room * 2);
        let xml = text.for_xml_attribute(limit);
        prop_assert!(powerless(&xml, false) && !xml.contains("]]>"));

        for html in [text.for_html(limit), text.for_html_block(limit)] {
            prop_assert!(powerless(&html, true) && !html.contains(['<', '>', '"', '\'']));
            prop_assert!(html.len() <= 6 * room);
        }

        let span = text.for_markdown(limit);
        let ticks = span.len() - span.trim_start_matches('`').len();
        let inside = &span[ticks..span.len() - ticks];
        prop_assert!(ticks > 0 && span.ends_with(&"`".repeat(ticks)) && longest_run(inside, '`') < ticks);
        prop_assert!(powerless(&span, false));
        prop_assert!(!text.for_markdown_cell(limit).contains('|'));

        let block = text.fenced(limit);
        let fence = &block[..block.len() - block.trim_start_matches('`').len()];
        let body = block.strip_prefix(&format!("{fence}text\n")).unwrap().strip_suffix(&format!("{fence}\n")).unwrap();
        prop_assert!(fence.len() >= 3 && longest_run(body, '`') < fence.len() && powerless(body, true));
        prop_assert!(!body.lines().any(is_quick_action));
    }

    #[test]
    fn a_filters_lines_do_not_depend_on_the_chunks(bytes in hostile(), size in 1usize..20) {
        for target in [LogTarget::Plain, LogTarget::GitHub, LogTarget::GitLab] {
            let mut filter = LogFilter::new(target);
            let mut whole = filter.push(&bytes);
            whole.extend(filter.finish());
            let mut filter = LogFilter::new(target);
            let mut parts: Vec<_> = bytes.chunks(size).flat_map(|c| filter.push(c)).collect();
            parts.extend(filter.finish());
            prop_assert_eq!(&whole, &parts);
            for line in &whole {
                prop_assert!(powerless(line, true) && !line.contains(['\n', '\r']));
                if target == LogTarget::GitHub {
                    prop_assert!(!line.trim_start().starts_with("::") && !line.contains("##["));
                }
            }
        }
    }
}
