//! How the token after a row is chosen.
//!
//! A draft `d` was drawn from the MTP head's distribution `q`; the model's distribution is `p`. With probability
//! `min(1, p(d) / q(d))` the draft stays. Otherwise the token is drawn from `max(p - q, 0)`, normalised. Either way the
//! token's distribution is `p`. Both `p` and `q` are taken after penalties, bias, constraint, temperature and filters.
//! A greedy distribution has one token, so a draft stays if it is the model's token.

use keel_array::sampling::Draw;

use crate::batch::Constraint;
use crate::{EngineError, Result, Sampler};

/// The token chosen after a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The token.
    pub token: u32,
    /// Whether the sequence ends with it.
    pub is_last: bool,
}

/// How a sequence chooses its drafts and tokens.
pub trait Chooser {
    /// Whether it can draft now.
    fn can_draft(&self) -> bool {
        true
    }

    /// Whether drafts and tokens are now always those with the greatest logit. Then the host reads no logits: the
    /// device draws, and [`Chooser::take`] gets the tokens.
    fn is_argmax(&self) -> bool {
        false
    }

    /// How the device can draw the next token from its logits; `None` if the host has to choose. The token is then
    /// passed to [`Chooser::take`]. The draw counts as made until [`Chooser::abandon`].
    fn draw_ahead(&mut self) -> Option<Draw> {
        None
    }

    /// As [`Chooser::draw_ahead`], for each of the next `count` tokens. [`Chooser::keep_draws`] says how many of them
    /// are taken. They are compared with the MTP head's most probable tokens as drafts.
    fn draw_rows(&mut self, _count: usize) -> Option<Vec<Draw>> {
        None
    }

    /// Keeps the first `count` draws of [`Chooser::draw_rows`], at least one. The others count as not made.
    fn keep_draws(&mut self, _count: usize) {}

    /// Draws a draft from the MTP head's logits, as if the drafts before it had stayed. The logits are overwritten.
    ///
    /// # Errors
    /// An error of the constraint.
    fn draft(&mut self, logits: &mut [f32]) -> Result<u32>;

    /// Begins a round. [`Chooser::abandon`] returns to this state.
    fn begin(&mut self);

    /// Takes back a failed round. The state is that of its begin, so a retry chooses the same tokens.
    ///
    /// # Errors
    /// An error of the constraint.
    fn abandon(&mut self) -> Result<()>;

    /// May change the drafts of a round once they are complete.
    fn revise(&mut self, _drafts: &mut [u32]) {}

    /// Ends drafting. The state is that before the first draft of the round.
    ///
    /// # Errors
    /// An error of the constraint.
    fn retract(&mut self) -> Result<()>;

    /// Chooses the token after a row with these logits, which are overwritten. `draft` is the draft for its place, with
    /// its number in the round.
    ///
    /// # Errors
    /// An error of the constraint.
    fn choose(&mut self, logits: &mut [f32], draft: Option<(usize, u32)>) -> Result<Choice>;

    /// Takes a token that was found without this chooser, such as one that the device drew.
    ///
    /// # Errors
    /// An error of the constraint.
    fn take(&mut self, token: u32) -> Result<Choice>;
}

/// Chooses with a [`Sampler`], and within a [`Constraint`] if there is one.
pub struct SamplerChooser {
    sampler: Sampler,
    constraint: Option<Box<dyn Constraint>>,
    end_tokens: Vec<u32>,
    /// Drafts that were not retracted yet.
    drafts: Trail,
    /// Tokens chosen in this round.
    chosen: Trail,
    /// The sampler's random state when the round began.
    random: u64,
    /// The random state before the next round's draw, if that draw was made already.
    random_behind: Option<u64>,
    /// The random state after each draw of [`Chooser::draw_rows`].
    random_of_rows: Vec<u64>,
    /// The drafts of the round, each with the distribution it was drawn from. Reused from round to round.
    proposals: Vec<(u32, Vec<(u32, f32)>)>,
    target: Vec<(u32, f32)>,
    residual: Residual,
}

