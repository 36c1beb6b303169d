//! How many tokens to draft.
//!
//! Let `a_i` be the share of drafts accepted at position `i` if all before it were accepted. A round of depth `k` gives
//! `1 + a_1 + a_1 a_2 + ... + a_1 .. a_k` tokens on average and takes the time `verify(k + 1) + k draft`. The depth
//! with the most tokens per second is chosen. Depth 0 is plain decoding and competes like the others. Times are
//! measured for the engine, shares for each sequence. A new sequence starts with the mean shares of all earlier ones,
//! which count as two observations.

use std::collections::BTreeMap;

use crate::options::{DRAFTS_MAX, MTP_LAG_MAX};
use crate::step::{Buckets, Outcome, StepKind, StepShape};

/// Positions of drafts.
pub(super) const POSITIONS: usize = DRAFTS_MAX;

/// Share of accepted drafts that an engine starts with.
const ACCEPTANCE_PRIOR: f64 = 0.7;
/// The weight of [`ACCEPTANCE_PRIOR`] in the engine's shares, in observations. So one sequence says little of others.
const ENGINE_PRIOR_OBSERVATIONS: u64 = 16;
/// Weight of the newest observation among those of all sequences, once there are many.
const ENGINE_ACCEPTANCE_WEIGHT: f64 = 0.01;
/// How many observations a sequence's prior counts for. One rejected draft then says little, and two in a row end
/// drafting.
const PRIOR_OBSERVATIONS: u64 = 2;
/// Weight of the newest observation, once there are many.
const ACCEPTANCE_WEIGHT: f64 = 0.06;
/// Weight of a time above the mean. Other work on the machine makes passes slower, never faster.
const COST_WEIGHT: f64 = 0.1;
/// Weight of a time below the mean.
const LOWER_COST_WEIGHT: f64 = 0.5;
/// The least share assumed for the first position once a trial's first draft was accepted.
const RETRY_ACCEPTANCE: f64 = 0.6;
/// Plain rounds before drafting is tried again. The MTP head's next pass can still hold the rows that it lags behind.
const RETRY_AFTER: u64 = POSITIONS as u64;
/// The same after a failed trial, at least. The head has just caught up then.
const SECOND_RETRY_AFTER: u64 = MTP_LAG_MAX as u64;
/// The same, at most.
const RETRY_AFTER_MAX: u64 = 32 * MTP_LAG_MAX as u64;
/// Each failed trial multiplies the number by this.
const RETRY_GROWTH: u64 = 4;
/// After this many plain rounds in a row, depths are compared only once in this many rounds.
pub(crate) const COMPARED_EVERY: u64 = 8;
/// One in this many drafting rounds makes one draft more than seems best. The cost of a depth is known only from trying
/// it, and the first trial may have been disturbed.
const DEEPER_EVERY: u64 = 16;
/// A plain round is measured again after this many rounds with drafts.
const PLAIN_EVERY: u64 = 256;
/// If a measurement is due, this many bounds take its place: each step may have prompts.
pub(crate) const BOUNDS_MAX: u64 = 3;
/// The share of a pass's time that another row is assumed to add, until it has been measured.
const ROW_COST_GUESS: f64 = 0.04;

/// Nominal time of a pass of the MTP head, as a share of a pass of the model.
const NOMINAL_DRAFT_COST: f64 = 0.15;

/// How many drafts a round makes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Depth {
    /// As many as pay, or none.
    #[default]
    Auto,
    /// Always this many, within the engine's `drafts` and the rest of the sequence.
    Fixed(usize),
}

/// A moving mean of seconds.
#[derive(Clone, Copy, Debug)]
struct Mean {
    seconds: f64,
    source: Source,
}

/// The source of a mean time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// A step that may have had prompts, too, or whose end was seen late. A plain step takes at most this time.
    Bound,
    /// A single measurement. The first run of a shape includes its preparation.
    First,
    /// Several measurements.
    Measurements,
}

