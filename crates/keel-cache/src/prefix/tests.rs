use super::*;

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

/// A text followed by one more token, as a prompt would have.
fn prompt(blocks: &[u32]) -> Vec<u32> {
    [text(blocks), vec![0]].concat()
}

#[test]
fn a_prompt_continues_at_the_deepest_state() {
    let mut tree = PrefixTree::new(true);
    assert_eq!(
        tree.insert(&text(&[1, 2]), &pages(&[7]), state(0)),
        Inserted { pages: pages(&[7]), took_state: true }
    );
    tree.insert(&text(&[1, 2, 3, 4, 5]), &pages(&[7, 8]), state(1));
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
    tree.insert(&text(&[1, 2, 3, 4, 5]), &pages(&[7, 8]), None);
    assert_eq!(tree.find(&prompt(&[1, 2, 3])).pages, pages(&[7]));
    assert_eq!(tree.find(&prompt(&[1, 2, 3, 4, 5])).pages, pages(&[7, 8]));
}

#[test]
fn the_deepest_block_names_the_page_of_a_branch() {
    let mut tree = PrefixTree::new(true);
    tree.insert(&text(&[1, 2, 3]), &pages(&[7]), state(0));
    let inserted = tree.insert(&text(&[1, 2, 9]), &pages(&[8]), state(1));
    assert_eq!(inserted.pages, pages(&[8]));
    assert_eq!(tree.find(&prompt(&[1, 2, 9])).pages, pages(&[8]));
    assert_eq!(tree.find(&prompt(&[1, 2, 3])).pages, pages(&[7]));
}

#[test]
fn what_was_used_longest_ago_goes_first_and_all_comes_back() {
    let mut tree = PrefixTree::new(true);
    tree.insert(&text(&[1, 2]), &pages(&[7]), state(0));
    tree.insert(&text(&[1, 3]), &pages(&[8]), state(1));
    tree.insert(&text(&[5]), &pages(&[9]), state(2));
    tree.find(&prompt(&[1, 2]));
    let evicted = tree.evict(|_| false).expect("something is remembered");
    assert_eq!(evicted, Evicted { pages: pages(&[8]), states: vec![CheckpointId(1)] });
    assert_eq!(tree.find(&prompt(&[1, 3])).known_len, 64);
    let evicted = tree.evict(|page| page == PageId(9)).expect("something is remembered");
    assert_eq!(
        evicted,
        Evicted { pages: pages(&[7]), states: vec![CheckpointId(0)] },
        "the pinned page goes last"
    );
    assert_eq!(tree.clear(), Evicted { pages: pages(&[9]), states: vec![CheckpointId(2)] });
    assert!(tree.is_empty() && tree.evict(|_| false).is_none());
}

#[test]
fn blocks_without_a_state_after_them_are_dropped_with_it() {
    let mut tree = PrefixTree::new(true);
    tree.insert(&text(&[1]), &pages(&[7]), state(0));
    tree.insert(&text(&[1, 2, 3]), &pages(&[7]), state(1));
    tree.find(&prompt(&[1]));
    assert_eq!(tree.evict_state(), Some(Evicted { pages: pages(&[]), states: vec![CheckpointId(1)] }));
    assert_eq!((tree.len(), tree.states()), (1, 1));
    assert_eq!(tree.evict_state(), Some(Evicted { pages: pages(&[7]), states: vec![CheckpointId(0)] }));
    assert!(tree.is_empty());
}

#[test]
fn a_state_that_is_known_stays_with_the_caller() {
    let mut tree = PrefixTree::new(true);
    assert!(tree.insert(&text(&[1]), &pages(&[7]), state(0)).took_state);
    assert_eq!(tree.insert(&text(&[1]), &pages(&[8]), state(1)), Inserted::default());
    assert_eq!(tree.texts(), [RememberedText { tokens: text(&[1]), pages: pages(&[7]), state: state(0) }]);
}

/// The ordered sets hold what a scan of all nodes finds.
fn assert_orders_are_right(tree: &PrefixTree) {
    let scan = |is_in: fn(&Node) -> bool| -> Vec<LastUse> {
        let live = tree.nodes.iter().enumerate().filter_map(|(id, node)| Some((id, node.as_ref()?)));
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

/// Random insertions, look-ups and evictions, compared with a separate count of holders.
#[test]
fn pages_and_states_are_conserved() {
    let mut seed = 1u64;
    let mut random = |below: u32| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((seed >> 33) as u32) % below
    };
    let mut tree = PrefixTree::new(true);
    let (mut held_pages, mut states) = (Vec::new(), Vec::new());
    for round in 0..2000 {
        let blocks: Vec<u32> = (0..1 + random(6)).map(|_| random(3)).collect();
        match random(4) {
            0 => {
                let hit = tree.find(&prompt(&blocks));
                assert!(hit.pages.iter().all(|page| held_pages.contains(page)), "{hit:?}");
                assert!(hit.len == 0 || states.contains(&hit.state.expect("a state")), "{hit:?}");
            }
            1 => {
                let gone = if random(2) == 0 { tree.evict(|p| p.0 % 3 == 0) } else { tree.evict_state() };
                let gone = gone.unwrap_or_default();
                held_pages.retain(|page| !gone.pages.contains(page));
                states.retain(|state| !gone.states.contains(state));
            }
            _ => {
                let own = [round * 2, round * 2 + 1].map(PageId);
                let inserted = tree.insert(&text(&blocks), &own, state(round));
                held_pages.extend(&inserted.pages);
                states.extend(inserted.took_state.then_some(CheckpointId(round)));
            }
        }
        let mut held: Vec<PageId> = tree.page_nodes.keys().copied().collect();
        held.sort_unstable();
        held_pages.sort_unstable();
        assert_eq!((tree.pages(), held), (held_pages.len(), held_pages.clone()));
        assert_eq!(tree.states(), states.len());
        assert_orders_are_right(&tree);
    }
    let all = tree.clear();
    assert_eq!((all.pages.len(), all.states.len()), (held_pages.len(), states.len()));
}
