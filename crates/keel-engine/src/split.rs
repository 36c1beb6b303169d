//! Which device holds which part of a model.

use std::ops::Range;
use std::sync::Arc;

use keel_array::{Backend, Runtime, RuntimeOptions};
use keel_cache::{CacheFormat, CacheSize, CacheSpec, ModelCache};
use keel_models::loading::{Loader, Parameters};
use keel_models::{HybridConfig, HybridModel, MixtureCut, ModelError, Part, Shard};
use serde_json::Value;

use crate::eyes::{self, Eyes};
use crate::{EngineError, EngineOptions, Result};

/// The parts of a pipeline of `stages` stages, each of `shares` devices that share its layers. With one share, a pipeline
/// of devices; with one stage, shares of every layer: attention by heads, recurrent layers by key heads, feed-forward
/// halves by columns, experts by columns or whole, embedding and output head by tokens. Consecutive layers lie in the
/// same stage, so that the largest stage of weights, keys, values and states is as small as it can be. `backend` must be
/// one that only plans.
///
/// # Errors
/// There are more stages than layers; something of the model does not divide; as [`crate::Engine::load`].
pub fn grid(
    backend: &Arc<dyn Backend>,
    source: (&dyn Parameters, &Value),
    options: EngineOptions,
    grid: (usize, usize),
) -> Result<Vec<Part>> {
    grid_within(backend, source, options, (grid, &[]))
}

/// As [`grid`], for devices that hold these bytes, by rank; none means that all hold the same. A stage gets layers in
/// proportion to what its smallest device holds.
///
/// # Errors
/// As [`grid`].
pub fn grid_within(
    backend: &Arc<dyn Backend>,
    (parameters, config): (&dyn Parameters, &Value),
    options: EngineOptions,
    ((stages, shares), limits): ((usize, usize), &[u64]),
) -> Result<Vec<Part>> {
    let room =
        |stage: usize| limits.iter().skip(stage * shares).take(shares).min().copied().unwrap_or(1).max(1);
    let rooms: Vec<u64> = (0..stages).map(room).collect();
    let model = keel_models::read_config_of(config, parameters)?;
    let (mixture, _) = mixture_cut(backend, (parameters, config), &options, (&model, shares))?;
    let stages = match stages {
        1 => std::iter::once(0..model.layers.len()).collect(),
        _ => {
            let shard = Shard { count: shares, mixture, ..Shard::default() };
            cut(backend, (parameters, config), &options, (model.layers.len(), &rooms, shard))?
        }
    };
    let parts = Part::by(mixture, Part::grid(&stages, shares));
    for part in parts.iter().filter(|part| part.shard.count > 1) {
        part.shard.config(&model)?;
    }
    Ok(parts)
}

/// How `shares` devices divide the mixtures of experts of a model, and the reason in one line, if it has any: by columns
/// if their number and the groups of the weights allow it in every layer and in the MTP head, because then all devices have
/// the same work whichever experts are chosen. `backend` must be one that only plans.
///
/// # Errors
/// As [`grid`].
pub fn mixture(
    backend: &Arc<dyn Backend>,
    source: (&dyn Parameters, &Value),
    options: EngineOptions,
    shares: usize,
) -> Result<Option<(MixtureCut, String)>> {
    let model = keel_models::read_config_of(source.1, source.0)?;
    let (cut, why) = mixture_cut(backend, source, &options, (&model, shares))?;
    Ok(why.map(|why| (cut, why)))
}

fn mixture_cut(
    backend: &Arc<dyn Backend>,
    source: (&dyn Parameters, &Value),
    options: &EngineOptions,
    (model, shares): (&HybridConfig, usize),
) -> Result<(MixtureCut, Option<String>)> {
    let Some(moe) = model.moe.as_ref().filter(|_| shares > 1) else { return Ok((MixtureCut::Columns, None)) };
    // Layers may have weights of different formats, and the MTP head, too. Dense layers in front do not matter.
    let layers = model.layers.len();
    let first = (0..layers).find(|layer| !moe.dense_layers.contains(layer)).unwrap_or(0);
    let part = Part { layers: first..layers, previous: Some(0), next: None, ..Part::default() };
    let options = &EngineOptions { vision: None, ..*options };
    let loads = |mixture| {
        let shard = Shard { count: shares, mixture, ..Shard::default() };
        shard.config(model)?;
        part_bytes(backend, source, options, Part { shard, ..part.clone() }).map(drop)
    };
    match loads(MixtureCut::Columns) {
        Ok(()) => {
            let why = "by columns: each device has a share of every expert, and all have the same work";
            Ok((MixtureCut::Columns, Some(why.into())))
        }
        Err(EngineError::Model(ModelError::Part(columns))) => match loads(MixtureCut::Experts) {
            Ok(()) => {
                // The reason alone, without the advice that follows it.
                let reason = columns.split(": take").next().unwrap_or(&columns);
                let why =
                    format!("each device has some of them whole, because by columns it cannot be: {reason}");
                Ok((MixtureCut::Experts, Some(why)))
            }
            // Something else does not divide either.
            Err(_) => Err(EngineError::Model(ModelError::Part(columns))),
        },
        Err(error) => Err(error),
    }
}

