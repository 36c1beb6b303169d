use super::*;
use crate::EngineOptions;

/// A pass takes 1 ms, and 0.1 ms for each further row. A pass of the head takes 0.2 ms.
fn costs() -> Costs {
    let mut costs = Costs::default();
    (1..=9).for_each(|rows| costs.note_pass(rows, 1, 1e-3 + 1e-4 * (rows - 1) as f64));
    costs.note_draft(1, 2e-4);
    costs
}

/// Runs rounds in which `accepts` says how many drafts are accepted. Returns the drafts made and the seconds per
/// token.
fn run(control: &mut DepthControl, rounds: usize, accepts: impl Fn(usize) -> usize) -> (usize, f64) {
    let costs = costs();
    let (mut drafted, mut seconds, mut tokens) = (0, 0.0, 0);
    for round in 0..rounds {
        let depth = control.choose(&costs, 1, 8, 1, 0);
        let accepted = accepts(round).min(depth);
        control.note(depth, accepted);
        drafted += depth;
        seconds += costs.round(1, depth);
        tokens += accepted + 1;
    }
    (drafted, seconds / tokens as f64)
}

#[test]
fn good_drafts_are_followed_deeply() {
    let mut control = DepthControl::new(Depth::Auto, false);
    run(&mut control, 100, |_| 8);
    assert_eq!(control.choose(&costs(), 1, 8, 1, 0), 8);
    assert_eq!(control.choose(&costs(), 1, 3, 1, 0), 3, "no deeper than there is room");
}

#[test]
fn wrong_drafts_cost_little() {
    let mut control = DepthControl::new(Depth::Auto, false);
    let (drafted, seconds) = run(&mut control, 512, |_| 0);
    assert!(seconds < 1e-3 / 0.98, "{seconds} s a token, 0.001 without speculation; {drafted} drafts");
    assert!(drafted > 3, "it tries again");
}

/// Runs a batch of 32 sequences for 256 rounds, all of whose drafts are wrong. Returns the drafts of each sequence.
fn wrong_drafts_in_a_crowd(costs: &mut Costs, learns: bool) -> usize {
    let mut controls: Vec<DepthControl> = (0..32).map(|_| DepthControl::new(Depth::Auto, false)).collect();
    let mut drafted = 0;
    for _ in 0..256 {
        let depths: Vec<usize> = controls.iter().map(|control| control.choose(costs, 1, 4, 1, 0)).collect();
        for (control, depth) in controls.iter_mut().zip(depths) {
            drafted += depth;
            control.note(depth, 0);
            if learns {
                costs.note_drafts(depth, 0);
            }
        }
    }
    drafted / controls.len()
}

#[test]
fn sequences_learn_from_each_other_that_drafts_are_wrong() {
    assert_eq!(wrong_drafts_in_a_crowd(&mut costs(), false), 5, "each tries alone");
    let mut costs = costs();
    assert_eq!(wrong_drafts_in_a_crowd(&mut costs, true), 3);
    assert_eq!(wrong_drafts_in_a_crowd(&mut costs, true), 2, "each tries all the same");
    let mut good = DepthControl::new(Depth::Auto, false);
    for _ in 0..40 {
        let depth = good.choose(&costs, 1, 8, 1, 0);
        good.note(depth, depth);
        costs.note_drafts(depth, depth);
    }
    assert!(good.choose(&costs, 1, 8, 1, 0) >= 4, "a text with good drafts is soon followed");
}

#[test]
fn a_sequence_begins_as_those_before_it_ended() {
    let mut costs = costs();
    (0..200).for_each(|_| costs.note_drafts(2, 2));
    let after_three = || {
        let mut control = DepthControl::new(Depth::Auto, false);
        (0..3).for_each(|_| control.note(1, 0));
        control
    };
    let (mut control, nothing) = (after_three(), self::costs());
    assert_eq!(control.choose(&nothing, 1, 8, 1, 0), 0, "three wrong drafts end drafting");
    assert!(control.choose(&costs, 1, 8, 1, 0) > 0, "three wrong drafts say less than 200 right ones");
    (0..8).for_each(|_| control.note(1, 0));
    assert_eq!(control.choose(&costs, 1, 8, 1, 0), 0, "eleven say more");
    assert_eq!(
        DepthControl::new(Depth::Auto, true).choose(&costs, 1, 8, 1, 0),
        1,
        "what is repeatable does not depend on it"
    );
}

#[test]
fn it_comes_back_when_drafts_become_good() {
    let mut control = DepthControl::new(Depth::Auto, false);
    run(&mut control, 300, |_| 0);
    assert_eq!(control.choose(&costs(), 1, 8, 1, 0), 0);
    run(&mut control, 600, |_| 8);
    assert!(control.choose(&costs(), 1, 8, 1, 0) >= 4);
}

#[test]
fn expensive_rows_are_not_bought() {
    let mut costs = Costs::default();
    (1..=9).for_each(|rows| costs.note_pass(rows, 1, 1e-3 * rows as f64));
    costs.note_draft(1, 2e-4);
    assert_eq!(DepthControl::new(Depth::Auto, false).choose(&costs, 1, 8, 1, 0), 0);
    assert_eq!(DepthControl::new(Depth::Fixed(5), false).choose(&costs, 1, 3, 1, 0), 3);
}

