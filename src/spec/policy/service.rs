//! The policy's rules for the service of this machine: who may ask, and for how much.

use crate::spec::error::SpecError;
use crate::spec::limits::Limit;
use crate::spec::place::{Place, shown};
use crate::spec::raw::{RawPerUser, RawService, Text};

/// A user or group of this machine. A name is looked up when somebody asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Account {
    /// By number.
    Id(u32),
    /// By name.
    Name(String),
}

/// Who may ask the service, and for how much. `Default` sets no rule.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServiceRules {
    /// Users who may ask.
    pub users: Option<Vec<Account>>,
    /// Groups whose members may ask.
    pub groups: Option<Vec<Account>>,
    /// Memory of all runs together, bytes.
    pub memory: Option<u64>,
    /// CPUs of all runs together, thousandths.
    pub cpus: Option<u64>,
    /// Memory of one user's runs together, bytes.
    pub user_memory: Option<u64>,
    /// CPUs of one user's runs together, thousandths.
    pub user_cpus: Option<u64>,
    /// Runs of one user at the same time.
    pub user_runs: Option<u32>,
}

impl ServiceRules {
    /// Whether everybody who can connect may ask.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        self.users.is_none() && self.groups.is_none()
    }

    pub(super) fn parse(raw: RawService, place: &Place) -> Result<ServiceRules, SpecError> {
        let RawService { users, groups, memory, cpus, per_user } = raw;
        let per = place.below("per-user");
        let RawPerUser { memory: user_memory, cpus: user_cpus, runs } = per_user.unwrap_or_default();
        let user_runs = runs.map(|text| {
            let runs = text.0.parse::<u32>().ok().filter(|runs| *runs > 0);
            runs.ok_or_else(|| {
                SpecError::invalid(&per.below("runs"), "not a number of runs, of which one is the least")
            })
        });
        Ok(ServiceRules {
            users: accounts(users, &place.below("users"))?,
            groups: accounts(groups, &place.below("groups"))?,
            memory: amount(memory, Limit::Memory, place)?,
            cpus: amount(cpus, Limit::Cpus, place)?,
            user_memory: amount(user_memory, Limit::Memory, &per)?,
            user_cpus: amount(user_cpus, Limit::Cpus, &per)?,
            user_runs: user_runs.transpose()?,
        })
    }
}

fn amount(text: Option<Text>, limit: Limit, place: &Place) -> Result<Option<u64>, SpecError> {
    let parsed = text.map(|text| {
        limit.parse(&text.0).map_err(|bad| {
            let reason = format!("`{}` is {}", shown(&text.0), bad.reason);
            SpecError::invalid_help(&place.below(limit.key()), reason, bad.help)
        })
    });
    parsed.transpose()
}

fn accounts(names: Option<Vec<Text>>, place: &Place) -> Result<Option<Vec<Account>>, SpecError> {
    let parsed = names.map(|names| {
        let account = |(index, Text(name)): (usize, Text)| {
            if !name.is_empty() && name.bytes().all(|b| b.is_ascii_digit()) {
                let id = name.parse().map_err(|_| SpecError::invalid(&place.item(index), "not an id"))?;
                return Ok(Account::Id(id));
            }
            let odd = |c: char| c == ':' || c.is_whitespace() || c.is_control();
            if name.is_empty() || name.contains(odd) {
                return Err(SpecError::invalid(&place.item(index), format!("`{}` is no name", shown(&name))));
            }
            Ok(Account::Name(name))
        };
        names.into_iter().enumerate().map(account).collect()
    });
    parsed.transpose()
}

#[cfg(test)]
mod tests {
    use crate::spec::Policy;

    use super::*;

    #[test]
    fn who_may_ask_and_for_how_much() {
        let text = "service:\n  users: [runner, 1001]\n  groups: [ci]\n  memory: 8GiB\n  cpus: 1.5\n  per-user: { memory: 2GiB, cpus: 1, runs: 3 }\n";
        let rules = Policy::of_text(text).service();
        assert_eq!(rules.users, Some(vec![Account::Name("runner".into()), Account::Id(1001)]));
        assert_eq!(rules.groups, Some(vec![Account::Name("ci".into())]));
        assert_eq!((rules.memory, rules.cpus), (Some(8 << 30), Some(1500)));
        assert_eq!((rules.user_memory, rules.user_cpus, rules.user_runs), (Some(2 << 30), Some(1000), Some(3)));
        assert!(!rules.is_open() && ServiceRules::default().is_open());
        assert!(!Policy::of_text("service: { users: [] }\n").service().is_open(), "an empty list lets nobody in");
        assert!(Policy::of_text("minimum-isolation: vm\n").service().is_open());
    }
}
