//! One row of logits.

use crate::isa::Isa;
use crate::simd::{self, Simd, VectorKernel};
use keel_array::sampling::{self, EXPONENT_MIN, enough, greatest, id_of, order, target, weight};
use std::ops::Range;

/// Number of buckets for candidates that have a weight.
pub const BUCKETS: usize = 512;

/// Number of buckets for a difference of 1 in `(l - max) / temperature`.
const BUCKETS_PER_UNIT: f32 = 18.0;

const _: () = assert!(-EXPONENT_MIN * BUCKETS_PER_UNIT + 1.0 < BUCKETS as f32);

/// Most members of a bucket that are sorted; a fuller bucket is divided further.
const HELD_MAX: usize = 1024;

/// Logits that are processed at a time.
const BLOCK: usize = 256;

/// Number of candidates, and the sum of their weights.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    count: u64,
    mass: u64,
}

impl Totals {
    pub fn add(&mut self, [count, mass]: [u64; 2]) {
        self.count += count;
        self.mass += mass;
    }
}

/// The quantity that defines a boundary: a count or a mass.
type Measure = fn(&Totals) -> u64;

const COUNT: Measure = |totals| totals.count;
const MASS: Measure = |totals| totals.mass;

/// A row and how its token is drawn.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    logits: &'a [f32],
    temperature: f32,
    top_k: u64,
    top_p: f32,
    log_min_p: f32,
    uniform: f32,
    /// The order of the first candidate, and its logit.
    first: u64,
    greatest: f32,
}

impl<'a> Row<'a> {
    /// Logits, and the words of [`keel_array::sampling::Draw`].
    pub fn new(logits: &'a [f32], words: &[f32]) -> Row<'a> {
        let &[temperature, top_k, top_p, log_min_p, uniform] = words else { panic!("{} words", words.len()) };
        Row { logits, temperature, top_k: top_k as u64, top_p, log_min_p, uniform, first: 0, greatest: 0.0 }
    }

    pub fn width(&self) -> usize {
        self.logits.len()
    }

    /// Whether no token is drawn from it.
    pub fn is_skipped(&self) -> bool {
        self.temperature < 0.0
    }

    /// Whether more than the greatest logit matters.
    pub fn draws(&self) -> bool {
        self.temperature > 0.0
    }

    /// The order of the first candidate in a share of the row; 0 if there is none.
    pub fn first_of(&self, share: Range<usize>) -> u64 {
        let x = &self.logits[share.clone()];
        let most = if self.draws() { f32::MAX } else { f32::INFINITY };
        let greatest = greatest(x, |x| x <= most);
        let is_candidate = !self.draws() || greatest.is_finite();
        let at = x.iter().position(|&x| x == greatest).filter(|_| is_candidate);
        at.map_or(0, |at| order(greatest, (share.start + at) as u32))
    }

    /// The row with its first candidate known.
    pub fn with_first(self, first: u64) -> Row<'a> {
        let greatest = if first == 0 { 0.0 } else { self.logits[id_of(first) as usize] };
        Row { first, greatest, ..self }
    }

    /// `(l - max) / temperature`
    #[inline]
    fn exponent(&self, logit: f32) -> f32 {
        (logit - self.greatest) / self.temperature
    }

    /// Sets the totals of the buckets to those of a share of the row. One more bucket, the last, counts logits without
    /// a weight.
    pub fn fill(self, share: Range<usize>, buckets: &mut [[u64; 2]], isa: Isa) {
        buckets.fill([0; 2]);
        if self.first != 0 {
            simd::run_at(isa, Fill { logits: &self.logits[share], row: self, buckets });
        }
    }

    /// The token, given the totals of all buckets.
    pub fn draw(&self, buckets: &[Totals; BUCKETS]) -> u32 {
        if !self.draws() || self.first == 0 {
            return if self.first == 0 { 0 } else { id_of(self.first) };
        }
        let mut all = Totals::default();
        buckets.iter().for_each(|bucket| all.add([bucket.count, bucket.mass]));
        let mut kept = all.mass;
        if (1..all.count).contains(&self.top_k) {
            (_, kept) = self.locate(buckets, COUNT, self.top_k - 1);
        }
        if self.top_p < 1.0 {
            (_, kept) = self.locate(buckets, MASS, enough(self.top_p, kept) - 1);
        }
        if is_within(self.log_min_p) {
            kept = kept.min(self.mass_down_to(buckets, self.log_min_p));
        }
        let (id, _) = self.locate(buckets, MASS, target(self.uniform, kept));
        id
    }

