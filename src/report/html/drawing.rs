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
        Tier::Process => 116,
        Tier::Container => 140,
        Tier::Kernel => 164,
        Tier::Vm => 188,
    }
}

/// Containers on deck: column, row, class.
const CARGO: [(i32, i32, &str); 8] =
    [(0, 0, "f2"), (1, 0, "f1"), (2, 0, "f3"), (3, 0, "f2"), (4, 0, "f1"), (0, 1, "f3"), (1, 1, "f2"), (3, 1, "f1")];

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
        svg viewBox="0 0 500 262" role="img" aria-label=(label) {
            // The untrusted cargo, deckhouse, funnel and masts.
            @for (column, row, class) in CARGO {
                rect class=(class) x=(192 + 37 * column) y=(74 - 18 * row) width="35" height="17" rx="2" {}
            }
            path class="funnel" d="M142 42h24l-3 48h-18z" {}
            path class="hull" d="M142 42h24l-.6 9h-22.8z" {}
            path class="house" d="M44 56h92v36H44zM58 36h62v20H58z" {}
            @for x in [60, 78, 96, 114] { circle class="hull" cx=(x) cy="74" r="4.5" {} }
            path class="hull" d="M62 42h54v7H62zM86 12h3v24h-3zM78 20h19v2.5H78zM410 44h3v34h-3z" {}
            // The hull, and the part of it that is painted red.
            path class="hull" d="M20 84C140 97 270 97 440 72C430 120 408 170 382 214Q376 226 360 226H76Q60 226 54 212C40 176 28 132 20 84z" {}
            path class="boot" d="M49.5 200H390L382 214Q376 226 360 226H76Q60 226 54 212z" {}
            @match water {
                Some(y) => {
                    path class="water" d=(format!("{}V262H0z", wave(y, 50, 5))) {}
                    path class="water-front" d=(format!("{}V262H0z", wave((y + 34).min(230), 100, 7))) {}
                    path class="surface" d=(wave(y, 50, 5)) {}
                    text class="scale-text" x="492" y=(y - 10) text-anchor="end" { "proven" }
                }
                None => {
                    path class="hull" d="M96 226h20v22h-20zM206 226h20v22h-20zM316 226h20v22h-20z" opacity=".55" {}
                    path class="hull" d="M0 248h500v14H0z" opacity=".3" {}
                    text class="scale-text" x="492" y="240" text-anchor="end" { "dry dock" }
                }
            }
            // The paint, over the water, or what lies below could not be read: the scale of tiers, and the load line at the floor.
            path class="painted" d="M232 104V194" {}
            @for t in Tier::ALL {
                path class="painted" d=(format!("M232 {0}h24", level(t))) {}
                text class="painted-text" x="264" y=(level(t) + 4) { (t) }
            }
            circle class="disc" cx="160" cy=(mark) r="19" {}
            path class="disc" d=(format!("M128 {mark}h64")) {}
            text class="painted-text" x="120" y=(mark + 4) text-anchor="end" { "floor" }
        }
    }
}

/// A line of waves across the drawing, at a height, of a length and height.
fn wave(y: i32, length: i32, height: i32) -> String {
    let mut path = format!("M0 {y}");
    for _ in 0..500 / length {
        path.push_str(&format!("c{} -{height} {} {height} {length} 0", length * 2 / 5, length * 3 / 5));
    }
    path
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
            svg viewBox="0 0 280 134" role="img" aria-label=(label) {
                @for t in Tier::ALL {
                    path class=(if tier.is_some_and(|proven| proven >= t) { "rung wet" } else { "rung" }) d=(format!("M52 {0}h56", y(t))) {}
                    @if tier == Some(t) { circle class="dot" cx="108" cy=(y(t)) r="6.5" {} }
                    text class="scale-text" x="126" y=(y(t) + 5) { (t) }
                    text class="scale-sub" x="200" y=(y(t) + 5) {
                        @match (tier == Some(t), floor == t) {
                            (true, true) => "floor, proven",
                            (true, false) => "proven",
                            (false, true) => "floor",
                            (false, false) => "",
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
