//! Which of the steps this run does: by name, then by shard.

use std::fmt;
use std::str::FromStr;

use super::error::SpecError;
use super::place::nearest;
use super::step::Step;

/// One part of several that share the steps among jobs: `--shard 2/5`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    index: usize,
    count: usize,
}

/// A text that is no shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a shard: write `I/N` with I from 1 to N, such as `2/5`")]
pub struct BadShard;

impl FromStr for Shard {
    type Err = BadShard;

    fn from_str(text: &str) -> Result<Self, BadShard> {
        let (index, count) = text.split_once('/').ok_or(BadShard)?;
        let number = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
            text.parse::<usize>().ok().filter(|_| digits).ok_or(BadShard)
        };
        let (index, count) = (number(index)?, number(count)?);
        if (1..=count).contains(&index) { Ok(Shard { index, count }) } else { Err(BadShard) }
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.count)
    }
}

/// The steps that carry one of the names (all, without names), and of those every `N`th. Steps keep their index, so
/// the reports of several shards can be merged. Names need not be unique: a name selects every step that has it.
///
/// An empty shard is no error: its run is `skipped`.
///
/// # Errors
/// When a name is no step's.
pub fn select(steps: Vec<Step>, names: &[String], shard: Option<Shard>) -> Result<Vec<Step>, SpecError> {
    for name in names {
        if !steps.iter().any(|step| step.name == *name) {
            let known: Vec<String> = steps.iter().map(|step| step.name.clone()).collect();
            return Err(SpecError::NotThere {
                flag: "--step",
                what: "step",
                name: name.clone(),
                nearest: nearest(name, known.iter().map(String::as_str)).map(str::to_owned),
                names: known,
            });
        }
    }
    let named = steps.into_iter().filter(|step| names.is_empty() || names.contains(&step.name));
    Ok(match shard {
        None => named.collect(),
        Some(Shard { index, count }) => {
            named.enumerate().filter(|(position, _)| position % count == index - 1).map(|(_, step)| step).collect()
        }
    })
}
