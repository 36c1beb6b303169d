//! Every fixture, split in 2, 3 and 4 by layers, by shares of every layer, and by both: logits of the whole model, the
//! MTP head, saved and loaded sequences, prefixes, parking, and the ledger of each device. In the fixed order of sums,
//! the bits of one device.
//!
//! `crate::common::splitting` asserts that each device allocates its planned bytes, takes no more, and keeps nothing.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::common::batching::{assert_all_is_back, run};
use crate::common::splitting::{self, backends, end, load_on};
use crate::common::{
    all_logits, decoded, engine, exact, expect_same_state, expected, fixture, models, relative_error, runtime,
};
use keel_array::{ArrayError, Backend, Compute, Launch};
use keel_engine::batch::{BatchOptions, BatchRequest, Batcher};
use keel_engine::{Depth, Engine, EngineOptions, SpeculationOptions};
use keel_models::loading::CheckpointParameters;
use keel_models::{MixtureCut, Part, SumOrder, read_config_of};
use keel_testkit::fixtures_plain::{OTHERS, other_fixture};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};
use keel_weights::Checkpoint;

/// Sums in another order differ by less than this.
const ROUNDING_MAX: f64 = 1e-5;

/// Stages, and devices of each.
type Grid = (usize, usize);

const PIPELINES: [Grid; 3] = [(2, 1), (3, 1), (4, 1)];
const TENSORS: [Grid; 3] = [(1, 2), (1, 3), (1, 4)];
const BOTH: [Grid; 2] = [(2, 2), (2, 3)];

fn fixtures() -> impl Iterator<Item = (&'static str, PathBuf)> {
    let others = OTHERS.into_iter().filter_map(|name| Some((name, other_fixture(name)?)));
    models().map(|name| (name, fixture(name))).chain(others)
}

/// A model split like this; the refusal if it cannot be. Mixtures of experts are divided like this, or as planned.
fn split_engine(
    folder: &Path,
    options: EngineOptions,
    (grid, mixture): (Grid, Option<MixtureCut>),
) -> Result<Engine, String> {
    let checkpoint = Checkpoint::open(folder).expect("the checkpoint opens");
    let parameters = CheckpointParameters(&checkpoint);
    let source = (&parameters as _, checkpoint.config());
    let parts = splitting::parts(source, options, grid).map_err(|error| error.to_string())?;
    let parts = match mixture {
        Some(mixture) => Part::by(mixture, parts),
        None => parts,
    };
    load_on(source, options, backends(parts.len(), false), &parts).map_err(|error| error.to_string())
}

/// Checks that a model was refused for a reason that the user can act on.
fn expect_good_reason(name: &str, (stages, shares): Grid, reason: &str) {
    let counts = [stages, shares].map(|count| count.to_string());
    let is_told = reason.contains("--split pipeline") || reason.contains("at least as many layers");
    let is_of_a_kind = reason.contains("norms all heads together");
    let has_numbers = counts.iter().any(|count| reason.contains(count)) || is_of_a_kind;
    assert!(is_told && has_numbers, "{name} in {stages} x {shares}: {reason}");
}

/// Runs `check` over the fixtures that can be split like this. Returns how many there are.
fn each_split(
    grid: Grid,
    options: impl Fn(&Path) -> EngineOptions,
    check: impl Fn(&str, &Path, Engine),
) -> usize {
    let mut count = 0;
    for (name, folder) in fixtures() {
        match split_engine(&folder, options(&folder), (grid, None)) {
            Ok(engine) => {
                check(name, &folder, engine);
                count += 1;
            }
            Err(reason) => expect_good_reason(name, grid, &reason),
        }
    }
    count
}

/// Logits of a split model, compared with those of the whole one in both regimes.
fn compare_logits(grid: Grid, is_exact: bool) -> usize {
    let compare = |name: &str, folder: &Path, parts| {
        expect_logits(&format!("{name} in {grid:?}"), folder, parts, is_exact)
    };
    each_split(grid, |_| exact(), compare)
}

