//! Converts experts to MLX's form: three stacks for a layer, `switch_mlp.{gate,up,down}_proj`. The source has either a
//! tensor for each expert, or `experts.gate_up_proj` and `experts.down_proj`.

use std::collections::BTreeMap;

use super::recipe::module_of;
use crate::{TensorInfo, TensorSpec};

/// Some tensors of the source, and the stacks that they become.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stacks {
    /// The source's tensors, in the order of their rows.
    pub sources: Vec<String>,
    /// The output modules. They take rows in turn.
    pub modules: Vec<String>,
    /// Shape of each module.
    pub shape: Vec<usize>,
    /// Rows that one module takes in its turn.
    pub turn_rows: usize,
    /// Whether the name differs from the source's.
    pub is_moved: bool,
}

/// Experts that the source stores as separate tensors, by their stack.
pub(super) struct Experts {
    /// For each stack, the tensor names by expert number.
    apart: BTreeMap<String, BTreeMap<usize, String>>,
}

impl Experts {
    pub(super) fn find(tensors: &[TensorSpec]) -> Experts {
        let mut apart: BTreeMap<String, BTreeMap<usize, String>> = BTreeMap::new();
        let mut first: BTreeMap<String, (Vec<usize>, keel_array::DType)> = BTreeMap::new();
        for TensorSpec { name, dtype, shape } in tensors {
            let info = TensorInfo { dtype: *dtype, shape };
            let Some((stack, number)) = module_of(name, &info).and_then(projection_of) else { continue };
            let kind = (shape.clone(), *dtype);
            if *first.entry(stack.clone()).or_insert_with(|| kind.clone()) == kind {
                apart.entry(stack).or_default().insert(number, name.clone());
            } else {
                // Experts of different shapes cannot form a stack; this entry excludes the whole stack below.
                apart.entry(stack).or_default().insert(usize::MAX, name.clone());
            }
        }
        apart.retain(|_, experts| experts.keys().copied().eq(0..experts.len()));
        Experts { apart }
    }

    /// The conversion of tensor `name` of a module that can be quantised. `None` for all but the first of separate
    /// experts: the first converts the whole stack.
    pub(super) fn stacks_of(&self, name: &str, module: &str, info: &TensorInfo<'_>) -> Option<Stacks> {
        let found = projection_of(module)
            .and_then(|(stack, number)| Some((number, self.apart.get_key_value(&stack)?)));
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

/// For the name `<layer>.experts.<number>.<part>` of an expert that is stored by itself: the name of its stack, the
/// number and the part.
pub fn expert_of(name: &str) -> Option<(String, usize, &str)> {
    let (layer, rest) = name.split_once(".experts.")?;
    let (number, part) = rest.split_once('.')?;
    Some((format!("{layer}.switch_mlp.{part}"), number.parse().ok()?, part))
}

/// The stack and the number of a module that is one of an expert's projections.
fn projection_of(module: &str) -> Option<(String, usize)> {
    let (stack, number, part) = expert_of(module)?;
    ["gate_proj", "up_proj", "down_proj"].contains(&part).then_some((stack, number))
}
