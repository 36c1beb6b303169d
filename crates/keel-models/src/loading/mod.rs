//! Loads named parameters into weights in device memory.

mod altered;
mod assembler;
mod checkpoint;
mod projection;
mod random;
mod rotation;
mod row_parallel;
mod source_rows;
mod stacks;

use std::ops::Range;
use std::sync::atomic::AtomicBool;

use assembler::RowAssembler;
use half::f16;
use keel_array::{Array, Category, Compute, DType, RowData, Runtime, Weight, WeightFormat, WeightSpec};
use keel_weights::RotationValues;

use crate::split::columns::columns_together;
use crate::split::sums::Sums;
use crate::{Part, Result, SumOrder};

pub use altered::Altered;
pub use checkpoint::CheckpointParameters;
pub use projection::{Projection, input};
pub use random::RandomParameters;
pub use row_parallel::RowParallel;
pub(crate) use row_parallel::columns_of;
pub use source_rows::{SourceRows, Stored};

/// Rows decoded at a time: the only host memory that loading needs. A multiple of every device's row tile.
pub(crate) const BLOCK_ROWS: usize = 256;

/// Receives the next rows of a linear layer: their number and their elements.
pub type RowSink<'a> = dyn FnMut(usize, RowData<'_>) -> Result<()> + 'a;

/// A source of parameters. Several devices may read it at the same time. A source that differs from another in a few
/// methods implements [`Altered`]. No method has a default. So the compiler reports a method that [`Altered`] forgets
/// to pass on. With a default it would load a different model.
pub trait Parameters: Sync {
    /// True if there is a parameter of this name.
    fn contains(&self, name: &str) -> bool;

    /// Shape of a parameter that is no linear layer.
    fn shape(&self, name: &str) -> Option<Vec<usize>>;

    /// The coding of the linear layer `module`, after a check of its `[experts,] rows, cols`.
    ///
    /// # Errors
    /// If it is missing or has another shape.
    fn linear_format(
        &self,
        module: &str,
        experts: Option<usize>,
        rows: usize,
        cols: usize,
    ) -> Result<WeightFormat>;

    /// Passes rows of one expert of a linear layer to `sink`, some at a time, in order. The specification is that of
    /// the weight to be filled; its columns and format are the layer's.
    ///
    /// # Errors
    /// An error of the file or the sink.
    fn linear_rows(
        &self,
        module: &str,
        expert: Option<usize>,
        rows: Range<usize>,
        spec: &WeightSpec,
        sink: &mut RowSink<'_>,
    ) -> Result<()>;

    /// The rotation of the input of `module`, or of all layers that share it; `None` for most layers. Its parameters'
    /// names begin with `prefix`.
    ///
    /// # Errors
    /// If it is misshapen.
    fn rotation(&self, prefix: &str, module: &str) -> Result<Option<RotationValues>>;

    /// Called after a layer, or one expert of it, has been read.
    fn release(&self, module: &str);

    /// A small parameter of `elements` values, as f32.
    ///
    /// # Errors
    /// If it is missing.
    fn values(&self, name: &str, elements: usize) -> Result<Vec<f32>>;

    /// True if all rows of a linear layer are equally good, so that a device may repeat some of them: for made-up
    /// models.
    fn rows_are_alike(&self) -> bool;

    /// True if norms are always stored as scales, even for model types that store offsets from one.
    fn norms_are_scales(&self) -> bool;

    /// How many tiles a layer's columns have. All tiles are equally long, and each has columns of every key head. It is
    /// 1 except for the output projection of recurrent layers in GGUF files: its columns are those of the first value
    /// head of every key head, then those of the second, and so on.
    fn column_tiles(&self, module: &str) -> usize;
}

/// Loads parameters into a runtime.
pub struct Loader<'a> {
    runtime: &'a Runtime,
    parameters: &'a dyn Parameters,
    compute: Compute,
    progress: &'a dyn Fn(u64),
    part: Part,
    order: SumOrder,
    /// Set when loading is to end.
    stop: Option<&'a AtomicBool>,
}

