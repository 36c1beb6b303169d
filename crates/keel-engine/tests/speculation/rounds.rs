//! Speculation changes only how fast tokens come.

use std::path::PathBuf;

use crate::common::adversary::{Adversary, Drafter};
use crate::common::drafted::{fixed, options, until};
use crate::common::{decoded, demo, engine, expect_same_state, expected, fixture, greedy, runtime, state_of};
use keel_array::{Category, Compute};
use keel_cache::SequenceCache;
use keel_engine::speculation::{Chooser, RoundSequence, Speculation, SpeculationOptions};
use keel_engine::{Depth, Engine, EngineError, GenerateOptions, LogitsRow, SamplerOptions, TokenIterator};
use proptest::prelude::*;

/// The fixtures with an MTP (multi-token-prediction) head.
const WITH_HEAD: [&str; 4] = ["qwen3_5", "qwen3_5_real_head_dims", "qwen3_5_moe", "qwen3_5_paro"];
const DEPTHS: [usize; 5] = [1, 2, 3, 5, 8];

/// The models of these tests: folder and a prompt.
fn models() -> Vec<(PathBuf, Vec<u32>)> {
    let mut models = vec![(demo(), vec![1, 250, 33, 700, 12, 5])];
    models.extend(WITH_HEAD.iter().map(|name| fixture(name)).map(|folder| {
        let ids = expected(&folder).ids;
        (folder, ids)
    }));
    models
}

#[test]
fn greedy_text_does_not_depend_on_speculation() {
    for (folder, prompt) in models() {
        for compute in [Compute::Auto, Compute::F32] {
            let tokens = if compute == Compute::Auto { 512 } else { 64 };
            let mut engine = engine(&folder, &runtime(2), options(1, 8, compute));
            // An engine without drafts has no log: it commits each token at once.
            let mut without = self::engine(&folder, &runtime(2), options(1, 0, compute));
            let want = greedy(&mut without, &prompt, tokens);
            assert_eq!(greedy(&mut engine, &prompt, tokens), want, "{}: no drafts", folder.display());
            for depth in DEPTHS.map(fixed).into_iter().chain([SpeculationOptions::default()]) {
                let sequence = engine.open().expect("a slot is free");
                let mut got = crate::common::drafting(&mut engine, sequence, &prompt, until(tokens), depth);
                let ids: Vec<u32> = got.by_ref().collect::<Result<_, _>>().expect("every round runs");
                let counters = got.counters().expect("it drafts").clone();
                drop(got);
                assert_eq!(ids, want, "{}: {depth:?}", folder.display());
                assert_eq!(counters.tokens as usize, tokens - 1);
                if let Depth::Fixed(depth) = depth.depth {
                    assert!(counters.drafted[depth - 1] > 0, "{depth} drafts are made");
                }
            }
            assert!(engine.cache().is_idle());
        }
    }
}

#[test]
fn the_head_of_the_built_in_model_drafts_well() {
    // The model card says: 88.6% of first drafts are accepted, and all of the first three in 63.2%. This is one text.
    let mut engine = engine(&demo(), &runtime(2), options(1, 3, Compute::Auto));
    let sequence = engine.open().expect("a slot is free");
    let prompt = [1, 250, 33, 700, 12, 5];
    let mut tokens = crate::common::drafting(&mut engine, sequence, &prompt, until(400), fixed(3));
    assert_eq!(tokens.by_ref().map_while(Result::ok).count(), 400);
    let counters = tokens.counters().expect("it drafts");
    let share = |i: usize| counters.accepted[i] as f64 / counters.drafted[0] as f64;
    assert!(share(0) > 0.75 && share(2) > 0.45, "{counters:?}");
}

