//! Hidden states of a round stay on the device for the MTP (multi-token-prediction) head. The host reads those of a
//! sequence that makes no drafts in the next round. A lost or wrong hidden state changes drafts, and no token.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::common::queueing::{Queueing, queueing, waiting_and_queueing};
use crate::common::rounds::{Member, hidden_bytes, round, round_of, rounds};
use crate::common::{demo, engine};
use keel_array::Runtime;
use keel_engine::{Depth, Engine, EngineOptions, SamplerOptions};
use keel_testkit::random::Random;

/// Sequences of a schedule.
const COUNT: usize = 12;

fn drafting(runtime: &Runtime) -> Engine {
    let options = EngineOptions { context: 256, sequences: COUNT, drafts: 4, ..EngineOptions::default() };
    engine(&demo(), runtime, options)
}

fn greedy(engine: &mut Engine, i: usize) -> Member {
    let prompt: Vec<u32> = (0..4 + 5 * i as u32).map(|j| (j * 11 + i as u32 * 17 + 3) % 500).collect();
    Member::join(engine, &prompt, 2, SamplerOptions::default())
}

fn release(engine: &mut Engine, members: impl IntoIterator<Item = Member>) {
    members.into_iter().for_each(|member| engine.release(member.cache));
}

/// The launches, waits and large transfers of a round.
fn events_of(engine: &mut Engine, queueing: &Arc<Queueing>, members: &mut [Member]) -> String {
    queueing.take_events();
    round(engine, members).expect("the round runs");
    queueing.take_events()
}

#[test]
fn no_hidden_state_passes_the_host_while_all_sequences_draft() {
    let (runtime, queueing) = queueing(512);
    let mut engine = drafting(&runtime);
    queueing.large_bytes.store(hidden_bytes(&engine), Ordering::Relaxed);
    let mut members: Vec<Member> = (0..4).map(|i| greedy(&mut engine, i)).collect();
    assert_eq!(
        events_of(&mut engine, &queueing, &mut members),
        "TLLLWWW",
        "those of prompts are on the host"
    );
    for _ in 0..6 {
        assert_eq!(events_of(&mut engine, &queueing, &mut members), "LLLWWW");
    }
    // A sequence that does not draft needs its rows later.
    members[1].speculation.set_depth(Depth::Fixed(0));
    for _ in 0..2 {
        assert_eq!(events_of(&mut engine, &queueing, &mut members), "RLLLWWW", "its rows alone are read");
    }
    members[1].speculation.set_depth(Depth::Fixed(2));
    let events = events_of(&mut engine, &queueing, &mut members);
    assert_eq!(events, "TLLLWWW", "all but its last row were on the host");
    queueing.take_events();
    for events in ["RLLLWWW", "LLLWWW"] {
        engine.fetch_lags([&mut members[3].speculation]).expect("the device keeps them");
        round(&mut engine, &mut members[..3]).expect("the round runs");
        assert_eq!(queueing.take_events(), events, "its rows are read once");
    }
    assert_eq!(events_of(&mut engine, &queueing, &mut members), "TLLLWWW");
    // Those of a sequence that has left are not.
    release(&mut engine, members.pop());
    assert_eq!(events_of(&mut engine, &queueing, &mut members), "LLLWWW");
    release(&mut engine, members);
}

#[test]
fn many_sequences_without_drafts_cost_one_read() {
    let (runtime, queueing) = queueing(512);
    let mut engine = drafting(&runtime);
    let mut members: Vec<Member> = (0..COUNT).map(|i| greedy(&mut engine, i)).collect();
    rounds(&mut engine, &mut members, 2);
    members.iter_mut().for_each(|member| member.speculation.set_depth(Depth::Fixed(0)));
    queueing.large_bytes.store(hidden_bytes(&engine), Ordering::Relaxed);
    assert_eq!(events_of(&mut engine, &queueing, &mut members), "RLW");
    release(&mut engine, members);
}

/// The device keeps the rows of two rounds. A sequence that misses two and whose rows were not read is told so.
#[test]
fn hidden_states_that_are_gone_are_an_error() {
    let mut engine = drafting(&crate::common::runtime(2));
    let mut members: Vec<Member> = (0..2).map(|i| greedy(&mut engine, i)).collect();
    rounds(&mut engine, &mut members, 1);
    round(&mut engine, &mut members[..1]).expect("the round runs");
    round(&mut engine, &mut members).expect("its rows are still there");
    rounds(&mut engine, &mut members[..1], 2);
    let refused = round(&mut engine, &mut members).expect_err("its rows are gone");
    assert!(refused.to_string().contains("call `fetch_lags`"), "{refused}");
    rounds(&mut engine, &mut members[..1], 1);
    release(&mut engine, members);
}

