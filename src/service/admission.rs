//! Which request may run now: as many as memory and CPUs allow, users in turn.
//!
//! [`Book`] is the whole rule, and pure. Within a user, first come, first served. Between users, whoever had their turn
//! goes to the end. A request that is next and doesn't fit holds back all others, or a large one would wait for ever; a user
//! who is at their own ceiling holds back nobody else. [`Admission`] is the book with those who wait for it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

use crate::spec::{ServiceRules, Step};

/// What a run takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Demand {
    /// Bytes.
    pub memory: u64,
    /// Thousandths.
    pub cpus: u64,
}

impl Demand {
    /// Of steps, `jobs` of which run at the same time: the largest that can come together.
    #[must_use]
    pub fn of(steps: &[Step], jobs: usize) -> Self {
        let sum = |mut all: Vec<u64>| {
            all.sort_unstable_by(|a, b| b.cmp(a));
            all.into_iter().take(jobs).fold(0u64, u64::saturating_add)
        };
        Self {
            memory: sum(steps.iter().map(|step| step.limits.memory).collect()),
            cpus: sum(steps.iter().map(|step| u64::from(step.limits.milli_cpus)).collect()),
        }
    }

    const fn fits(self, used: Self, most: Self) -> bool {
        self.memory <= most.memory.saturating_sub(used.memory) && self.cpus <= most.cpus.saturating_sub(used.cpus)
    }

    const fn plus(self, other: Self) -> Self {
        Self { memory: self.memory.saturating_add(other.memory), cpus: self.cpus.saturating_add(other.cpus) }
    }

    const fn minus(self, other: Self) -> Self {
        Self { memory: self.memory.saturating_sub(other.memory), cpus: self.cpus.saturating_sub(other.cpus) }
    }
}

/// What there is to give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Altogether.
    pub all: Demand,
    /// To one user.
    pub user: Demand,
    /// Runs of one user at the same time.
    pub user_runs: u32,
}

impl Capacity {
    /// What the policy says, and this machine where it says nothing.
    #[must_use]
    pub fn of(rules: &ServiceRules) -> Self {
        let all = Demand {
            memory: rules.memory.unwrap_or_else(|| host_memory() / 8 * 7),
            cpus: rules.cpus.unwrap_or_else(|| {
                std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u64 * 1000
            }),
        };
        let user = Demand {
            memory: rules.user_memory.unwrap_or(u64::MAX).min(all.memory),
            cpus: rules.user_cpus.unwrap_or(u64::MAX).min(all.cpus),
        };
        Self { all, user, user_runs: rules.user_runs.unwrap_or(u32::MAX) }
    }

    /// Whether such a request could ever run; if not, what it asks for too much of.
    #[must_use]
    pub fn excess(&self, demand: Demand) -> Option<String> {
        use crate::spec::Limit;
        let more = |asked: u64, most: u64, limit: Limit| {
            let show = |amount| limit.show(amount);
            (asked > most).then(|| format!("{} {} together, and {} is the most", limit.noun(), show(asked), show(most)))
        };
        more(demand.memory, self.user.memory, Limit::Memory).or_else(|| more(demand.cpus, self.user.cpus, Limit::Cpus))
    }
}

/// `MemTotal` of `/proc/meminfo` (proc(5)), bytes.
fn host_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

/// A request's number.
pub type Ticket = u64;

#[derive(Debug, Clone, Copy)]
struct Entry {
    ticket: Ticket,
    demand: Demand,
}

#[derive(Debug, Default, Clone)]
struct User {
    used: Demand,
    runs: u32,
    waiting: VecDeque<Entry>,
}

/// Who has what, and who waits.
#[derive(Debug, Default, Clone)]
pub struct Book {
    used: Demand,
    users: BTreeMap<u32, User>,
    /// Users who wait, whose turn is next first.
    turns: VecDeque<u32>,
    running: BTreeMap<Ticket, (u32, Demand)>,
    next: Ticket,
}

impl Book {
    /// Puts a request at the end of its user's queue.
    pub fn enter(&mut self, uid: u32, demand: Demand) -> Ticket {
        self.next += 1;
        let user = self.users.entry(uid).or_default();
        if user.waiting.is_empty() {
            self.turns.push_back(uid);
        }
        user.waiting.push_back(Entry { ticket: self.next, demand });
        self.next
    }