#[test]
fn sampled_sequences_follow_measured_costs_unless_they_must_come_again() {
    let mut engine = engine(&demo(), &runtime(2), options(1, 8, Compute::Auto));
    let mut run = |repeatable| {
        let sampler = SamplerOptions { temperature: 0.7, seed: 5, ..SamplerOptions::default() };
        let options = GenerateOptions { sampler, ..until(120) };
        let how = SpeculationOptions { repeatable, ..Default::default() };
        let sequence = engine.open().expect("a slot is free");
        let mut tokens = crate::common::drafting(&mut engine, sequence, &[1, 250, 33], options, how);
        let first: Vec<u32> = tokens.by_ref().take(2).map(|token| token.expect("runs")).collect();
        let plain_first = tokens.counters().expect("it drafts").plain_rounds;
        let rest: Vec<u32> = tokens.by_ref().map(|token| token.expect("runs")).collect();
        let drafted = tokens.counters().expect("it drafts").drafted_total();
        ([first, rest].concat(), plain_first, drafted)
    };
    // Without measurements a plain round comes first. Nominal costs are known from the start.
    let (_, plain_rounds, drafted) = run(false);
    assert!(plain_rounds == 1 && drafted > 0);
    let (tokens, plain_rounds, _) = run(true);
    assert_eq!(plain_rounds, 0);
    assert_eq!(run(true).0, tokens);
}

/// A sequence of a batch.
struct Member {
    cache: SequenceCache,
    speculation: Speculation,
    chooser: Adversary,
    tokens: Vec<u32>,
    wanted: usize,
}

impl Member {
    fn join(engine: &mut Engine, prompt: &[u32], chooser: Adversary, options: SpeculationOptions) -> Member {
        let (mut cache, mut chooser) = (engine.open().expect("a slot is free"), chooser);
        let mut logits = LogitsRow::default();
        engine.prefill(&mut cache, prompt, &mut logits.values, &mut |_| ()).expect("fits");
        let speculation = Speculation::new(options, engine.last_hidden().expect("drafts were planned"));
        let first = chooser.choose(&mut logits, None).expect("free").token;
        let wanted = chooser.truth.len();
        Member { cache, speculation, chooser, tokens: vec![first], wanted }
    }

    fn is_done(&self) -> bool {
        self.tokens.len() >= self.wanted
    }
}

fn round(engine: &mut Engine, members: &mut [&mut Member]) {
    let mut batch: Vec<RoundSequence<'_>> = members
        .iter_mut()
        .map(|m| RoundSequence {
            last: m.tokens[m.tokens.len() - 1],
            tokens_max: m.wanted - m.tokens.len(),
            cache: &mut m.cache,
            speculation: Some(&mut m.speculation),
            chooser: &mut m.chooser,
        })
        .collect();
    let rounds = engine.round(&mut batch).expect("the round runs");
    for (member, round) in members.iter_mut().zip(rounds) {
        member.tokens.extend(round.expect("nothing constrains it").tokens);
    }
}

#[test]
fn sequences_of_a_batch_draft_and_accept_each_for_itself() {
    let lens = [3, 64, 65, 130, 17, 1, 77];
    let depths = [1, 2, 3, 5, 8, 3].map(Depth::Fixed).into_iter().chain([Depth::Auto]);
    let options_of: Vec<_> = depths.map(|depth| SpeculationOptions { depth, ..Default::default() }).collect();
    for (folder, ids) in models() {
        let mut engine = engine(&folder, &runtime(2), options(7, 8, Compute::Auto));
        let vocab = engine.model().config.vocab as u32;
        let prompt = |len: usize| -> Vec<u32> {
            ids.iter().cycle().take(len).enumerate().map(|(i, id)| (id + i as u32 * 7) % vocab).collect()
        };
        let prompts = lens.map(prompt);
        let wanted: Vec<Vec<u32>> =
            prompts.iter().enumerate().map(|(i, p)| greedy(&mut engine, p, 512 - 40 * i)).collect();
        for turn in 0..2 {
            let drafter = |i: usize| match (i + turn) % 4 {
                0 => Drafter::Head,
                1 => Drafter::Right,
                2 => Drafter::Wrong,
                _ => Drafter::Random(i as u64),
            };
            let (mut waiting, mut running, mut done): (Vec<usize>, Vec<(usize, Member)>, Vec<_>) =
                ((0..7).collect(), Vec::new(), Vec::new());
            while !(waiting.is_empty() && running.is_empty()) {
                // A sequence joins every few rounds, and leaves when it has all its tokens.
                if (done.len() % 2 == 0 || running.len() < 4)
                    && let Some(i) = waiting.pop()
                {
                    let chooser = Adversary::new(drafter(i), &prompts[i], &wanted[i]);
                    let options = options_of[(i + turn) % 7];
                    running.push((i, Member::join(&mut engine, &prompts[i], chooser, options)));
                }
                for _ in 0..3 {
                    let mut open: Vec<&mut Member> =
                        running.iter_mut().map(|(_, m)| m).filter(|m| !m.is_done()).collect();
                    if !open.is_empty() {
                        round(&mut engine, &mut open);
                    }
                }
                while let Some(at) = running.iter().position(|(_, m)| m.is_done()) {
                    let (i, member) = running.remove(at);
                    assert_eq!(member.tokens, wanted[i], "{}: sequence {i}", folder.display());
                    engine.release(member.cache);
                    done.push(i);
                }
            }
            assert_eq!(done.len(), 7);
        }
        assert!(engine.cache().is_idle());
    }
}

