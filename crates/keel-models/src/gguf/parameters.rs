//! Presents the tensors of a GGUF file as the parameters of a Hugging Face checkpoint.

use std::ops::Range;

use keel_array::{RowData, WeightFormat, WeightSpec};
use keel_weights::gguf::GgufFile;
use keel_weights::{LinearTensor, RotationValues};

use super::architecture;
use super::names::Names;
use super::order::{Orders, RowOrder};
use super::tower_tensors::TowerTensors;
use crate::loading::{BLOCK_ROWS, CheckpointParameters, Parameters, RowSink};
use crate::{HybridConfig, ModelError, Result};

/// The parameters of a GGUF file.
pub struct GgufParameters<'a> {
    /// The same parameters under the names of the file, and with its order of rows.
    stored: CheckpointParameters<'a>,
    names: Names,
    orders: Orders,
    conv_width: Option<usize>,
    tower: Option<TowerTensors<'a>>,
}

impl<'a> GgufParameters<'a> {
    /// The parameters of a file whose config has these numbers.
    pub fn new(file: &'a GgufFile, config: &HybridConfig) -> GgufParameters<'a> {
        let arch = architecture(file);
        let (names, orders) = (Names::new(arch, config.layers.len()), Orders::new(arch, config));
        let conv_width = config.recurrent.map(|r| r.conv_width);
        let stored = CheckpointParameters(file);
        GgufParameters { stored, names, orders, conv_width, tower: None }
    }

    /// The same parameters, and those of a vision tower in a file of its own.
    #[must_use]
    pub fn with_tower(self, tower: &'a GgufFile) -> GgufParameters<'a> {
        GgufParameters { tower: Some(TowerTensors::new(tower)), ..self }
    }

    /// The tower, if a parameter belongs to it.
    fn tower_of(&self, name: &str) -> Option<&TowerTensors<'a>> {
        self.tower.as_ref().filter(|_| TowerTensors::owns(name))
    }

    fn order(&self, name: &str) -> RowOrder {
        self.orders.rows(name)
    }

    fn module(&self, module: &str) -> Result<String> {
        self.names.module(module).ok_or_else(|| ModelError::Config(format!("GGUF has no name for {module}")))
    }

    fn tensor(&self, name: &str) -> Result<String> {
        self.names.tensor(name).ok_or_else(|| ModelError::Config(format!("GGUF has no name for {name}")))
    }
}

impl Parameters for GgufParameters<'_> {
    fn contains(&self, name: &str) -> bool {
        if let Some(tower) = self.tower_of(name) {
            return tower.contains(name);
        }
        self.names.tensor(name).is_some_and(|tensor| self.stored.contains(&tensor))
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        if let Some(tower) = self.tower_of(name) {
            return tower.shape(name);
        }
        self.stored.shape(&self.names.tensor(name)?)
    }

    fn linear_format(
        &self,
        module: &str,
        experts: Option<usize>,
        rows: usize,
        cols: usize,
    ) -> Result<WeightFormat> {
        if let Some(tower) = self.tower_of(module) {
            return tower.linear_format(module, rows, cols);
        }
        let rows = rows * self.order(module).share();
        self.stored.linear_format(&self.module(module)?, experts, rows, cols)
    }

    fn linear_rows(
        &self,
        module: &str,
        expert: Option<usize>,
        rows: Range<usize>,
        spec: &WeightSpec,
        sink: &mut RowSink<'_>,
    ) -> Result<()> {
        if let Some(tower) = self.tower_of(module) {
            return tower.linear_rows(module, rows, spec, sink);
        }
        let (name, order) = (self.module(module)?, self.order(module));
        if order == RowOrder::Same {
            return self.stored.linear_rows(&name, expert, rows, spec, sink);
        }
        let tensor = self.stored.0.linear(&name)?;
        let base = expert.unwrap_or(0) * tensor.info().rows;
        let mut gathered = Vec::new();
        for first in rows.clone().step_by(BLOCK_ROWS) {
            let block = first..rows.end.min(first + BLOCK_ROWS);
            gathered.clear();
            for row in block.clone() {
                let at = base + order.row(row);
                gathered.extend_from_slice(match &tensor {
                    LinearTensor::Dense(view) => view.bytes_of_rows(at..at + 1)?,
                    LinearTensor::Blocks(blocks) => blocks.bytes_of_rows(at..at + 1)?,
                    other => return Err(ModelError::Config(format!("{module}: {other:?} is not supported"))),
                });
            }
            sink(block.len(), row_data(&tensor, &gathered))?;
        }
        Ok(self.stored.0.check_intact()?)
    }

    fn rotation(&self, _: &str, _: &str) -> Result<Option<RotationValues>> {
        Ok(None)
    }

    fn release(&self, module: &str) {
        if let Some(tower) = self.tower_of(module) {
            return tower.release(module);
        }
        if let Some(tensor) = self.names.module(module) {
            self.stored.release(&tensor);
        }
    }

    fn values(&self, name: &str, elements: usize) -> Result<Vec<f32>> {
        if let Some(tower) = self.tower_of(name) {
            return tower.values(name);
        }
        let mut values = self.stored.values(&self.tensor(name)?, elements)?;
        if name.ends_with("A_log") {
            // Files store -e^A_log.
            values.iter_mut().for_each(|a| *a = (-*a).ln());
        }
        let order = self.order(name);
        if order != RowOrder::Same {
            let width = self.conv_width.filter(|_| name.ends_with("conv1d.weight")).unwrap_or(1);
            let stored = values.clone();
            for (row, out) in values.chunks_exact_mut(width).enumerate().take(elements / width) {
                let at = order.row(row) * width;
                out.copy_from_slice(&stored[at..at + width]);
            }
        }
        Ok(values)
    }

    fn rows_are_alike(&self) -> bool {
        false
    }

    fn norms_are_scales(&self) -> bool {
        true
    }

    fn column_tiles(&self, module: &str) -> usize {
        match self.orders.cols(module) {
            RowOrder::TiledHeads { ratio, .. } => ratio,
            _ => 1,
        }
    }
}

/// The bytes of a tensor's rows, as floats or blocks.
fn row_data<'b>(tensor: &LinearTensor<'_>, bytes: &'b [u8]) -> RowData<'b> {
    if matches!(tensor, LinearTensor::Dense(_)) { RowData::Dense(bytes) } else { RowData::Blocks(bytes) }
}
