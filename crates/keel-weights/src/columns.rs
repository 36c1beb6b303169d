//! Experts' matrices that are stored by columns, as Qwen3-VL's mixtures are published.
//!
//! `experts.gate_up_proj` is `[experts, hidden, 2 * width]`, and `experts.down_proj` is `[experts, width, hidden]`.
//! Other model types have the last two dimensions the other way round, and so have new files of this one. The shapes of
//! both tensors tell: no sizes make both orders alike.

use std::ops::Range;

use crate::{
    Checkpoint, LinearFormat, LinearInfo, Result, TensorSource, TensorView, float, view::check_rows,
};

/// Model types whose experts may be stored by columns.
const MODEL_TYPES: [&str; 2] = ["qwen3_vl_moe", "qwen3_vl_moe_text"];

/// A stack of matrices stored by columns, borrowed from its checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct ColumnsTensor<'a> {
    view: TensorView<'a>,
    experts: usize,
    rows: usize,
    cols: usize,
}

impl<'a> ColumnsTensor<'a> {
    /// The weight of `module`, if the checkpoint stores it by columns.
    pub(crate) fn find(source: &'a Checkpoint, module: &str) -> Option<ColumnsTensor<'a>> {
        let config = source.config();
        let model_type = config["model_type"].as_str()?;
        let (experts, part) = module.rsplit_once('.')?;
        if !MODEL_TYPES.contains(&model_type) || !experts.ends_with(".experts") {
            return None;
        }
        let text = if config["text_config"].is_object() { &config["text_config"] } else { config };
        let size = |key: &str| text[key].as_u64().filter(|n| *n > 0).and_then(|n| usize::try_from(n).ok());
        let (hidden, width) = (size("hidden_size")?, size("moe_intermediate_size")?);
        let both = width.checked_mul(2)?;
        let stored = |part: &str| source.info(&format!("{experts}.{part}")).ok();
        let (gate_up, down) = (stored("gate_up_proj")?, stored("down_proj")?);
        let &[count, ..] = gate_up.shape else { return None };
        if *gate_up.shape != [count, hidden, both]
            || *down.shape != [count, width, hidden]
            || !gate_up.dtype.is_float()
            || !down.dtype.is_float()
        {
            return None;
        }
        let (rows, cols) = match part {
            "gate_up_proj" => (both, hidden),
            "down_proj" => (hidden, width),
            _ => return None,
        };
        Some(ColumnsTensor { view: source.tensor(module).ok()?, experts: count, rows, cols })
    }

    /// The weight's sizes and format.
    pub fn info(&self) -> LinearInfo {
        let ColumnsTensor { experts, rows, cols, .. } = *self;
        LinearInfo { experts: Some(experts), rows, cols, format: LinearFormat::Dense(self.view.dtype()) }
    }

    /// The shape by rows, `[experts, rows, cols]`.
    pub(crate) fn shape(&self) -> Vec<usize> {
        vec![self.experts, self.rows, self.cols]
    }

    /// Rows `range` of all experts, counted through, in the type of the file.
    ///
    /// # Errors
    /// [`WeightsError::Rows`](crate::WeightsError::Rows) if the rows do not exist.
    pub fn bytes_of_rows(&self, range: Range<usize>) -> Result<Vec<u8>> {
        let (rows, cols, size) = (self.rows, self.cols, self.view.dtype().size());
        let count = range.len().saturating_mul(cols);
        check_rows(self.view.name(), self.experts * rows, cols, &range, count)?;
        let mut out = vec![0; count * size];
        let mut row = range.start;
        while row < range.end {
            let first = row % rows;
            let count = (rows - first).min(range.end - row);
            let matrix = &self.view.bytes()[row / rows * rows * cols * size..][..rows * cols * size];
            let out = &mut out[(row - range.start) * cols * size..][..count * cols * size];
            for (col, column) in matrix.chunks_exact(rows * size).enumerate() {
                let column = &column[first * size..][..count * size];
                if size == 2 {
                    place::<2>(column, out, col, cols);
                } else {
                    place::<4>(column, out, col, cols);
                }
            }
            row += count;
        }
        Ok(out)
    }

    /// The rows of the file that hold these rows: those of whole matrices, because each row lies in all rows of its
    /// matrix.
    pub fn stored_rows(&self, range: Range<usize>) -> Range<usize> {
        let (first, end) = (range.start / self.rows, range.end.div_ceil(self.rows));
        first.saturating_mul(self.cols)..end.saturating_mul(self.cols)
    }

    /// Decodes rows `range` of all experts into `out`, `range.len() * cols` values.
    ///
    /// # Errors
    /// [`WeightsError::Rows`](crate::WeightsError::Rows) if the rows do not exist or `out` has another length.
    pub fn rows_f32(&self, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        check_rows(self.view.name(), self.experts * self.rows, self.cols, &range, out.len())?;
        float::decode(self.view.dtype(), &self.bytes_of_rows(range)?, out);
        Ok(())
    }
}

/// Writes the values of column `col` into rows of `cols` values.
fn place<const SIZE: usize>(column: &[u8], rows: &mut [u8], col: usize, cols: usize) {
    let rows = rows.as_chunks_mut::<SIZE>().0.chunks_exact_mut(cols);
    for (row, value) in rows.zip(column.as_chunks::<SIZE>().0) {
        row[col] = *value;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use keel_array::DType;
    use serde_json::{Value, json};

    use super::*;
    use crate::{LinearTensor, SafetensorsWriter, TensorSpec, quantize::RowSource};

    const UP: &str = "l.experts.gate_up_proj";
    const DOWN: &str = "l.experts.down_proj";

    fn config(model_type: &str, hidden: usize, width: usize) -> Value {
        json!({"model_type": model_type, "text_config": {"hidden_size": hidden, "moe_intermediate_size": width}})
    }

    /// A checkpoint of two tensors. Each value is its place in the file.
    fn checkpoint(
        config: &Value,
        up: &[usize],
        down: &[usize],
        dtype: DType,
    ) -> (tempfile::TempDir, Checkpoint) {
        let folder = tempfile::tempdir().unwrap();
        let spec = |name: &str, shape: &[usize]| TensorSpec { name: name.into(), dtype, shape: shape.into() };
        let specs = [spec(DOWN, down), spec(UP, up)];
        let path = folder.path().join("model.safetensors");
        let mut writer = SafetensorsWriter::create(&path, &specs, &BTreeMap::new()).unwrap();
        for spec in &specs {
            let count: usize = spec.shape.iter().product();
            let mut bytes = vec![0; count * dtype.size()];
            float::encode(dtype, &(0..count).map(|i| i as f32).collect::<Vec<_>>(), &mut bytes);
            writer.append(&spec.name, &bytes).unwrap();
        }
        writer.finish().unwrap();
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        (folder, checkpoint)
    }

    #[test]
    fn rows_are_the_columns_of_the_file() {
        for dtype in [DType::F32, DType::BF16] {
            let (_folder, source) = checkpoint(&config("qwen3_vl_moe", 5, 3), &[2, 5, 6], &[2, 3, 5], dtype);
            let linear = source.linear(UP).unwrap();
            let format = LinearFormat::Dense(dtype);
            assert_eq!(linear.info(), LinearInfo { experts: Some(2), rows: 6, cols: 5, format });
            assert_eq!(source.linear_info(UP).unwrap(), linear.info());
            // Rows 4 to 7: the last two of the first expert, the first two of the second.
            let mut rows = vec![0.0; 4 * 5];
            linear.rows_f32(4..8, &mut rows).unwrap();
            let want = [4, 5, 30, 31].map(|first| (0..5).map(move |col| (first + 6 * col) as f32));
            assert_eq!(rows, want.into_iter().flatten().collect::<Vec<_>>());
            assert!(linear.rows_f32(11..13, &mut rows[..10]).is_err());
            let LinearTensor::Columns(columns) = linear else { panic!("{linear:?}") };
            let stored = [0..1, 4..7, 6..12, 0..usize::MAX].map(|rows| columns.stored_rows(rows));
            assert_eq!(stored[..3], [0..5, 0..10, 5..10]);
            assert!(stored[3].end >= 10, "{stored:?}");

            // Conversions see the same rows.
            let spec = RowSource::tensors(&source).unwrap().remove(0);
            assert_eq!((spec.name.as_str(), &spec.shape[..]), (DOWN, &[2, 5, 3][..]));
            let mut row = vec![0.0; 3];
            RowSource::rows_f32(&source, DOWN, 6..7, &mut row).unwrap();
            assert_eq!(row, [16.0, 21.0, 26.0]);
            let mut bytes = vec![0; 3 * dtype.size()];
            float::encode(dtype, &row, &mut bytes);
            assert_eq!(RowSource::bytes_of_rows(&source, &spec, 6..7).unwrap(), bytes);
        }
    }

    #[test]
    fn other_files_are_stored_by_rows() {
        let sizes = [
            // By rows; square, once by rows and once by columns; of another type.
            ("qwen3_vl_moe", 5, 3, [2, 6, 5], [2, 5, 3], false),
            ("qwen3_vl_moe", 6, 3, [2, 6, 6], [2, 6, 3], false),
            ("qwen3_vl_moe", 6, 3, [2, 6, 6], [2, 3, 6], true),
            ("qwen3_vl_moe", 3, 3, [2, 6, 3], [2, 3, 3], false),
            ("qwen3_vl_moe", 3, 3, [2, 3, 6], [2, 3, 3], true),
            ("qwen3_5_moe", 5, 3, [2, 5, 6], [2, 3, 5], false),
        ];
        for (model_type, hidden, width, up, down, by_columns) in sizes {
            let (_folder, source) = checkpoint(&config(model_type, hidden, width), &up, &down, DType::F32);
            for module in [UP, DOWN] {
                let found = matches!(source.linear(module).unwrap(), LinearTensor::Columns(_));
                assert_eq!(found, by_columns, "{model_type} {module} {up:?} {down:?}");
            }
        }
    }
}
