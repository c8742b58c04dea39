//! The layers of an image laid over each other, in memory: names, kinds, links, and which layer put them there.
//!
//! Main type: [`Tree`]. It decides everything about names: what a whiteout hides, what replaces what, where a path leads
//! through symbolic links (resolved here, with the image's root as the root; there are none on disk to follow). On disk
//! there is meanwhile nothing but contents under numbers.

use std::collections::{BTreeMap, VecDeque};

use crate::artifact::budget::Meter;
use crate::artifact::path::MemberPath;
use crate::artifact::rejection::{Rejection, Rule, shown};

/// Links that one path may lead through, as Linux has it (`MAXSYMLINKS`).
const MAX_LINKS: u32 = 40;

/// A member, which may have been removed since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeId(usize);

/// The image's root directory.
pub const ROOT: NodeId = NodeId(0);

/// Content of a regular file, on disk under this number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Content(pub usize);

/// What a member is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// With its members by name.
    Directory(BTreeMap<Box<str>, NodeId>),
    /// One of the names of a content.
    File(Content),
    /// And its target.
    Symlink(Box<str>),
}

#[derive(Debug)]
struct Node {
    parent: NodeId,
    name: Box<str>,
    kind: Kind,
    /// The last layer that put it there.
    layer: u32,
}

/// The whole image so far.
#[derive(Debug)]
pub struct Tree<'m> {
    nodes: Vec<Node>,
    /// How many names each content has.
    names: Vec<u32>,
    /// Contents that have lost their last name, to be removed.
    unnamed: Vec<Content>,
    layer: u32,
    meter: &'m Meter,
}

impl<'m> Tree<'m> {
    /// Nothing but a root.
    pub fn new(meter: &'m Meter) -> Self {
        let root = Node { parent: ROOT, name: "".into(), kind: Kind::Directory(BTreeMap::new()), layer: 0 };
        Tree { nodes: vec![root], names: Vec::new(), unnamed: Vec::new(), layer: 0, meter }
    }

    /// What follows belongs to the next layer.
    pub fn next_layer(&mut self) {
        self.layer += 1;
    }

    /// What a member is.
    pub fn kind(&self, node: NodeId) -> &Kind {
        &self.nodes[node.0].kind
    }

    /// How many names a content has.
    pub fn names(&self, content: Content) -> u32 {
        self.names[content.0]
    }

    /// Contents that have lost their last name since this was asked.
    pub fn take_unnamed(&mut self) -> Vec<Content> {
        let mut unnamed = std::mem::take(&mut self.unnamed);
        // A hard link may have given one another name in the place of its last.
        unnamed.retain(|&content| self.names(content) == 0);
        unnamed
    }

    /// A directory, which keeps what it has if there is one already.
    pub fn directory(&mut self, path: &MemberPath) -> Result<(), Rejection> {
        let Some((directory, name)) = self.place(path)? else {
            return self.meter.member();
        };
        match self.child(directory, name) {
            Some(known) if matches!(self.kind(known), Kind::Directory(_)) => self.nodes[known.0].layer = self.layer,
            _ => {
                self.put(directory, name, Kind::Directory(BTreeMap::new()))?;
                return Ok(());
            }
        }
        // Every member counts, also one that changes nothing: else a million of them were free.
        self.meter.member()
    }

    /// A regular file in place of whatever was there; says where its content goes.
    pub fn file(&mut self, path: &MemberPath) -> Result<Content, Rejection> {
        let (directory, name) = self.place(path)?.ok_or_else(root_only)?;
        let content = Content(self.names.len());
        self.names.push(0);
        self.put(directory, name, Kind::File(content))?;
        Ok(content)
    }

    /// A symbolic link in place of whatever was there.
    pub fn symlink(&mut self, path: &MemberPath, target: &str) -> Result<(), Rejection> {
        let (directory, name) = self.place(path)?.ok_or_else(root_only)?;
        self.put(directory, name, Kind::Symlink(target.into()))?;
        Ok(())
    }

    /// A second name for a file or symbolic link of this layer or one below.
    pub fn hardlink(&mut self, path: &MemberPath, target: &MemberPath) -> Result<(), Rejection> {
        let refuse = |message: String| Err(Rejection::new(Rule::Hardlink, message));
        let named = shown(target.as_str().as_bytes());
        let found = match target.split() {
            Some((above, name)) => self.find(above)?.and_then(|directory| self.child(directory, name)),
            None => Some(ROOT),
        };
        let kind = match found.map(|node| self.kind(node)) {
            None => return refuse(format!("it is a hard link to `{named}`, which no member before it is")),
            Some(Kind::Directory(_)) => return refuse(format!("it is a hard link to `{named}`, a directory")),
            Some(kind) => kind.clone(),
        };
        let (directory, name) = self.place(path)?.ok_or_else(root_only)?;
        if self.child(directory, name) == found {
            return refuse("it is a hard link to itself".to_owned());
        }
        self.put(directory, name, kind)?;
        Ok(())
    }

    /// Hides a member of the layers below, with everything of theirs in it. What this layer put there stays.
    pub fn whiteout(&mut self, directory: &str, name: &str) -> Result<(), Rejection> {
        if let Some(node) = self.find(directory)?.and_then(|directory| self.child(directory, name)) {
            self.hide(node);
        }
        Ok(())
    }

    /// Hides everything that the layers below have in a directory.
    pub fn opaque(&mut self, directory: &str) -> Result<(), Rejection> {
        if let Some(node) = self.find(directory)? {
            self.hide_members(node);
        }
        Ok(())
    }