/// Seconds by number of rows.
type Times = BTreeMap<usize, Mean>;

/// Seconds of passes of the model by number of sequences and of rows, and of the MTP head by number of sequences. They
/// are numbers of the list of shapes, because padding takes time, too.
#[derive(Debug, Default)]
pub(crate) struct Costs {
    verify: BTreeMap<usize, Times>,
    draft: Times,
    /// Times of the same passes without a sequence, where they were run so before the first request.
    empty: Empty,
    /// The list of shapes; `None` if each number has its own.
    buckets: Option<Buckets>,
    /// Rounds since all sequences decoded plainly.
    since_plain: u64,
    /// Bounds on plain steps since a measurement is due.
    bounds: u64,
    /// Drafts of all sequences.
    shares: Shares,
}

/// Shares of accepted drafts by position, each a moving mean that begins with [`ACCEPTANCE_PRIOR`].
#[derive(Debug)]
struct Shares {
    /// Share accepted at each position, given that those before it were.
    accepted: [f64; POSITIONS],
    /// The part of the prior in this share.
    prior_weight: [f64; POSITIONS],
    observed: [u64; POSITIONS],
    /// How many observations the prior counts for.
    prior_observations: u64,
    /// Weight of the newest observation, once there are many.
    least_weight: f64,
}

impl Default for Shares {
    /// Those of an engine.
    fn default() -> Shares {
        Shares::new(ENGINE_PRIOR_OBSERVATIONS, ENGINE_ACCEPTANCE_WEIGHT)
    }
}

impl Shares {
    fn new(prior_observations: u64, least_weight: f64) -> Shares {
        Shares {
            accepted: [ACCEPTANCE_PRIOR; POSITIONS],
            prior_weight: [1.0; POSITIONS],
            observed: [0; POSITIONS],
            prior_observations,
            least_weight,
        }
    }

    /// Learns from a round. The first rejected draft is the last one judged.
    fn note(&mut self, drafted: usize, accepted: usize) {
        for i in 0..drafted.min(accepted + 1) {
            let is_accepted = if i < accepted { 1.0 } else { 0.0 };
            self.observed[i] += 1;
            let weight = self.least_weight.max(1.0 / (self.observed[i] + self.prior_observations) as f64);
            self.accepted[i] += weight * (is_accepted - self.accepted[i]);
            self.prior_weight[i] *= 1.0 - weight;
        }
    }
}

/// The size of a pass of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct PassSize {
    sequences: usize,
    rows: usize,
}

/// Seconds of passes without a sequence. They read all weights, but no states, keys or values.
#[derive(Debug, Default)]
struct Empty {
    verify: BTreeMap<PassSize, f64>,
    /// By number of sequences.
    draft: BTreeMap<usize, f64>,
}

impl Costs {
    /// Assumed costs of a pass of the model and of the MTP head for one sequence, where measured times must not matter.
    fn nominal() -> Costs {
        let mut costs = Costs::default();
        costs.note_pass(1, 1, 1.0);
        costs.note_draft(1, NOMINAL_DRAFT_COST);
        costs
    }

    /// No times yet.
    pub fn new(buckets: &Buckets) -> Costs {
        Costs { buckets: Some(buckets.clone()), ..Costs::default() }
    }

    /// Whether the time of a pass of this shape without a sequence is of use: a plain step, a verify pass, or a pass of
    /// the head with one row for each sequence.
    pub fn wants_empty(shape: &StepShape) -> bool {
        match shape.outcome {
            Outcome::Ahead | Outcome::OpenRows => true,
            Outcome::Draft => shape.rows == shape.sequences,
            _ => false,
        }
    }

    /// Records the time of a pass of this shape without a sequence.
    pub fn note_empty(&mut self, shape: &StepShape, seconds: f64) {
        let pass = PassSize { sequences: shape.sequences, rows: shape.rows };
        match shape.outcome {
            Outcome::Draft => self.empty.draft.insert(shape.sequences, seconds),
            // Where plain steps run ahead, none is a pass with one open row for each sequence.
            Outcome::Ahead => self.empty.verify.insert(pass, seconds),
            _ => Some(*self.empty.verify.entry(pass).or_insert(seconds)),
        };
    }