    /// Lets in who can be let in; those are running from here on.
    pub fn admit(&mut self, capacity: &Capacity) -> Vec<Ticket> {
        let mut admitted = Vec::new();
        while let Some((turn, entry)) = self.first(capacity) {
            if !entry.demand.fits(self.used, capacity.all) {
                break;
            }
            let Some(uid) = self.turns.remove(turn) else { break };
            let Some(user) = self.users.get_mut(&uid) else { break };
            user.waiting.pop_front();
            user.used = user.used.plus(entry.demand);
            user.runs += 1;
            if !user.waiting.is_empty() {
                self.turns.push_back(uid);
            }
            self.used = self.used.plus(entry.demand);
            self.running.insert(entry.ticket, (uid, entry.demand));
            admitted.push(entry.ticket);
        }
        admitted
    }

    /// The request whose turn it is: of the first user who is below their ceiling.
    fn first(&self, capacity: &Capacity) -> Option<(usize, Entry)> {
        self.turns.iter().enumerate().find_map(|(turn, uid)| {
            let user = self.users.get(uid)?;
            let entry = *user.waiting.front()?;
            let below = user.runs < capacity.user_runs && entry.demand.fits(user.used, capacity.user);
            below.then_some((turn, entry))
        })
    }

    /// A request is over, or is withdrawn.
    pub fn leave(&mut self, ticket: Ticket) {
        if let Some((uid, demand)) = self.running.remove(&ticket) {
            self.used = self.used.minus(demand);
            if let Some(user) = self.users.get_mut(&uid) {
                user.used = user.used.minus(demand);
                user.runs = user.runs.saturating_sub(1);
            }
        } else {
            for user in self.users.values_mut() {
                user.waiting.retain(|entry| entry.ticket != ticket);
            }
            let users = &self.users;
            self.turns.retain(|uid| users.get(uid).is_some_and(|user| !user.waiting.is_empty()));
        }
        self.users.retain(|_, user| user.runs > 0 || !user.waiting.is_empty());
    }

    /// Requests that wait, in the order of their turns; ceilings apart.
    #[must_use]
    pub fn queue(&self) -> Vec<Ticket> {
        let mut queue = Vec::new();
        for round in 0.. {
            let before = queue.len();
            let next = |uid| self.users.get(uid).and_then(|user: &User| user.waiting.get(round));
            queue.extend(self.turns.iter().filter_map(next).map(|entry| entry.ticket));
            if queue.len() == before {
                break;
            }
        }
        queue
    }

    /// Whether a request runs.
    #[must_use]
    pub fn runs(&self, ticket: Ticket) -> bool {
        self.running.contains_key(&ticket)
    }
}

/// The book, and those who wait for it. Cloning gives another handle.
#[derive(Debug, Clone)]
pub struct Admission {
    book: Arc<Mutex<Book>>,
    changed: Arc<watch::Sender<u64>>,
}

impl Default for Admission {
    fn default() -> Self {
        Self { book: Arc::default(), changed: Arc::new(watch::channel(0).0) }
    }
}

/// A request's place, in the queue or among those that run; given up on drop.
#[derive(Debug)]
pub struct Place {
    ticket: Ticket,
    capacity: Capacity,
    admission: Admission,
    changed: watch::Receiver<u64>,
}

/// Where a request stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It may run.
    Admitted,
    /// It waits.
    Waiting {
        /// From 1.
        position: u32,
        /// Of how many.
        waiting: u32,
    },
}

impl Admission {
    /// Queues a request. The capacity is that of the policy in force now, so that a change of it takes effect.
    #[must_use]
    pub fn enter(&self, uid: u32, demand: Demand, capacity: Capacity) -> Place {
        let changed = self.changed.subscribe();
        let ticket = self.with(|book| {
            let ticket = book.enter(uid, demand);
            book.admit(&capacity);
            ticket
        });
        Place { ticket, capacity, admission: self.clone(), changed }
    }

    fn with<T>(&self, act: impl FnOnce(&mut Book) -> T) -> T {
        // A panic can't leave the book half written: each change of it is a few assignments.
        let done = act(&mut self.book.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.send_modify(|change| *change += 1);
        done
    }
}

impl Place {
    /// Where it stands now.
    #[must_use]
    pub fn standing(&self) -> Standing {
        let book = self.admission.book.lock().unwrap_or_else(PoisonError::into_inner);
        if book.runs(self.ticket) {
            return Standing::Admitted;
        }
        let queue = book.queue();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let position = queue.iter().position(|ticket| *ticket == self.ticket).map_or(queue.len(), |at| at + 1);
        Standing::Waiting { position: count(position), waiting: count(queue.len()) }
    }

