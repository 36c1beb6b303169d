//! The checkpoints that the loader refuses, and the pages of a checkpoint that it releases, on a backend that keeps
//! nothing.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use keel_array::{
    Backend, Compute, DType, DeviceMemory, Kernel, Launch, Memory, Programs, RowBlock, Runtime,
    RuntimeOptions, Submission, WeightFormat, WeightSpec,
};
use keel_models::loading::{Altered, CheckpointParameters, Loader, Parameters, RandomParameters, SourceRows};
use keel_models::{has_mtp_head, read_config, read_config_of, shape_with_mtp_head};
use keel_weights::{RotationValues, TensorInfo, TensorSource, TensorView};

/// A backend whose memory holds nothing.
struct Forgetful;

struct Nothing;

impl DeviceMemory for Nothing {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Backend for Forgetful {
    fn name(&self) -> &str {
        "forgetful"
    }
}

impl Memory for Forgetful {
    fn allocate(&self, _: usize) -> Result<Box<dyn DeviceMemory>, String> {
        Ok(Box::new(Nothing))
    }

    fn write(&self, _: &dyn DeviceMemory, _: usize, _: &[u8]) {}

    fn read(&self, _: &dyn DeviceMemory, _: usize, bytes: &mut [u8]) -> keel_array::Result<()> {
        bytes.fill(0);
        Ok(())
    }

    fn packed_bytes(&self, spec: &WeightSpec) -> usize {
        4 * spec.experts * spec.rows * spec.cols
    }

    fn pack(
        &self,
        _: &WeightSpec,
        _: &dyn DeviceMemory,
        _: usize,
        _: &RowBlock<'_>,
    ) -> keel_array::Result<()> {
        Ok(())
    }
}

impl Programs for Forgetful {
    fn supports(&self, _: &Kernel) -> Result<(), String> {
        Ok(())
    }

    fn workspace_bytes(&self, _: &Kernel) -> usize {
        0
    }
}

impl Submission for Forgetful {
    fn launch(&self, _: &Launch<'_>) -> keel_array::Result<()> {
        Ok(())
    }
}

fn runtime() -> Runtime {
    Runtime::new(Arc::new(Forgetful), RuntimeOptions::default())
}

/// All layers rotate their input.
struct Rotated(RandomParameters);

impl Altered for Rotated {
    fn inner(&self) -> &dyn Parameters {
        &self.0
    }

    fn rotation(&self, _: &str, _: &str) -> keel_models::Result<Option<RotationValues>> {
        Ok(Some(RotationValues { scales: vec![1.0; 32], pairs: (0..32).collect(), angles: vec![0.5; 16] }))
    }
}

/// `Altered` passes every method on. A method that returned a default instead would load a different model.
#[test]
fn what_is_not_altered_is_that_of_the_others() {
    let dense = || RandomParameters { format: WeightFormat::Dense(DType::F32) };
    let (others, altered) = (dense(), Rotated(dense()));
    let [others, altered]: [&dyn Parameters; 2] = [&others, &altered];
    for parameters in [others, altered] {
        assert!(parameters.rows_are_alike() && parameters.norms_are_scales());
    }
    assert!(others.rotation("lm_head.", "lm_head").expect("there is none").is_none());
    assert!(altered.rotation("lm_head.", "lm_head").expect("it is sound").is_some());
}

#[test]
fn a_layer_that_cannot_rotate_its_input_is_refused() {
    let parameters = Rotated(RandomParameters { format: WeightFormat::Dense(DType::F32) });
    let runtime = runtime();
    let loader = Loader::new(&runtime, &parameters, Compute::F32, &|_| ());
    let rotating = vec![SourceRows::whole("model.layers.0.mlp.down_proj", 8)];
    loader.projection(rotating, 32).expect("it rotates its input");
    let message = loader.linear(SourceRows::whole("lm_head", 8), 32).expect_err("wrong logits").to_string();
    assert!(message.contains("lm_head: its input is rotated"), "{message}");
}

/// The name of the stack.
const STACK: &str = "model.layers.0.mlp.experts.gate_up_proj";
/// Experts, rows and columns.
const SHAPE: [usize; 3] = [4, 300, 8];

/// A checkpoint of one stack of experts, a bare parameter. It notes which of its rows are released.
struct Stacked {
    bytes: Vec<u8>,
    released: Mutex<Vec<Range<usize>>>,
}

impl TensorSource for Stacked {
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new([STACK].into_iter())
    }