impl SamplerChooser {
    /// Tokens in `end_tokens` end the sequence.
    pub fn new(
        sampler: Sampler,
        constraint: Option<Box<dyn Constraint>>,
        end_tokens: Vec<u32>,
    ) -> SamplerChooser {
        SamplerChooser {
            constraint,
            end_tokens,
            drafts: Trail::default(),
            chosen: Trail::default(),
            random: sampler.random(),
            random_behind: None,
            random_of_rows: Vec::new(),
            sampler,
            proposals: Vec::new(),
            target: Vec::new(),
            residual: Residual::default(),
        }
    }

    /// Whether the device can draw every token.
    pub(crate) fn draws_ahead(&self) -> bool {
        self.constraint.is_none() && self.sampler.draws_ahead()
    }

    /// As [`Chooser::draw_ahead`], for the next round. That round begins when this round's token has been taken.
    pub(crate) fn draw_behind(&mut self) -> Option<Draw> {
        self.random_behind = Some(self.sampler.random());
        self.draw_ahead()
    }

    /// Undoes [`SamplerChooser::draw_behind`].
    pub(crate) fn forget_behind(&mut self) {
        if let Some(random) = self.random_behind.take() {
            self.sampler.set_random(random);
        }
    }

    fn process(&mut self, logits: &mut [f32]) -> Result<()> {
        if let Some(constraint) = &mut self.constraint {
            constraint.mask(logits).map_err(EngineError::Constraint)?;
        }
        Ok(())
    }

    /// Counts a chosen token and passes it to the constraint.
    fn chosen(&mut self, token: u32) -> Result<Choice> {
        self.chosen.tokens.push((token, self.sampler.note(token)));
        let mut is_last = self.end_tokens.contains(&token);
        if let Some(constraint) = self.constraint.as_mut().filter(|_| !is_last) {
            constraint.accept(token).map_err(EngineError::Constraint)?;
            self.chosen.constrained += 1;
            is_last = constraint.is_complete();
        }
        Ok(Choice { token, is_last })
    }
}

/// Tokens that sampler and constraint can take back.
#[derive(Debug, Default)]
struct Trail {
    /// Each token, and whether the sampler had not seen it before.
    tokens: Vec<(u32, bool)>,
    /// How many of them the constraint accepted. It accepts none once it is complete.
    constrained: usize,
}

impl Trail {
    fn undo(&mut self, sampler: &mut Sampler, constraint: Option<&mut Box<dyn Constraint>>) -> Result<()> {
        while let Some((token, was_new)) = self.tokens.pop() {
            sampler.forget(token, was_new);
        }
        match (std::mem::take(&mut self.constrained), constraint) {
            (taken @ 1.., Some(constraint)) => constraint.rollback(taken).map_err(EngineError::Constraint),
            _ => Ok(()),
        }
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.constrained = 0;
    }
}

impl Chooser for SamplerChooser {
    fn can_draft(&self) -> bool {
        self.constraint.as_ref().is_none_or(|constraint| constraint.can_roll_back())
    }

    fn is_argmax(&self) -> bool {
        self.constraint.is_none() && self.sampler.is_argmax()
    }

    fn draw_ahead(&mut self) -> Option<Draw> {
        if self.constraint.is_none() { self.sampler.draw_ahead() } else { None }
    }

    fn draw_rows(&mut self, count: usize) -> Option<Vec<Draw>> {
        self.random_of_rows.clear();
        let mut draw = || {
            let draw = self.draw_ahead();
            self.random_of_rows.push(self.sampler.random());
            draw
        };
        (0..count).map(|_| draw()).collect()
    }

    fn keep_draws(&mut self, count: usize) {
        if let Some(&random) = count.checked_sub(1).and_then(|last| self.random_of_rows.get(last)) {
            self.sampler.set_random(random);
        }
    }

    fn begin(&mut self) {
        self.chosen.clear();
        self.random = self.random_behind.take().unwrap_or(self.sampler.random());
    }

    fn abandon(&mut self) -> Result<()> {
        self.sampler.set_random(self.random);
        self.random_behind = None;
        let retracted = self.retract();
        retracted.and(self.chosen.undo(&mut self.sampler, self.constraint.as_mut()))
    }