    /// The pass that holds `rows` rows of this many sequences.
    fn padded(&self, rows: usize, sequences: usize) -> PassSize {
        let Some(buckets) = &self.buckets else { return PassSize { sequences, rows } };
        let shape = buckets.fit(StepKind::decode(Outcome::OpenRows), rows, sequences);
        PassSize { sequences: shape.sequences, rows: shape.rows }
    }

    /// Records the time of a pass of the model over `rows` rows of `sequences` sequences.
    pub fn note_pass(&mut self, rows: usize, sequences: usize, seconds: f64) {
        let PassSize { sequences, rows } = self.padded(rows, sequences);
        note(self.verify.entry(sequences).or_default(), rows, seconds);
    }

    /// Records that a plain step of `sequences` sequences took at most this time. This is no measurement of a plain
    /// step. If one is due and only bounds come, rounds with drafts go on.
    pub fn note_plain_bound(&mut self, sequences: usize, seconds: f64) {
        let plain = self.padded(sequences, sequences);
        let times = self.verify.entry(plain.sequences).or_default();
        // Fewer rows cannot take longer.
        let seconds = times.range(plain.rows + 1..).fold(seconds, |least, (_, more)| least.min(more.seconds));
        // An estimate from a pass with drafts is better than an old measurement.
        let has_better = without_drafts(times, &self.empty.verify, plain).is_some();
        let bound = Mean { seconds, source: Source::Bound };
        let mean = times.entry(plain.rows).or_insert(bound);
        mean.seconds = mean.seconds.min(seconds);
        if self.since_plain < PLAIN_EVERY {
            return;
        }
        self.bounds += 1;
        if self.bounds < BOUNDS_MAX {
            return;
        }
        if has_better {
            // The time is out of date, and contexts have grown.
            *mean = bound;
        }
        (self.since_plain, self.bounds) = (0, 0);
    }

    /// Records the time of a pass of the MTP head for `sequences` sequences.
    pub fn note_draft(&mut self, sequences: usize, seconds: f64) {
        let padded = self.padded(sequences, sequences);
        note(&mut self.draft, padded.sequences, seconds);
    }

    /// Records how many drafts of a sequence's round were accepted.
    pub fn note_drafts(&mut self, drafted: usize, accepted: usize) {
        self.shares.note(drafted, accepted);
    }

    pub fn note_round(&mut self, was_plain: bool) {
        if was_plain {
            (self.since_plain, self.bounds) = (0, 0);
        } else {
            self.since_plain += 1;
        }
    }

    /// Whether a plain round of this many sequences should be measured now.
    pub fn wants_plain(&self, sequences: usize) -> bool {
        let PassSize { sequences, rows } = self.padded(sequences, sequences);
        let is_known = self.verify.get(&sequences).is_some_and(|times| times.contains_key(&rows));
        self.since_plain >= PLAIN_EVERY || !is_known
    }

    /// Estimated seconds of a round of depth `k` for this many sequences.
    fn round(&self, sequences: usize, k: usize) -> f64 {
        let per_row = ROW_COST_GUESS / sequences as f64;
        let plain = self.padded(sequences, sequences);
        let pass = self.padded(sequences * (k + 1), sequences);
        let unknown = Times::new();
        let measured = self.verify.get(&plain.sequences).unwrap_or(&unknown);
        let verify = match (self.empty.verify.get(&plain), self.empty.verify.get(&pass)) {
            // Not measured yet: the plain step's time, plus the difference of the two passes without a sequence.
            (Some(one), Some(all)) if !measured.contains_key(&pass.rows) => {
                self.plain_step(measured, plain, per_row) + (all - one).max(0.0)
            }
            _ if k == 0 => self.plain_step(measured, plain, per_row),
            _ => estimate(measured, pass.rows, per_row),
        };
        let draft = match self.empty.draft.get(&plain.sequences) {
            Some(&empty) if !self.draft.contains_key(&plain.sequences) => empty,
            _ => estimate(&self.draft, plain.sequences, per_row),
        };
        verify + k as f64 * draft
    }

