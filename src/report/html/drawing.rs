//! The drawings: the load line on a hull, a ladder of tiers, bars. Inline SVG; everything in it is computed here.
//!
//! The mark is read as on a ship: the scale of tiers is painted on the hull, weakest on top. The load line (disc and bar)
//! is painted at the floor, and the water stands at the tier that was proven. A strong boundary rides high; water above the
//! mark means that the floor is not proven.

use maud::{Markup, html};

use crate::evidence::Tier;

/// The height of a tier's line on the hull.
const fn level(tier: Tier) -> i32 {
    match tier {
        Tier::Process => 104,
        Tier::Container => 130,
        Tier::Kernel => 156,
        Tier::Vm => 182,
    }
}

/// The mark alone, as a sign.
pub(super) fn sign() -> Markup {
    html! {
        svg viewBox="0 0 32 32" aria-hidden="true" {
            circle cx="16" cy="16" r="9.5" fill="none" stroke="currentColor" stroke-width="3" {}
            path d="M2 16h28" stroke="currentColor" stroke-width="3" stroke-linecap="round" {}
        }
    }
}

/// The ship: `floor` is where the mark is painted, `tier` where the water stands; without one she lies in dry dock.
pub(super) fn ship(floor: Tier, tier: Option<Tier>) -> Markup {
    let mark = level(floor);
    let water = tier.map(level);
    let label = match tier {
        Some(tier) if tier >= floor => {
            format!("A ship's hull: the water stands at {tier}, not above the load line at {floor}.")
        }
        Some(tier) => format!("A ship's hull: the water stands at {tier}, above the load line at {floor}."),
        None => format!("A ship's hull in dry dock, its load line at {floor}: no boundary was observed."),
    };
    html! {
        svg viewBox="0 0 470 250" role="img" aria-label=(label) {
            // Deckhouse, funnel and mast.
            path class="funnel" d="M96 36h26l-3 34h-20z" {}
            rect class="house" x="58" y="62" width="96" height="28" rx="3" {}
            @for x in [70, 90, 110, 130] { circle class="hull" cx=(x) cy="76" r="4" {} }
            path class="hull" d="M208 40h4v50h-4zM184 50h52v3h-52z" {}
            // The hull, and the part of it that is painted red.
            path class="hull" d="M30 84H352c-6 44-22 90-52 122H74C50 196 34 150 30 84z" {}
            path class="boot" d="M39 146c7 30 18 52 35 60H300c18-19 31-41 40-64z" {}
            // What the scale means, right of the ship.
            @for t in Tier::ALL {
                path class="painted" d=(format!("M214 {0}h34", level(t))) {}
                text class="scale-text" x="370" y=(level(t) + 5) { (t) }
                path class="leader" d=(format!("M254 {0}H362", level(t))) {}
            }
            // The load line: disc, bar, and the vertical from which the scale is measured.
            path class="painted" d="M214 102v82" {}
            circle class="disc" cx="168" cy=(mark) r="19" {}
            path class="disc" d=(format!("M138 {mark}h60")) {}
            text class="painted-text" x="150" y=(mark - 24) font-size="11" font-weight="700" font-family="system-ui, sans-serif" { "floor" }
            @match water {
                Some(y) => {
                    path class="water" d=(format!("M0 {y}c20-5 30 5 50 0s30-5 50 0 30 5 50 0 30-5 50 0 30 5 50 0 30-5 50 0 30 5 50 0 30-5 50 0 30 5 50 0 30-5 50 0V250H0z")) {}
                    path class="water-front" d=(format!("M0 {0}c26 6 40-6 66 0s40 6 66 0 40-6 66 0 40 6 66 0 40-6 66 0 40 6 66 0 40-6 74 0V250H0z", y + 26)) {}
                    path class="surface" d=(format!("M0 {y}c20-5 30 5 50 0s30-5 50 0 30 5 50 0 30-5 50 0 30 5 50 0 30-5 50 0 30 5 50 0 30-5 50 0 30 5 50 0")) {}
                    // Painted again above the water, or the mark could not be read.
                    circle class="disc" cx="168" cy=(mark) r="19" opacity=".9" {}
                    path class="disc" d=(format!("M138 {mark}h60")) opacity=".9" {}
                }
                None => {
                    path class="hull" d="M96 206h18v26h-18zM176 206h18v26h-18zM256 206h18v26h-18z" opacity=".6" {}
                    path class="hull" d="M0 232h470v18H0z" opacity=".35" {}
                }
            }
        }
    }
}

/// The same scale without a ship, for one step of several.
pub(super) fn ladder(floor: Tier, tier: Option<Tier>) -> Markup {
    let y = |t: Tier| 22 + 30 * (Tier::Vm as i32 - t as i32);
    let label = match tier {
        Some(tier) => format!("Floor {floor}, proven {tier}."),
        None => format!("Floor {floor}, nothing proven."),
    };
    html! {
        div.ladder {
            svg viewBox="0 0 250 134" role="img" aria-label=(label) {
                @for t in Tier::ALL {
                    path class=(if tier.is_some_and(|proven| proven >= t) { "rung wet" } else { "rung" }) d=(format!("M52 {0}h56", y(t))) {}
                    text class="scale-text" x="150" y=(y(t) + 5) { (t) }
                    @if tier == Some(t) {
                        circle class="dot" cx="128" cy=(y(t)) r="6" {}
                    }
                    @if tier == Some(t) || floor == t {
                        text class="scale-sub" x="212" y=(y(t) + 5) text-anchor="start" {
                            @if tier == Some(t) { "✓" }
                        }
                    }
                }
                circle class="disc" cx="26" cy=(y(floor)) r="13" {}
                path class="bar" d=(format!("M4 {0}h44", y(floor))) {}
            }
        }
    }
}

/// One part of a bar: its share, its class, and what it says in the key.
pub(super) struct Part {
    /// In the bar's unit.
    pub value: u64,
    /// `f1`, `f2`, `f3`, `fgood`, `fbad`, `fwarn`.
    pub class: &'static str,
    /// For the key; empty for none.
    pub label: String,
}

/// A bar of parts, of `whole` (at least their sum) in all.
pub(super) fn bar(title: &str, value: &str, parts: &[Part], whole: u64) -> Markup {
    let whole = whole.max(parts.iter().map(|p| p.value).sum()).max(1);
    // Thousandths, so that no part that is there vanishes.
    let share = |v: u64| if v == 0 { 0 } else { (u128::from(v) * 1000 / u128::from(whole)).max(6) };
    let mut x = 0;
    let placed: Vec<_> = parts
        .iter()
        .map(|p| {
            let from = x;
            x += share(p.value);
            (from, share(p.value), p.class)
        })
        .collect();
    html! {
        div.plot {
            p { span { (title) } span.muted { (value) } }
            svg viewBox="0 0 1000 12" preserveAspectRatio="none" aria-hidden="true" {
                @for (x, width, class) in placed { rect class=(class) x=(x) y="0" width=(width) height="12" {} }
            }
            @if parts.iter().any(|p| !p.label.is_empty()) {
                ul.key {
                    @for part in parts.iter().filter(|p| !p.label.is_empty()) { li { i class=(part.class) {} (part.label) } }
                }
            }
        }
    }
}
