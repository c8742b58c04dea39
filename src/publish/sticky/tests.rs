//! Against a forge in memory, where others write in between.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::convert::Infallible;

use super::super::body::{Mark, compose, parse};
use super::*;

const OURS: u64 = 1;
const SETTLED: Duration = Duration::ZERO;

type Interruption = Box<dyn FnMut(&mut BTreeMap<u64, (u64, String)>)>;

/// Comments by number: author and body. What `between` holds happens before the call that it is due at.
#[derive(Default)]
struct Forge {
    posts: RefCell<BTreeMap<u64, (u64, String)>>,
    calls: RefCell<Vec<String>>,
    between: RefCell<BTreeMap<usize, Interruption>>,
}

impl Forge {
    fn called(&self, what: String) {
        let at = self.calls.borrow().len();
        self.calls.borrow_mut().push(what);
        if let Some(mut happens) = self.between.borrow_mut().remove(&at) {
            happens(&mut self.posts.borrow_mut());
        }
    }

    fn post(&self, id: u64) -> Post {
        let posts = self.posts.borrow();
        let (author, body) = &posts[&id];
        Post { id, own: *author == OURS, body: body.clone(), url: Some(format!("#{id}")) }
    }
}

impl Thread for Forge {
    type Error = Infallible;
    const LIMIT: usize = 65_536;

    async fn page(&self, page: usize) -> Result<(Vec<Post>, bool), Infallible> {
        self.called(format!("page {page}"));
        let ids: Vec<u64> = self.posts.borrow().keys().copied().collect();
        let here: Vec<Post> = ids.iter().skip((page - 1) * 3).take(3).map(|&id| self.post(id)).collect();
        let last = here.len() < 3;
        Ok((here, last))
    }

    async fn read(&self, id: u64) -> Result<Post, Infallible> {
        self.called(format!("read {id}"));
        Ok(self.post(id))
    }

    async fn create(&mut self, body: &str) -> Result<Post, Infallible> {
        self.called("create".to_owned());
        let id = self.posts.borrow().keys().max().map_or(1, |id| id + 1);
        self.posts.borrow_mut().insert(id, (OURS, body.to_owned()));
        Ok(self.post(id))
    }

    async fn update(&self, id: u64, body: &str) -> Result<Post, Infallible> {
        self.called(format!("update {id}"));
        self.posts.borrow_mut().insert(id, (OURS, body.to_owned()));
        Ok(self.post(id))
    }

    async fn delete(&self, id: u64) -> Result<(), Infallible> {
        self.called(format!("delete {id}"));
        self.posts.borrow_mut().remove(&id);
        Ok(())
    }
}

fn section(key: char) -> Section {
    let key = key.to_string().repeat(16);
    let text = format!("of {key}\n");
    Section { key, run: 1, attempt: 1, sha: "ab".repeat(20), mark: Mark::Passed, brief: text, details: String::new() }
}

fn body(keys: &str) -> String {
    compose(&keys.chars().map(section).collect::<Vec<_>>(), 65_536)
}

fn keys(forge: &Forge, id: u64) -> String {
    parse(&forge.posts.borrow()[&id].1).iter().map(|s| s.key.chars().next().unwrap()).collect()
}

async fn put_in(forge: &mut Forge, key: char) -> Stuck {
    let Ok(stuck) = put(forge, &section(key), SETTLED).await;
    stuck
}

#[tokio::test]
async fn the_first_makes_it_the_next_writes_it_and_one_that_says_the_same_leaves_it() {
    let mut forge = Forge::default();
    assert_eq!(put_in(&mut forge, 'a').await, Stuck::Posted(Some("#1".to_owned())));
    assert_eq!(put_in(&mut forge, 'b').await, Stuck::Updated(Some("#1".to_owned())));
    forge.calls.borrow_mut().clear();
    assert_eq!(put_in(&mut forge, 'b').await, Stuck::Unchanged(Some("#1".to_owned())));
    assert_eq!(*forge.calls.borrow(), ["page 1"]);
    assert_eq!(keys(&forge, 1), "ab");
}

#[tokio::test]
async fn a_marker_that_somebody_else_wrote_is_not_ours_and_ours_is_found_on_any_page() {
    let mut forge = Forge::default();
    for id in 1..=8 {
        forge.posts.borrow_mut().insert(id, (99, body("f")));
    }
    forge.posts.borrow_mut().insert(9, (OURS, "no marker".to_owned()));
    forge.posts.borrow_mut().insert(10, (OURS, body("b")));
    assert_eq!(put_in(&mut forge, 'a').await, Stuck::Updated(Some("#10".to_owned())));
    assert_eq!(keys(&forge, 10), "ab");
    assert_eq!(keys(&forge, 1), "f", "left alone");
}

#[tokio::test]
async fn two_jobs_that_make_one_at_once_end_with_the_oldest() {
    let mut forge = Forge::default();
    // Another job's comes just before ours.
    let happens: Interruption = Box::new(|posts| {
        posts.insert(1, (OURS, body("b")));
    });
    forge.between.borrow_mut().insert(1, happens);
    assert_eq!(put_in(&mut forge, 'a').await, Stuck::Updated(Some("#1".to_owned())));
    assert_eq!(keys(&forge, 1), "ab");
    assert_eq!(forge.posts.borrow().len(), 1, "the newer one is gone");
}

#[tokio::test]
async fn one_that_was_written_over_is_written_again() {
    let mut forge = Forge::default();
    forge.posts.borrow_mut().insert(1, (OURS, body("b")));
    // Between our writing and our looking again, a job that had read before writes what it made of it.
    let happens: Interruption = Box::new(|posts| {
        posts.insert(1, (OURS, body("bc")));
    });
    forge.between.borrow_mut().insert(2, happens);
    assert_eq!(put_in(&mut forge, 'a').await, Stuck::Updated(Some("#1".to_owned())));
    assert_eq!(keys(&forge, 1), "abc");
}

#[tokio::test]
async fn one_that_is_always_written_over_is_given_up() {
    let mut forge = Forge::default();
    forge.posts.borrow_mut().insert(1, (OURS, body("b")));
    for round in 0..ROUNDS {
        let happens: Interruption = Box::new(|posts| {
            posts.insert(1, (OURS, body("b")));
        });
        forge.between.borrow_mut().insert(round * 3 + 2, happens);
    }
    assert_eq!(put_in(&mut forge, 'a').await, Stuck::Lost);
}

#[tokio::test]
async fn a_run_that_was_overtaken_writes_nothing() {
    let mut forge = Forge::default();
    let newer = Section { run: 2, sha: "cd".repeat(20), ..section('a') };
    forge.posts.borrow_mut().insert(1, (OURS, compose(std::slice::from_ref(&newer), 65_536)));
    assert_eq!(put_in(&mut forge, 'a').await, Stuck::Outdated);
    assert_eq!(*forge.calls.borrow(), ["page 1"]);
}
