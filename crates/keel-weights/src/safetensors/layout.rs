//! Places of the tensors in a file to be written, computed before the first byte is written.

use std::collections::BTreeMap;

use keel_array::DType;
use serde_json::{Map, Value, json};

use super::header::format_name;
use crate::{
    source::element_count,
    stream::{TensorSpan, TensorSpans},
};

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Its dimensions, slowest first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Bytes of the elements, or `None` if they overflow.
    pub fn bytes(&self) -> Option<usize> {
        element_count(&self.shape)?.checked_mul(self.dtype.size())
    }
}

/// The header of a file and the place of each tensor in it.
pub(super) struct Layout {
    /// Length field and JSON, padded to a multiple of eight bytes.
    pub header: Vec<u8>,
    pub places: TensorSpans,
}

impl Layout {
    /// Places the tensors in descending order of element size, so that each lies at a multiple of its element size.
    /// `Err` names the tensor that cannot be placed, and the reason.
    pub fn new(specs: &[TensorSpec], metadata: &BTreeMap<String, String>) -> Result<Layout, String> {
        let mut order: Vec<&TensorSpec> = specs.iter().collect();
        order.sort_by_key(|spec| std::cmp::Reverse(spec.dtype.size()));
        let mut json = Map::new();
        if !metadata.is_empty() {
            json.insert("__metadata__".into(), json!(metadata));
        }
        let mut places = BTreeMap::new();
        let mut end = 0u64;
        for spec in order {
            let TensorSpec { name, dtype, shape } = spec;
            let begin = end;
            let bytes = spec.bytes().map(|bytes| bytes as u64);
            end = bytes
                .and_then(|bytes| begin.checked_add(bytes))
                .ok_or_else(|| format!("tensor '{name}' of shape {shape:?} overflows 64 bits"))?;
            let entry = json!({"dtype": format_name(*dtype), "shape": shape, "data_offsets": [begin, end]});
            if name == "__metadata__" || json.insert(name.clone(), entry).is_some() {
                return Err(format!("two tensors are named '{name}'"));
            }
            places.insert(name.clone(), TensorSpan { offset: begin, bytes: end - begin });
        }
        let header = frame(&Value::Object(json));
        places.values_mut().for_each(|place: &mut TensorSpan| place.offset += header.len() as u64);
        Ok(Layout { header, places })
    }
}

/// The JSON after its length, padded with spaces.
fn frame(json: &Value) -> Vec<u8> {
    let mut text = json.to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text);
    header
}
