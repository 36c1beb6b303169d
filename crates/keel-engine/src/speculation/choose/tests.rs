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
    let sampler = sampler(options(0));
    let mut logits = LogitsRow::from(TARGET);
    sampler.penalise(&mut logits.values);
    let mut p = vec![0.0; 8];
    let tokens = sampler.distribution(&mut logits);
    tokens.tokens().for_each(|(id, probability)| p[id as usize] = f64::from(probability));
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
    let (plain, mut counts) = (plain(), vec![0; 8]);
    for seed in 0..DRAWS {
        let mut chooser = chooser(options(seed));
        let draft = chooser.draft(&mut LogitsRow::from(HEAD)).expect("nothing constrains it");
        chooser.retract();
        let first = Draft { index: 0, token: draft };
        let allowed = plain[draft as usize] > 0.0;
        let choice =
            chooser.choose(&mut LogitsRow::from(TARGET), Some(first)).expect("nothing constrains it");
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
        counts[sampler(options(seed)).sample(&mut LogitsRow::from(TARGET)) as usize] += 1;
    }
    let chi = chi_square(&counts, &plain());
    assert!(chi < CHI_SQUARE_MAX, "chi-square of 7 degrees of freedom is {chi}");
}

#[test]
fn a_greedy_draft_stays_if_it_is_the_models() {
    let mut chooser = chooser(SamplerOptions::default());
    let first = |token| Some(Draft { index: 0, token });
    let mut choose = |token| chooser.choose(&mut LogitsRow::from(TARGET), first(token)).expect("free").token;
    assert_eq!((choose(1), choose(4), choose(7)), (1, 1, 1));
}

#[test]
fn drafts_leave_no_trace() {
    let options = SamplerOptions { repetition_penalty: 4.0, ..SamplerOptions::default() };
    let mut chooser = chooser(options);
    let first = chooser.draft(&mut LogitsRow::from([0.0, 0.0, 3.0, 2.9, 0.0])).expect("free");
    let second = chooser.draft(&mut LogitsRow::from([0.0, 0.0, 3.0, 2.9, 0.0])).expect("free");
    assert_eq!((first, second), (2, 3), "a draft is penalised for those before it");
    chooser.retract();
    let choice = chooser
        .choose(&mut LogitsRow::from([0.0, 0.0, 3.0, 2.9, 0.0]), Some(Draft { index: 0, token: 2 }))
        .expect("free");
    assert_eq!(choice, Choice { token: 2, is_last: false });
}

#[test]
fn a_draft_takes_no_more_memory_than_is_planned() {
    let mut chooser = chooser(SamplerOptions { temperature: 100.0, ..SamplerOptions::default() });
    for tokens in [200, 400] {
        chooser.draft(&mut LogitsRow::from(vec![1.0; tokens])).expect("free");
        chooser.retract();
    }
    let bytes = chooser.proposed[0].distribution.capacity() * size_of::<(u32, f32)>();
    assert_eq!(bytes, SamplerChooser::DRAFT_BYTES);
}

#[test]
fn an_abandoned_round_chooses_the_same_again() {
    let mut chooser = SamplerChooser::new(sampler(options(3)), Some(Box::new(Turns(0))), Vec::new());
    let round = |chooser: &mut SamplerChooser| {
        chooser.begin();
        let drafts = [(); 3].map(|()| chooser.draft(&mut LogitsRow::from(HEAD)).expect("allowed"));
        chooser.retract();
        let mut choose = |draft| chooser.choose(&mut LogitsRow::from(TARGET), draft).expect("allowed").token;
        let [first, second] = [0, 1].map(|index| Some(Draft { index, token: drafts[index] }));
        let tokens = [choose(first), choose(second), choose(None)];
        (drafts, tokens)
    };
    let seen = |chooser: &SamplerChooser| {
        let mut logits = [1.0; 8];
        chooser.sampler.penalise(&mut logits);
        logits
    };
    let before = seen(&chooser);
    let first = round(&mut chooser);
    chooser.abandon();
    assert_eq!(seen(&chooser), before);
    // The same after an abandoned round that was halfway through drafting.
    chooser.begin();
    chooser.draft(&mut LogitsRow::from(HEAD)).expect("allowed");
    chooser.abandon();
    assert_eq!(round(&mut chooser), first);
    assert_ne!(seen(&chooser), before);
}

