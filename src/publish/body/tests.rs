use super::*;

fn section(key: char, mark: Mark, brief: &str, details: &str) -> Section {
    Section {
        key: key.to_string().repeat(16),
        run: 7,
        attempt: 1,
        sha: "ab".repeat(20),
        mark,
        brief: brief.to_owned(),
        details: details.to_owned(),
    }
}

fn sections(merged: Merged) -> Vec<Section> {
    match merged {
        Merged::Sections(sections) => sections,
        Merged::Outdated => panic!("outdated"),
    }
}

#[test]
fn what_is_composed_is_read_back() {
    let all = vec![
        section('a', Mark::Refused, "first\n\n", "<details>\n\nmore\n\n</details>\n"),
        section('b', Mark::Missing, "second\n", ""),
        section('c', Mark::Passed, "third\n", "x\n"),
    ];
    let body = compose(&all, 65_536);
    assert_eq!(parse(&body), all);
    assert_eq!(parse(&body.replace('\n', "\r\n")), all, "as a form may send it");
    assert!(body.starts_with(&format!("{MARKER}\n### ⛔ Plimsoll: refused\n")), "{body}");
    assert!(body.contains("3 jobs: 1 refused, 1 no report, 1 passed."), "{body}");
}

#[test]
fn details_go_before_sections_and_what_passed_before_what_did_not() {
    let long = |c: &str| format!("{}\n", c.repeat(400));
    let all =
        vec![section('a', Mark::Failed, "failed\n", &long("ä")), section('b', Mark::Passed, "passed\n", &long("ö"))];
    let whole = compose(&all, 65_536);
    for limit in [whole.chars().count(), 1000, 600] {
        let body = compose(&all, limit);
        assert!(body.chars().count() <= limit, "{limit}: {body}");
        assert!(body.starts_with(&format!("{MARKER}\n### ❌ Plimsoll: failed\n")), "{body}");
        assert!(body.contains("failed\n") && body.contains("passed\n"), "{limit}: {body}");
        assert_eq!(body.contains("ää"), limit >= 1000, "{limit}: {body}");
        assert_eq!(body.contains("öö"), limit == whole.chars().count(), "{limit}: {body}");
        assert_eq!(body.matches("section v1").count(), body.matches(END).count(), "{body}");
    }
    let many: Vec<Section> = (0..60).map(|_| section('f', Mark::Passed, &long("x"), "")).collect();
    let body = compose(&many, 10_000);
    assert!(body.chars().count() <= 10_000 && body.contains("more jobs did not fit here"), "{body}");
    assert!(body.contains("60 jobs: 60 passed."), "the verdict counts them all: {body}");
}

#[test]
fn a_section_takes_the_place_of_its_jobs_last_one() {
    let old = section('a', Mark::Failed, "old\n", "");
    let other = section('b', Mark::Passed, "other\n", "");
    let new = Section { attempt: 2, mark: Mark::Passed, ..section('a', Mark::Passed, "new\n", "") };
    let merged = sections(merge(vec![old.clone(), other.clone()], &new));
    assert_eq!(merged, [new.clone(), other]);
    assert_eq!(merge(vec![new.clone()], &old), Merged::Outdated, "an attempt that was overtaken");
    assert_eq!(sections(merge(vec![new.clone()], &new)), [new]);
}

#[test]
fn sections_about_another_commit_go_unless_they_are_newer() {
    let old = section('a', Mark::Failed, "old\n", "");
    let new = Section { run: 8, sha: "cd".repeat(20), ..section('b', Mark::Passed, "new\n", "") };
    assert_eq!(sections(merge(vec![old.clone()], &new)), std::slice::from_ref(&new));
    assert_eq!(merge(vec![new], &old), Merged::Outdated);
}

#[test]
fn duplicates_of_a_race_become_one_section_each() {
    let one = section('a', Mark::Failed, "one\n", "");
    let later = Section { attempt: 2, ..section('a', Mark::Passed, "two\n", "") };
    let own = section('b', Mark::Passed, "own\n", "");
    for there in [vec![one.clone(), later.clone()], vec![later.clone(), one]] {
        assert_eq!(sections(merge(there, &own)), [later.clone(), own.clone()]);
    }
}

#[test]
fn a_hostile_body_is_read_without_trust() {
    let marker = section('a', Mark::Passed, "", "").marker();
    for body in [
        String::new(),
        marker.clone(),
        format!("{END}\n{END}\n{DETAILS}\n"),
        format!("{marker}\n{marker}\n"),
        marker.replace("run=7", "run=-1") + "\nx\n" + END,
        marker.replace("run=7", "run=7 run=8") + "\nx\n" + END,
        marker.replace("verdict=passed", "verdict=great") + "\nx\n" + END,
        marker.replace(&"a".repeat(16), "../../../../../x") + "\nx\n" + END,
    ] {
        assert_eq!(parse(&body), [], "{body}");
    }
    assert_eq!(parse(&format!("{marker}\nx\n{END}\n").repeat(1000)).len(), MAX_SECTIONS);
}

#[test]
fn no_marker_is_left_in_a_text() {
    let text = format!("a {MARKER}\n{END}\n<!--x");
    assert!(!inert(&text).contains("<!--"), "{}", inert(&text));
}

proptest::proptest! {
    #[test]
    fn any_text_in_a_section_is_read_back_as_that_section_alone(
        brief in "(<!-- plimsoll:(end|details|section v1 |comment v1)|-->|[a-z`~<>\n \r]){0,20}",
        details in "(<!-- plimsoll:(end|details)|-->|[^\r]){0,20}",
    ) {
        let whole = |text: &str| format!("{}\n", inert(text).replace('\r', ""));
        let one = Section { brief: whole(&brief), details: whole(&details), ..section('a', Mark::Failed, "", "") };
        let other = section('b', Mark::Passed, "other\n", "");
        let body = compose(&[one.clone(), other.clone()], 65_536);
        proptest::prop_assert_eq!(parse(&body), [one, other]);
    }

    #[test]
    fn any_body_is_read_without_harm(body in ".{0,200}") {
        let _ = parse(&body);
    }
}
