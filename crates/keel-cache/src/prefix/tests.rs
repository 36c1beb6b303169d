use super::*;
use crate::PageAllocator;
use crate::pools::{Pools, SharedPools};

/// A text of blocks; each block repeats one number.
fn text(blocks: &[u32]) -> Vec<u32> {
    blocks.iter().flat_map(|&b| [b; PREFIX_BLOCK]).collect()
}

fn pages(numbers: &[u32]) -> Vec<PageId> {
    numbers.iter().copied().map(PageId).collect()
}

fn state(number: u32) -> Option<CheckpointId> {
    Some(CheckpointId(number))
}

/// Pools of checkpoints alone. They are taken in ascending order.
fn checkpoints(total: usize) -> SharedPools {
    SharedPools::new(Pools {
        pages: PageAllocator::new(0),
        sliding_pages: PageAllocator::new(0),
        slots: Vec::new(),
        checkpoints: CheckpointId::all(total),
        blocks: Vec::new(),
        failed_steps: Vec::new(),
    })
}

/// The free checkpoints. The last of them is taken next.
fn free(pools: &SharedPools) -> Vec<u32> {
    pools.lock().checkpoints.iter().map(|checkpoint| checkpoint.0).collect()
}

/// A text followed by one more token, as a prompt would have.
fn prompt(blocks: &[u32]) -> Vec<u32> {
    [text(blocks), vec![0]].concat()
}

#[test]
fn a_prompt_continues_at_the_deepest_state() {
    let (mut tree, pools) = (PrefixTree::new(true), checkpoints(3));
    let inserted = tree.insert(&text(&[1, 2]), &pages(&[7]), pools.take_checkpoint());
    assert_eq!(inserted, Inserted { pages: pages(&[7]) });
    let inserted = tree.insert(&text(&[1, 2, 3, 4, 5]), &pages(&[7, 8]), pools.take_checkpoint());
    assert_eq!(inserted, Inserted { pages: pages(&[8]) });
    let hit = tree.find(&prompt(&[1, 2, 3, 4, 5, 6]));
    assert_eq!(hit, PrefixHit { len: 320, pages: pages(&[7, 8]), state: state(1), known_len: 320 });
    let hit = tree.find(&prompt(&[1, 2, 3, 9]));
    assert_eq!(hit, PrefixHit { len: 128, pages: pages(&[7]), state: state(0), known_len: 192 });
    assert_eq!(tree.find(&text(&[1, 2])).len, 0, "the last token is left to run, and its block with it");
    assert_eq!(tree.find(&prompt(&[2])).len, 0);
    assert_eq!(tree.find(&[]).len, 0);
}

#[test]
fn without_recurrent_layers_every_block_will_do() {
    let mut tree = PrefixTree::new(false);
    assert_eq!(tree.insert(&text(&[1, 2, 3, 4, 5]), &pages(&[7, 8]), None).pages, pages(&[7, 8]));
    assert_eq!(tree.find(&prompt(&[1, 2, 3])).pages, pages(&[7]));
    assert_eq!(tree.find(&prompt(&[1, 2, 3, 4, 5])).pages, pages(&[7, 8]));
}

#[test]
fn the_deepest_block_names_the_page_of_a_branch() {
    let (mut tree, pools) = (PrefixTree::new(true), checkpoints(3));
    assert_eq!(tree.insert(&text(&[1, 2, 3]), &pages(&[7]), pools.take_checkpoint()).pages, pages(&[7]));
    assert_eq!(tree.insert(&text(&[1, 2, 9]), &pages(&[8]), pools.take_checkpoint()).pages, pages(&[8]));
    assert_eq!(tree.find(&prompt(&[1, 2, 9])).pages, pages(&[8]));
    assert_eq!(tree.find(&prompt(&[1, 2, 3])).pages, pages(&[7]));
    let pages_of = |blocks: &[u32]| tree.pages_of(&text(blocks));
    assert_eq!((pages_of(&[1, 2]), pages_of(&[1, 2, 9])), (Some(pages(&[7])), Some(pages(&[8]))));
    assert_eq!((pages_of(&[]), pages_of(&[1, 2, 3, 4])), (Some(Vec::new()), None));
}

/// Within one use, texts with fewer pages come first. Of those that end in one page the longest comes first.
#[test]
fn a_text_comes_after_those_that_end_in_its_earlier_pages() {
    let (mut tree, pools) = (PrefixTree::new(true), checkpoints(5));
    let chat = [1, 2, 3, 4, 5, 6];
    for (blocks, page) in [(&[7][..], 7), (&chat[..4], 8)] {
        let inserted = tree.insert(&text(blocks), &pages(&[page]), pools.take_checkpoint());
        assert_eq!(inserted.pages, pages(&[page]));
    }
    assert_eq!(tree.evict(|_| false), Some(Evicted { pages: pages(&[7]) }));
    // Block 5 gets the place of the evicted block, which comes before that of block 4.
    for (len, new_pages) in [(6, &[9][..]), (5, &[]), (1, &[])] {
        let inserted = tree.insert(&text(&chat[..len]), &pages(&[8, 9]), pools.take_checkpoint());
        assert_eq!(inserted.pages, pages(new_pages));
    }
    assert_eq!(tree.insert(&text(&[8]), &pages(&[10]), pools.take_checkpoint()).pages, pages(&[10]));
    tree.use_now(&text(&chat));
    let texts: Vec<Vec<u32>> = tree.texts(9).into_iter().map(|found| found.tokens).collect();
    assert_eq!(texts, [text(&chat[..4]), text(&chat[..1]), text(&chat), text(&chat[..5]), text(&[8])]);
    assert_eq!(tree.texts(2).len(), 2);
}

