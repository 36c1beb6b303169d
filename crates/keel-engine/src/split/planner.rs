//! Which device holds which part of a model.

use std::ops::Range;
use std::sync::Arc;

use keel_array::{Backend, Runtime, RuntimeOptions};
use keel_cache::{CacheSize, ModelCache};
use keel_models::loading::{Loader, Parameters};
use keel_models::{HybridConfig, MixtureCut, ModelError, Part, Share};
use serde_json::Value;

use crate::vision::{self, VisionRunner};
use crate::{EngineError, EngineOptions, Result};

/// Devices in stages: consecutive layers lie in a stage, and the devices of a stage share its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceGrid {
    /// Number of stages; 1 is a split by tensors alone.
    pub stages: usize,
    /// Devices of each stage; 1 is a pipeline of devices.
    pub shares: usize,
}

/// A device, and the part of a model that lies there. The device is a [`Runtime`], or the backend of a plan.
#[derive(Clone, Debug)]
pub struct PlacedPart<D> {
    /// The device.
    pub device: D,
    /// The part.
    pub part: Part,
}

impl<D> PlacedPart<D> {
    /// A whole model on one device.
    pub fn whole(device: D) -> PlacedPart<D> {
        PlacedPart { device, part: Part::default() }
    }

    /// Each part on the device of its rank.
    pub fn each(
        devices: impl IntoIterator<Item = D>,
        parts: impl IntoIterator<Item = Part>,
    ) -> Vec<PlacedPart<D>> {
        devices.into_iter().zip(parts).map(|(device, part)| PlacedPart { device, part }).collect()
    }
}

/// How devices divide the mixtures of experts of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MixtureChoice {
    /// The part of a mixture that each device has.
    pub cut: MixtureCut,
    /// The reason in one line.
    pub reason: String,
}

/// Chooses how devices split a model. No weight is read.
#[derive(Clone, Copy)]
pub struct SplitPlanner<'a> {
    /// A backend that only plans.
    pub backend: &'a Arc<dyn Backend>,
    /// The weights of the model.
    pub parameters: &'a dyn Parameters,
    /// Its `config.json`.
    pub config: &'a Value,
    /// The options of the engine.
    pub options: EngineOptions,
}

