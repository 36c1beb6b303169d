//! Rotation of queries and keys in a model's layers, and the factors on scores.

use keel_array::RopeSpec;

use crate::config::rope::RopeScaling;
use crate::{HybridConfig, MixerKind, ModelError, Result, RopeSections};

/// Queries grow with their position `p`: they are multiplied by `1 + beta ln(1 + floor(p / original))`, as in Llama 4.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryGrowth {
    /// Rate of the growth.
    pub beta: f64,
    /// Context of the first training. Within it nothing grows.
    pub original: usize,
}

impl HybridConfig {
    /// The rotation of queries and keys. Sections matter only with pictures: a text token has the same position on all
    /// axes.
    pub fn rope(&self) -> RopeSpec {
        let sections = self.rope_sections;
        RopeSpec {
            rotary: self.rotary,
            sections: sections.map(|s| s.counts),
            interleaved: sections.is_some_and(|s| s.interleaved),
        }
    }

    /// Checks that every frequency has an axis, which matters only with pictures.
    pub(crate) fn check_sections(&self) -> Result<()> {
        let Some(RopeSections { counts: sections, .. }) = self.rope_sections else { return Ok(()) };
        let (sum, frequencies) =
            (sections.iter().fold(0usize, |sum, n| sum.saturating_add(*n)), self.rotary / 2);
        if sum == frequencies {
            return Ok(());
        }
        let reason =
            format!("mrope_section {sections:?} adds up to {sum}, expected the {frequencies} frequencies");
        Err(ModelError::Config(reason))
    }

    /// Base of the frequencies of a kind of layers.
    fn theta(&self, kind: MixerKind) -> f64 {
        if kind == MixerKind::SlidingAttention { self.sliding_rope_theta } else { self.rope_theta }
    }

    /// Scaling of these frequencies.
    fn scaling(&self, kind: MixerKind) -> &RopeScaling {
        if kind == MixerKind::SlidingAttention { &self.sliding_rope_scaling } else { &self.rope_scaling }
    }

    /// Inverse rotary frequencies of layers without a window.
    pub fn inverse_frequencies(&self) -> Vec<f32> {
        self.frequencies_of(MixerKind::Attention)
    }

    /// Inverse rotary frequencies of a kind of layers.
    pub fn frequencies_of(&self, kind: MixerKind) -> Vec<f32> {
        self.scaling(kind).inverse_frequencies(self.theta(kind), self.rotary)
    }

    /// Inverse rotary frequencies of a kind of layers for sequences longer than the original context, if they differ.
    pub fn long_frequencies_of(&self, kind: MixerKind) -> Option<Vec<f32>> {
        let long = self.scaling(kind).of_long_sequences()?;
        Some(long.inverse_frequencies(self.theta(kind), self.rotary))
    }

    /// Longest sequence with the usual frequencies; `None` if all lengths have the same.
    pub fn short_context(&self) -> Option<usize> {
        self.rope_scaling.short_context()
    }

    /// Factor on scores of a kind of layers. The rope scaling's factor applies to rotated queries and to rotated keys.
    /// If the whole head rotates, scores get its square.
    pub fn score_scale(&self, kind: MixerKind) -> f64 {
        let factor = self.scaling(kind).attention_factor();
        if self.rotary == self.head_dim {
            self.attention_scale * factor.powi(2)
        } else {
            self.attention_scale
        }
    }

    /// Factors on the elements of a rotated query, if only part of a head rotates and the rope scaling has a factor.
    pub fn query_scales(&self, kind: MixerKind) -> Option<Vec<f32>> {
        let factor = self.scaling(kind).attention_factor();
        let square = |i: usize| if i < self.rotary { factor.powi(2) as f32 } else { 1.0 };
        (factor != 1.0 && self.rotary < self.head_dim).then(|| (0..self.head_dim).map(square).collect())
    }

    /// Checks the numbers of the rotations.
    pub(crate) fn check_turns(&self) -> Result<()> {
        for scaling in [&self.rope_scaling, &self.sliding_rope_scaling] {
            let lists: &[(&str, &Vec<f64>)] = match scaling {
                RopeScaling::Long { short, long, .. } => &[("short_factor", short), ("long_factor", long)],
                RopeScaling::Divisors(divisors) => &[("divisors", divisors)],
                _ => &[],
            };
            let expected = self.rotary / 2;
            if let Some((key, list)) = lists.iter().find(|(_, list)| list.len() != expected) {
                return Err(ModelError::Config(format!(
                    "{key} of the rope has {} numbers, expected {expected}: one for each rotary frequency",
                    list.len()
                )));
            }
            if let RopeScaling::Long { original, .. } = scaling
                && *original < 2
            {
                let reason = format!("original_max_position_embeddings is {original}, expected at least 2");
                return Err(ModelError::Config(reason));
            }
        }
        if let Some(QueryGrowth { original, .. }) = self.query_growth
            && (original == 0 || original > i32::MAX as usize)
        {
            let reason = format!("original_max_position_embeddings is {original}, expected 1 to 2^31 - 1");
            return Err(ModelError::Config(reason));
        }
        Ok(())
    }
}