/// Cuts `layers` layers into stages whose first devices fill their rooms evenly. The devices of a stage have these shares.
fn cut(
    backend: &Arc<dyn Backend>,
    source: (&dyn Parameters, &Value),
    options: &EngineOptions,
    (layers, rooms, shard): (usize, &[u64], Shard),
) -> Result<Vec<Range<usize>>> {
    let stages = rooms.len();
    assert!(backend.is_planning(), "a split is planned on a planning backend");
    if stages == 0 || stages > layers {
        return Err(EngineError::Option(format!(
            "a pipeline of {stages} devices needs at least as many layers, and the model has {layers}: give 1 to {layers} \
             devices"
        )));
    }
    // A neighbour that keeps the ends of the model away from a part.
    let neighbour = Some(0);
    let bytes = |part: Part| part_bytes(backend, source, options, part);
    let mut shares = Vec::with_capacity(layers);
    for i in 0..layers {
        shares.push(bytes(Part { layers: i..i + 1, previous: neighbour, next: neighbour, shard })?);
    }
    let begin = bytes(Part { layers: 0..0, previous: None, next: neighbour, shard })?;
    let end = bytes(Part { layers: layers..layers, previous: neighbour, next: None, shard })?;
    shares[0] += begin;
    shares[layers - 1] += end;
    Ok(even(&shares, rooms))
}

/// Bytes of a part's weights and of its cache with these options, and of the vision tower if the part has it.
fn part_bytes(
    backend: &Arc<dyn Backend>,
    (parameters, config): (&dyn Parameters, &Value),
    options: &EngineOptions,
    part: Part,
) -> Result<u64> {
    let runtime = Runtime::new(Arc::clone(backend), RuntimeOptions::default());
    let own = runtime.ledger().active().total();
    // The tower lies on the device with the output head.
    let has_tower = part.is_last();
    let loader = Loader::new(&runtime, parameters, options.compute, &|_| ());
    let loader = loader.in_order(options.sums).of_part(part);
    let model = keel_models::load(&loader, config)?;
    let size = CacheSize { swap_bytes: 0, ..options.cache_size() };
    let cache = ModelCache::allocate(&runtime, model.cache_spec(options.cache_format()), size)?;
    let eyes = match eyes::config(config, options.vision)?.zip(options.vision).filter(|_| has_tower) {
        Some((vision, sizes)) => {
            let text = keel_models::read_config_of(config, parameters)?;
            let loader = Loader::new(&runtime, parameters, options.compute, &|_| ());
            let options = EngineOptions { largest_steps: true, ..*options };
            Some(Eyes::load(&runtime, &loader, vision, &text, sizes, &options)?)
        }
        None => None,
    };
    let bytes = runtime.ledger().active().total() - own;
    drop((model, cache, eyes));
    Ok(bytes)
}

/// Cuts `shares` into ranges, one for each room and none of them empty, so that the largest sum, compared with its room,
/// is as small as possible.
fn even(shares: &[u64], rooms: &[u64]) -> Vec<Range<usize>> {
    let count = rooms.len();
    let widest = u128::from(rooms.iter().max().copied().unwrap_or(1));
    // With equal rooms this is the sum itself.
    let filled = |range: Range<usize>, room: u64| {
        shares[range].iter().map(|&share| u128::from(share)).sum::<u128>() * widest / u128::from(room)
    };
    // `best[i]` is the largest filling of the best cut of the first `i` shares into the ranges so far, and where the last
    // of them begins.
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
pub(crate) fn check_devices(devices: &[(Runtime, Part)], layers: usize) -> Result<&(Runtime, Part)> {
    let Some(lead) = devices.last() else {
        return Err(EngineError::Option("a model needs a device".into()));
    };
    let parts: Vec<Part> = devices.iter().map(|(_, part)| part.clone()).collect();
    Part::check_all(&parts, layers)?;
    if devices.len() == 1 {
        return Ok(lead);
    }
    for (rank, (runtime, _)) in devices.iter().enumerate() {
        let place = runtime.backend().group().map(|group| (group.rank(), group.size()));
        if place != Some((rank, devices.len())) {
            let count = devices.len();
            let reason = format!(
                "device {rank} of a model on {count} devices is not device {rank} of a group of {count}"
            );
            return Err(EngineError::Option(reason));
        }
    }
    Ok(lead)
}

/// The cache of all devices, and each one's layers in it.
pub(crate) fn cache_spec(
    models: &[(&Runtime, HybridModel)],
    format: CacheFormat,
) -> (CacheSpec, Vec<(Runtime, Range<usize>)>) {
    let (mut spec, mut places) = (CacheSpec { layers: Vec::new(), format }, Vec::with_capacity(models.len()));
    for (runtime, model) in models {
        let start = spec.layers.len();
        spec.layers.extend(model.cache_spec(format).layers);
        places.push(((*runtime).clone(), start..spec.layers.len()));
    }
    (spec, places)
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