    /// Estimated seconds of a plain step. `measured` has the times of passes of as many sequences. If there is only a
    /// bound, which may be the time of prompts, the time follows from a pass with drafts.
    fn plain_step(&self, measured: &Times, plain: PassSize, per_row: f64) -> f64 {
        let seconds = estimate(measured, plain.rows, per_row);
        let is_bound = measured.get(&plain.rows).is_some_and(|mean| mean.source == Source::Bound);
        let from_pass = is_bound.then(|| without_drafts(measured, &self.empty.verify, plain)).flatten();
        from_pass.map_or(seconds, |time| time.min(seconds))
    }
}

fn note(times: &mut Times, rows: usize, seconds: f64) {
    let mean = times.entry(rows).or_insert(Mean { seconds: f64::INFINITY, source: Source::Bound });
    *mean = match mean.source {
        Source::Bound => Mean { seconds: seconds.min(mean.seconds), source: Source::First },
        Source::First => Mean { seconds: seconds.min(mean.seconds), source: Source::Measurements },
        Source::Measurements => {
            // An interrupted pass says nothing about the next, so a measurement counts as at most twice the mean.
            let change = seconds.min(2.0 * mean.seconds) - mean.seconds;
            let weight = if change < 0.0 { LOWER_COST_WEIGHT } else { COST_WEIGHT };
            Mean { seconds: mean.seconds + weight * change, ..*mean }
        }
    };
    // Fewer rows cannot take longer. A longer mean is out of date or was disturbed.
    times.range_mut(..rows).for_each(|(_, mean)| mean.seconds = mean.seconds.min(seconds));
}

/// Estimated seconds of a pass over `rows` rows:
///
/// - the time measured at the greatest number of rows up to `rows`, plus its share `per_row` for each row more;
/// - at least the time of any fewer rows, since a shorter time would be noise of a shared machine;
/// - the time of the fewest measured rows if those are more; 0 if nothing is known.
fn estimate(times: &Times, rows: usize, per_row: f64) -> f64 {
    let fewer = times.range(..=rows);
    let least = fewer.clone().map(|(_, mean)| mean.seconds).fold(0.0, f64::max);
    if let Some((&known, mean)) = fewer.last() {
        return least.max(mean.seconds * (1.0 + per_row * (rows - known) as f64));
    }
    times.values().next().map_or(0.0, |mean| mean.seconds)
}

/// Seconds of a plain step by those of the smallest pass with drafts, less the difference of the two passes without a
/// sequence. `None` if a time is missing.
fn without_drafts(measured: &Times, empty: &BTreeMap<PassSize, f64>, plain: PassSize) -> Option<f64> {
    let one = *empty.get(&plain)?;
    measured.range(plain.rows + 1..).find_map(|(&rows, mean)| {
        let all = empty.get(&PassSize { rows, ..plain })?;
        Some((mean.seconds - (all - one).max(0.0)).max(one))
    })
}

/// The depth of one sequence.
#[derive(Debug)]
pub(super) struct DepthControl {
    depth: Depth,
    nominal: Option<Costs>,
    shares: Shares,
    plain_rounds: u64,
    drafting_rounds: u64,
    retry_after: u64,
}

impl DepthControl {
    /// Uses measured costs, or nominal ones if `repeatable`.
    pub fn new(depth: Depth, repeatable: bool) -> DepthControl {
        DepthControl {
            depth,
            nominal: repeatable.then(Costs::nominal),
            shares: Shares::new(PRIOR_OBSERVATIONS, ACCEPTANCE_WEIGHT),
            plain_rounds: 0,
            drafting_rounds: 0,
            retry_after: RETRY_AFTER,
        }
    }