    fn draft(&mut self, logits: &mut [f32]) -> Result<u32> {
        self.process(logits)?;
        self.sampler.penalise(logits);
        let at = self.drafts.tokens.len();
        if self.proposals.len() == at {
            self.proposals.push(Default::default());
        }
        let (proposed, distribution) = &mut self.proposals[at];
        self.sampler.distribution(logits, distribution);
        let token = draw(distribution, self.sampler.uniform());
        *proposed = token;
        if let Some(constraint) = self.constraint.as_mut().filter(|constraint| !constraint.is_complete()) {
            constraint.accept(token).map_err(EngineError::Constraint)?;
            self.drafts.constrained += 1;
        }
        self.drafts.tokens.push((token, self.sampler.note(token)));
        Ok(token)
    }

    fn retract(&mut self) -> Result<()> {
        self.drafts.undo(&mut self.sampler, self.constraint.as_mut())
    }

    fn choose(&mut self, logits: &mut [f32], draft: Option<(usize, u32)>) -> Result<Choice> {
        self.process(logits)?;
        let Some((at, draft)) = draft else {
            let token = self.sampler.pick(logits);
            return self.chosen(token);
        };
        self.sampler.penalise(logits);
        self.sampler.distribution(logits, &mut self.target);
        let uniforms = [self.sampler.uniform(), self.sampler.uniform()];
        // A draft that was not drawn here counts as proposed with probability 1.
        let certain = [(draft, 1.0)];
        let drawn = self.proposals.get(at).filter(|(proposed, _)| *proposed == draft);
        let q = drawn.map_or(&certain[..], |(_, distribution)| distribution);
        let token = self.residual.judge(&self.target, q, draft, uniforms);
        self.chosen(token)
    }

    fn take(&mut self, token: u32) -> Result<Choice> {
        self.chosen(token)
    }
}

/// Draws from a distribution.
fn draw(distribution: &[(u32, f32)], uniform: f32) -> u32 {
    let mut left = uniform;
    for &(id, p) in distribution {
        left -= p;
        if left < 0.0 {
            return id;
        }
    }
    // Rounding may leave a small rest; the most probable token gets it.
    distribution[0].0
}

/// Rejection sampling.
#[derive(Debug, Default)]
pub(super) struct Residual {
    /// q by id; zero between calls.
    q: Vec<f32>,
    rest: Vec<(u32, f32)>,
}