impl<'a> Loader<'a> {
    /// A loader that reports the bytes of each weight to `progress` once it is in memory.
    pub fn new(
        runtime: &'a Runtime,
        parameters: &'a dyn Parameters,
        compute: Compute,
        progress: &'a dyn Fn(u64),
    ) -> Loader<'a> {
        let (part, order, stop) = Default::default();
        Loader { runtime, parameters, compute, progress, part, order, stop }
    }

    /// The same loader for a part of the model.
    pub fn of_part(self, part: Part) -> Loader<'a> {
        Loader { part, ..self }
    }

    /// The same loader for a model that adds columns in this order.
    pub fn in_order(self, order: SumOrder) -> Loader<'a> {
        Loader { order, ..self }
    }

    /// The same loader, which ends with an error soon after `stop` is set.
    pub fn until(self, stop: &'a AtomicBool) -> Loader<'a> {
        Loader { stop: Some(stop), ..self }
    }

    /// The same loader for other parameters.
    pub(crate) fn reading<'b>(&'b self, parameters: &'b dyn Parameters) -> Loader<'b> {
        let Loader { runtime, compute, progress, ref part, order, stop, .. } = *self;
        Loader { runtime, parameters, compute, progress, part: part.clone(), order, stop }
    }

    /// The order in which columns are added.
    pub(crate) fn order(&self) -> SumOrder {
        self.order
    }

    /// How the device adds the columns of a layer that it shares.
    pub fn sums(&self) -> Sums {
        Sums { order: self.order, share: self.part.share }
    }

    /// The part of the model to load.
    pub fn part(&self) -> &Part {
        &self.part
    }

    /// The source of the parameters.
    pub fn parameters(&self) -> &dyn Parameters {
        self.parameters
    }

    /// The format of all sources, if they have the same.
    fn common_format(&self, sources: &[SourceRows], cols: usize) -> Result<Option<WeightFormat>> {
        let mut common = None;
        for source in sources {
            let Stored { experts, rows } = source.stored;
            let format = self.parameters.linear_format(&source.module, experts, rows, cols)?;
            if *common.get_or_insert(format) != format {
                return Ok(None);
            }
        }
        Ok(common)
    }

    /// A plain layer of the source's rows.
    ///
    /// # Errors
    /// If a layer of the checkpoint is missing or misshapen, its input is rotated, or memory runs out.
    pub fn linear(&self, source: SourceRows, cols: usize) -> Result<Weight> {
        self.refuse_rotation(&source.module)?;
        self.weight(source, cols)
    }

    /// As [`Loader::linear`], for a layer whose rotation the caller applies.
    fn weight(&self, source: SourceRows, cols: usize) -> Result<Weight> {
        let Stored { experts, rows } = source.stored;
        let format = self.parameters.linear_format(&source.module, experts, rows, cols)?;
        self.stack(&[vec![source]], cols, format)
    }

    /// Several layers that read the same input, as the fewest products that their formats allow.
    ///
    /// # Errors
    /// If a layer of the checkpoint is missing or misshapen, or memory runs out.
    pub fn projection(&self, sources: Vec<SourceRows>, cols: usize) -> Result<Projection> {
        let widths: Vec<usize> = sources.iter().map(SourceRows::len).collect();
        let rotation = |source: &SourceRows| self.own_rotation(&source.module);
        let rotations = sources.iter().map(rotation).collect::<Result<Vec<_>>>()?;
        let rotates = rotations.iter().any(Option::is_some);
        let (weights, rotations) = match self.common_format(&sources, cols)? {
            Some(format) if !rotates => (vec![self.stack(&[sources], cols, format)?], vec![None]),
            _ => {
                let weights = sources.into_iter().map(|one| self.weight(one, cols)).collect::<Result<_>>()?;
                let load = |rotation: &Option<_>| rotation.as_ref().map(|r| self.rotation(r)).transpose();
                (weights, rotations.iter().map(load).collect::<Result<_>>()?)
            }
        };
        Ok(Projection { weights, rotations, widths, bias: None })
    }

    /// A layer that is summed over the devices that share its columns. This device has `cols` of them.
    ///
    /// # Errors
    /// As [`Loader::projection`].
    pub fn row_parallel(&self, source: SourceRows, cols: usize, sums: Sums) -> Result<RowParallel> {
        let Stored { experts, rows } = source.stored;
        let format = self.parameters.linear_format(&source.module, experts, rows, cols)?;
        let rotation = self.own_rotation(&source.module)?;
        let rotation = rotation.map(|values| self.rotation(&values)).transpose()?;
        let tiles = self.parameters.column_tiles(&source.module);
        let parts = sums.parts(cols / tiles, columns_together(format));
        let parts = self.stack_in_parts(&[vec![source]], cols, parts, format)?;
        Ok(RowParallel { parts, tiles, rotation, sums, bias: None })
    }

    /// A stack of experts, each made of its list of sources. All sources must have the same format.
    ///
    /// # Errors
    /// If a layer of the checkpoint is missing or misshapen, the formats differ, or memory runs out.
    pub fn experts(&self, experts: &[Vec<SourceRows>], cols: usize) -> Result<Weight> {
        self.stack(experts, cols, self.format_of_experts(experts, cols)?)
    }

    /// As [`Loader::experts`], in the parts whose products are added.
    ///
    /// # Errors
    /// As [`Loader::experts`].
    pub fn row_parallel_experts(
        &self,
        experts: &[Vec<SourceRows>],
        cols: usize,
        sums: Sums,
    ) -> Result<Vec<Weight>> {
        let format = self.format_of_experts(experts, cols)?;
        self.stack_in_parts(experts, cols, sums.parts(cols, columns_together(format)), format)
    }

    fn format_of_experts(&self, experts: &[Vec<SourceRows>], cols: usize) -> Result<WeightFormat> {
        let mut common = None;
        for sources in experts {
            let format = self.common_format(sources, cols)?;
            if format.is_none() || format != *common.get_or_insert(format) {
                let first = sources.first().map_or("experts", |source| &source.module);
                let reason = format!("{first}: the experts of a layer are quantised in different formats");
                return Err(crate::ModelError::Config(reason));
            }
        }
        common.flatten().ok_or_else(|| crate::ModelError::Config("a layer has no experts".into()))
    }

    fn stack(&self, experts: &[Vec<SourceRows>], cols: usize, format: WeightFormat) -> Result<Weight> {
        let mut whole = self.stack_in_parts(experts, cols, 1, format)?;
        Ok(whole.pop().unwrap_or_else(|| unreachable!("there is one part")))
    }

    /// A vector or small matrix as f32, `transform`ed, of the given shape.
    ///
    /// # Errors
    /// If it is missing or has another number of elements, or memory runs out.
    pub fn vector(&self, name: &str, shape: &[usize], transform: impl Fn(f32) -> f32) -> Result<Array> {
        self.small(name, shape, |values| values.iter_mut().for_each(|v| *v = transform(*v)))
    }

    /// A small matrix that is stored as `[rows, cols]`, as f32 `[cols, rows]`.
    ///
    /// # Errors
    /// As [`Loader::vector`].
    pub fn transposed(&self, name: &str, rows: usize, cols: usize) -> Result<Array> {
        self.small(name, &[cols, rows], |values| {
            *values = (0..values.len()).map(|i| values[i % rows * cols + i / rows]).collect();
        })
    }

    /// A projection of one layer. Its `[rows, cols]` values are stored in another order, which `order` corrects. They
    /// are kept in f32 for f32 arithmetic, else in f16, which keeps all bits of the published bf16 for values above
    /// 6.1e-5.
    ///
    /// # Errors
    /// As [`Loader::vector`].
    pub fn dense(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
        order: impl FnOnce(Vec<f32>) -> Vec<f32>,
    ) -> Result<Projection> {
        self.check_elements(name, &[rows, cols])?;
        let dtype = if self.compute == Compute::F32 { DType::F32 } else { DType::F16 };
        let format = WeightFormat::Dense(dtype);
        let spec = WeightSpec { experts: 1, rows, cols, format, compute: self.compute };
        let weight = Weight::allocate(self.runtime, spec)?;
        if !self.runtime.backend().is_planning() {
            let values = order(self.parameters.values(name, rows * cols)?);
            // Values beyond the range of f16 saturate.
            let half = |value: &f32| f16::from_f32(value.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()));
            let bytes: Vec<u8> = match dtype {
                DType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
                _ => values.iter().flat_map(|value| half(value).to_le_bytes()).collect(),
            };
            let mut assembler = RowAssembler::new(&weight, 0);
            assembler.push(rows, RowData::Dense(&bytes))?;
            assembler.flush()?;
        }
        (self.progress)(weight.bytes() as u64);
        Ok(Projection { weights: vec![weight], rotations: vec![None], widths: vec![rows], bias: None })
    }

    /// The biases of several layers, one after the other, in the order of the layers' rows.
    ///
    /// # Errors
    /// As [`Loader::vector`].
    pub fn biases(&self, sources: &[SourceRows]) -> Result<Array> {
        let elements = sources.iter().map(SourceRows::len).sum::<usize>();
        let array = Array::persistent(self.runtime, Category::Weights, [elements], DType::F32)?;
        let mut all = Vec::with_capacity(elements);
        for source in sources {
            let (name, rows) = (format!("{}.bias", source.module), source.stored.rows);
            self.check_elements(&name, &[rows])?;
            if !self.runtime.backend().is_planning() {
                let values = self.parameters.values(&name, rows)?;
                source.rows.iter().for_each(|range| all.extend_from_slice(&values[range.clone()]));
            }
        }
        if !self.runtime.backend().is_planning() {
            array.write(&all)?;
        }
        (self.progress)(array.bytes() as u64);
        Ok(array)
    }

    fn check_elements(&self, name: &str, shape: &[usize]) -> Result<()> {
        let elements: usize = shape.iter().product();
        match self.parameters.shape(name).filter(|s| s.iter().product::<usize>() != elements) {
            None => Ok(()),
            Some(stored) => {
                let (expected, got) = (format!("{shape:?}"), format!("{stored:?}"));
                Err(crate::ModelError::Shape { name: name.into(), expected, got })
            }
        }
    }

    fn small(&self, name: &str, shape: &[usize], change: impl FnOnce(&mut Vec<f32>)) -> Result<Array> {
        let elements = shape.iter().product();
        self.check_elements(name, shape)?;
        let array = Array::persistent(self.runtime, Category::Weights, shape, DType::F32)?;
        if !self.runtime.backend().is_planning() {
            let mut values = self.parameters.values(name, elements)?;
            change(&mut values);
            array.write(&values)?;
        }
        (self.progress)(array.bytes() as u64);
        Ok(array)
    }

    /// Numbers computed from the config, kept with the weights.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn constant(&self, values: &[f32]) -> Result<Array> {
        let array = Array::persistent(self.runtime, Category::Weights, [values.len()], DType::F32)?;
        array.write(values)?;
        Ok(array)
    }

    /// As [`Loader::constant`], for a whole number.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn whole_constant(&self, value: i32) -> Result<Array> {
        let array = Array::persistent(self.runtime, Category::Weights, [1], DType::I32)?;
        array.write(&[value])?;
        Ok(array)
    }
}
