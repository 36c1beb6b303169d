//! A checkpoint as the device of a share sees it: some rows or columns of each layer.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use keel_array::{WeightFormat, WeightSpec};
use keel_weights::RotationValues;

use crate::loading::{Altered, Parameters, RowSink};
use crate::split::columns::{Columns, columns_together, pick_columns};
use crate::{HybridConfig, MixtureCut, ModelError, Result, Share, SumOrder};

/// How a layer is divided.
enum Cut {
    /// Not at all.
    Whole,
    /// By rows: the share's ranges of them.
    Rows(Vec<Range<usize>>),
    /// By columns: every device has an even share.
    Columns,
}

/// Rows of a layer that are divided together, such as those of its queries.
struct Section {
    len: usize,
    /// The share's range of them.
    own: Range<usize>,
}

/// A checkpoint, as the device of a share sees it.
pub(crate) struct ShareParameters<'a> {
    whole: &'a dyn Parameters,
    config: &'a HybridConfig,
    share: Share,
    order: SumOrder,
    /// Rows of the layers of the whole checkpoint that were asked about.
    rows: Mutex<HashMap<String, usize>>,
}

impl<'a> ShareParameters<'a> {
    /// The share of a checkpoint of the model with this config.
    pub fn new(
        whole: &'a dyn Parameters,
        config: &'a HybridConfig,
        share: Share,
        order: SumOrder,
    ) -> ShareParameters<'a> {
        ShareParameters { whole, config, share, order, rows: Mutex::default() }
    }

    /// Whether a layer belongs to experts that are not cut.
    fn is_of_whole_expert(&self, module: &str) -> bool {
        let of_experts =
            [".experts.", "switch_mlp.", ".shared_expert."].iter().any(|name| module.contains(name));
        self.share.mixture == MixtureCut::Experts && of_experts
    }

    /// Rows of a layer of the whole checkpoint, or entries of a parameter with one for each row. The share has `own`.
    fn whole_rows(&self, module: &str, own: usize) -> usize {
        let (c, share) = (self.config, self.share);
        match last(module) {
            _ if self.is_of_whole_expert(module) => own,
            "k_proj" | "v_proj" => own / share.kv_heads(c.kv_heads).len().max(1) * c.kv_heads,
            "qkv_proj" => (c.heads + 2 * c.kv_heads) * c.head_dim,
            "in_proj_qkv" | "conv1d" => c.recurrent_layers().conv_channels(),
            name if EVEN.contains(&name) || name == "gate_up_proj" => own * share.count,
            _ => own,
        }
    }

    /// How a layer of `rows` rows, or a parameter with one entry for each of them, is divided.
    fn cut(&self, module: &str, rows: usize) -> Cut {
        let (c, share) = (self.config, self.share);
        // The share's ranges of parts that follow each other.
        let ranges = |parts: &[Section]| {
            let mut start = 0;
            let range = |Section { len, own }: &Section| {
                let range = start + own.start..start + own.end;
                start += len;
                range
            };
            Cut::Rows(parts.iter().map(range).collect())
        };
        let even = |len: usize| Section { len, own: share.of(len) };
        let key_values = |len: usize| {
            let (heads, size) = (share.kv_heads(c.kv_heads), len / c.kv_heads.max(1));
            Section { len, own: heads.start * size..heads.end * size }
        };
        match last(module) {
            _ if self.is_of_whole_expert(module) => Cut::Whole,
            "k_proj" | "v_proj" => ranges(&[key_values(rows)]),
            "qkv_proj" => {
                let kv = c.kv_heads * c.head_dim;
                ranges(&[even(c.heads * c.head_dim), key_values(kv), key_values(kv)])
            }
            "in_proj_qkv" | "conv1d" => {
                let r = c.recurrent_layers();
                let keys = r.key_heads * r.key_dim;
                ranges(&[even(keys), even(keys), even(r.values())])
            }
            "gate_up_proj" => ranges(&[even(rows / 2), even(rows / 2)]),
            "o_proj" | "down_proj" | "out_proj" => Cut::Columns,
            name if EVEN.contains(&name) => ranges(&[even(rows)]),
            _ => Cut::Whole,
        }
    }

    /// The part of the rotation of a layer's input that belongs to this device's columns. Pairs stay within groups of
    /// columns, so a device that has whole groups has both columns of each pair.
    fn own_rotation(&self, module: &str, whole: RotationValues) -> Result<RotationValues> {
        if !matches!(self.cut(module, 0), Cut::Columns) {
            return Ok(whole);
        }
        let (cols, count) = (whole.scales.len(), self.share.count);
        let own = self.share.of(cols);
        let of_rounds = |row: &[u32]| row[own.clone()].to_vec();
        let mut pairs: Vec<u32> = whole.pairs.chunks_exact(cols.max(1)).flat_map(of_rounds).collect();
        for column in &mut pairs {
            if !own.contains(&(*column as usize)) {
                return Err(ModelError::Part(format!(
                    "{module}: {cols} columns cannot be split over {count} devices, because column {column} is rotated together with \
                     one of {} to {}: take fewer devices, or --split pipeline",
                    own.start,
                    own.end - 1
                )));
            }
            *column -= own.start as u32;
        }
        let of_rounds = |row: &[f32]| row[own.start / 2..own.end / 2].to_vec();
        let angles = whole.angles.chunks_exact((cols / 2).max(1)).flat_map(of_rounds).collect();
        Ok(RotationValues { scales: whole.scales[own.clone()].to_vec(), pairs, angles })
    }
}