#[test]
fn any_accept_counts_leave_the_state_of_plain_decoding() {
    for (folder, prompt) in models() {
        let engine = engine(&folder, &runtime(2), options(2, 8, Compute::Auto));
        // This engine has no log, so it commits each token at once.
        let mut without = self::engine(&folder, &runtime(2), options(1, 0, Compute::Auto));
        let truth = greedy(&mut without, &prompt, 60);
        let mut runner = proptest::test_runner::TestRunner::new_with_rng(
            ProptestConfig { cases: 12, ..ProptestConfig::default() },
            proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha),
        );
        let cases = (prop::collection::vec(0usize..=8, 1..12), any::<u64>());
        let engines = std::cell::RefCell::new((engine, without));
        let outcome = runner.run(&cases, |(depths, seed)| {
            let (engine, without) = &mut *engines.borrow_mut();
            let chooser = Adversary::new(Drafter::Random(seed), &prompt, &truth);
            let mut member = Member::join(engine, &prompt, chooser, fixed(0));
            for depth in depths {
                member.speculation.set_depth(Depth::Fixed(depth));
                if !member.is_done() {
                    round(engine, &mut [&mut member]);
                }
            }
            prop_assert_eq!(&member.tokens, &truth[..member.tokens.len()]);
            let run = &member.tokens[..member.tokens.len() - 1];
            let straight = decoded(without, &prompt, run);
            prop_assert!(state_of(engine, member.cache) == state_of(without, straight), "{:?}", run);
            Ok(())
        });
        outcome.unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    }
}

#[test]
fn tokens_that_are_not_taken_are_taken_back() {
    let prompt = [1, 250, 33, 700, 12, 5];
    let mut engine = engine(&demo(), &runtime(2), options(2, 8, Compute::Auto));
    let truth = greedy(&mut engine, &prompt, 40);
    for taken in 1..14 {
        let sequence = engine.open().expect("a slot is free");
        let chooser = Adversary::new(Drafter::Right, &prompt, &truth);
        let how = GenerateOptions { speculation: Some(fixed(5)), ..until(40) };
        let mut tokens =
            TokenIterator::with_chooser(&mut engine, sequence, &prompt, how, Box::new(chooser), &mut |_| ())
                .expect("fits");
        let got: Vec<u32> = tokens.by_ref().take(taken).collect::<Result<_, _>>().expect("every round runs");
        let sequence = tokens.into_sequence();
        let straight = decoded(&mut engine, &prompt, &got[..taken - 1]);
        expect_same_state(&mut engine, sequence, straight);
    }
}