    pub fn set_depth(&mut self, depth: Depth) {
        self.depth = depth;
    }

    /// How many drafts the round after `ahead` plain rounds under way makes, at most `most`. `lag` is the number of
    /// rows that the head lags behind by then: drafting is tried again only when they are few.
    pub fn choose(&self, costs: &Costs, sequences: usize, most: usize, lag: usize, ahead: usize) -> usize {
        let is_measured = self.nominal.is_none();
        // Nominal costs are those of one sequence: other sequences must not matter either.
        let (costs, sequences) = self.nominal.as_ref().map_or((costs, sequences), |nominal| (nominal, 1));
        let plain_rounds = self.plain_rounds + ahead as u64;
        match self.depth {
            Depth::Fixed(depth) => depth.min(most),
            Depth::Auto if most == 0 || self.stays_plain(plain_rounds) => 0,
            Depth::Auto if is_measured && costs.wants_plain(sequences) => 0,
            Depth::Auto => match self.best(costs, sequences, most) {
                0 if plain_rounds >= self.retry_after && lag <= POSITIONS => 1,
                0 => 0,
                _ if lag > POSITIONS => 0,
                best if self.drafting_rounds % DEEPER_EVERY == DEEPER_EVERY - 1 => {
                    (best + 1).min(most).min(POSITIONS)
                }
                best => best,
            },
        }
    }

    /// Whether it is not yet time to compare depths again, after this number of plain rounds.
    fn stays_plain(&self, plain_rounds: u64) -> bool {
        (COMPARED_EVERY..self.retry_after).contains(&plain_rounds)
            && !plain_rounds.is_multiple_of(COMPARED_EVERY)
    }

    /// The depth with the most tokens per second. Nothing is known in the first rounds, where wrong drafts cost most.
    /// So a position is drafted only once the position before it has been observed.
    fn best(&self, costs: &Costs, sequences: usize, most: usize) -> usize {
        let judged = self.shares.observed.iter().take_while(|&&n| n > 0).count();
        let most = most.min(judged + 1).min(POSITIONS);
        let (mut best, mut best_rate) = (0, 0.0);
        let (mut tokens, mut all_accepted, mut share) = (1.0, 1.0, ACCEPTANCE_PRIOR);
        let (own, of_engine) = (&self.shares, &costs.shares);
        for k in 0..=most {
            if k > 0 {
                let i = k - 1;
                // A position that was never reached is assumed to be as good as the one before it.
                if own.observed[i] + of_engine.observed[i] > 0 {
                    // The engine's share takes the place of the prior.
                    share =
                        own.accepted[i] + own.prior_weight[i] * (of_engine.accepted[i] - ACCEPTANCE_PRIOR);
                }
                all_accepted *= share;
                tokens += all_accepted;
            }
            let rate = tokens / costs.round(sequences, k).max(f64::MIN_POSITIVE);
            if rate > best_rate {
                (best, best_rate) = (k, rate);
            }
        }
        best
    }

    /// Learns from a round.
    pub fn note(&mut self, drafted: usize, accepted: usize) {
        if drafted == 0 {
            self.plain_rounds += 1;
            return;
        }
        self.drafting_rounds += 1;
        let was_retry = self.plain_rounds >= self.retry_after;
        self.shares.note(drafted, accepted);
        if !was_retry {
            self.plain_rounds = 0;
        } else if accepted > 0 {
            let Shares { accepted: [first, ..], prior_weight, .. } = &mut self.shares;
            (*first, prior_weight[0]) = (first.max(RETRY_ACCEPTANCE), 0.0);
            (self.plain_rounds, self.retry_after) = (0, RETRY_AFTER);
        } else {
            let later = (RETRY_GROWTH * self.retry_after).clamp(SECOND_RETRY_AFTER, RETRY_AFTER_MAX);
            (self.plain_rounds, self.retry_after) = (0, later);
        }
    }
}

#[cfg(test)]
mod tests;
