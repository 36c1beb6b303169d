//! Experts on their way to MLX's form: three stacks for a layer, `switch_mlp.{gate,up,down}_proj`, whether the source has a
//! tensor for each expert or `experts.gate_up_proj` and `experts.down_proj`.

use std::collections::BTreeMap;

use super::recipe::module_of;
use crate::{TensorInfo, TensorSpec};

/// The stacks that tensors of the source become.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stacks {
    /// The source's tensors, in the order in which their rows follow each other.
    pub sources: Vec<String>,
    /// The modules, which take rows in turns.
    pub modules: Vec<String>,
    /// Extents of each of them.
    pub shape: Vec<usize>,
    /// Rows of a turn.
    pub turn_rows: usize,
    /// Whether it is called otherwise in the source.
    pub is_moved: bool,
}

/// The experts that the source keeps apart, by the stack that they become.
pub(super) struct Experts {
    /// Names by number.
    apart: BTreeMap<String, BTreeMap<usize, String>>,
}

impl Experts {
    pub(super) fn find(tensors: &[TensorSpec]) -> Experts {
        let mut apart: BTreeMap<String, BTreeMap<usize, String>> = BTreeMap::new();
        let mut first: BTreeMap<String, (Vec<usize>, keel_array::DType)> = BTreeMap::new();
        for TensorSpec { name, dtype, shape } in tensors {
            let info = TensorInfo { dtype: *dtype, shape };
            let Some((stack, number)) = module_of(name, &info).and_then(expert) else { continue };
            let kind = (shape.clone(), *dtype);
            if *first.entry(stack.clone()).or_insert_with(|| kind.clone()) == kind {
                apart.entry(stack).or_default().insert(number, name.clone());
            } else {
                // Experts of several shapes are no stack.
                apart.entry(stack).or_default().insert(usize::MAX, name.clone());
            }
        }
        apart.retain(|_, experts| experts.keys().copied().eq(0..experts.len()));
        Experts { apart }
    }

    /// What becomes of tensor `name` of a module that can be quantised; `None` for an expert that is done together with the first.
    pub(super) fn stacks_of(&self, name: &str, module: &str, info: &TensorInfo<'_>) -> Option<Stacks> {
        let found =
            expert(module).and_then(|(stack, number)| Some((number, self.apart.get_key_value(&stack)?)));
        if let Some((number, (stack, experts))) = found {
            let shape = [&[experts.len()], info.shape].concat();
            return (number == 0).then(|| Stacks {
                sources: experts.values().cloned().collect(),
                modules: vec![stack.clone()],
                shape,
                turn_rows: 0,
                is_moved: true,
            });
        }
        let kept = Stacks {
            sources: vec![name.into()],
            modules: vec![module.into()],
            shape: info.shape.into(),
            turn_rows: 0,
            is_moved: false,
        };
        let (Some((layer, part)), &[experts, rows, cols]) = (module.split_once(".experts."), info.shape)
        else {
            return Some(kept);
        };
        match part {
            "gate_up_proj" if rows % 2 == 0 => Some(Stacks {
                modules: ["gate_proj", "up_proj"].map(|part| format!("{layer}.switch_mlp.{part}")).into(),
                shape: vec![experts, rows / 2, cols],
                turn_rows: rows / 2,
                is_moved: true,
                ..kept
            }),
            "down_proj" => Some(Stacks {
                modules: vec![format!("{layer}.switch_mlp.down_proj")],
                is_moved: true,
                ..kept
            }),
            _ => Some(kept),
        }
    }
}

/// The stack of `<layer>.experts.<number>.<projection>`, and the number.
fn expert(module: &str) -> Option<(String, usize)> {
    let (layer, rest) = module.split_once(".experts.")?;
    let (number, projection) = rest.split_once('.')?;
    if !["gate_proj", "up_proj", "down_proj"].contains(&projection) {
        return None;
    }
    Some((format!("{layer}.switch_mlp.{projection}"), number.parse().ok()?))
}
