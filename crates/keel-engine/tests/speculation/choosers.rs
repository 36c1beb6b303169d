//! The effect of a sequence's chooser on its drafts: constraints, penalties, and errors.

use std::time::Instant;

use crate::common::drafted::{fixed, options, until};
use crate::common::{decoded, demo, engine, greedy, runtime, state_of};
use keel_array::Compute;
use keel_cache::SequenceCache;
use keel_engine::batch::{BatchEvent, BatchOptions, BatchRequest, Batcher, Constraint, SequenceEvent};
use keel_engine::speculation::{Choice, Chooser, Draft, RoundSequence, SamplerChooser, Speculation};
use keel_engine::{
    EngineError, GenerateOptions, LogitsRow, Sampler, SamplerOptions, SpeculationOptions, TokenIterator,
};

/// Allows odd and even tokens in turn, `end` tokens in all.
struct Alternate {
    taken: usize,
    end: usize,
}

impl Constraint for Alternate {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        logits.iter_mut().skip(self.taken % 2).step_by(2).for_each(|logit| *logit = f32::NEG_INFINITY);
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        if token as usize % 2 == self.taken % 2 {
            return Err(format!("token {token} comes at place {}", self.taken));
        }
        self.taken += 1;
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.taken >= self.end
    }

    fn rollback(&mut self, tokens: usize) -> Result<(), String> {
        self.taken = self.taken.checked_sub(tokens).ok_or("more than came")?;
        Ok(())
    }
}

#[test]
fn penalties_and_constraints_bind_drafts_and_tokens_alike() {
    let mut engine = engine(&demo(), &runtime(2), options(1, 8, Compute::Auto));
    let prompt = [1, 250, 33, 700, 12, 5];
    let mut run = |how: SpeculationOptions, is_bound: bool| {
        let sampler = SamplerOptions {
            repetition_penalty: 1.15,
            frequency_penalty: 0.3,
            presence_penalty: 0.2,
            logit_bias: vec![(17, 2.0)],
            ..SamplerOptions::default()
        };
        let sampler = Sampler::new(sampler, &prompt).expect("in range");
        let constraint: Option<Box<dyn Constraint>> =
            if is_bound { Some(Box::new(Alternate { taken: 0, end: 203 })) } else { None };
        let chooser = Box::new(SamplerChooser::new(sampler, constraint, Vec::new()));
        let sequence = engine.open().expect("a slot is free");
        let how = GenerateOptions { speculation: Some(how), ..until(300) };
        let mut tokens =
            TokenIterator::with_chooser(&mut engine, sequence, &prompt, how, chooser, &mut |_| ())
                .expect("fits");
        let ids: Vec<u32> = tokens.by_ref().map(|token| token.expect("every round runs")).collect();
        let counters = tokens.counters().expect("it drafts").clone();
        (ids, counters)
    };
    for (is_bound, len) in [(false, 300), (true, 203)] {
        let (want, _) = run(fixed(0), is_bound);
        assert_eq!(want.len(), len);
        for depth in [1, 3, 8] {
            let (ids, counters) = run(fixed(depth), is_bound);
            assert_eq!(ids, want, "depth {depth}, bound: {is_bound}");
            // If the constraint did not bind the first draft, half of them would be rejected for their parity alone.
            let share = counters.accepted[0] as f64 / counters.drafted[0] as f64;
            assert!(share > 0.3, "{share}");
            if is_bound {
                let (ids, _) = run(SpeculationOptions { optimistic: true, ..fixed(depth) }, true);
                assert_eq!(ids, want, "depth {depth}: within a constraint, no draft stays unchecked");
            }
        }
    }
}

/// Fails at one of its choices.
struct Failing {
    chooser: SamplerChooser,
    choices_left: usize,
}

impl Chooser for Failing {
    fn draft(&mut self, row: &mut LogitsRow) -> keel_engine::Result<u32> {
        self.chooser.draft(row)
    }

    fn begin(&mut self) {
        self.chooser.begin();
    }

    fn abandon(&mut self) {
        self.chooser.abandon();
    }

    fn retract(&mut self) {
        self.chooser.retract();
    }

    fn choose(&mut self, row: &mut LogitsRow, draft: Option<Draft>) -> keel_engine::Result<Choice> {
        self.choices_left =
            self.choices_left.checked_sub(1).ok_or_else(|| EngineError::Constraint("it fails".into()))?;
        self.chooser.choose(row, draft)
    }

