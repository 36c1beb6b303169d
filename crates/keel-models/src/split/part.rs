//! The part of a model that one of several devices holds.

use std::ops::Range;

use crate::{MixtureCut, ModelError, Result, Share};

/// Consecutive layers, with the parts of the model before its first and after its last layer.
///
/// A device without a `previous` one embeds the tokens. A device without a `next` one holds the final norm, the output
/// head and the multi-token-prediction head. Hidden states go from a device to the next. Or each device holds a share
/// of every layer, and the devices add up the results of their shares. In a combination each stage of the pipeline is
/// several devices that share its layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The layers.
    pub layers: Range<usize>,
    /// Rank of the device with the layers before.
    pub previous: Option<usize>,
    /// Rank of the device with the layers after.
    pub next: Option<usize>,
    /// The share of each of these layers.
    pub share: Share,
}

impl Default for Part {
    /// The whole model.
    fn default() -> Part {
        Part { layers: 0..usize::MAX, previous: None, next: None, share: Share::default() }
    }
}

impl Part {
    /// The parts of a pipeline of devices by rank, which hold these layers.
    pub fn pipeline(stages: &[Range<usize>]) -> Vec<Part> {
        Part::grid(stages, 1)
    }

    /// The shares of `count` devices of each of a model's layers.
    pub fn tensor(layers: usize, count: usize) -> Vec<Part> {
        Part::grid(std::slice::from_ref(&(0..layers)), count)
    }

    /// The parts of a pipeline whose stages hold these layers and are `count` devices each, by rank. The devices of a
    /// stage have consecutive ranks. Share `i` of a stage hands on to share `i` of the next.
    pub fn grid(stages: &[Range<usize>], count: usize) -> Vec<Part> {
        let devices = stages.len() * count;
        let part = |rank: usize| {
            let first = rank / count * count;
            Part {
                layers: stages[rank / count].clone(),
                previous: rank.checked_sub(count),
                next: Some(rank + count).filter(|next| *next < devices),
                share: Share { index: rank - first, count, first, mixture: MixtureCut::default() },
            }
        };
        (0..devices).map(part).collect()
    }

    /// The same parts, whose shares divide mixtures of experts like this.
    pub fn by(mixture: MixtureCut, mut parts: Vec<Part>) -> Vec<Part> {
        parts.iter_mut().for_each(|part| part.share.mixture = mixture);
        parts
    }

    /// Checks that the parts, by rank, are those of a split of a model of `layers` layers: each layer is held once, in
    /// order, and each device exchanges with its neighbours.
    ///
    /// # Errors
    /// [`ModelError::Part`] with the first part that is not in its place.
    pub fn check_all(parts: &[Part], layers: usize) -> Result<()> {
        let devices = parts.len();
        let wrong = |reason: String| Err(ModelError::Part(reason));
        let count = parts.first().map_or(1, |part| part.share.count);
        if count == 0 || !devices.is_multiple_of(count) {
            return wrong(format!("{devices} devices cannot be stages of {count} devices each"));
        }
        let stages: Vec<Range<usize>> = parts.iter().step_by(count).map(|part| part.layers.clone()).collect();
        let mixture = parts.first().map(|part| part.share.mixture).unwrap_or_default();
        let fitting = Part::by(mixture, Part::grid(&stages, count));
        for (rank, (part, fitting)) in parts.iter().zip(fitting).enumerate() {
            if *part != fitting {
                return wrong(format!(
                    "device {rank} of {devices} has {part:?}, which does not fit its place: {fitting:?} does"
                ));
            }
        }
        let mut end = 0;
        for (stage, layers) in stages.iter().enumerate() {
            if layers.start != end || layers.is_empty() {
                return wrong(format!(
                    "stage {stage} of {} has layers {layers:?}, and the layers before it end at {end}",
                    stages.len()
                ));
            }
            end = layers.end;
        }
        match end.min(layers) == layers {
            true => Ok(()),
            false => wrong(format!("the parts end at layer {end}, and the model has {layers} layers")),
        }
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

    #[test]
    fn each_share_of_a_stage_hands_on_to_the_same_share_of_the_next() {
        let parts = Part::grid(&[0..2, 2..7], 3);
        let neighbours: Vec<_> = parts.iter().map(|part| (part.previous, part.next)).collect();
        let none = [(None, Some(3)), (None, Some(4)), (None, Some(5))];
        assert_eq!(neighbours[..3], none);
        assert_eq!(neighbours[3..], [(Some(0), None), (Some(1), None), (Some(2), None)]);
        assert_eq!(parts[4].share, Share { index: 1, count: 3, first: 3, mixture: MixtureCut::Columns });
    }

    #[test]
    fn parts_that_are_no_split_of_the_model_are_refused() {
        let refusal = |parts: &[Part]| Part::check_all(parts, 7).expect_err("refused").to_string();
        for parts in [Part::pipeline(&[0..2, 2..7]), Part::tensor(7, 3), Part::grid(&[0..1, 1..7], 2)] {
            Part::check_all(&parts, 7).expect("a split of the model");
        }
        Part::check_all(&[Part::default()], 7).expect("the whole model");
        let mut swapped = Part::pipeline(&[0..2, 2..7]);
        swapped.reverse();
        assert!(refusal(&swapped).contains("device 0 of 2 has"), "{}", refusal(&swapped));
        let mut shares = Part::tensor(7, 2);
        shares.swap(0, 1);
        assert!(refusal(&shares).contains("device 0 of 2 has"));
        let by_experts = Part::by(MixtureCut::Experts, Part::tensor(7, 2));
        Part::check_all(&by_experts, 7).expect("all divide experts alike");
        let unlike = [by_experts[0].clone(), Part::tensor(7, 2)[1].clone()];
        assert!(refusal(&unlike).contains("device 1 of 2 has"), "{}", refusal(&unlike));
        assert!(
            refusal(&Part::pipeline(&[0..2, 3..7]))
                .contains("layers 3..7, and the layers before it end at 2")
        );
        assert!(refusal(&Part::pipeline(&[0..2, 2..6])).contains("end at layer 6, and the model has 7"));
        assert!(refusal(&Part::tensor(7, 3)[..2]).contains("2 devices cannot be stages of 3"));
        assert!(refusal(&Part::pipeline(&[0..2, 2..7])[..1]).contains("does not fit its place"));
    }
}