fn expect_logits(what: &str, folder: &Path, mut parts: Engine, is_exact: bool) {
    let want = expected(folder);
    let mtp = want.mtp_logits.is_some();
    let mut whole = engine(folder, &runtime(1), exact());
    for one_by_one in [false, true] {
        let what = format!("{what}, one by one: {one_by_one}");
        let got = all_logits(&mut parts, &want.ids, one_by_one, mtp);
        let whole = all_logits(&mut whole, &want.ids, one_by_one, mtp);
        if is_exact {
            assert!(got == whole, "{what}");
            continue;
        }
        assert!(got == all_logits(&mut parts, &want.ids, one_by_one, mtp), "{what}: two runs differ");
        for (got, whole) in [(&got.0, &whole.0), (&got.1, &whole.1)] {
            let error = if mtp || !whole.is_empty() { relative_error(got, whole) } else { 0.0 };
            assert!(error <= ROUNDING_MAX, "{what}: logits differ by {error:.1e}");
        }
    }
    end(parts);
}

#[test]
fn mixtures_shared_by_experts_give_the_logits_of_the_whole_model_to_rounding() {
    let mut counts = Vec::new();
    for grid in [(1, 2), (1, 3), (1, 4), (2, 2)] {
        let mut count = 0;
        for (name, folder) in fixtures() {
            let checkpoint = Checkpoint::open(&folder).expect("the checkpoint opens");
            let parameters = CheckpointParameters(&checkpoint);
            let config = read_config_of(checkpoint.config(), &parameters).expect("a config");
            if config.moe.is_none() {
                continue;
            }
            match split_engine(&folder, exact(), (grid, Some(MixtureCut::Experts))) {
                Ok(parts) => {
                    expect_logits(&format!("{name} by experts in {grid:?}"), &folder, parts, false);
                    count += 1;
                }
                Err(reason) => expect_good_reason(name, grid, &reason),
            }
        }
        counts.push(count);
    }
    assert!(counts[0] > 1 && counts[2] > 0 && counts[3] > 1, "mixtures in 2, 3, 4 and 2 x 2: {counts:?}");
}

/// The rows of the weights in a device's products.
#[derive(Default)]
struct ProductRows(Mutex<BTreeSet<usize>>);

impl Interceptor for ProductRows {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<(), ArrayError> {
        let products = launch.kernels().iter().filter(|kernel| kernel.op.name() == "linear");
        let rows = products.filter_map(|product| product.outputs[0].layout.shape.last().copied());
        self.0.lock().expect("a set cannot panic").extend(rows);
        backend.launch(launch)
    }
}

/// A product of other rows may be cut differently on a GPU, and round differently.
#[test]
fn devices_that_share_experts_have_the_same_router() {
    let folder = fixture("qwen3_5_moe");
    let checkpoint = Checkpoint::open(&folder).expect("the checkpoint opens");
    let source = (&CheckpointParameters(&checkpoint) as _, checkpoint.config());
    let parts = Part::by(MixtureCut::Experts, splitting::parts(source, exact(), (1, 2)).expect("it divides"));
    let seen: [Arc<ProductRows>; 2] = Default::default();
    let watched = backends(2, false).into_iter().zip(&seen);
    let watched = watched.map(|(backend, rows)| InterceptedBackend::new(backend, Arc::clone(rows) as _) as _);
    let mut engine = load_on(source, exact(), watched.collect(), &parts).expect("the model loads");
    all_logits(&mut engine, &expected(&folder).ids, false, false);
    end(engine);
    let config = read_config_of(checkpoint.config(), source.0).expect("a config");
    let router = config.moe.expect("a mixture").experts + 1;
    let of_router = seen.map(|rows| {
        rows.0.lock().expect("no test has failed").range(router - 1..=router).copied().collect::<Vec<_>>()
    });
    assert_eq!(of_router, [[router], [router]]);
}

