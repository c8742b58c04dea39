//! What has been unpacked so far, in memory: the authority on kinds, collisions and where links lead.
//!
//! Main type: [`Tree`]. The destination starts empty and only this unpacking writes there, so the tree knows every
//! member without asking the file system, and a question about it can't be raced.

use std::borrow::Cow;
use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::path::fold;
use super::rejection::{Rejection, Rule, shown};

/// Links that one resolution may follow, Linux's own limit (`MAXSYMLINKS`, path_resolution(7)).
const MAX_LINKS: u32 = 40;

/// What a tree is for, which decides what its links and names may be. Confinement is the same for both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Purpose {
    /// Files that a step runs, and that the host may read by name: links stay inside, names that differ only by case or
    /// normalisation are refused, and so are devices.
    #[default]
    Artifact,
    /// A root file system, never used but as a root: an absolute link, or one that climbs, means the tree's own root, as
    /// it will for whoever follows it there. Names are taken as they are (terminfo has `E` and `e`), devices and FIFOs
    /// are left out, since `/dev` is the engine's.
    RootFs,
}

/// A member of a [`Tree`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(u32);

/// The root directory of a tree.
pub const ROOT: NodeId = NodeId(0);

/// What a member is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A directory, declared or implied by a longer path.
    Directory,
    /// A regular file, or a hard link to one.
    File,
    /// A symbolic link and its target. Not on disk until the whole artifact is unpacked.
    Symlink(String),
}

impl Kind {
    /// For people.
    pub fn noun(&self) -> &'static str {
        match self {
            Kind::Directory => "directory",
            Kind::File => "file",
            Kind::Symlink(_) => "symbolic link",
        }
    }
}

#[derive(Debug)]
struct Node {
    parent: NodeId,
    name: Box<str>,
    kind: Kind,
}

/// Where following a link ends: a member, and how many components that don't exist lie below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    node: NodeId,
    missing: u32,
}

/// All members of one artifact.
#[derive(Debug)]
pub struct Tree {
    purpose: Purpose,
    nodes: Vec<Node>,
    children: HashMap<(NodeId, Box<str>), NodeId>,
}

impl Tree {
    /// A tree of nothing but its root.
    pub fn new(purpose: Purpose) -> Self {
        let root = Node { parent: ROOT, name: "".into(), kind: Kind::Directory };
        Tree { purpose, nodes: vec![root], children: HashMap::new() }
    }

    /// What it is for.
    pub fn purpose(&self) -> Purpose {
        self.purpose
    }