    fn take(&mut self, token: u32) -> keel_engine::Result<Choice> {
        self.chooser.take(token)
    }
}

/// The rows of a sequence whose chooser fails after the pass are taken back, and the others of the round go on.
#[test]
fn a_chooser_that_fails_fails_alone() {
    let (prompts, new) = ([[1, 250, 33, 700, 12, 5], [9, 8, 7, 6, 5, 4]], |prompt: &[u32]| {
        SamplerChooser::new(
            Sampler::new(SamplerOptions::default(), prompt).expect("in range"),
            None,
            Vec::new(),
        )
    });
    for (drafts, choices) in [(0, 9), (3, 4), (3, 9), (3, 14)] {
        let mut engine = engine(&demo(), &runtime(2), options(2, drafts, Compute::Auto));
        let truth = prompts.map(|prompt| greedy(&mut engine, &prompt, 40));
        let mut caches = Vec::new();
        let mut states = Vec::new();
        for prompt in &prompts {
            let mut cache = engine.open().expect("a slot is free");
            engine.prefill(&mut cache, prompt, &mut Vec::new(), &mut |_| ()).expect("fits");
            let drafting = (drafts > 0).then(|| engine.last_hidden().expect("drafts were planned"));
            states.push(drafting.map(|hidden| Speculation::new(fixed(drafts), hidden)));
            caches.push(cache);
        }
        let mut tokens = truth.clone().map(|truth| truth[..1].to_vec());
        let mut failing = Failing { chooser: new(&prompts[0]), choices_left: choices };
        let mut good = new(&prompts[1]);
        let mut has_failed = false;
        while !has_failed {
            let mut choosers: [&mut dyn Chooser; 2] = [&mut failing, &mut good];
            let members = caches.iter_mut().zip(&mut states).zip(&mut choosers).zip(&tokens);
            let mut batch: Vec<RoundSequence<'_>> = members
                .map(|(((cache, speculation), chooser), tokens)| RoundSequence {
                    last: tokens[tokens.len() - 1],
                    tokens_max: 40 - tokens.len(),
                    cache,
                    speculation: speculation.as_mut(),
                    chooser: &mut **chooser,
                })
                .collect();
            for (i, round) in engine.round(&mut batch).expect("the pass runs").into_iter().enumerate() {
                match round {
                    Ok(round) => tokens[i].extend(round.tokens),
                    Err(error) => has_failed = i == 0 && error.to_string().contains("it fails"),
                }
            }
        }
        for (tokens, truth) in tokens.iter().zip(&truth) {
            assert!(tokens.len() > 1, "{drafts} drafts, {choices} choices");
            assert_eq!(tokens[..], truth[..tokens.len()], "{drafts} drafts, {choices} choices");
        }
        let [failed, other] = <[SequenceCache; 2]>::try_from(caches).expect("two");
        // Without a log, its last token counts as run.
        let run = tokens[0].len() - usize::from(drafts > 0);
        for (cache, i, run) in [(failed, 0, run), (other, 1, tokens[1].len() - 1)] {
            let kept = state_of(&mut engine, cache);
            let straight = decoded(&mut engine, &prompts[i], &tokens[i][..run]);
            assert!(
                kept == state_of(&mut engine, straight),
                "{drafts} drafts, {choices} choices, sequence {i}"
            );
        }
    }
}

/// Each token has the log probability of its own row, also where drafts may go unchecked.
#[test]
fn log_probabilities_are_those_of_their_tokens() {
    let speculation = SpeculationOptions { optimistic: true, ..fixed(3) };
    let batch = BatchOptions { speculation, ..BatchOptions::default() };
    let mut batcher = Batcher::new(engine(&demo(), &runtime(2), options(1, 3, Compute::Auto)), batch);
    let mut request = BatchRequest::new(0, (0..30).map(|i| 3 + i * 7).collect(), 40);
    request.top_logprobs = Some(2);
    let now = Instant::now();
    batcher.submit(request, now).expect("accepted");
    let mut tokens = 0;
    while !batcher.is_idle() {
        for SequenceEvent { event, .. } in batcher.step(now) {
            if let BatchEvent::Token { id, logprobs } = event {
                let of_it = logprobs.expect("they were asked for");
                assert_eq!(of_it.top[0], (id, of_it.drawn), "token {tokens} is the most probable one");
                tokens += 1;
            }
        }
    }
    assert_eq!(tokens, 40);
}