/// The sequences of each round, with their depths.
fn schedule(seed: u64, rounds: usize) -> Vec<Vec<(usize, usize)>> {
    let mut random = Random::new(seed);
    let round = |random: &mut Random| -> Vec<(usize, usize)> {
        // In some rounds most sequences sit out or make no drafts.
        let (joins, deepest) = (1 + random.below(4), random.below(5));
        let mut all: Vec<(usize, usize)> = (0..COUNT).map(|i| (i, random.below(deepest + 1))).collect();
        all.retain(|_| random.below(4) < joins);
        all
    };
    (0..rounds).map(|_| round(&mut random)).filter(|round| !round.is_empty()).collect()
}

/// Runs a round of the members that it names, at these depths. The others sit out.
fn run(engine: &mut Engine, members: &mut [Member], round: &[(usize, usize)]) -> keel_engine::Result<()> {
    let (mut inside, mut outside) = (Vec::new(), Vec::new());
    for (i, member) in members.iter_mut().enumerate() {
        match round.iter().find(|(of, _)| *of == i) {
            Some((_, depth)) => {
                member.speculation.set_depth(Depth::Fixed(*depth));
                inside.push(member);
            }
            None => outside.push(&mut member.speculation),
        }
    }
    engine.fetch_lags(outside)?;
    round_of(engine, inside)
}

type Standing = (Vec<u32>, Vec<u64>, Vec<u64>);

/// Tokens, drafts and accepted drafts by position.
fn standing(member: &Member) -> Standing {
    let counters = member.speculation.counters();
    (member.tokens.clone(), counters.drafted.to_vec(), counters.accepted.to_vec())
}

/// The standing of each sequence when it runs alone, with the depths of the schedule.
fn alone(engine: &mut Engine, schedule: &[Vec<(usize, usize)>]) -> Vec<Standing> {
    let each = (0..COUNT).map(|i| {
        let mut one = [greedy(engine, i)];
        for (_, depth) in schedule.iter().flatten().filter(|(of, _)| *of == i) {
            one[0].speculation.set_depth(Depth::Fixed(*depth));
            round(engine, &mut one).expect("the round runs");
        }
        let standing = standing(&one[0]);
        release(engine, one);
        standing
    });
    each.collect()
}

#[test]
fn drafts_do_not_depend_on_who_sits_out_or_makes_none() {
    for (seed, (waiting, queueing)) in waiting_and_queueing().into_iter().enumerate() {
        let schedule = schedule(seed as u64, 28);
        let (mut waiting, mut queueing) = (drafting(&waiting), drafting(&queueing));
        let want = alone(&mut waiting, &schedule);
        let accepted: u64 = want.iter().flat_map(|(.., accepted)| accepted).sum();
        assert!(accepted > 60, "{accepted} drafts accepted");
        for engine in [&mut waiting, &mut queueing] {
            let mut members: Vec<Member> = (0..COUNT).map(|i| greedy(engine, i)).collect();
            for round in &schedule {
                run(engine, &mut members, round).expect("the round runs");
            }
            assert_eq!(members.iter().map(standing).collect::<Vec<_>>(), want);
            release(engine, members);
            assert!(engine.cache().is_idle());
        }
    }
}

#[test]
fn a_round_that_fails_loses_no_hidden_state() {
    let schedule = schedule(5, 40);
    let want = alone(&mut drafting(&crate::common::runtime(2)), &schedule);
    let (runtime, queueing) = queueing(512);
    let mut engine = drafting(&runtime);
    queueing.large_bytes.store(hidden_bytes(&engine), Ordering::Relaxed);
    let mut members: Vec<Member> = (0..COUNT).map(|i| greedy(&mut engine, i)).collect();
    let mut random = Random::new(9);
    // Rounds in which a launch and a read failed.
    let mut failed = [0; 2];
    for (i, round) in schedule.iter().enumerate() {
        let has_run = [i % 2, 1 - i % 2].into_iter().any(|fault| {
            match fault {
                0 => queueing.until.store(random.below(4), Ordering::Relaxed),
                _ => queueing.breaks_large_reads.store(true, Ordering::Relaxed),
            }
            let outcome = run(&mut engine, &mut members, round);
            queueing.until.store(usize::MAX, Ordering::Relaxed);
            queueing.breaks_large_reads.store(false, Ordering::Relaxed);
            failed[fault] += usize::from(outcome.is_err());
            outcome.is_ok()
        });
        if !has_run {
            run(&mut engine, &mut members, round).expect("the round runs");
        }
    }
    assert!(failed.iter().all(|&failed| failed > 8), "{failed:?} rounds failed");
    assert_eq!(members.iter().map(standing).collect::<Vec<_>>(), want);
    release(&mut engine, members);
}
