//! A device's share of every layer, where several devices split the layers of a model.
//!
//! A device loads its share from a checkpoint that looks smaller than it is: [`ShardedParameters`] shows the rows and
//! columns of the share, under a config with the share's numbers of heads and widths. The code that reads a model type
//! does not know of it.
//!
//! ```text
//! q, k, v, z, a, b, convolution    rows of the device's heads         y_r = W[rows_r] x
//! gate, up                         rows of the device's columns
//! experts                          the same, or some of the experts whole
//! o, down, out                     the columns that read them         y = sum over r of W[:, cols_r] y_r
//! norms, router                    whole on every device
//! embedding, output head           rows of the device's tokens
//! ```

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;

use keel_array::{Peers, RowData, WeightFormat, WeightSpec};
use keel_weights::RotationValues;

use crate::loading::{Parameters, RowSink};
use crate::{HybridConfig, MixerKind, ModelError, MoeConfig, RecurrentConfig, Result};

/// How devices share a mixture of experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MixtureCut {
    /// Each has some columns of every expert. So all have the same work, whichever experts are chosen.
    #[default]
    Columns,
    /// Each has some of the experts whole; the first one also has the shared expert. A device computes something for each
    /// choice, also for those of other devices.
    Experts,
}

/// Which share of each layer a device holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// The share's number.
    pub index: usize,
    /// How many shares there are.
    pub count: usize,
    /// Rank of the device with the first share. Those with the others follow.
    pub first: usize,
    /// How mixtures of experts are divided.
    pub mixture: MixtureCut,
}

impl Default for Shard {
    /// All of every layer.
    fn default() -> Shard {
        Shard { index: 0, count: 1, first: 0, mixture: MixtureCut::Columns }
    }
}

impl Shard {
    /// The devices that hold the shares, if there are several.
    pub fn peers(self) -> Option<Peers> {
        (self.count > 1).then_some(Peers { first: self.first, count: self.count })
    }

    /// The devices that share the vocabulary, and the tokens of this one. `None` if each device has all of it: there is
    /// one, or the vocabulary does not divide evenly.
    pub fn vocabulary(self, vocab: usize) -> Option<(Peers, Range<usize>)> {
        let peers = self.peers().filter(|peers| vocab.is_multiple_of(peers.count))?;
        Some((peers, self.of(vocab)))
    }

    /// This share of `total` things, which divide evenly.
    pub fn of(self, total: usize) -> Range<usize> {
        total / self.count * self.index..total / self.count * (self.index + 1)
    }

    /// The key-value heads of this share: some of the model's, or one that several shares repeat.
    fn kv_heads(self, total: usize) -> Range<usize> {
        if total.is_multiple_of(self.count) {
            return self.of(total);
        }
        let head = self.index * total / self.count;
        head..head + 1
    }

    /// The numbers of a share of this model.
    ///
    /// # Errors
    /// A number of it does not divide by the number of shares.
    pub fn config(self, whole: &HybridConfig) -> Result<HybridConfig> {
        let count = self.count;
        let share = |what: &str, total: usize| match total.is_multiple_of(count) {
            true => Ok(total / count),
            false => Err(ModelError::Part(format!(
                "{total} {what} cannot be split evenly over {count} devices: take a number of devices that divides them, or \
                 --split pipeline"
            ))),
        };
        let recurrent = |r: RecurrentConfig| {
            Ok::<_, ModelError>(RecurrentConfig {
                key_heads: share("key heads of recurrent layers", r.key_heads)?,
                value_heads: share("value heads of recurrent layers", r.value_heads)?,
                ..r
            })
        };
        let has_recurrent = whole.layers.contains(&MixerKind::GatedDelta);
        let heads = share("attention heads", whole.heads)?;
        if !whole.kv_heads.is_multiple_of(count) && !count.is_multiple_of(whole.kv_heads.max(1)) {
            return Err(ModelError::Part(format!(
                "{} key-value heads can neither be split over {count} devices nor repeated on them evenly: take a number of \
                 devices that divides them or is a multiple of them, or --split pipeline",
                whole.kv_heads
            )));
        }
        let moe = match (&whole.moe, self.mixture) {
            (None, _) => None,
            (Some(moe), MixtureCut::Experts) => Some(self.some_experts(moe)?),
            (Some(moe), MixtureCut::Columns) => Some(MoeConfig {
                intermediate: share("columns of an expert", moe.intermediate)?,
                shared_intermediate: moe
                    .shared_intermediate
                    .map(|width| share("columns of the shared expert", width))
                    .transpose()?,
                ..moe.clone()
            }),
        };
        Ok(HybridConfig {
            heads,
            kv_heads: self.kv_heads(whole.kv_heads).len(),
            recurrent: whole.recurrent.filter(|_| has_recurrent).map(recurrent).transpose()?,
            intermediate: match &whole.moe {
                Some(moe) if moe.dense_layers.is_empty() => whole.intermediate,
                _ => whole
                    .intermediate
                    .map(|width| share("columns of the feed-forward half", width))
                    .transpose()?,
            },
            moe,
            ..whole.clone()
        })
    }
}