    fn contains(&self, name: &str) -> bool {
        name == STACK
    }

    fn info(&self, _: &str) -> keel_weights::Result<TensorInfo<'_>> {
        Ok(TensorInfo { dtype: DType::F32, shape: &SHAPE })
    }

    fn tensor(&self, _: &str) -> keel_weights::Result<TensorView<'_>> {
        TensorView::new(STACK, DType::F32, &SHAPE, &self.bytes)
    }

    fn release_rows(&self, name: &str, rows: Range<usize>) {
        if name == STACK {
            self.released.lock().expect("no test panics with it").push(rows);
        }
    }
}

/// A device that shares the experts with others reads some of them.
#[test]
fn bare_stacks_are_released_while_they_are_read_and_after_the_last_own_expert() {
    let [experts, rows, cols] = SHAPE;
    for (own, expected) in [
        (1..3, vec![300..556, 556..600, 600..856, 856..900, 0..usize::MAX]),
        (3..4, vec![900..1156, 1156..1200, 0..usize::MAX]),
    ] {
        let source = Stacked { bytes: vec![0; 4 * experts * rows * cols], released: Mutex::default() };
        let parameters = CheckpointParameters(&source);
        let runtime = runtime();
        let loader = Loader::new(&runtime, &parameters, Compute::F32, &|_| ());
        let of = |expert| vec![SourceRows::expert(STACK, expert, experts, rows)];
        loader.experts(&own.clone().map(of).collect::<Vec<_>>(), cols).expect("the stack is sound");
        assert_eq!(*source.released.lock().expect("no test panics with it"), expected, "{own:?}");
    }
}

/// A checkpoint of some tensors.
struct Named<'a>(&'a [&'a str]);

impl TensorSource for Named<'_> {
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.0.iter().copied())
    }

    fn contains(&self, name: &str) -> bool {
        self.0.contains(&name)
    }

    fn info(&self, name: &str) -> keel_weights::Result<TensorInfo<'_>> {
        unreachable!("the shape of {name} is not needed")
    }

    fn tensor(&self, name: &str) -> keel_weights::Result<TensorView<'_>> {
        unreachable!("the bytes of {name} are not needed")
    }
}

#[test]
fn a_head_is_found_under_all_of_its_names_packed_or_not() {
    let json = shape_with_mtp_head("qwen3.5-0.8b").expect("a shape with a head");
    let config = read_config(&json).expect("complete");
    let has = |name: &str| has_mtp_head(&config, &CheckpointParameters(&Named(&[name])));
    for root in ["mtp", "language_model.mtp", "model.mtp", "model.language_model.mtp"] {
        for kind in ["weight", "qweight"] {
            let name = format!("{root}.fc.{kind}");
            assert!(has(&name), "{name}");
        }
    }
    for other in ["mtp.norm.weight", "visual.mtp.fc.weight", "mtp.fc.bias"] {
        assert!(!has(other), "{other}");
    }
}

#[test]
fn a_head_of_qwen3_next_is_counted_by_its_tensors() {
    let layers = |model_type: &str, count: serde_json::Value, names: &[&str]| {
        let mut json = shape_with_mtp_head("qwen3.5-0.8b").expect("a shape with a head");
        json["model_type"] = model_type.into();
        json["mtp_num_hidden_layers"] = count;
        let parameters = Named(names);
        let config = read_config_of(&json, &CheckpointParameters(&parameters)).expect("complete");
        assert_eq!(has_mtp_head(&config, &CheckpointParameters(&parameters)), config.mtp_layers > 0);
        config.mtp_layers
    };
    let head = ["mtp.fc.weight", "mtp.layers.0.input_layernorm.weight"];
    let absent = || serde_json::Value::Null;
    assert_eq!(layers("qwen3_next", absent(), &head), 1);
    assert_eq!(layers("qwen3_next", absent(), &head[..1]), 0);
    assert_eq!(layers("qwen3_next", absent(), &head[1..]), 0);
    assert_eq!(layers("qwen3_next", 0.into(), &head), 0);
    assert_eq!(layers("qwen3_5", absent(), &head), 0);
}