#[test]
fn what_was_used_longest_ago_goes_first_and_all_comes_back() {
    let (mut tree, pools) = (PrefixTree::new(true), checkpoints(3));
    for (blocks, page) in [(&[1, 2][..], 7), (&[1, 3], 8), (&[5], 9)] {
        let inserted = tree.insert(&text(blocks), &pages(&[page]), pools.take_checkpoint());
        assert_eq!(inserted.pages, pages(&[page]));
    }
    tree.find(&prompt(&[1, 2]));
    let evicted = tree.evict(|_| false).expect("something is remembered");
    assert_eq!((evicted.pages, free(&pools)), (pages(&[8]), vec![1]));
    assert_eq!(tree.find(&prompt(&[1, 3])).known_len, 64);
    let evicted = tree.evict(|page| page == PageId(9)).expect("something is remembered");
    assert_eq!((evicted.pages, free(&pools)), (pages(&[7]), vec![1, 0]), "the pinned page goes last");
    assert_eq!((tree.clear().pages, free(&pools)), (pages(&[9]), vec![1, 0, 2]));
    assert!(tree.is_empty() && tree.evict(|_| false).is_none());
}

#[test]
fn blocks_without_a_state_after_them_are_dropped_with_it() {
    let (mut tree, pools) = (PrefixTree::new(true), checkpoints(3));
    assert_eq!(tree.insert(&text(&[1]), &pages(&[7]), pools.take_checkpoint()).pages, pages(&[7]));
    let inserted = tree.insert(&text(&[1, 2, 3]), &pages(&[7]), pools.take_checkpoint());
    assert_eq!(inserted, Inserted::default());
    tree.find(&prompt(&[1]));
    assert_eq!((tree.evict_state(), free(&pools)), (Some(Evicted::default()), vec![2, 1]));
    assert_eq!((tree.len(), tree.states()), (1, 1));
    assert_eq!((tree.evict_state(), free(&pools)), (Some(Evicted { pages: pages(&[7]) }), vec![2, 1, 0]));
    assert!(tree.is_empty());
}

#[test]
fn a_second_state_at_a_place_is_freed() {
    let (mut tree, pools) = (PrefixTree::new(true), checkpoints(3));
    assert_eq!(tree.insert(&text(&[1]), &pages(&[7]), pools.take_checkpoint()).pages, pages(&[7]));
    assert_eq!(tree.insert(&text(&[1]), &pages(&[8]), pools.take_checkpoint()), Inserted::default());
    assert_eq!(free(&pools), [2, 1]);
    assert_eq!(tree.texts(9), [RememberedText { tokens: text(&[1]), pages: pages(&[7]), state: state(0) }]);
}

/// The ordered sets hold what a scan of all nodes finds.
fn assert_orders_are_right(tree: &PrefixTree) {
    let scan = |is_in: fn(&Node) -> bool| -> Vec<LastUse> {
        let live = tree.nodes.iter().enumerate().filter_map(|(id, node)| Some((NodeId(id), node.as_ref()?)));
        let mut found: Vec<_> = live
            .filter(|(_, node)| is_in(node))
            .map(|(id, node)| LastUse { at: node.last_used, node: id })
            .collect();
        found.sort_unstable();
        found
    };
    assert!(tree.leaves.iter().copied().eq(scan(|node| node.children.is_empty())));
    assert!(tree.with_state.iter().copied().eq(scan(|node| node.state.is_some())));
}

/// Random insertions, look-ups and evictions, compared with a separate count of holders of pages and with the free
/// checkpoints.
#[test]
fn pages_and_states_are_conserved() {
    let mut seed = 1u64;
    let mut random = |below: u32| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((seed >> 33) as u32) % below
    };
    let (mut tree, pools) = (PrefixTree::new(true), checkpoints(2000));
    let mut held_pages = Vec::new();
    for round in 0..2000 {
        let blocks: Vec<u32> = (0..1 + random(6)).map(|_| random(3)).collect();
        match random(4) {
            0 => {
                let hit = tree.find(&prompt(&blocks));
                assert!(hit.pages.iter().all(|page| held_pages.contains(page)), "{hit:?}");
                assert!(hit.len == 0 || !free(&pools).contains(&hit.state.expect("a state").0), "{hit:?}");
            }
            1 => {
                let gone = if random(2) == 0 { tree.evict(|p| p.0 % 3 == 0) } else { tree.evict_state() };
                let gone = gone.unwrap_or_default();
                held_pages.retain(|page| !gone.pages.contains(page));
            }
            _ => {
                let own = [round * 2, round * 2 + 1].map(PageId);
                let inserted = tree.insert(&text(&blocks), &own, pools.take_checkpoint());
                held_pages.extend(&inserted.pages);
            }
        }
        let mut held: Vec<PageId> = tree.page_nodes.keys().copied().collect();
        held.sort_unstable();
        held_pages.sort_unstable();
        assert_eq!((tree.pages(), held), (held_pages.len(), held_pages.clone()));
        assert_eq!(tree.states() + free(&pools).len(), 2000);
        assert_orders_are_right(&tree);
    }
    assert_eq!((tree.clear().pages.len(), free(&pools).len()), (held_pages.len(), 2000));
}