    fn key<'n>(&self, name: &'n str) -> Cow<'n, str> {
        match self.purpose {
            Purpose::Artifact => fold(name),
            Purpose::RootFs => Cow::Borrowed(name),
        }
    }

    /// The member of that name in a directory.
    ///
    /// # Errors
    /// [`Rule::NameCollision`] when a member is there whose name differs only by case or normalisation.
    pub fn find(&self, directory: NodeId, name: &str) -> Result<Option<NodeId>, Rejection> {
        let Some(&node) = self.children.get(&(directory, Box::from(&*self.key(name)))) else {
            return Ok(None);
        };
        let known = &*self.node(node).name;
        if known != name {
            let message = format!(
                "`{}` differs from the {} `{}` only by case or Unicode normalisation",
                shown(name.as_bytes()),
                self.kind(node).noun(),
                shown(known.as_bytes())
            );
            return Err(Rejection::new(Rule::NameCollision, message));
        }
        Ok(Some(node))
    }

    /// Adds a member that [`Tree::find`] didn't find.
    pub fn insert(&mut self, directory: NodeId, name: &str, kind: Kind) -> NodeId {
        let node = NodeId(self.nodes.len() as u32);
        self.nodes.push(Node { parent: directory, name: name.into(), kind });
        self.children.insert((directory, Box::from(&*self.key(name))), node);
        node
    }

    /// How many members there are, the root included.
    #[allow(clippy::len_without_is_empty, reason = "a tree is never empty")]
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// What a member is.
    pub fn kind(&self, node: NodeId) -> &Kind {
        &self.node(node).kind
    }

    /// Gives a symbolic link another target.
    pub fn replace(&mut self, node: NodeId, kind: Kind) {
        self.nodes[node.0 as usize].kind = kind;
    }

    /// The name of a member in its directory.
    pub fn name(&self, node: NodeId) -> &str {
        &self.node(node).name
    }

    /// The path of a member from the root; empty for the root.
    pub fn path(&self, node: NodeId) -> String {
        let mut names = Vec::new();
        let mut at = node;
        while at != ROOT {
            names.push(&*self.node(at).name);
            at = self.node(at).parent;
        }
        names.reverse();
        names.join("/")
    }

    /// All symbolic links, in the order of their first appearance: directory, link, target.
    pub fn symlinks(&self) -> impl Iterator<Item = (NodeId, NodeId, &str)> {
        self.nodes.iter().enumerate().filter_map(|(index, node)| match &node.kind {
            Kind::Symlink(target) => Some((node.parent, NodeId(index as u32), target.as_str())),
            _ => None,
        })
    }

    /// Follows every symbolic link through the finished tree, component by component and through other links, and
    /// refuses the first that would leave it. A link to something that isn't there is fine, as long as the way to it
    /// stays inside.
    ///
    /// Each link is followed once, so the cost is that of reading all targets.
    pub fn check_symlinks(&self) -> Result<(), Rejection> {
        let mut known = HashMap::new();
        for (_, node, _) in self.symlinks() {
            self.resolve(node, 0, &mut known).map_err(|rejection| rejection.at(self.path(node).as_bytes()))?;
        }
        Ok(())
    }

    /// The place a link leads to. `known` holds links already followed; `depth` counts links within links.
    fn resolve(&self, link: NodeId, depth: u32, known: &mut HashMap<NodeId, Place>) -> Result<Place, Rejection> {
        if let Some(&place) = known.get(&link) {
            return Ok(place);
        }
        let Kind::Symlink(target) = self.kind(link) else {
            return Ok(Place { node: link, missing: 0 });
        };
        if depth == MAX_LINKS {
            return Err(Rejection::new(Rule::Symlink, "symbolic links lead in a circle or through too many others"));
        }
        let rooted = self.purpose == Purpose::RootFs;
        let start = match target.starts_with('/') {
            true if rooted => ROOT,
            true => return Err(leaves(target, "is absolute")),
            false => self.node(link).parent,
        };
        let mut at = Place { node: start, missing: 0 };
        for component in target.split('/') {
            match component {
                "" | "." => {}
                ".." if at.missing > 0 => at.missing -= 1,
                ".." if at.node == ROOT && rooted => {}
                ".." if at.node == ROOT => return Err(leaves(target, "leaves the artifact")),
                ".." => at.node = self.node(at.node).parent,
                _ if at.missing > 0 => at.missing += 1,
                name => match self.find(at.node, name).ok().flatten() {
                    Some(next) => at = self.resolve(next, depth + 1, known)?,
                    None => at.missing += 1,
                },
            }
        }
        known.insert(link, at);
        Ok(at)
    }

    fn node(&self, node: NodeId) -> &Node {
        &self.nodes[node.0 as usize]
    }
}