impl SplitPlanner<'_> {
    /// The parts of the model on a grid of devices, by rank. The devices of a stage share every layer: attention by
    /// heads, recurrent layers by key heads, feed-forward halves by columns, experts by columns or whole, embedding and
    /// output head by tokens. The largest stage of weights, keys, values and states is as small as it can be.
    ///
    /// `limits` are the bytes of each device; none means that all hold the same. A stage gets layers in proportion to
    /// the bytes of its smallest device.
    ///
    /// # Errors
    /// There are more stages than layers; something of the model does not divide; as [`crate::Engine::load`].
    pub fn parts(&self, DeviceGrid { stages, shares }: DeviceGrid, limits: &[u64]) -> Result<Vec<Part>> {
        let room =
            |stage: usize| limits.iter().skip(stage * shares).take(shares).min().copied().unwrap_or(1).max(1);
        let rooms: Vec<u64> = (0..stages).map(room).collect();
        let model = keel_models::read_config_of(self.config, self.parameters)?;
        let mixture = self.choose_mixture(&model, shares)?.map_or(MixtureCut::Columns, |choice| choice.cut);
        let layers = model.layers.len();
        let stages = match stages {
            1 => std::iter::once(0..layers).collect(),
            _ => self.stages(layers, &rooms, Share { count: shares, mixture, ..Share::default() })?,
        };
        let parts = Part::by(mixture, Part::grid(&stages, shares));
        for part in parts.iter().filter(|part| part.share.count > 1) {
            part.share.config(&model)?;
        }
        Ok(parts)
    }

    /// How `shares` devices divide the mixtures of experts, if there are any. Experts are cut by columns if that
    /// divides every layer and the MTP head at borders of groups of the weights. Then all devices have the same work,
    /// whichever experts are chosen.
    ///
    /// # Errors
    /// As [`SplitPlanner::parts`].
    pub fn mixture(&self, shares: usize) -> Result<Option<MixtureChoice>> {
        self.choose_mixture(&keel_models::read_config_of(self.config, self.parameters)?, shares)
    }

    fn choose_mixture(&self, model: &HybridConfig, shares: usize) -> Result<Option<MixtureChoice>> {
        let Some(moe) = model.moe.as_ref().filter(|_| shares > 1) else { return Ok(None) };
        // Layers may have weights of different formats, and the MTP head, too. Dense layers in front do not matter.
        let layers = model.layers.len();
        let first = (0..layers).find(|layer| !moe.dense_layers.contains(layer)).unwrap_or(0);
        let part = Part { layers: first..layers, previous: Some(0), next: None, ..Part::default() };
        let without_tower = SplitPlanner { options: EngineOptions { vision: None, ..self.options }, ..*self };
        let loads = |mixture| {
            let share = Share { count: shares, mixture, ..Share::default() };
            share.config(model)?;
            without_tower.part_bytes(Part { share, ..part.clone() }).map(drop)
        };
        let choice = |cut, reason: String| Ok(Some(MixtureChoice { cut, reason }));
        match loads(MixtureCut::Columns) {
            Ok(()) => choice(
                MixtureCut::Columns,
                "by columns: each device has a share of every expert, and all have the same work".into(),
            ),
            Err(EngineError::Model(ModelError::Part(columns))) => match loads(MixtureCut::Experts) {
                Ok(()) => {
                    // The reason alone, without the advice that follows it.
                    let reason = columns.split(": take").next().unwrap_or(&columns);
                    let whole = "each device has some of them whole, because by columns it cannot be";
                    choice(MixtureCut::Experts, format!("{whole}: {reason}"))
                }
                // Something else does not divide either.
                Err(_) => Err(EngineError::Model(ModelError::Part(columns))),
            },
            Err(error) => Err(error),
        }
    }

    /// Cuts `layers` layers into stages whose first devices fill their rooms evenly. The devices of a stage have these
    /// shares.
    fn stages(&self, layers: usize, rooms: &[u64], share: Share) -> Result<Vec<Range<usize>>> {
        let stages = rooms.len();
        assert!(self.backend.is_planning(), "a split is planned on a planning backend");
        if stages == 0 || stages > layers {
            return Err(EngineError::Option(format!(
                "a pipeline of {stages} devices needs at least as many layers, and the model has {layers}: give 1 to \
                 {layers} devices"
            )));
        }
        // A neighbour that keeps the ends of the model away from a part.
        let neighbour = Some(0);
        let bytes = |layers, previous, next| self.part_bytes(Part { layers, previous, next, share });
        let mut shares = Vec::with_capacity(layers);
        for i in 0..layers {
            shares.push(bytes(i..i + 1, neighbour, neighbour)?);
        }
        shares[0] += bytes(0..0, None, neighbour)?;
        shares[layers - 1] += bytes(layers..layers, neighbour, None)?;
        Ok(even(&shares, rooms))
    }

    /// Bytes of a part's weights and of its cache, and of the vision tower if the part has it.
    fn part_bytes(&self, part: Part) -> Result<u64> {
        let SplitPlanner { backend, parameters, config, options } = *self;
        let runtime = Runtime::new(Arc::clone(backend), RuntimeOptions::default());
        let own = runtime.ledger().active().total();
        // The tower lies on the device with the output head.
        let has_tower = part.is_last();
        let loader = Loader::new(&runtime, parameters, options.compute, &|_| ());
        let loader = loader.in_order(options.sums).of_part(part);
        let model = keel_models::load(&loader, config)?;
        let size = CacheSize { swap_bytes: 0, ..options.cache_size() };
        let cache = ModelCache::allocate(&runtime, model.cache_spec(options.cache_format()), size)?;
        let runner = match vision::config(config, options.vision)?.zip(options.vision).filter(|_| has_tower) {
            Some((vision, sizes)) => {
                let text = keel_models::read_config_of(config, parameters)?;
                let loader = Loader::new(&runtime, parameters, options.compute, &|_| ());
                let options = EngineOptions { largest_steps: true, ..options };
                Some(VisionRunner::load(&runtime, &loader, vision, &text, sizes, &options)?)
            }
            None => None,
        };
        let bytes = runtime.ledger().active().total() - own;
        drop((model, cache, runner));
        Ok(bytes)
    }
}