#[test]
fn pipelines_give_the_bits_of_the_whole_model() {
    let counts = PIPELINES.map(|grid| compare_logits(grid, true));
    assert!(counts[0] > 10 && counts[1] > 5 && counts[2] > 5, "models in 2, 3 and 4: {counts:?}");
}

#[test]
fn shares_give_the_logits_of_the_whole_model_to_rounding() {
    let counts = TENSORS.map(|grid| compare_logits(grid, false));
    assert!(counts[0] > 8 && counts[2] > 1, "models in 2, 3 and 4: {counts:?}");
}

#[test]
fn stages_of_shares_give_the_logits_of_the_whole_model_to_rounding() {
    let counts = BOTH.map(|grid| compare_logits(grid, false));
    assert!(counts[0] > 8, "models in 2 x 2 and 2 x 3: {counts:?}");
}

/// Logits of the rows of a prompt and of the MTP head, in the prefill regime and in the decode regime.
fn logits_of(engine: &mut Engine, folder: &Path) -> [(Vec<f32>, Vec<f32>); 2] {
    let want = expected(folder);
    [false, true].map(|one_by_one| all_logits(engine, &want.ids, one_by_one, want.mtp_logits.is_some()))
}

/// The median of the rows' relative errors.
fn middle_row_error(want: &[f32], got: &[f32], vocab: usize) -> f64 {
    let rows = want.chunks(vocab).zip(got.chunks(vocab));
    let mut errors: Vec<f64> = rows.map(|(want, got)| relative_error(want, got)).collect();
    errors.sort_by(f64::total_cmp);
    errors[errors.len() / 2]
}

/// Compares the logits of 2 and 4 devices in the fixed order with those of one device.
fn compare_bits(compute: Compute) {
    let options = EngineOptions { sums: SumOrder::Fixed, compute, ..exact() };
    let mut counts = [0; 8];
    for (name, folder) in fixtures() {
        let checkpoint = Checkpoint::open(&folder).expect("the checkpoint opens");
        let config =
            read_config_of(checkpoint.config(), &CheckpointParameters(&checkpoint)).expect("a config");
        let has_experts = config.moe.is_some();
        let whole = logits_of(&mut engine(&folder, &runtime(1), options), &folder);
        let by_device = EngineOptions { sums: SumOrder::ByDevice, ..options };
        let other = logits_of(&mut engine(&folder, &runtime(1), by_device), &folder);
        let relative_max = if compute == Compute::F32 { ROUNDING_MAX } else { 1e-2 };
        for (fixed, other) in whole.iter().zip(&other) {
            // Where arithmetic is rounded, the router of a row may choose another one of two nearly equal experts. That
            // row and later rows then have little to do with the others.
            let error = match has_experts && compute != Compute::F32 {
                true => middle_row_error(&fixed.0, &other.0, config.vocab),
                false => relative_error(&fixed.0, &other.0),
            };
            assert!(error <= relative_max, "{name}: the order of sums changes logits by {error:.1e}");
        }
        let grids = [(1, 2), (1, 4), (2, 1), (2, 2)].into_iter();
        let cuts = grids.flat_map(|grid| [(grid, None), (grid, Some(MixtureCut::Experts))]);
        for (count, split) in counts.iter_mut().zip(cuts).filter(|(_, (_, cut))| cut.is_none() || has_experts)
        {
            match split_engine(&folder, options, split) {
                Ok(mut parts) => {
                    let got = logits_of(&mut parts, &folder);
                    assert!(got == whole, "{name} in {split:?}, {compute:?}: other bits than on one device");
                    end(parts);
                    *count += 1;
                }
                Err(reason) => expect_good_reason(name, split.0, &reason),
            }
        }
    }
    let [two, two_by_experts, four, four_by_experts, stages, _, both, _] = counts;
    assert!(two > 8 && four > 1 && stages > 10 && both > 8, "models in each split: {counts:?}");
    assert!(two_by_experts > 1 && four_by_experts > 0, "mixtures by experts: {counts:?}");
}

