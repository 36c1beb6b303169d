//! Sequences that draft, in rounds of a batch.

use std::sync::atomic::Ordering;

use keel_cache::SequenceCache;
use keel_engine::speculation::{Chooser, RoundSequence, SamplerChooser, Speculation};
use keel_engine::{
    Depth, Engine, LogitsRow, Sampler, SamplerOptions, SpeculationCounters, SpeculationOptions,
};

use super::queueing::Queueing;

/// Not in order: the sequences of later passes of the head are not the first ones of the batch.
pub const DEPTHS: [usize; 4] = [2, 4, 0, 1];

/// A sequence that drafts, with the tokens it was given.
pub struct Member {
    pub prompt: Vec<u32>,
    pub cache: SequenceCache,
    pub speculation: Speculation,
    pub chooser: SamplerChooser,
    pub tokens: Vec<u32>,
}

impl Member {
    pub fn join(engine: &mut Engine, prompt: &[u32], depth: usize, sampler: SamplerOptions) -> Member {
        let mut cache = engine.open().expect("a slot is free");
        let mut logits = LogitsRow::default();
        engine.prefill(&mut cache, prompt, &mut logits.values, &mut |_| ()).expect("fits");
        let options = SpeculationOptions { depth: Depth::Fixed(depth), ..Default::default() };
        let speculation = Speculation::new(options, engine.last_hidden().expect("drafts were planned"));
        let sampler = Sampler::new(sampler, prompt).expect("in range");
        let mut chooser = SamplerChooser::new(sampler, None, Vec::new());
        let first = chooser.choose(&mut logits, None).expect("free").token;
        Member { prompt: prompt.to_vec(), cache, speculation, chooser, tokens: vec![first] }
    }

    /// Position, open rows and counters.
    pub fn standing(&self) -> (usize, usize, SpeculationCounters) {
        (self.cache.len(), self.cache.accepted(), self.speculation.counters().clone())
    }
}

/// Runs a round of all members.
pub fn round(engine: &mut Engine, members: &mut [Member]) -> keel_engine::Result<()> {
    round_of(engine, members)
}

/// Runs a round of these members.
pub fn round_of<'a>(
    engine: &mut Engine,
    members: impl IntoIterator<Item = &'a mut Member>,
) -> keel_engine::Result<()> {
    let mut members: Vec<&mut Member> = members.into_iter().collect();
    let mut batch: Vec<RoundSequence<'_>> = members
        .iter_mut()
        .map(|m| RoundSequence {
            last: m.tokens[m.tokens.len() - 1],
            tokens_max: 100,
            cache: &mut m.cache,
            speculation: Some(&mut m.speculation),
            chooser: &mut m.chooser,
        })
        .collect();
    let rounds = engine.round(&mut batch)?;
    let all = members.iter_mut().zip(rounds);
    all.for_each(|(member, round)| member.tokens.extend(round.expect("nothing constrains it").tokens));
    Ok(())
}

/// Greedy and sampled sequences with these depths.
pub fn members(engine: &mut Engine, depths: [usize; 4]) -> Vec<Member> {
    let join = |i: usize| {
        let prompt: Vec<u32> = (0..5 + 30 * i as u32).map(|j| (j * 7 + i as u32 * 13 + 5) % 500).collect();
        let sampled = SamplerOptions { temperature: 0.8, top_p: 0.95, seed: 7, ..SamplerOptions::default() };
        let sampler = if i % 2 == 1 { sampled } else { SamplerOptions::default() };
        Member::join(engine, &prompt, depths[i], sampler)
    };
    (0..4).map(join).collect()
}

/// Bytes of a hidden state.
pub fn hidden_bytes(engine: &Engine) -> usize {
    engine.model().config.hidden * size_of::<f32>()
}

pub fn rounds(engine: &mut Engine, members: &mut [Member], count: usize) {
    (0..count).for_each(|_| round(engine, members).expect("the round runs"));
}

/// Lets a round fail at launch after launch until it succeeds; every third failure is at a random earlier launch. A
/// failure may come while the attempt makes up for the one before. Returns how many failures there were.
pub fn fail_everywhere(engine: &mut Engine, queueing: &Queueing, members: &mut [Member]) -> usize {
    let before: Vec<_> = members.iter().map(Member::standing).collect();
    let mut random = keel_testkit::random::Random::new(11);
    for at in 0.. {
        queueing.until.store(if at % 3 == 2 { random.below(at) } else { at }, Ordering::Relaxed);
        let outcome = round(engine, members);
        queueing.until.store(usize::MAX, Ordering::Relaxed);
        let Err(error) = outcome else { return at };
        assert!(error.to_string().contains("injected"), "{error}");
        for (member, before) in members.iter().zip(&before) {
            let (len, accepted, counters) = member.standing();
            assert_eq!((len, &counters), (before.0, &before.2));
            // A failed attempt may have committed accepted rows.
            assert!(accepted == before.1 || accepted == 0);
        }
        assert!(engine.runtimes().all(|runtime| runtime.runs_under_way() == 0));
    }
    unreachable!("a round has an end")
}