/// Layers and parameters whose rows belong to heads, key heads or columns, in order.
const EVEN: [&str; 10] = [
    "q_proj",
    "gate_proj",
    "up_proj",
    "in_proj_z",
    "in_proj_a",
    "in_proj_b",
    "in_proj_qkvz",
    "in_proj_ba",
    "A_log",
    "dt_bias",
];

/// The layer that a small parameter belongs to, or the parameter itself.
fn layer_of(name: &str) -> &str {
    name.strip_suffix(".weight").or_else(|| name.strip_suffix(".bias")).unwrap_or(name)
}

/// The last part of a name.
fn last(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

/// The parts of `ranges`, laid end to end, that `range` names.
fn within(ranges: &[Range<usize>], range: Range<usize>) -> Vec<Range<usize>> {
    let mut at = 0;
    let mut parts = Vec::new();
    for whole in ranges {
        let own = at..at + whole.len();
        let (start, end) = (range.start.max(own.start), range.end.min(own.end));
        if start < end {
            parts.push(whole.start + start - at..whole.start + end - at);
        }
        at = own.end;
    }
    parts
}

impl Altered for ShareParameters<'_> {
    fn inner(&self) -> &dyn Parameters {
        self.whole
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let mut shape = self.whole.shape(name)?;
        if let Some(rows) = shape.first_mut()
            && let Cut::Rows(ranges) = self.cut(layer_of(name), *rows)
        {
            *rows = ranges.iter().map(Range::len).sum();
        }
        Some(shape)
    }

    fn linear_format(
        &self,
        module: &str,
        experts: Option<usize>,
        rows: usize,
        cols: usize,
    ) -> Result<WeightFormat> {
        let rows = self.whole_rows(module, rows);
        let whole_cols = match self.cut(module, rows) {
            Cut::Columns => cols * self.share.count,
            _ => cols,
        };
        let format = self.whole.linear_format(module, experts, rows, whole_cols)?;
        self.rows.lock().unwrap_or_else(PoisonError::into_inner).insert(module.into(), rows);
        let (together, tiles) = (columns_together(format), self.whole.column_tiles(module));
        if whole_cols != cols && !cols.is_multiple_of(tiles * together) {
            let of_tiles = if tiles == 1 { String::new() } else { format!("{tiles} tiles of ") };
            return Err(ModelError::Part(format!(
                "{module}: {of_tiles}{} columns in groups of {together} cannot be split over {} devices, which would have {} each: \
                 take fewer devices, or --split pipeline",
                whole_cols / tiles,
                self.share.count,
                cols / tiles,
            )));
        }
        Ok(format)
    }

    fn linear_rows(
        &self,
        module: &str,
        expert: Option<usize>,
        rows: Range<usize>,
        spec: &WeightSpec,
        sink: &mut RowSink<'_>,
    ) -> Result<()> {
        // The loader asks for a layer's format before it reads rows.
        let rows_of = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let whole_rows = rows_of.get(module).copied().unwrap_or_default();
        drop(rows_of);
        match self.cut(module, whole_rows) {
            Cut::Rows(ranges) if !self.whole.rows_are_alike() => {
                let parts = within(&ranges, rows);
                parts
                    .into_iter()
                    .try_for_each(|part| self.whole.linear_rows(module, expert, part, spec, sink))
            }
            Cut::Columns => {
                let whole = WeightSpec { cols: spec.cols * self.share.count, ..*spec };
                let Share { index, count, .. } = self.share;
                let columns = Columns { tiles: self.whole.column_tiles(module), index, count };
                self.whole.linear_rows(module, expert, rows, &whole, &mut |count, data| {
                    pick_columns(count, data, &columns, sink)
                })
            }
            Cut::Whole | Cut::Rows(_) => self.whole.linear_rows(module, expert, rows, spec, sink),
        }
    }

    fn rotation(&self, prefix: &str, module: &str) -> Result<Option<RotationValues>> {
        let values = self.whole.rotation(prefix, module)?;
        values.map(|values| self.own_rotation(module, values)).transpose()
    }

    fn values(&self, name: &str, elements: usize) -> Result<Vec<f32>> {
        let layer = layer_of(name);
        let rows = self.whole_rows(layer, elements);
        match self.cut(layer, rows) {
            // Every device adds its product to the sum; the first one adds the bias. In the fixed order each device
            // adds it to the whole sum.
            Cut::Columns if self.share.index > 0 && self.order == SumOrder::ByDevice => {
                Ok(vec![0.0; elements])
            }
            Cut::Rows(ranges) => {
                let own = ranges.iter().map(Range::len).sum::<usize>();
                let each = elements / own.max(1);
                let all = self.whole.values(name, rows * each)?;
                let part = |range: Range<usize>| all.get(range.start * each..range.end * each);
                let parts: Option<Vec<&[f32]>> = ranges.into_iter().map(part).collect();
                let misshapen = || {
                    ModelError::Part(format!("{name}: {} values are fewer than {}", all.len(), rows * each))
                };
                Ok(parts.ok_or_else(misshapen)?.concat())
            }
            _ => self.whole.values(name, elements),
        }
    }
}