/// A plain step of 32 sequences took 4 ms with them and 3 ms without. Passes of the head and of more rows were run
/// without a sequence alone.
fn crowd(verify: f64) -> Costs {
    let options = EngineOptions { sequences: 32, drafts: 3, ..EngineOptions::default() };
    let mut costs = Costs::new(&Buckets::new(&options, 0, true, false));
    let shape = |outcome, rows| StepKind::decode(outcome).of(rows, 32);
    costs.note_empty(&shape(Outcome::Ahead, 32), 3e-3);
    costs.note_empty(&shape(Outcome::OpenRows, 32), 9e-3);
    [64, 96, 128].iter().for_each(|&rows| costs.note_empty(&shape(Outcome::OpenRows, rows), verify));
    costs.note_empty(&shape(Outcome::Draft, 32), 4e-4);
    costs.note_pass(32, 32, 4e-3);
    costs
}

#[test]
fn depths_follow_from_passes_without_a_sequence_until_they_are_measured() {
    let control = DepthControl::new(Depth::Auto, false);
    // A draft that stays seven times in ten costs 0.4 ms, and 0.3 ms or 4 ms more for the pass.
    assert_eq!(control.choose(&crowd(3.3e-3), 32, 3, 1, 0), 1);
    assert_eq!(control.choose(&crowd(7e-3), 32, 3, 1, 0), 0);
    assert!((crowd(7e-3).round(32, 1) - 8.4e-3).abs() < 1e-9);
    // 27 sequences take the passes of 32.
    assert_eq!(crowd(7e-3).round(27, 1), crowd(7e-3).round(32, 1));
    let mut measured = crowd(7e-3);
    measured.note_pass(64, 32, 4.5e-3);
    assert_eq!(control.choose(&measured, 32, 3, 1, 0), 1);
}

#[test]
fn passes_with_as_many_rows_of_other_sequences_are_not_mixed() {
    let options = EngineOptions { sequences: 64, drafts: 1, ..EngineOptions::default() };
    let mut costs = Costs::new(&Buckets::new(&options, 0, true, false));
    let shape = |outcome, rows, sequences| StepKind::decode(outcome).of(rows, sequences);
    costs.note_empty(&shape(Outcome::OpenRows, 128, 64), 8e-3);
    costs.note_empty(&shape(Outcome::OpenRows, 64, 64), 9e-3);
    costs.note_empty(&shape(Outcome::Ahead, 64, 64), 5e-3);
    costs.note_empty(&shape(Outcome::OpenRows, 64, 32), 4e-3);
    costs.note_pass(64, 64, 6e-3);
    assert!((costs.round(64, 1) - 9e-3).abs() < 1e-9, "{}", costs.round(64, 1));
    (0..9).for_each(|_| costs.note_pass(64, 32, 4.5e-3));
    assert_eq!(costs.round(64, 0), 6e-3);
    assert!(costs.wants_plain(32), "a pass with drafts is no plain pass");
}

#[test]
fn a_bound_on_a_plain_step_only_makes_it_shorter() {
    let mut costs = Costs::default();
    costs.note_plain_bound(1, 9e-3);
    assert_eq!(costs.round(1, 0), 9e-3);
    costs.note_pass(1, 1, 1e-3);
    costs.note_plain_bound(1, 5e-3);
    assert_eq!(costs.round(1, 0), 1e-3);
    costs.note_plain_bound(1, 5e-4);
    assert_eq!(costs.round(1, 0), 5e-4);
}

/// One sequence whose plain steps all had prompts and took 100 ms. A pass of two rows took 20 ms, and 8 ms more than a
/// plain step without a sequence.
fn next_to_prompts() -> Costs {
    let mut costs = without_rounds();
    costs.note_pass(2, 1, 20e-3);
    costs
}

/// The same before the first round with drafts.
fn without_rounds() -> Costs {
    let mut costs = Costs::default();
    let shape = |outcome, rows| StepKind::decode(outcome).of(rows, 1);
    costs.note_empty(&shape(Outcome::Ahead, 1), 8e-3);
    costs.note_empty(&shape(Outcome::OpenRows, 2), 16e-3);
    costs.note_draft(1, 1e-4);
    costs.note_plain_bound(1, 0.1);
    costs
}

#[test]
fn a_step_with_prompts_does_not_speak_for_drafts() {
    let mut costs = next_to_prompts();
    let mut control = DepthControl::new(Depth::Auto, false);
    let shares = &mut control.shares;
    (shares.accepted[0], shares.prior_weight[0], shares.observed[0]) = (0.3, 0.0, 100);
    for _ in 0..2 {
        assert_eq!(control.choose(&costs, 1, 8, 1, 0), 0, "1 token in 12 ms, or 1.3 in 20");
        assert!((costs.round(1, 0) - 12e-3).abs() < 1e-9, "{}", costs.round(1, 0));
        // A bound that is greater than the time of more rows says nothing.
        costs.note_plain_bound(1, 0.1);
    }
    control.shares.accepted[0] = 0.8;
    assert!(control.choose(&costs, 1, 8, 1, 0) > 0, "1.8 tokens in 20 ms");
    costs.note_plain_bound(1, 9e-3);
    assert_eq!(costs.round(1, 0), 9e-3, "it cannot take longer");
}

