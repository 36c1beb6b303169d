//! The prefixes kept after their sequences have ended: a tree over blocks of 64 tokens.
//!
//! The tree owns no memory, so it can be tested without a device. It holds leases of pages and of saved states, which
//! give back when a block is forgotten.
//!
//! ```text
//! root ── block 0 ── block 1 ── block 2 ── block 3      a page holds four blocks
//!          page 7     page 7  │  page 7     page 7 *    * a saved state: a sequence can begin here
//!                             └─ block 2'── block 3'    a second text with the same first 128 tokens
//!                                 page 9     page 9 *
//! ```
//!
//! Blocks 2' and 3' lie in a page that also holds a copy of blocks 0 and 1: the sequence that wrote them got its own
//! copy of the partly filled page. So, among the blocks of one page's range of tokens, the deepest names the page that
//! holds them all.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use keel_array::{AttentionSpec, PREFILL_GRID};

use crate::pools::{PageLease, SharedPools};
use crate::{CheckpointId, CheckpointLease, ModelCache, PageId};

/// Tokens of a block: the grid on which a sequence can be resumed.
pub const PREFIX_BLOCK: usize = PREFILL_GRID;

const BLOCKS_PER_PAGE: usize = AttentionSpec::PAGE / PREFIX_BLOCK;

/// A remembered prefix from which a sequence can continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixHit {
    /// Tokens remembered, a multiple of [`PREFIX_BLOCK`]; 0 if there is nothing to continue from.
    pub len: usize,
    /// The pages that hold them.
    pub pages: Vec<PageId>,
    /// The recurrent state after the last of them; `None` for models without one.
    pub state: Option<CheckpointId>,
    /// Tokens that the tree and the prompt have in common, with or without a saved state. A state saved here would let
    /// the next prompt of this kind start later.
    pub known_len: usize,
}

/// A text that is remembered to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RememberedText {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// The pages that hold them.
    pub pages: Vec<PageId>,
    /// The recurrent state after the last of them; `None` for models without one.
    pub state: Option<CheckpointId>,
}

/// An entry of [`PrefixTree::nodes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct NodeId(usize);

#[derive(Debug)]
struct Node {
    parent: Option<NodeId>,
    block: Box<[u32]>,
    page: PageLease,
    state: Option<CheckpointLease>,
    children: HashMap<Box<[u32]>, NodeId>,
    last_used: u64,
}

/// When a node was last used. The order is that of eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct LastUse {
    at: u64,
    node: NodeId,
}

/// Remembered prefixes. The least recently used is evicted first.
#[derive(Debug)]
pub struct PrefixTree {
    /// Freed entries are reused.
    nodes: Vec<Option<Node>>,
    free: Vec<NodeId>,
    roots: HashMap<Box<[u32]>, NodeId>,
    /// Nodes without children, the least recently used first.
    leaves: BTreeSet<LastUse>,
    /// Nodes with a saved state, the least recently used first.
    with_state: BTreeSet<LastUse>,
    /// Whether a sequence can only continue from a saved state.
    needs_state: bool,
    clock: u64,
    home: SharedPools,
}

impl PrefixTree {
    /// An empty tree over the pages of a cache.
    pub fn new(cache: &ModelCache) -> PrefixTree {
        PrefixTree::over(cache.pools.clone(), cache.spec.is_recurrent())
    }

    fn over(home: SharedPools, needs_state: bool) -> PrefixTree {
        PrefixTree {
            nodes: Vec::new(),
            free: Vec::new(),
            roots: HashMap::new(),
            leaves: BTreeSet::new(),
            with_state: BTreeSet::new(),
            needs_state,
            clock: 0,
            home,
        }
    }

    /// Blocks remembered.
    pub fn len(&self) -> usize {
        self.nodes.len() - self.free.len()
    }

    /// True if nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many saved states are held. O(1).
    pub fn states(&self) -> usize {
        self.with_state.len()
    }