fn leaves(target: &str, how: &str) -> Rejection {
    Rejection::new(Rule::Symlink, format!("the link's target `{}` {how}", shown(target.as_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds a tree from `path/` (directory), `path` (file) and `path -> target`.
    fn tree(members: &[&str]) -> Tree {
        tree_for(Purpose::Artifact, members)
    }

    fn tree_for(purpose: Purpose, members: &[&str]) -> Tree {
        let mut tree = Tree::new(purpose);
        for member in members {
            let (path, kind) = match member.split_once(" -> ") {
                Some((path, target)) => (path, Kind::Symlink(target.to_owned())),
                None if member.ends_with('/') => (member.trim_end_matches('/'), Kind::Directory),
                None => (*member, Kind::File),
            };
            let mut at = ROOT;
            let (parents, name) = path.rsplit_once('/').unwrap_or(("", path));
            for parent in parents.split('/').filter(|p| !p.is_empty()) {
                at = match tree.find(at, parent).unwrap() {
                    Some(node) => node,
                    None => tree.insert(at, parent, Kind::Directory),
                };
            }
            tree.insert(at, name, kind);
        }
        tree
    }

    #[test]
    fn links_that_stay_inside_pass() {
        for members in [
            &["a", "b -> a"][..],
            &["d/a", "d/b -> ../c", "c"],
            &["d/e/f", "l -> d/e/../e/f"],
            &["l -> missing/../also/missing"],
            &["lib/x.so.1", "lib/x.so -> x.so.1", "lib64 -> lib", "y -> lib64/x.so"],
            // Lexically this leaves; through the link it doesn't.
            &["a/b/c/", "l -> a/b/c", "m -> l/../../x"],
            &["a/.. b", "l -> a/...", "m -> ."],
            &["f", "l -> f/.."],
        ] {
            tree(members).check_symlinks().unwrap_or_else(|e| panic!("{members:?}: {e}"));
        }
    }

    #[test]
    fn links_that_leave_are_refused_also_through_others() {
        for members in [
            &["l -> /etc/passwd"][..],
            &["l -> .."],
            &["l -> ../x"],
            &["d/l -> ../../x"],
            &["d/l -> ./.././.././x"],
            &["l -> missing/../../x"],
            // Lexically this stays; through the link it doesn't.
            &["d/e/", "d/e/up -> ../..", "l -> d/e/up/../x"],
            &["here -> .", "l -> here/here/../x"],
            // The link it goes through comes later in the archive.
            &["l -> later/../x", "later -> ."],
            &["d/", "l -> d/../d/../../x"],
        ] {
            let rejection = tree(members).check_symlinks().expect_err(&format!("{members:?}"));
            assert_eq!(rejection.rule, Rule::Symlink, "{members:?}");
            assert!(rejection.member.is_some());
        }
    }

    #[test]
    fn in_a_root_file_system_links_mean_its_own_root() {
        let tree = tree_for(
            Purpose::RootFs,
            &["run/x", "var/run -> /run", "etc/alternatives/vi -> /usr/bin/vim", "up -> ../../../etc", "E", "e"],
        );
        tree.check_symlinks().unwrap();
        assert_eq!(tree_for(Purpose::RootFs, &["a -> /a"]).check_symlinks().unwrap_err().rule, Rule::Symlink);
    }

    #[test]
    fn circles_and_long_chains_end() {
        for members in [&["a -> a"][..], &["a -> b", "b -> a"], &["d/a -> ../d/a/x"]] {
            assert_eq!(tree(members).check_symlinks().unwrap_err().rule, Rule::Symlink);
        }
        let chain: Vec<String> = (0..60).map(|n| format!("l{n} -> l{}", n + 1)).collect();
        let chain: Vec<&str> = chain.iter().map(String::as_str).collect();
        assert_eq!(tree(&chain).check_symlinks().unwrap_err().rule, Rule::Symlink);
        assert!(tree(&chain[30..]).check_symlinks().is_ok());
    }

    #[test]
    fn many_links_through_each_other_cost_little() {
        // Each target passes two others: 2^n walks without the memory of those already followed.
        let members: Vec<String> =
            (0..39).map(|n| format!("l{n} -> l{0}/l{0}", n + 1)).chain(["l39 -> .".into()]).collect();
        let members: Vec<&str> = members.iter().map(String::as_str).collect();
        tree(&members).check_symlinks().unwrap();
    }

    #[test]
    fn names_that_fold_together_collide_whatever_their_kinds() {
        let tree = tree(&["Dir/", "link -> Dir", "caf\u{e9}"]);
        for name in ["dir", "LINK", "cafe\u{301}"] {
            assert_eq!(tree.find(ROOT, name).unwrap_err().rule, Rule::NameCollision, "{name}");
        }
        assert!(tree.find(ROOT, "Dir").unwrap().is_some());
        assert!(tree.find(ROOT, "other").unwrap().is_none());
    }
}
