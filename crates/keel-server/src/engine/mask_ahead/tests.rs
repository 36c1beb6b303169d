use std::sync::atomic::{AtomicUsize, Ordering};

use keel_text::{GrammarFactory, GrammarSource, TextFiles, Tokenizer};

use super::*;

/// Longer than any mask here takes.
const LONG: Duration = Duration::from_secs(60);

fn start(source: GrammarSource, took: Duration) -> (GrammarState, MaskAhead, usize) {
    let folder = keel_testkit::fixtures::demo();
    let files = TextFiles::read(&folder).expect("there");
    let tokenizer = Tokenizer::new(&files).expect("sound");
    let factory = GrammarFactory::new(&files, &tokenizer).expect("it takes grammars");
    let mut state = factory.start(&source).expect("sound");
    let first = state.allowed().expect("bounded");
    let vocab = tokenizer.vocab_size();
    (state.clone(), MaskAhead::new(state, Arc::new(first), took), vocab)
}

fn small(took: Duration) -> (GrammarState, MaskAhead, usize) {
    start(GrammarSource::Regex("[a-c]{1,4}x(y|z){2}".into()), took)
}

/// A grammar whose every token has many ways to go on.
fn tangled() -> GrammarSource {
    let names: Vec<String> = (0..40).map(|i| format!("w{i}")).collect();
    let rule = |i: usize| {
        let (next, other) = ((i + 1) % 40, (i * 7 + 3) % 40);
        format!("w{i}: /[a-z ]{{0,{}}}[aeiou]{{1,{}}}/ (w{next} | w{other})?", 20 + i, 9 + i % 7)
    };
    let rules: Vec<String> = (0..40).map(rule).collect();
    GrammarSource::Lark(format!("start: ({})+\n{}\n", names.join("|"), rules.join("\n")))
}

fn allowed(mask: impl FnOnce(&mut [f32]) -> Result<(), String>, vocab: usize) -> Vec<u32> {
    let mut logits = vec![0.0; vocab];
    mask(&mut logits).expect("bounded");
    (0..vocab as u32).filter(|&id| logits[id as usize] == 0.0).collect()
}

/// The tokens that both allow.
fn same(state: &mut GrammarState, ahead: &mut MaskAhead, vocab: usize) -> Vec<u32> {
    let want = allowed(|logits| state.mask(logits).map_err(|e| e.to_string()), vocab);
    assert_eq!(allowed(|logits| ahead.apply(logits), vocab), want);
    want
}

#[test]
fn masks_are_those_that_the_grammar_gives_and_can_be_taken_back() {
    for took in [Duration::ZERO, 2 * SLOW] {
        let (mut state, mut ahead, vocab) = small(took);
        for step in 0..12 {
            // Some masks are waited for, some are needed at once.
            while step % 3 != 0 && !ahead.is_ready(Duration::ZERO) {}
            let want = same(&mut state, &mut ahead, vocab);
            let Some(&token) = want.get(step % want.len()) else { break };
            state.accept(token).expect("allowed");
            ahead.accept(token).expect("allowed");
            assert_eq!(ahead.is_complete(), state.is_complete());
            if ahead.is_complete() {
                break;
            }
            if step % 4 == 1 {
                // Also while a thread has it.
                ahead.is_ready(Duration::ZERO);
                ahead.rollback(1).expect("accepted");
                state.rollback(1).expect("accepted");
            }
        }
    }
}

#[test]
fn an_answer_drafts_while_its_masks_are_quick_and_is_not_waited_for_after_a_slow_one() {
    let (_, mut ahead, _) = small(Duration::ZERO);
    assert!(ahead.is_quick());
    ahead.rollback(0).expect("nothing is taken back");
    assert!(ahead.mask.is_some(), "the mask is still there");
    let computed = |ahead: &mut MaskAhead, took: Duration| {
        let state = ahead.state.take().expect("no thread has it");
        let mask = Err(TextError::Grammar { reason: "it took long".into() });
        ahead.keep(Computed { state, mask, took });
    };
    for (took, is_quick) in [(2 * QUICK, false), (QUICK, true), (2 * SLOW, false), (QUICK, false)] {
        computed(&mut ahead, took);
        assert_eq!(ahead.is_quick(), is_quick, "{took:?}");
    }
    ahead.mask = None;
    let start = Instant::now();
    while !ahead.is_ready(LONG) {}
    assert!(start.elapsed() < LONG / 2, "nobody waits for a slow one");
}

/// A position whose mask takes more than half a millisecond.
fn before_a_long_mask() -> GrammarState {
    let (mut state, ..) = start(tangled(), Duration::ZERO);
    for _ in 0..200 {
        let before = state.clone();
        let (start, mut logits) = (Instant::now(), vec![0.0; 5000]);
        state.mask(&mut logits).expect("bounded");
        if start.elapsed() > Duration::from_micros(500) {
            return before;
        }
        let token = (0..5000u32).rev().find(|&id| logits[id as usize] == 0.0).expect("any");
        state.accept(token).expect("allowed");
    }
    panic!("every mask is quick")
}

#[test]
fn a_mask_is_given_up_with_its_answer() {
    let before = before_a_long_mask();
    let first = Arc::new(before.clone().allowed().expect("bounded"));
    let was_given_up = (0..50).any(|_| {
        let mut ahead = MaskAhead::new(before.clone(), Arc::clone(&first), Duration::ZERO);
        ahead.mask = None;
        ahead.is_ready(Duration::ZERO);
        let thread = ahead.thread.take().expect("it computes the mask");
        drop(ahead);
        thread.masks.recv_timeout(LONG).expect("it ends").mask.is_err()
    });
    assert!(was_given_up, "every mask ran to its end");
    before.clone().allowed().expect("the clones of an answer go on without it");
}

#[test]
fn a_clone_goes_on_while_a_mask_is_computed() {
    let before = before_a_long_mask();
    let (mut other, mut logits) = (before.clone(), vec![0.0; 5000]);
    other.mask(&mut logits).expect("bounded");
    let token = (0..5000u32).find(|&id| logits[id as usize] == 0.0).expect("any");
    // Odd while a mask is computed. The tables of a clone are those of `before`, so each mask takes long again.
    let (count, mut original) = (Arc::new(AtomicUsize::new(0)), before.clone());
    let mut siblings: Vec<GrammarState> = (0..200).map(|_| original.clone()).collect();
    let worker = std::thread::spawn({
        let count = Arc::clone(&count);
        move || {
            for state in siblings.iter_mut().chain([&mut original]) {
                count.fetch_add(1, Ordering::SeqCst);
                state.allowed().expect("bounded");
                count.fetch_add(1, Ordering::SeqCst);
            }
        }
    });
    let (mut most, mut here, mut of) = (0, 0, 0);
    while !worker.is_finished() {
        let during = count.load(Ordering::SeqCst);
        other.accept(token).expect("allowed");
        other.rollback(1).expect("accepted");
        if during % 2 == 1 && count.load(Ordering::SeqCst) == during {
            (here, of) = (if of == during { here + 1 } else { 1 }, during);
            most = most.max(here);
        }
    }
    worker.join().expect("it ends");
    assert!(most >= 10, "at most {most} tokens were taken during one mask");
}