#[test]
fn a_sequence_with_open_rows_can_be_forked_saved_and_prefilled() {
    let prompt = [1, 250, 33, 700, 12, 5];
    let mut engine = engine(&demo(), &runtime(2), options(3, 4, Compute::Auto));
    let truth = greedy(&mut engine, &prompt, 60);
    let mut member =
        Member::join(&mut engine, &prompt, Adversary::new(Drafter::Right, &prompt, &truth), fixed(4));
    while member.cache.len() < 64 - 4 {
        round(&mut engine, &mut [&mut member]);
    }
    assert!(member.cache.accepted() > 0);
    let twin = engine.cache_mut().fork(&member.cache).expect("a slot is free");
    let straight = decoded(&mut engine, &prompt, &member.tokens[..member.tokens.len() - 1]);
    expect_same_state(&mut engine, twin, straight);
    let path = tempfile::tempdir().expect("a temporary folder");
    let path = path.path().join("cache");
    let ids = vec![0; member.cache.len()];
    let refused = engine.cache().save(&member.cache, &ids, "demo", &path);
    assert!(refused.expect_err("rows are open").to_string().contains("not committed yet"));
    engine.commit(&mut member.cache).expect("runs");
    engine.cache().save(&member.cache, &ids, "demo", &path).expect("all is committed");
    engine.release(member.cache);
}

#[test]
fn optimistic_rounds_take_every_draft() {
    let prompt = [1, 250, 33, 700, 12, 5];
    let mut engine = engine(&demo(), &runtime(2), options(1, 4, Compute::Auto));
    let truth = greedy(&mut engine, &prompt, 40);
    for (drafter, is_same) in [(Drafter::Right, true), (Drafter::Wrong, false)] {
        let sequence = engine.open().expect("a slot is free");
        let chooser = Box::new(Adversary::new(drafter, &prompt, &truth));
        let optimistic = SpeculationOptions { optimistic: true, ..fixed(4) };
        let how = GenerateOptions { speculation: Some(optimistic), ..until(40) };
        let mut tokens =
            TokenIterator::with_chooser(&mut engine, sequence, &prompt, how, chooser, &mut |_| ())
                .expect("fits");
        let got: Vec<u32> = tokens.by_ref().collect::<Result<_, _>>().expect("every round runs");
        assert_eq!(got == truth, is_same);
        assert_eq!(
            tokens.counters().expect("it drafts").accepted,
            tokens.counters().expect("it drafts").drafted
        );
    }
}

#[test]
fn the_delta_log_is_all_that_speculation_adds_to_a_sequence() {
    let prompt = [1, 250, 33, 700, 12, 5];
    let memory = |drafts| {
        let runtime = runtime(2);
        let engine = engine(&demo(), &runtime, options(3, drafts, Compute::Auto));
        (runtime, engine)
    };
    let (without, _engine) = memory(0);
    let (with, mut engine) = memory(5);
    let loaded = with.ledger().active();
    let unchanged = [Category::Weights, Category::Kv, Category::Recurrent, Category::Checkpoints];
    for category in unchanged {
        assert_eq!(loaded.get(category), without.ledger().active().get(category), "{category}");
    }
    let row_bytes = engine.cache().spec().open_row_bytes() as u64;
    assert_eq!(loaded.get(Category::DeltaLog), 3 * 6 * row_bytes);
    assert_eq!(without.ledger().active().get(Category::DeltaLog), 0);
    let charges = with.ledger().charges();
    let truth = greedy(&mut engine, &prompt, 200);
    let chooser = Adversary::new(Drafter::Random(5), &prompt, &truth);
    let mut member = Member::join(&mut engine, &prompt, chooser, fixed(5));
    while !member.is_done() {
        round(&mut engine, &mut [&mut member]);
    }
    engine.release(member.cache);
    assert_eq!(with.ledger().charges(), charges, "nothing is allocated in a round");
    assert_eq!(with.ledger().peak(), loaded, "a run needs what was planned");
}

#[test]
fn a_model_without_a_head_says_so() {
    let folder = fixture("qwen3_5_mlx_4bit");
    let checkpoint = keel_weights::Checkpoint::open(&folder).expect("opens");
    let parameters = keel_models::loading::CheckpointParameters(&checkpoint);
    let options = options(1, 2, Compute::Auto);
    let refused = Engine::load(&runtime(1), &parameters, checkpoint.config(), options, &|_| ());
    assert!(matches!(refused.err(), Some(EngineError::NoMtpHead)));
}