#[test]
fn drafts_leave_a_grammar_where_it_is() {
    let sampler = Sampler::new(SamplerOptions::default(), &[]).expect("in range");
    let mut chooser = SamplerChooser::new(sampler, Some(Box::new(Turns(0))), Vec::new());
    let choose = |chooser: &mut SamplerChooser| {
        chooser.begin();
        chooser.choose(&mut LogitsRow::from([0.0; 8]), None).expect("allowed").token
    };
    assert_eq!(choose(&mut chooser), 0);
    // The grammar is complete after four more tokens.
    for _ in 0..8 {
        chooser.draft(&mut LogitsRow::from([0.0; 8])).expect("allowed");
    }
    chooser.retract();
    assert_eq!(choose(&mut chooser), 1);
    chooser.abandon();
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
    fn rollback(&mut self, tokens: usize) -> Result<(), String> {
        self.0 = self.0.checked_sub(tokens as u32).ok_or("more than came")?;
        Ok(())
    }
}

#[test]
fn masks_apply_to_the_first_draft_and_to_every_token() {
    for temperature in [0.0, 1.0] {
        let options = SamplerOptions { temperature, ..SamplerOptions::default() };
        let sampler = Sampler::new(options, &[]).expect("in range");
        let mut chooser = SamplerChooser::new(sampler, Some(Box::new(Turns(0))), Vec::new());
        let logits = [0.0, 5.0, 2.0, 9.0];
        let drafts = [(); 3].map(|()| chooser.draft(&mut LogitsRow::from(logits)).expect("allowed"));
        assert_eq!(drafts[0], 0);
        if temperature == 0.0 {
            assert_eq!(drafts[1..], [3, 3], "what the head finds most probable");
        }
        chooser.retract();
        for (index, &token) in drafts.iter().enumerate() {
            let choice =
                chooser.choose(&mut LogitsRow::from(logits), Some(Draft { index, token })).expect("allowed");
            assert_eq!(choice, Choice { token: index as u32, is_last: false });
        }
        let forbidden = Draft { index: 0, token: 3 };
        assert_eq!(chooser.choose(&mut LogitsRow::from(logits), Some(forbidden)).expect("allowed").token, 0);
        let last = chooser.choose(&mut LogitsRow::from(logits), None).expect("allowed");
        assert_eq!(last, Choice { token: 1, is_last: true });
    }
}

#[test]
fn draws_that_are_not_taken_count_as_not_made() {
    let options = || SamplerOptions { temperature: 0.9, seed: 5, ..SamplerOptions::default() };
    let draws = |chooser: &mut SamplerChooser, count: usize| -> Vec<_> {
        (0..count).map(|_| chooser.draw_next().expect("the device draws")).collect()
    };
    let mut chooser = chooser(options());
    let all = draws(&mut chooser, 5);
    assert!(all.windows(2).all(|pair| pair[0] != pair[1]), "{all:?}");
    chooser.forget_draws(4);
    assert_eq!(draws(&mut chooser, 2), all[1..3]);
    chooser.take(7).expect("free");
    chooser.take(7).expect("free");
    // A round begins with the first draw whose token was not taken.
    chooser.begin();
    draws(&mut chooser, 1);
    chooser.abandon();
    assert_eq!(draws(&mut chooser, 3), all[2..]);
    chooser.forget_draws(9);
    assert_eq!(draws(&mut chooser, 3), all[2..], "there were three");
}

#[test]
fn a_constraint_that_cannot_go_back_refuses_every_token() {
    struct Stubborn;
    impl Constraint for Stubborn {
        fn mask(&mut self, _: &mut [f32]) -> Result<(), String> {
            Ok(())
        }
        fn accept(&mut self, _: u32) -> Result<(), String> {
            Ok(())
        }
        fn is_complete(&self) -> bool {
            false
        }
    }
    let mut chooser = SamplerChooser::new(sampler(options(0)), Some(Box::new(Stubborn)), Vec::new());
    chooser.begin();
    chooser.choose(&mut LogitsRow::from(TARGET), None).expect("allowed");
    chooser.abandon();
    let refused = chooser.choose(&mut LogitsRow::from(TARGET), None).expect_err("its state is not known");
    assert!(refused.to_string().contains("cannot take back 1 tokens"), "{refused}");
}
