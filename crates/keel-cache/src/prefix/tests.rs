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

/// Pools in which a sequence holds every page. Checkpoints are taken in ascending order.
fn pools(total_pages: usize, checkpoints: usize) -> SharedPools {
    let mut all = PageAllocator::new(total_pages);
    assert_eq!(all.take(total_pages).expect("all are free").count(), total_pages);
    SharedPools::new(Pools {
        pages: all,
        sliding_pages: PageAllocator::new(0),
        slots: Vec::new(),
        checkpoints: CheckpointId::all(checkpoints),
        blocks: Vec::new(),
        failed_steps: Vec::new(),
    })
}

/// A tree for a model with recurrent layers or without, over ten pages.
fn tree(needs_state: bool, checkpoints: usize) -> (PrefixTree, SharedPools) {
    let pools = pools(10, checkpoints);
    (PrefixTree::over(pools.clone(), needs_state), pools)
}

/// The sequence that holds a page ends.
fn end(pools: &SharedPools, page: u32) {
    pools.lock().pages.release(PageId(page));
}

/// The pages that the tree holds.
fn held(pools: &SharedPools) -> Vec<PageId> {
    let pools = &pools.lock().pages;
    let all = (0..pools.total() as u32).map(PageId);
    let held: Vec<PageId> = all.filter(|&page| pools.holders(page) > pools.sequences(page)).collect();
    assert_eq!(held.len(), pools.remembered());
    held
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
    let (mut tree, pools) = tree(true, 3);
    tree.insert(&text(&[1, 2]), &pages(&[7]), pools.take_checkpoint());
    assert_eq!(held(&pools), pages(&[7]));
    tree.insert(&text(&[1, 2, 3, 4, 5]), &pages(&[7, 8]), pools.take_checkpoint());
    assert_eq!(held(&pools), pages(&[7, 8]));
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
    let (mut tree, pools) = tree(false, 0);
    tree.insert(&text(&[1, 2, 3, 4, 5]), &pages(&[7, 8]), None);
    assert_eq!(held(&pools), pages(&[7, 8]));
    assert_eq!(tree.find(&prompt(&[1, 2, 3])).pages, pages(&[7]));
    assert_eq!(tree.find(&prompt(&[1, 2, 3, 4, 5])).pages, pages(&[7, 8]));
}

#[test]
fn the_deepest_block_names_the_page_of_a_branch() {
    let (mut tree, pools) = tree(true, 3);
    tree.insert(&text(&[1, 2, 3]), &pages(&[7]), pools.take_checkpoint());
    tree.insert(&text(&[1, 2, 9]), &pages(&[8]), pools.take_checkpoint());
    assert_eq!(held(&pools), pages(&[7, 8]));
    assert_eq!(tree.find(&prompt(&[1, 2, 9])).pages, pages(&[8]));
    assert_eq!(tree.find(&prompt(&[1, 2, 3])).pages, pages(&[7]));
    let pages_of = |blocks: &[u32]| tree.pages_of(&text(blocks));
    assert_eq!((pages_of(&[1, 2]), pages_of(&[1, 2, 9])), (Some(pages(&[7])), Some(pages(&[8]))));
    assert_eq!((pages_of(&[]), pages_of(&[1, 2, 3, 4])), (Some(Vec::new()), None));
}

/// Within one use, texts with fewer pages come first. Of those that end in one page the longest comes first.
#[test]
fn a_text_comes_after_those_that_end_in_its_earlier_pages() {
    let (mut tree, pools) = tree(true, 5);
    let chat = [1, 2, 3, 4, 5, 6];
    for (blocks, page) in [(&[7][..], 1), (&chat[..4], 8)] {
        tree.insert(&text(blocks), &pages(&[page]), pools.take_checkpoint());
    }
    assert!(tree.evict());
    assert_eq!(held(&pools), pages(&[8]));
    // Block 5 gets the place of the evicted block, which comes before that of block 4.
    for len in [6, 5, 1] {
        tree.insert(&text(&chat[..len]), &pages(&[8, 9]), pools.take_checkpoint());
    }
    tree.insert(&text(&[8]), &pages(&[7]), pools.take_checkpoint());
    assert_eq!(held(&pools), pages(&[7, 8, 9]));
    tree.use_now(&text(&chat));
    let texts: Vec<Vec<u32>> = tree.texts(9).into_iter().map(|found| found.tokens).collect();
    assert_eq!(texts, [text(&chat[..4]), text(&chat[..1]), text(&chat), text(&chat[..5]), text(&[8])]);
    assert_eq!(tree.texts(2).len(), 2);
}