    /// The id of the first candidate at which the running measure exceeds `target`, and the weight up to and including
    /// it.
    fn locate(&self, buckets: &[Totals; BUCKETS], measure: Measure, target: u64) -> (u32, u64) {
        let (bucket, mut before) = find(buckets, measure, target, Totals::default());
        let (mut low, mut high, mut count) = (0, u64::MAX, buckets[bucket].count);
        while count > HELD_MAX as u64 {
            let shift = (64 - (high - low).leading_zeros()).saturating_sub(8);
            let mut parts = [Totals::default(); 256];
            self.each_member(bucket, |order, mass| {
                if (low..=high).contains(&order) {
                    parts[((high - order) >> shift) as usize].add([1, mass]);
                }
            });
            let part;
            (part, before) = find(&parts, measure, target, before);
            high -= (part as u64) << shift;
            low = low.max(high.saturating_sub((1 << shift) - 1));
            count = parts[part].count;
        }
        let (mut held, mut len) = ([(0, 0); HELD_MAX], 0);
        self.each_member(bucket, |order, mass| {
            if (low..=high).contains(&order) {
                held[len] = (order, mass);
                len += 1;
            }
        });
        held[..len].sort_unstable_by_key(|&(order, _)| std::cmp::Reverse(order));
        for &(order, mass) in &held[..len] {
            before.add([1, mass]);
            if measure(&before) > target {
                return (id_of(order), before.mass);
            }
        }
        unreachable!("the totals are those of the members")
    }

    /// The weight of the candidates with at least this exponent.
    fn mass_down_to(&self, buckets: &[Totals; BUCKETS], exponent: f32) -> u64 {
        let bucket = bucket_of(exponent);
        let mut mass = buckets[..bucket].iter().map(|bucket| bucket.mass).sum();
        self.each_member(bucket, |order, weight| {
            if self.exponent(self.logits[id_of(order) as usize]) >= exponent {
                mass += weight;
            }
        });
        mass
    }

    /// Calls `f` with order and weight of each member of a bucket.
    fn each_member(&self, bucket: usize, mut f: impl FnMut(u64, u64)) {
        // Bounds on the logit are cheaper than a division; `slack` covers the division's rounding.
        let slack = 1e-5 * (self.greatest.abs() + self.temperature * -EXPONENT_MIN);
        let edge = |place: f32| self.greatest - self.temperature * (place / BUCKETS_PER_UNIT);
        let near = edge(bucket as f32 + 0.5) - slack..=edge(bucket as f32 - 0.5) + slack;
        for (first, block) in (0..).step_by(BLOCK).zip(self.logits.chunks(BLOCK)) {
            // Most blocks have no member; this vectorised test skips them.
            if !block.iter().fold(false, |any, logit| any | near.contains(logit)) {
                continue;
            }
            for (id, &logit) in (first..).zip(block).filter(|(_, logit)| near.contains(logit)) {
                let exponent = self.exponent(logit);
                if is_within(exponent) && bucket_of(exponent) == bucket {
                    f(order(logit, id), weight(exponent));
                }
            }
        }
    }
}

/// Whether a candidate with this exponent has a weight; also false for exponents that are not finite.
#[inline]
fn is_within(exponent: f32) -> bool {
    (EXPONENT_MIN..=0.0).contains(&exponent)
}

/// The bucket of a candidate that [`is_within`].
#[inline]
fn bucket_of(exponent: f32) -> usize {
    // Adding 2^23 rounds to a whole number, which then stands in the low bits.
    const ROUND: f32 = 8_388_608.0;
    ((exponent * -BUCKETS_PER_UNIT + ROUND).to_bits() - ROUND.to_bits()) as usize
}

/// The first part at which the running measure exceeds `target`, and the totals before it.
fn find(parts: &[Totals], measure: Measure, target: u64, mut before: Totals) -> (usize, Totals) {
    for (i, part) in parts.iter().enumerate() {
        let mut through = before;
        through.add([part.count, part.mass]);
        if measure(&through) > target {
            return (i, before);
        }
        before = through;
    }
    unreachable!("the target is within the sum of the parts")
}

struct Fill<'a> {
    logits: &'a [f32],
    row: Row<'a>,
    buckets: &'a mut [[u64; 2]],
}

impl VectorKernel for Fill<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (mut exponents, mut places, mut weights) = ([0.0; BLOCK], [0; BLOCK], [0; BLOCK]);
        for logits in self.logits.chunks(BLOCK) {
            // Several simple loops, each of which the compiler turns into vectors.
            let len = logits.len();
            for (exponent, &logit) in exponents.iter_mut().zip(logits) {
                *exponent = self.row.exponent(logit);
            }
            for (place, &exponent) in places[..len].iter_mut().zip(&exponents) {
                *place = if is_within(exponent) { bucket_of(exponent) } else { BUCKETS };
            }
            for (weight, &exponent) in weights[..len].iter_mut().zip(&exponents) {
                *weight = sampling::weight(exponent);
            }
            for (&place, &weight) in places[..len].iter().zip(&weights) {
                let [count, mass] = &mut self.buckets[place];
                *count += 1;
                *mass += weight;
            }
        }
    }
}
