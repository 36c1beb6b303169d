use std::time::Instant;

use super::*;
use crate::batch::drafting::tests::{batcher, request};

/// The copy of a state fails while steps run ahead: the answer goes on, and the failure is counted.
#[test]
fn a_state_that_cannot_be_saved_ahead_is_counted() {
    let (mut batcher, mut other) = (batcher(0, 1), batcher(0, 2));
    let now = Instant::now();
    // Row 64, at the grid point, is a row of the answer.
    batcher.submit(request(0, 20, 60), now).expect("accepted");
    let mut tokens = 0;
    let mut step = |batcher: &mut Batcher| {
        let events = batcher.step(now).into_iter();
        tokens += events.filter(|of| matches!(of.event, BatchEvent::Token { .. })).count();
    };
    step(&mut batcher);
    // No checkpoint is free, so the state is saved over the last one of the answer. There is no entry of that number.
    let cache = batcher.engine.cache_mut();
    let taken = cache.save_checkpoint(&batcher.running[0].cache).expect("saved").expect("there is one");
    let sequence = other.engine.open().expect("a slot is free");
    let mut save = || other.engine.cache_mut().save_checkpoint(&sequence).expect("saved");
    let [first, second] = [save(), save()].map(|checkpoint| checkpoint.expect("there are two"));
    assert_eq!([taken.id(), first.id(), second.id()].map(|id| id.index()), [0, 0, 1]);
    batcher.running[0].rolling = Some(SavedState { position: 0, checkpoint: second });
    while batcher.has(0) {
        step(&mut batcher);
    }
    assert_eq!((tokens, batcher.status().failed_steps), (60, 1));
}