impl Residual {
    /// Keeps `draft`, which was drawn from `q`, or draws another token. The result has the distribution `p`.
    pub fn judge(&mut self, p: &[(u32, f32)], q: &[(u32, f32)], draft: u32, [keep, other]: [f32; 2]) -> u32 {
        let of = |distribution: &[(u32, f32)]| {
            distribution.iter().find(|&&(id, _)| id == draft).map_or(0.0, |&(_, weight)| weight)
        };
        if keep * of(q) < of(p) {
            return draft;
        }
        let ids = p.iter().chain(q).map(|&(id, _)| id as usize + 1).max().unwrap_or(0);
        if self.q.len() < ids {
            self.q.resize(ids, 0.0);
        }
        q.iter().for_each(|&(id, weight)| self.q[id as usize] = weight);
        self.rest.clear();
        self.rest.extend(p.iter().map(|&(id, weight)| (id, (weight - self.q[id as usize]).max(0.0))));
        q.iter().for_each(|&(id, _)| self.q[id as usize] = 0.0);
        let total: f32 = self.rest.iter().map(|&(_, weight)| weight).sum();
        if total <= 0.0 {
            // p and q are equal up to rounding, so any draw from p will do.
            return draw(p, other);
        }
        self.rest.iter_mut().for_each(|(_, weight)| *weight /= total);
        self.rest.retain(|&(_, weight)| weight > 0.0);
        draw(&self.rest, other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SamplerOptions;

    const DRAWS: usize = 50_000;
    /// For 7 degrees of freedom: exceeded with probability 1e-4.
    const CHI_SQUARE_MAX: f64 = 29.9;

    fn sampler(options: SamplerOptions) -> Sampler {
        Sampler::new(options, &[1, 5]).expect("in range")
    }

    fn chooser(options: SamplerOptions) -> SamplerChooser {
        SamplerChooser::new(sampler(options), None, Vec::new())
    }

    fn options(seed: usize) -> SamplerOptions {
        SamplerOptions {
            temperature: 0.8,
            top_k: 7,
            top_p: 0.97,
            repetition_penalty: 1.2,
            presence_penalty: 0.3,
            logit_bias: vec![(3, 0.5)],
            seed: seed as u64,
            ..SamplerOptions::default()
        }
    }

    const TARGET: [f32; 8] = [1.0, 2.0, -0.5, 0.3, 1.7, 0.9, -2.0, 0.0];
    const HEAD: [f32; 8] = [2.0, 0.5, 0.1, 1.3, -0.7, 1.9, 0.0, -1.0];

    /// The probabilities of plain sampling.
    fn plain() -> Vec<f64> {
        let mut sampler = sampler(options(0));
        let (mut logits, mut distribution) = (TARGET, Vec::new());
        sampler.penalise(&mut logits);
        sampler.distribution(&logits, &mut distribution);
        let mut p = vec![0.0; 8];
        distribution.iter().for_each(|&(id, weight)| p[id as usize] = f64::from(weight));
        p
    }

    fn chi_square(counts: &[usize], p: &[f64]) -> f64 {
        let draws: usize = counts.iter().sum();
        let term = |(&n, &p): (&usize, &f64)| {
            let expected = p * draws as f64;
            // A token of probability 0 must not come: one is enough to fail the test.
            if expected > 0.0 { (n as f64 - expected).powi(2) / expected } else { n as f64 * 1e9 }
        };
        counts.iter().zip(p).map(term).sum()
    }

    /// Draws the first tokens of many sequences. `broken` keeps every draft whose target probability is not 0.
    fn counts(broken: bool) -> Vec<usize> {
        let mut counts = vec![0; 8];
        for seed in 0..DRAWS {
            let mut chooser = chooser(options(seed));
            let draft = chooser.draft(&mut HEAD.clone()).expect("nothing constrains it");
            chooser.retract().expect("nothing constrains it");
            let choice =
                chooser.choose(&mut TARGET.clone(), Some((0, draft))).expect("nothing constrains it");
            let allowed = chooser.target.iter().any(|&(id, _)| id == draft);
            counts[if broken && allowed { draft } else { choice.token } as usize] += 1;
        }
        counts
    }

    #[test]
    fn sampled_tokens_have_the_distribution_of_plain_sampling() {
        let p = plain();
        assert!(p.iter().filter(|&&p| p > 0.0).count() >= 5, "{p:?}");
        let chi = chi_square(&counts(false), &p);
        assert!(chi < CHI_SQUARE_MAX, "chi-square of 7 degrees of freedom is {chi}");
    }

    #[test]
    fn a_broken_rule_of_acceptance_is_seen() {
        let chi = chi_square(&counts(true), &plain());
        assert!(chi > 10.0 * CHI_SQUARE_MAX, "chi-square is only {chi}");
    }

    #[test]
    fn plain_draws_pass_the_same_test() {
        let mut counts = vec![0; 8];
        for seed in 0..DRAWS {
            counts[sampler(options(seed)).sample(&mut TARGET.clone()) as usize] += 1;
        }
        let chi = chi_square(&counts, &plain());
        assert!(chi < CHI_SQUARE_MAX, "chi-square of 7 degrees of freedom is {chi}");
    }

    #[test]
    fn a_greedy_draft_stays_if_it_is_the_models() {
        let mut chooser = chooser(SamplerOptions::default());
        let mut choose = |draft| chooser.choose(&mut TARGET.clone(), Some((0, draft))).expect("free").token;
        assert_eq!((choose(1), choose(4), choose(7)), (1, 1, 1));
    }

    #[test]
    fn drafts_leave_no_trace() {
        let options = SamplerOptions { repetition_penalty: 4.0, ..SamplerOptions::default() };
        let mut chooser = chooser(options);
        let first = chooser.draft(&mut [0.0, 0.0, 3.0, 2.9, 0.0]).expect("free");
        let second = chooser.draft(&mut [0.0, 0.0, 3.0, 2.9, 0.0]).expect("free");
        assert_eq!((first, second), (2, 3), "a draft is penalised for those before it");
        chooser.retract().expect("free");
        let choice = chooser.choose(&mut [0.0, 0.0, 3.0, 2.9, 0.0], Some((0, 2))).expect("free");
        assert_eq!(choice, Choice { token: 2, is_last: false });
    }

    #[test]
    fn an_abandoned_round_chooses_the_same_again() {
        let mut chooser = SamplerChooser::new(sampler(options(3)), Some(Box::new(Turns(0))), Vec::new());
        let round = |chooser: &mut SamplerChooser| {
            chooser.begin();
            let drafts = [(); 3].map(|()| chooser.draft(&mut HEAD.clone()).expect("allowed"));
            chooser.retract().expect("rolls back");
            let mut choose = |draft| chooser.choose(&mut TARGET.clone(), draft).expect("allowed").token;
            let tokens = [choose(Some((0, drafts[0]))), choose(Some((1, drafts[1]))), choose(None)];
            (drafts, tokens)
        };
        let seen = |chooser: &SamplerChooser| {
            let mut logits = [1.0; 8];
            chooser.sampler.penalise(&mut logits);
            logits
        };
        let before = seen(&chooser);
        let first = round(&mut chooser);
        chooser.abandon().expect("rolls back");
        assert_eq!(seen(&chooser), before);
        // The same after an abandoned round that was halfway through drafting.
        chooser.begin();
        chooser.draft(&mut HEAD.clone()).expect("allowed");
        chooser.abandon().expect("rolls back");
        assert_eq!(round(&mut chooser), first);
        assert_ne!(seen(&chooser), before);
    }

    #[test]
    fn drafts_behind_the_end_of_a_grammar_are_not_taken_back_from_it() {
        let sampler = Sampler::new(SamplerOptions::default(), &[]).expect("in range");
        let mut chooser = SamplerChooser::new(sampler, Some(Box::new(Turns(0))), Vec::new());
        let choose = |chooser: &mut SamplerChooser| {
            chooser.begin();
            chooser.choose(&mut [0.0; 8], None).expect("allowed").token
        };
        assert_eq!(choose(&mut chooser), 0);
        // The grammar is complete after four more tokens.
        for _ in 0..8 {
            chooser.draft(&mut [0.0; 8]).expect("allowed");
        }
        chooser.retract().expect("rolls back");
        assert_eq!(choose(&mut chooser), 1);
    }

    /// Allows the tokens 0, 1, 2, 0, ... in turn, and no others.
    struct Turns(u32);

    impl Constraint for Turns {
        fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
            let allowed = self.0 as usize % 3;
            let masked = logits.iter_mut().enumerate().filter(|(id, _)| *id != allowed);
            masked.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
            Ok(())
        }
        fn accept(&mut self, token: u32) -> Result<(), String> {
            if token != self.0 % 3 {
                return Err(format!("{token} is not next"));
            }
            self.0 += 1;
            Ok(())
        }
        fn is_complete(&self) -> bool {
            self.0 >= 5
        }
        fn can_roll_back(&self) -> bool {
            true
        }
        fn rollback(&mut self, tokens: usize) -> Result<(), String> {
            self.0 = self.0.checked_sub(tokens as u32).ok_or("more than came")?;
            Ok(())
        }
    }

    #[test]
    fn masks_apply_to_drafts_and_tokens_alike() {
        for temperature in [0.0, 1.0] {
            let options = SamplerOptions { temperature, ..SamplerOptions::default() };
            let sampler = Sampler::new(options, &[]).expect("in range");
            let mut chooser = SamplerChooser::new(sampler, Some(Box::new(Turns(0))), Vec::new());
            let logits = [0.0, 5.0, 2.0, 9.0];
            let drafts: Vec<u32> =
                (0..3).map(|_| chooser.draft(&mut logits.clone()).expect("allowed")).collect();
            assert_eq!(drafts, [0, 1, 2]);
            chooser.retract().expect("rolls back");
            for (i, &draft) in drafts.iter().enumerate() {
                let choice = chooser.choose(&mut logits.clone(), Some((i, draft))).expect("allowed");
                assert_eq!(choice, Choice { token: draft, is_last: false });
            }
            assert_eq!(chooser.choose(&mut logits.clone(), Some((0, 3))).expect("allowed").token, 0);
            let last = chooser.choose(&mut logits.clone(), None).expect("allowed");
            assert_eq!(last, Choice { token: 1, is_last: true });
        }
    }
}