    /// Waits until where it stands may have changed. Can be given up.
    pub async fn moved(&mut self) {
        // The sender lives as long as the admission, which this holds.
        let _ = self.changed.changed().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let (ticket, capacity) = (self.ticket, self.capacity);
        self.admission.with(|book| {
            book.leave(ticket);
            book.admit(&capacity);
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn capacity(memory: u64, user: u64) -> Capacity {
        let all = Demand { memory, cpus: 1000 };
        Capacity { all, user: Demand { memory: user, cpus: 1000 }, user_runs: 100 }
    }

    fn memory(memory: u64) -> Demand {
        Demand { memory, cpus: 1 }
    }

    #[test]
    fn users_take_turns_and_each_is_served_in_order() {
        let (mut book, one) = (Book::default(), capacity(1, 1));
        let tickets = [7, 7, 7, 8, 9, 8].map(|uid| book.enter(uid, memory(1)));
        let [a1, a2, a3, b1, c1, b2] = tickets;
        assert_eq!(book.queue(), [a1, b1, c1, a2, b2, a3]);
        let mut order = Vec::new();
        while let [ticket] = book.admit(&one)[..] {
            order.push(ticket);
            book.leave(ticket);
        }
        assert_eq!(order, [a1, b1, c1, a2, b2, a3]);
    }

    #[test]
    fn a_large_request_is_not_passed_by_small_ones_for_ever() {
        let (mut book, ten) = (Book::default(), capacity(10, 10));
        let small = book.enter(1, memory(6));
        assert_eq!(book.admit(&ten), [small]);
        let large = book.enter(2, memory(10));
        let after = book.enter(3, memory(1));
        assert_eq!(book.admit(&ten), [0u64; 0], "the large one is next");
        book.leave(small);
        assert_eq!(book.admit(&ten), [large]);
        book.leave(large);
        assert_eq!(book.admit(&ten), [after]);
    }

    #[test]
    fn a_user_at_the_ceiling_holds_back_nobody_else() {
        let (mut book, ceiling) = (Book::default(), capacity(10, 4));
        let first = book.enter(1, memory(4));
        let greedy = book.enter(1, memory(1));
        let other = book.enter(2, memory(4));
        assert_eq!(book.admit(&ceiling), [first, other]);
        book.leave(greedy);
        assert_eq!(book.queue(), [0u64; 0], "withdrawn");
        let one_run = Capacity { user_runs: 1, ..ceiling };
        let waits = book.enter(2, memory(0));
        assert_eq!(book.admit(&one_run), [0u64; 0]);
        book.leave(other);
        assert_eq!(book.admit(&one_run), [waits]);
    }

    #[test]
    fn what_can_never_run_is_known_at_once() {
        let ceiling = capacity(4 << 30, 1 << 30);
        assert_eq!(ceiling.excess(memory(1 << 30)), None);
        assert!(ceiling.excess(memory(2 << 30)).unwrap().contains("1GiB is the most"));
        assert!(ceiling.excess(Demand { memory: 0, cpus: 1001 }).unwrap().contains("CPUs"));
    }

    #[test]
    fn a_place_moves_up_when_another_is_given_up() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let admission = Admission::default();
            let first = admission.enter(1, memory(1), capacity(1, 1));
            let second = admission.enter(1, memory(1), capacity(1, 1));
            let mut third = admission.enter(2, memory(1), capacity(1, 1));
            assert_eq!(first.standing(), Standing::Admitted);
            assert_eq!(third.standing(), Standing::Waiting { position: 2, waiting: 2 });
            drop(second);
            third.moved().await;
            assert_eq!(third.standing(), Standing::Waiting { position: 1, waiting: 1 });
            drop(first);
            assert_eq!(third.standing(), Standing::Admitted);
        });
    }

    proptest! {
        /// Whatever comes and goes: never more than there is, nobody is forgotten.
        #[test]
        fn the_book_balances(actions in proptest::collection::vec((0u32..4, 0u64..6, any::<bool>()), 1..60)) {
            let (mut book, ceiling) = (Book::default(), capacity(10, 5));
            let (mut live, mut running) = (Vec::new(), Vec::new());
            for (uid, amount, leave) in actions {
                if leave && !live.is_empty() {
                    let ticket = live.remove(amount as usize % live.len());
                    running.retain(|t| *t != ticket);
                    book.leave(ticket);
                } else {
                    live.push(book.enter(uid, memory(amount.min(5))));
                }
                running.extend(book.admit(&ceiling));
                prop_assert!(book.used.memory <= 10);
                prop_assert!(book.users.values().all(|user| user.used.memory <= 5));
                prop_assert_eq!(running.len() + book.queue().len(), live.len());
            }
            for ticket in live {
                book.leave(ticket);
                book.admit(&ceiling);
            }
            prop_assert_eq!(book.used, Demand::default());
            prop_assert!(book.users.is_empty() && book.turns.is_empty());
        }
    }
}