    /// Hides a node if it is of a layer below and nothing of this layer is in it.
    fn hide(&mut self, node: NodeId) {
        self.hide_members(node);
        let Node { parent, ref name, ref kind, layer } = self.nodes[node.0];
        if layer == self.layer || matches!(kind, Kind::Directory(members) if !members.is_empty()) {
            return;
        }
        let name = name.clone();
        if let Kind::File(content) = *kind {
            self.unname(content);
        }
        if let Kind::Directory(members) = &mut self.nodes[parent.0].kind {
            members.remove(&name);
        }
    }

    // As deep as a path may be, which `place` sees to.
    fn hide_members(&mut self, node: NodeId) {
        let Kind::Directory(members) = &self.nodes[node.0].kind else { return };
        let members: Vec<NodeId> = members.values().copied().collect();
        for member in members {
            self.hide(member);
        }
    }

    fn unname(&mut self, content: Content) {
        self.names[content.0] -= 1;
        if self.names[content.0] == 0 {
            self.unnamed.push(content);
        }
    }

    /// Forgets the content of everything below and including a node.
    fn drop_all(&mut self, node: NodeId) {
        match std::mem::replace(&mut self.nodes[node.0].kind, Kind::Directory(BTreeMap::new())) {
            Kind::Directory(members) => members.into_values().for_each(|member| self.drop_all(member)),
            Kind::File(content) => self.unname(content),
            Kind::Symlink(_) => {}
        }
    }

    fn child(&self, directory: NodeId, name: &str) -> Option<NodeId> {
        match self.kind(directory) {
            Kind::Directory(members) => members.get(name).copied(),
            _ => None,
        }
    }

    /// Puts a member there, in place of whatever was.
    fn put(&mut self, directory: NodeId, name: &str, kind: Kind) -> Result<NodeId, Rejection> {
        self.meter.member()?;
        if let Kind::File(content) = kind {
            self.names[content.0] += 1;
        }
        if let Some(known) = self.child(directory, name) {
            self.drop_all(known);
        }
        let node = NodeId(self.nodes.len());
        self.nodes.push(Node { parent: directory, name: name.into(), kind, layer: self.layer });
        if let Kind::Directory(members) = &mut self.nodes[directory.0].kind {
            members.insert(name.into(), node);
        }
        Ok(node)
    }

    /// The directory that a member goes to, made if need be, and the member's name there; none for the root itself.
    fn place<'p>(&mut self, path: &'p MemberPath) -> Result<Option<(NodeId, &'p str)>, Rejection> {
        let Some((above, name)) = path.split() else { return Ok(None) };
        let directory = self.walk(above, true)?;
        let Some(directory) = directory else { return Ok(None) };
        // Through links a path may become longer than it is written.
        let (mut at, mut depth, mut bytes) = (directory, 1, name.len());
        while at != ROOT {
            depth += 1;
            bytes += self.nodes[at.0].name.len() + 1;
            at = self.nodes[at.0].parent;
        }
        let budget = self.meter.budget();
        if depth > budget.depth || bytes > budget.path_bytes as usize {
            return Err(Rejection::new(Rule::BudgetDepth, format!("deeper than {} directories", budget.depth)));
        }
        Ok(Some((directory, name)))
    }

    /// The directory of that path, if it is there.
    fn find(&mut self, path: &str) -> Result<Option<NodeId>, Rejection> {
        self.walk(path, false)
    }

    /// Follows a path from the root through symbolic links, as a process whose root this is would. With `make`, what is
    /// missing becomes a directory, and so does a file of a layer below.
    fn walk(&mut self, path: &str, make: bool) -> Result<Option<NodeId>, Rejection> {
        let mut todo: VecDeque<Box<str>> = path.split('/').map(Box::from).collect();
        let (mut at, mut links) = (ROOT, 0);
        while let Some(component) = todo.pop_front() {
            match &*component {
                "" | "." => continue,
                ".." => {
                    at = self.nodes[at.0].parent;
                    continue;
                }
                // A member's own name was looked at; this one comes out of a link.
                name if make && name.starts_with(super::WHITEOUT) => {
                    let message = "its path leads through a link to a name that hides another";
                    return Err(Rejection::new(Rule::ThroughLink, message));
                }
                _ => {}
            }
            at = match self.child(at, &component) {
                Some(node) => match &self.nodes[node.0] {
                    Node { kind: Kind::Directory(_), .. } => node,
                    Node { kind: Kind::Symlink(target), .. } => {
                        links += 1;
                        if links > MAX_LINKS {
                            let message = "its path leads through too many symbolic links, or in a circle";
                            return Err(Rejection::new(Rule::ThroughLink, message));
                        }
                        if target.starts_with('/') {
                            at = ROOT;
                        }
                        for part in target.split('/').rev() {
                            todo.push_front(part.into());
                        }
                        continue;
                    }
                    Node { layer, .. } if make && *layer < self.layer => {
                        self.put(at, &component, Kind::Directory(BTreeMap::new()))?
                    }
                    Node { .. } if make => {
                        let message = format!("its path goes through the file `{}`", shown(component.as_bytes()));
                        return Err(Rejection::new(Rule::ThroughLink, message));
                    }
                    Node { .. } => return Ok(None),
                },
                None if make => self.put(at, &component, Kind::Directory(BTreeMap::new()))?,
                None => return Ok(None),
            };
        }
        Ok(Some(at))
    }
}

fn root_only() -> Rejection {
    Rejection::new(Rule::Path, "only a directory may be the root")
}