impl Shard {
    /// The experts of this share, and on the first one the shared expert.
    fn some_experts(self, whole: &MoeConfig) -> Result<MoeConfig> {
        let (experts, count) = (whole.experts, self.count);
        let own = self.index * experts / count..(self.index + 1) * experts / count;
        if experts < count {
            return Err(ModelError::Part(format!(
                "{experts} experts cannot be shared by {count} devices: take {experts} devices or fewer, or --split pipeline"
            )));
        }
        let shared_intermediate = whole.shared_intermediate.filter(|_| self.index == 0);
        Ok(MoeConfig { own, shared_intermediate, ..whole.clone() })
    }
}

/// How a layer is divided.
enum Cut {
    /// Not at all.
    Whole,
    /// By rows: the share's ranges of them.
    Rows(Vec<Range<usize>>),
    /// By columns: every device has an even share.
    Columns,
}

/// A checkpoint, as the device of a share sees it.
pub(crate) struct ShardedParameters<'a> {
    whole: &'a dyn Parameters,
    config: &'a HybridConfig,
    shard: Shard,
    /// Rows of the layers of the whole checkpoint that were asked about.
    rows: RefCell<HashMap<String, usize>>,
}

impl<'a> ShardedParameters<'a> {
    /// The share of a checkpoint of the model with this config.
    ///
    /// # Errors
    /// The columns of a layer lie in an order that is not split.
    pub fn new(
        whole: &'a dyn Parameters,
        config: &'a HybridConfig,
        shard: Shard,
    ) -> Result<ShardedParameters<'a>> {
        if whole.value_heads_are_tiled() && config.layers.contains(&MixerKind::GatedDelta) {
            let reason = "GGUF files keep the value heads of recurrent layers in an order that is not split by heads: use \
                          --split pipeline, or a safetensors checkpoint";
            return Err(ModelError::Part(reason.into()));
        }
        Ok(ShardedParameters { whole, config, shard, rows: RefCell::default() })
    }

    /// Whether a layer belongs to experts that are not cut.
    fn is_of_whole_expert(&self, module: &str) -> bool {
        let of_experts =
            [".experts.", "switch_mlp.", ".shared_expert."].iter().any(|name| module.contains(name));
        self.shard.mixture == MixtureCut::Experts && of_experts
    }

    /// Rows of a layer of the whole checkpoint, or entries of a parameter with one for each row. The share has `own`.
    fn whole_rows(&self, module: &str, own: usize) -> usize {
        let (c, shard) = (self.config, self.shard);
        match last(module) {
            _ if self.is_of_whole_expert(module) => own,
            "k_proj" | "v_proj" => own / shard.kv_heads(c.kv_heads).len().max(1) * c.kv_heads,
            "qkv_proj" => (c.heads + 2 * c.kv_heads) * c.head_dim,
            "in_proj_qkv" | "conv1d" => c.recurrent_layers().conv_channels(),
            name if EVEN.contains(&name) || name == "gate_up_proj" => own * shard.count,
            _ => own,
        }
    }

    /// How a layer of `rows` rows, or a parameter with one entry for each of them, is divided.
    fn cut(&self, module: &str, rows: usize) -> Cut {
        let (c, shard) = (self.config, self.shard);
        // The share's ranges of parts that follow each other.
        let ranges = |parts: &[(usize, Range<usize>)]| {
            let mut start = 0;
            let range = |(len, own): &(usize, Range<usize>)| {
                let range = start + own.start..start + own.end;
                start += len;
                range
            };
            Cut::Rows(parts.iter().map(range).collect())
        };
        let even = |len: usize| (len, shard.of(len));
        let key_values = |rows: usize| {
            let (heads, size) = (shard.kv_heads(c.kv_heads), rows / c.kv_heads.max(1));
            (rows, heads.start * size..heads.end * size)
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

/// Columns that are coded together.
fn columns_together(format: WeightFormat) -> usize {
    match format {
        WeightFormat::Dense(_) => 1,
        WeightFormat::Affine { group_size, .. } => group_size.into(),
        WeightFormat::Blocks(format) => format.values(),
    }
}

/// These entries of each row of `row` entries.
fn pick<T: Copy>(data: &[T], row: usize, columns: Range<usize>) -> Vec<T> {
    data.chunks_exact(row).flat_map(|row| &row[columns.clone()]).copied().collect()
}

/// Passes some columns of these rows of `cols` columns to `sink`.
fn pick_columns(
    (rows, data): (usize, RowData<'_>),
    (format, cols, columns): (WeightFormat, usize, &Range<usize>),
    sink: &mut RowSink<'_>,
) -> Result<()> {
    let together = columns_together(format);
    let units = columns.start / together..columns.end / together;
    let of_bytes = |unit: usize| units.start * unit..units.end * unit;
    match data {
        RowData::Dense(bytes) => {
            let unit = bytes.len() / (rows * cols).max(1);
            sink(rows, RowData::Dense(&pick(bytes, cols * unit, of_bytes(unit))))
        }
        RowData::Affine { codes, scales, biases } => {
            let groups = cols / together;
            let codes = pick(codes, cols, columns.clone());
            let (scales, biases) = (pick(scales, groups, units.clone()), pick(biases, groups, units));
            sink(rows, RowData::Affine { codes: &codes, scales: &scales, biases: &biases })
        }
        RowData::Blocks(bytes) => {
            let unit = bytes.len() / (rows * cols / together).max(1);
            sink(rows, RowData::Blocks(&pick(bytes, cols / together * unit, of_bytes(unit))))
        }
    }
}

impl Parameters for ShardedParameters<'_> {
    fn contains(&self, name: &str) -> bool {
        self.whole.contains(name)
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
            Cut::Columns => cols * self.shard.count,
            _ => cols,
        };
        let format = self.whole.linear_format(module, experts, rows, whole_cols)?;
        self.rows.borrow_mut().insert(module.into(), rows);
        let together = columns_together(format);
        if whole_cols != cols && !cols.is_multiple_of(together) {
            return Err(ModelError::Part(format!(
                "{module}: {whole_cols} columns in groups of {together} cannot be split over {} devices, which would have {cols} \
                 each: take fewer devices, or --split pipeline",
                self.shard.count
            )));
        }
        if whole_cols != cols && self.whole.rotation(module)?.is_some() {
            return Err(ModelError::Part(format!(
                "{module}: an input with rotated pairs of columns is not split by columns: use --split pipeline"
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
        let whole_rows = self.rows.borrow().get(module).copied().unwrap_or_default();
        match self.cut(module, whole_rows) {
            Cut::Whole => self.whole.linear_rows(module, expert, rows, spec, sink),
            Cut::Rows(_) if self.rows_are_alike() => self.whole.linear_rows(module, expert, rows, spec, sink),
            Cut::Rows(ranges) => {
                let parts = within(&ranges, rows);
                parts
                    .into_iter()
                    .try_for_each(|part| self.whole.linear_rows(module, expert, part, spec, sink))
            }
            Cut::Columns => {
                let whole = WeightSpec { cols: spec.cols * self.shard.count, ..*spec };
                let columns = self.shard.of(whole.cols);
                self.whole.linear_rows(module, expert, rows, &whole, &mut |count, data| {
                    pick_columns((count, data), (spec.format, whole.cols, &columns), sink)
                })
            }
        }
    }

    fn rotation(&self, module: &str) -> Result<Option<RotationValues>> {
        self.whole.rotation(module)
    }

    fn shared_rotation(&self, prefix: &str, module: &str) -> Result<Option<RotationValues>> {
        let values = self.whole.shared_rotation(prefix, module)?;
        if values.is_some() && matches!(self.cut(module, 0), Cut::Columns) {
            return Err(ModelError::Part(format!(
                "{module}: an input with rotated pairs of columns is not split by columns: use --split pipeline"
            )));
        }
        Ok(values)
    }

    fn release(&self, module: &str) {
        self.whole.release(module);
    }

    fn values(&self, name: &str, elements: usize) -> Result<Vec<f32>> {
        let layer = layer_of(name);
        let rows = self.whole_rows(layer, elements);
        match self.cut(layer, rows) {
            // Every device adds its product to the sum; the first one adds the bias.
            Cut::Columns if self.shard.index > 0 => Ok(vec![0.0; elements]),
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

    fn rows_are_alike(&self) -> bool {
        self.whole.rows_are_alike()
    }

    fn norms_are_scales(&self) -> bool {
        self.whole.norms_are_scales()
    }

    fn value_heads_are_tiled(&self) -> bool {
        self.whole.value_heads_are_tiled()
    }
}