/// Cuts `shares` into ranges, one for each room and none of them empty, so that the largest sum, compared with its
/// room, is as small as possible.
fn even(shares: &[u64], rooms: &[u64]) -> Vec<Range<usize>> {
    let count = rooms.len();
    let widest = u128::from(rooms.iter().max().copied().unwrap_or(1));
    // With equal rooms this is the sum itself.
    let filled = |range: Range<usize>, room: u64| {
        shares[range].iter().map(|&share| u128::from(share)).sum::<u128>() * widest / u128::from(room)
    };
    // `best[i]` is the largest filling of the best cut of the first `i` shares into the ranges so far, and where the
    // last of them begins.
    let mut best: Vec<Option<(u128, usize)>> = vec![None; shares.len() + 1];
    best[0] = Some((0, 0));
    let mut begins = Vec::with_capacity(count);
    for &room in rooms {
        let longer = |end: usize| {
            let cut =
                |start: usize| best[start].map(|(largest, _)| (largest.max(filled(start..end, room)), start));
            (0..end).filter_map(cut).min()
        };
        best = (0..=shares.len()).map(longer).collect();
        begins.push(best.clone());
    }
    let mut ranges = Vec::with_capacity(count);
    let mut end = shares.len();
    for best in begins.iter().rev() {
        let start = best[end].map_or(0, |(_, start)| start);
        ranges.push(start..end);
        end = start;
    }
    ranges.reverse();
    ranges
}

/// The device that leads, after a check that the devices are one group, and that their parts are a split of a model of
/// `layers` layers.
pub(crate) fn check_devices(devices: &[PlacedPart<Runtime>], layers: usize) -> Result<&Runtime> {
    let Some(lead) = devices.last() else {
        return Err(EngineError::Option("a model needs a device".into()));
    };
    let parts: Vec<Part> = devices.iter().map(|placed| placed.part.clone()).collect();
    Part::check_all(&parts, layers)?;
    if devices.len() == 1 {
        return Ok(&lead.device);
    }
    for (rank, placed) in devices.iter().enumerate() {
        let place = placed.device.backend().group().map(|group| (group.rank(), group.size()));
        if place != Some((rank, devices.len())) {
            let count = devices.len();
            let reason = format!(
                "device {rank} of a model on {count} devices is not device {rank} of a group of {count}"
            );
            return Err(EngineError::Option(reason));
        }
    }
    Ok(&lead.device)
}

#[cfg(test)]
mod tests {
    use super::even;

    #[test]
    fn ranges_are_as_even_as_their_order_allows() {
        assert_eq!(even(&[1, 1, 1, 1], &[1; 2]), [0..2, 2..4]);
        assert_eq!(even(&[5, 1, 1, 1], &[1; 2]), [0..1, 1..4]);
        assert_eq!(even(&[1, 1, 1, 5], &[1; 3]), [0..1, 1..3, 3..4]);
        assert_eq!(even(&[0, 0, 9], &[1; 3]), [0..1, 1..2, 2..3]);
        assert_eq!(even(&[7, 8], &[1; 2]), [0..1, 1..2]);
    }

    #[test]
    fn a_room_twice_as_large_gets_twice_as_much() {
        assert_eq!(even(&[1; 9], &[200, 100]), [0..6, 6..9]);
        assert_eq!(even(&[1; 9], &[100, 200]), [0..3, 3..9]);
        assert_eq!(even(&[1; 8], &[100, 200, 100]), [0..2, 2..6, 6..8]);
        assert_eq!(even(&[u64::MAX / 4; 3], &[u64::MAX, 1]), [0..2, 2..3]);
    }

    #[test]
    fn no_cut_is_better() {
        let shares: Vec<u64> = (0..12).map(|i| (i * 7919 + 13) % 97).collect();
        let largest = |cut: &[std::ops::Range<usize>]| {
            cut.iter().map(|range| shares[range.clone()].iter().sum::<u64>()).max().unwrap_or(0)
        };
        let found = largest(&even(&shares, &[1; 3]));
        for a in 1..11 {
            for b in a + 1..12 {
                assert!(found <= largest(&[0..a, a..b, b..12]), "{a} {b}");
            }
        }
    }
}