#[test]
fn a_plain_step_is_waited_for_until_only_bounds_come() {
    let mut costs = next_to_prompts();
    costs.note_pass(1, 1, 5e-3);
    costs.note_round(true);
    let rounds = |costs: &mut Costs| (0..PLAIN_EVERY).for_each(|_| costs.note_round(false));
    rounds(&mut costs);
    for _ in 0..BOUNDS_MAX {
        assert!(costs.wants_plain(1), "a bound is no measurement");
        assert_eq!(costs.round(1, 0), 5e-3);
        costs.note_plain_bound(1, 0.1);
    }
    assert!(!costs.wants_plain(1), "each step has prompts");
    assert!((costs.round(1, 0) - 12e-3).abs() < 1e-9, "contexts have grown: {}", costs.round(1, 0));
    rounds(&mut costs);
    costs.note_plain_bound(1, 0.1);
    costs.note_pass(1, 1, 7e-3);
    costs.note_round(true);
    assert!(!costs.wants_plain(1));
    assert_eq!(costs.round(1, 0), 7e-3, "it is measured");
}

#[test]
fn a_measured_plain_step_stays_if_no_round_with_drafts_corrects_a_bound() {
    let mut costs = without_rounds();
    costs.note_pass(1, 1, 5e-3);
    costs.note_round(true);
    // Another number of sequences drafts.
    (0..PLAIN_EVERY).for_each(|_| costs.note_round(false));
    (0..BOUNDS_MAX).for_each(|_| costs.note_plain_bound(1, 0.1));
    assert!(!costs.wants_plain(1), "each step has prompts");
    assert_eq!(costs.round(1, 0), 5e-3, "the bound is the time of prompts");
}

#[test]
fn a_plain_round_that_was_disturbed_does_not_speak_for_drafts() {
    let mut costs = costs();
    (0..200).for_each(|_| costs.note_pass(1, 1, 3e-3));
    let mut control = DepthControl::new(Depth::Auto, false);
    (0..20).for_each(|_| control.note(1, 0));
    assert_eq!(control.choose(&costs, 1, 8, 1, 0), 0);
}

#[test]
fn a_depth_that_was_slow_at_first_is_tried_again() {
    let mut costs = Costs::default();
    [1e-3, 1.1e-3, 9e-3].iter().enumerate().for_each(|(i, &seconds)| costs.note_pass(i + 1, 1, seconds));
    costs.note_draft(1, 2e-4);
    let mut control = DepthControl::new(Depth::Auto, false);
    let mut depths = Vec::new();
    for _ in 0..64 {
        let depth = control.choose(&costs, 1, 8, 1, 0);
        costs.note_pass(depth + 1, 1, 1e-3 + 1e-4 * depth as f64);
        costs.note_round(depth == 0);
        control.note(depth, depth);
        depths.push(depth);
    }
    assert!(depths[..8].iter().all(|&depth| depth == 1), "three rows seem slow: {depths:?}");
    assert!(depths[48..].iter().all(|&depth| depth >= 6), "they are not: {depths:?}");
}

#[test]
fn a_disturbance_is_soon_forgotten() {
    let mut costs = costs();
    (0..200).for_each(|_| costs.note_pass(1, 1, 3e-3));
    assert!(costs.round(1, 0) > 2.9e-3);
    costs.note_pass(2, 1, 1.1e-3);
    assert!(costs.round(1, 0) < 1.11e-3, "a pass of two rows took less");
    (0..200).for_each(|_| costs.note_draft(1, 3e-3));
    (0..5).for_each(|_| costs.note_draft(1, 2e-4));
    assert!(costs.round(1, 1) < 1.11e-3 + 3e-4);
}

#[test]
fn a_plain_round_is_measured_first() {
    assert_eq!(DepthControl::new(Depth::Auto, false).choose(&Costs::default(), 1, 8, 1, 0), 0);
}

#[test]
fn a_repeatable_depth_follows_from_acceptance_alone() {
    let mut expensive = Costs::default();
    (1..=9).for_each(|rows| expensive.note_pass(rows, 1, rows as f64));
    for accepted in [0, 8] {
        let mut control = DepthControl::new(Depth::Auto, true);
        for _ in 0..200 {
            let depth = control.choose(&costs(), 1, 8, 1, 0);
            assert_eq!(depth, control.choose(&expensive, 1, 8, 1, 0));
            control.note(depth, accepted.min(depth));
        }
        assert_eq!(control.choose(&expensive, 1, 8, 1, 0), accepted);
    }
}

impl Costs {
    /// Has these times from now on, whatever was measured.
    pub(crate) fn replace_times(&mut self, times: Costs) {
        (self.verify, self.draft) = (times.verify, times.draft);
    }
}