#[test]
fn what_was_used_longest_ago_goes_first_and_all_comes_back() {
    let (mut tree, pools) = tree(true, 3);
    for (blocks, page) in [(&[1, 2][..], 7), (&[1, 3], 8), (&[5], 9)] {
        tree.insert(&text(blocks), &pages(&[page]), pools.take_checkpoint());
    }
    tree.find(&prompt(&[1, 2]));
    let free_pages = || pools.lock().pages.free();
    end(&pools, 8);
    assert!(tree.evict());
    assert_eq!((held(&pools), free(&pools), free_pages()), (pages(&[7, 9]), vec![1], 1));
    assert_eq!(tree.find(&prompt(&[1, 3])).known_len, 64);
    end(&pools, 7);
    assert!(tree.evict());
    let shared_goes_last = (pages(&[9]), vec![1, 0], 2);
    assert_eq!((held(&pools), free(&pools), free_pages()), shared_goes_last);
    tree.clear();
    assert_eq!((held(&pools), free(&pools), free_pages()), (Vec::new(), vec![1, 0, 2], 2));
    assert!(tree.is_empty() && !tree.evict());
}

#[test]
fn a_tree_that_is_dropped_gives_everything_back() {
    let (mut tree, pools) = tree(true, 1);
    tree.insert(&text(&[1, 2, 3, 4, 5]), &pages(&[7, 8]), pools.take_checkpoint());
    end(&pools, 7);
    drop(tree);
    assert_eq!((held(&pools), free(&pools), pools.lock().pages.free()), (Vec::new(), vec![0], 1));
    assert!(pools.lock().pages.is_conserved());
}

#[test]
fn blocks_without_a_state_after_them_are_dropped_with_it() {
    let (mut tree, pools) = tree(true, 3);
    tree.insert(&text(&[1]), &pages(&[7]), pools.take_checkpoint());
    tree.insert(&text(&[1, 2, 3]), &pages(&[7]), pools.take_checkpoint());
    tree.find(&prompt(&[1]));
    tree.evict_state();
    assert_eq!((held(&pools), free(&pools)), (pages(&[7]), vec![2, 1]));
    assert_eq!((tree.len(), tree.states()), (1, 1));
    tree.evict_state();
    assert_eq!((held(&pools), free(&pools)), (Vec::new(), vec![2, 1, 0]));
    assert!(tree.is_empty());
}

#[test]
fn a_second_state_at_a_place_is_freed() {
    let (mut tree, pools) = tree(true, 3);
    tree.insert(&text(&[1]), &pages(&[7]), pools.take_checkpoint());
    tree.insert(&text(&[1]), &pages(&[8]), pools.take_checkpoint());
    assert_eq!((held(&pools), free(&pools)), (pages(&[7]), vec![2, 1]));
    assert_eq!(tree.texts(9), [RememberedText { tokens: text(&[1]), pages: pages(&[7]), state: state(0) }]);
}

/// The ordered sets hold the nodes that a scan of all nodes finds.
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

/// Random insertions, look-ups and evictions, compared with a count of the blocks in each page. A third of the pages
/// stays held by sequences.
#[test]
fn pages_and_states_are_conserved() {
    let mut seed = 1u64;
    let mut random = |below: u32| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((seed >> 33) as u32) % below
    };
    let pools = pools(4000, 2000);
    let mut tree = PrefixTree::over(pools.clone(), true);
    for round in 0..2000 {
        let blocks: Vec<u32> = (0..1 + random(6)).map(|_| random(3)).collect();
        match random(4) {
            0 => {
                let hit = tree.find(&prompt(&blocks));
                assert!(hit.pages.iter().all(|page| held(&pools).contains(page)), "{hit:?}");
                assert!(hit.len == 0 || !free(&pools).contains(&hit.state.expect("a state").0), "{hit:?}");
            }
            1 if random(2) == 0 => assert!(tree.evict() || tree.is_empty()),
            1 => tree.evict_state(),
            _ => {
                let own = [round * 2, round * 2 + 1];
                tree.insert(&text(&blocks), &own.map(PageId), pools.take_checkpoint());
                own.into_iter().filter(|page| page % 3 != 0).for_each(|page| end(&pools, page));
            }
        }
        let mut pages_of_blocks: Vec<PageId> =
            tree.nodes.iter().flatten().map(|node| node.page.id()).collect();
        pages_of_blocks.sort_unstable();
        pages_of_blocks.dedup();
        assert_eq!(held(&pools), pages_of_blocks);
        assert!(pools.lock().pages.is_conserved());
        assert_eq!(tree.states() + free(&pools).len(), 2000);
        assert_orders_are_right(&tree);
    }
    tree.clear();
    assert_eq!((held(&pools), free(&pools).len()), (Vec::new(), 2000));
}