#[test]
fn in_the_fixed_order_two_and_four_devices_give_the_bits_of_one() {
    compare_bits(Compute::F32);
}

#[test]
fn in_the_fixed_order_activations_of_8_and_16_bits_give_the_bits_of_one_device() {
    compare_bits(Compute::Auto);
}

fn serving(folder: &Path) -> EngineOptions {
    let drafts = if expected(folder).mtp_logits.is_some() { 2 } else { 0 };
    EngineOptions {
        context: 512,
        sequences: 2,
        checkpoints: 4,
        prefill_step: 128,
        drafts,
        compute: Compute::F32,
        swap_bytes: 4 << 20,
        ..EngineOptions::default()
    }
}

fn prompt(tokens: u32) -> Vec<u32> {
    (0..tokens).map(|i| (i * 7919 + 11) % 251).collect()
}

/// A sequence that is saved and loaded, and one that is parked and comes back, go on as if nothing had happened.
fn expect_kept(name: &str, parts: &mut Engine) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("sequence");
    let tokens = [5, 6, 7];
    let mut sequence = decoded(parts, &prompt(130), &tokens);
    let all: Vec<u32> = prompt(130).into_iter().chain(tokens).collect();
    parts.commit(&mut sequence).expect("runs");
    parts.cache().save(&sequence, &all, name, &path).expect("written");
    parts.cache_mut().park(&mut sequence).expect("there is room");
    let (loaded, ids) = parts.cache_mut().load(name, &path).expect("read");
    assert_eq!(ids, all, "{name}");
    parts.cache_mut().unpark(&mut sequence).expect("it comes back");
    expect_same_state(parts, loaded, sequence);
}

/// A request that finds its beginning remembered answers as one that does not, also after the prefixes were saved and
/// restored. Models with sliding layers remember nothing, whole or split.
fn expect_prefixes(name: &str, parts: Engine) -> Engine {
    if parts.model().config.window.is_some() {
        return parts;
    }
    let speculation = SpeculationOptions { depth: Depth::Fixed(2), ..SpeculationOptions::default() };
    let options = BatchOptions { step_tokens: 128, speculation, ..BatchOptions::default() };
    let mut batcher = Batcher::new(parts, options);
    let request = || BatchRequest::new(0, prompt(200), 12);
    let ask = |batcher: &mut Batcher| run(batcher, vec![request()]).swap_remove(0);
    let fresh = ask(&mut batcher);
    assert!(fresh.error.is_none() && fresh.tokens.len() == 12 && fresh.cached == 0, "{name}: {fresh:?}");
    let reused = ask(&mut batcher);
    assert!(reused.cached >= 128 && reused.tokens == fresh.tokens, "{name}: {fresh:?}, then {reused:?}");
    let folder = tempfile::tempdir().expect("a temporary folder");
    assert!(batcher.save_prefixes(name, folder.path()).expect("written") > 0, "{name}");
    batcher.forget_prefixes();
    let restored = batcher.restore_prefixes(name, folder.path());
    assert!(restored.texts > 0 && restored.problems.is_empty(), "{name}: {:?}", restored.problems);
    let again = ask(&mut batcher);
    assert!(again.cached >= 128 && again.tokens == fresh.tokens, "{name}: {fresh:?}, restored {again:?}");
    assert_all_is_back(&mut batcher);
    batcher.into_engine()
}

#[test]
fn split_models_keep_sequences_and_prefixes() {
    for grid in [(2, 1), (3, 1), (4, 1), (1, 2), (1, 4), (2, 2)] {
        let count = each_split(grid, serving, |name, _, mut parts| {
            expect_kept(name, &mut parts);
            end(expect_prefixes(name, parts));
        });
        assert!(count > 1, "{count} models in {grid:?}");
    }
}
