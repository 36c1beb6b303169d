//! The part of a model that one of several devices holds.

use std::ops::Range;

use crate::Shard;

/// Consecutive layers, with what comes before the first and after the last layer of the model.
///
/// A device without a `previous` one embeds the tokens. A device without a `next` one holds the final norm, the output
/// head and the multi-token-prediction head. Hidden states go from a device to the next. Or each device holds a share of
/// every layer, and they add up what their shares compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The layers.
    pub layers: Range<usize>,
    /// Rank of the device with the layers before.
    pub previous: Option<usize>,
    /// Rank of the device with the layers after.
    pub next: Option<usize>,
    /// The share of each of these layers.
    pub shard: Shard,
}

impl Default for Part {
    /// The whole model.
    fn default() -> Part {
        Part { layers: 0..usize::MAX, previous: None, next: None, shard: Shard::default() }
    }
}

impl Part {
    /// The parts of a pipeline of devices by rank, which hold these layers.
    pub fn pipeline(stages: &[Range<usize>]) -> Vec<Part> {
        let part = |(rank, layers): (usize, &Range<usize>)| Part {
            layers: layers.clone(),
            previous: rank.checked_sub(1),
            next: Some(rank + 1).filter(|next| *next < stages.len()),
            shard: Shard::default(),
        };
        stages.iter().enumerate().map(part).collect()
    }

    /// The shares of `count` devices of each of a model's layers.
    pub fn tensor(layers: usize, count: usize) -> Vec<Part> {
        let part = |index| Part { layers: 0..layers, shard: Shard { index, count }, ..Part::default() };
        (0..count).map(part).collect()
    }

    /// Whether it embeds the tokens.
    pub fn is_first(&self) -> bool {
        self.previous.is_none()
    }

    /// Whether it has the output head.
    pub fn is_last(&self) -> bool {
        self.next.is_none()
    }

    /// Those of a model's layers that belong to it, with their numbers.
    pub fn of<'a, T>(&self, layers: &'a [T]) -> impl Iterator<Item = (usize, &'a T)> + use<'a, T> {
        let end = self.layers.end.min(layers.len());
        (self.layers.start.min(end)..end).map(|i| (i, &layers[i]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipeline_hands_on_from_each_device_to_the_next() {
        let parts = Part::pipeline(&[0..2, 2..3, 3..7]);
        let neighbours: Vec<_> = parts.iter().map(|part| (part.previous, part.next)).collect();
        assert_eq!(neighbours, [(None, Some(1)), (Some(0), Some(2)), (Some(1), None)]);
        assert!(parts[0].is_first() && !parts[0].is_last() && parts[2].is_last());
        let of = |part: &Part| part.of(&[10, 11, 12, 13]).collect::<Vec<_>>();
        assert_eq!(of(&parts[1]), [(2, &12)]);
        assert_eq!(of(&parts[2]), [(3, &13)]);
        assert_eq!(of(&Part::default()).len(), 4);
        assert_eq!(of(&Part { layers: 5..9, ..Part::default() }), []);
    }
}