    fn node(&self, id: NodeId) -> &Node {
        self.nodes[id.0].as_ref().expect("ids name live nodes")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id.0].as_mut().expect("ids name live nodes")
    }

    fn state_after(&self, id: NodeId) -> Option<CheckpointId> {
        self.node(id).state.as_ref().map(CheckpointLease::id)
    }

    fn child(&self, parent: Option<NodeId>, block: &[u32]) -> Option<NodeId> {
        let children = parent.map_or(&self.roots, |id| &self.node(id).children);
        children.get(block).copied()
    }

    /// The nodes of the longest known prefix, in order.
    fn walk(&self, tokens: &[u32]) -> Vec<NodeId> {
        let mut path = Vec::new();
        for block in tokens.chunks_exact(PREFIX_BLOCK) {
            let Some(id) = self.child(path.last().copied(), block) else { break };
            path.push(id);
        }
        path
    }

    /// The deepest point of `prompt` from which a sequence can continue. At least the last token is left to run.
    pub fn find(&mut self, prompt: &[u32]) -> PrefixHit {
        let mut path = self.walk(&prompt[..prompt.len().saturating_sub(1)]);
        let known_len = path.len() * PREFIX_BLOCK;
        let resumable = |id: &NodeId| !self.needs_state || self.node(*id).state.is_some();
        path.truncate(path.iter().rposition(resumable).map_or(0, |last| last + 1));
        self.touch(&path);
        PrefixHit {
            len: path.len() * PREFIX_BLOCK,
            pages: self.pages_along(&path),
            state: path.last().and_then(|&id| self.state_after(id)),
            known_len,
        }
    }

    /// The pages that hold `tokens`, with or without a saved state; `None` if not all of the tokens are known.
    pub fn pages_of(&self, tokens: &[u32]) -> Option<Vec<PageId>> {
        let path = self.walk(tokens);
        (path.len() * PREFIX_BLOCK == tokens.len()).then(|| self.pages_along(&path))
    }

    /// The pages that hold the blocks of a path: the deepest block of each page names it.
    fn pages_along(&self, path: &[NodeId]) -> Vec<PageId> {
        let deepest = path.chunks(BLOCKS_PER_PAGE).filter_map(<[NodeId]>::last);
        deepest.map(|&id| self.node(id).page.id()).collect()
    }

    /// Notes that the blocks of a text were used just now.
    pub fn use_now(&mut self, text: &[u32]) {
        let path = self.walk(text);
        self.touch(&path);
    }

    fn touch(&mut self, path: &[NodeId]) {
        self.clock += 1;
        let now = self.clock;
        for &id in path {
            let node = self.nodes[id.0].as_mut().expect("ids name live nodes");
            let before = std::mem::replace(&mut node.last_used, now);
            for order in [&mut self.leaves, &mut self.with_state] {
                if order.remove(&LastUse { at: before, node: id }) {
                    order.insert(LastUse { at: now, node: id });
                }
            }
        }
    }

    /// Remembers whole blocks of `tokens`, which lie in `pages`, with the `state` after the last block. If the tree has
    /// a state there, it drops the given one. If a state is needed and none is given, nothing is remembered.
    ///
    /// # Panics
    /// If the tokens are not whole blocks, lie in more pages than given, or lie in a page that is free.
    pub fn insert(&mut self, tokens: &[u32], pages: &[PageId], state: Option<CheckpointLease>) {
        assert!(tokens.len().is_multiple_of(PREFIX_BLOCK), "{} tokens are no whole blocks", tokens.len());
        assert!(tokens.len() <= pages.len() * AttentionSpec::PAGE, "a page is missing");
        if self.needs_state && state.is_none() {
            return;
        }
        let mut path: Vec<NodeId> = Vec::new();
        for (i, block) in tokens.chunks_exact(PREFIX_BLOCK).enumerate() {
            let parent = path.last().copied();
            let known = self.child(parent, block);
            path.push(known.unwrap_or_else(|| self.add(parent, block, pages[i / BLOCKS_PER_PAGE])));
        }
        self.touch(&path);
        if let (Some(&last), Some(state)) = (path.last(), state) {
            let node = self.node_mut(last);
            if node.state.is_none() {
                node.state = Some(state);
                let used = LastUse { at: node.last_used, node: last };
                self.with_state.insert(used);
            }
        }
    }

    fn add(&mut self, parent: Option<NodeId>, block: &[u32], page: PageId) -> NodeId {
        let node = Node {
            parent,
            block: block.into(),
            page: self.home.remember(page),
            state: None,
            children: HashMap::new(),
            last_used: self.clock,
        };
        let id = match self.free.pop() {
            Some(id) => {
                self.nodes[id.0] = Some(node);
                id
            }
            None => {
                self.nodes.push(Some(node));
                NodeId(self.nodes.len() - 1)
            }
        };
        if let Some(parent) = parent {
            self.leaves.remove(&self.last_use_of(parent));
        }
        self.leaves.insert(LastUse { at: self.clock, node: id });
        self.siblings_under(parent).insert(block.into(), id);
        id
    }

    fn last_use_of(&self, node: NodeId) -> LastUse {
        LastUse { at: self.node(node).last_used, node }
    }

    fn siblings_under(&mut self, parent: Option<NodeId>) -> &mut HashMap<Box<[u32]>, NodeId> {
        match parent {
            Some(parent) => &mut self.node_mut(parent).children,
            None => &mut self.roots,
        }
    }

    /// Forgets the least recently used leaf, and ancestors that are useless without it. Leaves in pages that a running
    /// sequence shares go last: forgetting them frees nothing. Returns false if nothing is remembered. O(log n) for
    /// each block forgotten and each leaf passed over.
    pub fn evict(&mut self) -> bool {
        let pools = self.home.lock();
        let is_free = |used: &&LastUse| !pools.pages.is_shared(self.node(used.node).page.id());
        let leaf = self.leaves.iter().find(is_free).or_else(|| self.leaves.first()).copied();
        // Each lease locks the pools.
        drop(pools);
        leaf.inspect(|leaf| self.remove_leaf(leaf.node)).is_some()
    }

    /// Forgets the least recently used state, and blocks that are useless without it.
    pub fn evict_state(&mut self) {
        let Some(LastUse { node: id, .. }) = self.with_state.pop_first() else { return };
        self.node_mut(id).state = None;
        if self.node(id).children.is_empty() && self.needs_state {
            self.remove_leaf(id);
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        while let Some(&leaf) = self.leaves.first() {
            self.remove_leaf(leaf.node);
        }
    }

    /// The `most` remembered texts that were used last, most recently used first. A text comes after those that it
    /// begins with. Exception: if one use touched both and both end in the same page, the longer comes first, because
    /// its page holds both. A text ends at a saved state, or at a last block if no state is needed.
    pub fn texts(&self, most: usize) -> Vec<RememberedText> {
        let is_end = |node: &Node| {
            if self.needs_state { node.state.is_some() } else { node.children.is_empty() }
        };
        let mut ends: Vec<NodeId> = (0..self.nodes.len())
            .map(NodeId)
            .filter(|&id| self.nodes[id.0].as_ref().is_some_and(is_end))
            .collect();
        // A block is used whenever one after it is.
        ends.sort_by_cached_key(|&id| {
            let blocks = self.path_to(id).len();
            (Reverse(self.node(id).last_used), blocks.div_ceil(BLOCKS_PER_PAGE), Reverse(blocks))
        });
        ends.truncate(most);
        ends.into_iter().map(|id| self.text_of(id)).collect()
    }

    /// The nodes from the root to `end`.
    fn path_to(&self, end: NodeId) -> Vec<NodeId> {
        let mut path: Vec<NodeId> = std::iter::successors(Some(end), |&id| self.node(id).parent).collect();
        path.reverse();
        path
    }

    fn text_of(&self, end: NodeId) -> RememberedText {
        let path = self.path_to(end);
        let tokens = path.iter().flat_map(|&id| self.node(id).block.iter().copied()).collect();
        RememberedText { tokens, pages: self.pages_along(&path), state: self.state_after(end) }
    }

    /// Removes a leaf, then each ancestor from which and through which nothing can continue.
    fn remove_leaf(&mut self, leaf: NodeId) {
        let mut next = Some(leaf);
        while let Some(id) = next {
            let Some(node) = self.nodes[id.0].take() else { break };
            self.free.push(id);
            let used = LastUse { at: node.last_used, node: id };
            self.leaves.remove(&used);
            self.with_state.remove(&used);
            self.siblings_under(node.parent).remove(&node.block);
            let childless = node.parent.filter(|&parent| self.node(parent).children.is_empty());
            if let Some(parent) = childless {
                self.leaves.insert(self.last_use_of(parent));
            }
            next = childless.filter(|&parent| self.needs_state && self.node(parent).state.is_none());
        }
    }
}

#[cfg(test)]
mod tests;
