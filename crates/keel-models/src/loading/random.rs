//! Generates random parameters, so that a shape of any size can be timed without a checkpoint.

use std::ops::Range;

use half::{bf16, f16};
use keel_array::random::SplitMix64;
use keel_array::{BlockFormat, DType, RowData, WeightFormat, WeightSpec};
use keel_weights::RotationValues;

use super::{BLOCK_ROWS, Parameters, RowSink};
use crate::Result;

/// Standard deviation of the elements, small enough that activations stay finite through any depth.
const DEVIATION: f32 = 0.02;

/// Random parameters of one format. The values depend only on the names, so the same shape is always the same model on
/// a device. A device that can repeats the first rows of each weight: a model of any size is then ready within seconds.
pub struct RandomParameters {
    /// Format of linear layers whose columns are whole groups or blocks; the others are bf16.
    pub format: WeightFormat,
}

/// Random bits, and elements made of them.
struct Generator(SplitMix64);

impl Generator {
    fn of_name(name: &str) -> Generator {
        // FNV-1a.
        let hash = |h: u64, b: u8| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3);
        Generator(SplitMix64(name.bytes().fold(0xcbf2_9ce4_8422_2325, hash)))
    }

    /// Uniform in `[-1, 1) * deviation * sqrt(3)`: mean 0 and this deviation.
    fn value(&mut self) -> f32 {
        ((self.0.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * DEVIATION * 1.732
    }
}

impl Parameters for RandomParameters {
    fn contains(&self, name: &str) -> bool {
        // A fixed answer for optional parameters: the Hugging Face layout with fused experts.
        !name.contains("switch_mlp") && !name.contains("experts.0.")
    }

    fn shape(&self, _name: &str) -> Option<Vec<usize>> {
        None
    }

    fn linear_format(
        &self,
        _module: &str,
        _experts: Option<usize>,
        _rows: usize,
        cols: usize,
    ) -> Result<WeightFormat> {
        Ok(match self.format {
            WeightFormat::Affine { group_size, .. } if !cols.is_multiple_of(usize::from(group_size)) => {
                WeightFormat::Dense(DType::BF16)
            }
            WeightFormat::Blocks(blocks) if !cols.is_multiple_of(blocks.values()) => {
                WeightFormat::Dense(DType::BF16)
            }
            format => format,
        })
    }

    fn linear_rows(
        &self,
        module: &str,
        expert: Option<usize>,
        rows: Range<usize>,
        spec: &WeightSpec,
        sink: &mut RowSink<'_>,
    ) -> Result<()> {
        let mut generator = Generator::of_name(module);
        generator.0.0 ^= expert.unwrap_or(0) as u64;
        for first in rows.clone().step_by(BLOCK_ROWS) {
            let count = rows.end.min(first + BLOCK_ROWS) - first;
            random_block(&mut generator, spec, count, sink)?;
        }
        Ok(())
    }

    fn rotation(&self, _: &str, _: &str) -> Result<Option<RotationValues>> {
        Ok(None)
    }

    fn release(&self, _: &str) {}

    fn rows_are_alike(&self) -> bool {
        true
    }

    fn norms_are_scales(&self) -> bool {
        true
    }

    fn column_tiles(&self, _: &str) -> usize {
        1
    }

    fn values(&self, name: &str, elements: usize) -> Result<Vec<f32>> {
        let mut generator = Generator::of_name(name);
        let value = |generator: &mut Generator| match name.rsplit('.').nth(1).unwrap_or_default() {
            norm if norm.contains("norm") => 1.0,
            "conv1d" => generator.value() / DEVIATION * 0.25,
            // A_log and dt_bias: states decay over some dozens of tokens.
            _ if name.ends_with("dt_bias") => -3.0,
            _ => generator.value(),
        };
        Ok((0..elements).map(|_| value(&mut generator)).collect())
    }
}

fn random_block(
    generator: &mut Generator,
    spec: &WeightSpec,
    rows: usize,
    sink: &mut RowSink<'_>,
) -> Result<()> {
    let elements = rows * spec.cols;
    match spec.format {
        WeightFormat::Dense(dtype) => {
            let mut bytes = Vec::with_capacity(elements * dtype.size());
            for _ in 0..elements {
                let value = generator.value();
                match dtype {
                    DType::BF16 => bytes.extend(bf16::from_f32(value).to_le_bytes()),
                    DType::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
                    _ => bytes.extend(value.to_le_bytes()),
                }
            }
            sink(rows, RowData::Dense(&bytes))
        }
        WeightFormat::Blocks(format) => {
            let scales = random_scales(generator, format);
            let mut bytes = random_bytes(generator, elements / format.values() * format.bytes());
            bytes.chunks_exact_mut(format.bytes()).for_each(|block| scales.put(format, block));
            sink(rows, RowData::Blocks(&bytes))
        }
        WeightFormat::Affine { bits, group_size, .. } => {
            let mask = ((1u16 << bits) - 1) as u8;
            let mut codes = random_bytes(generator, elements);
            codes.iter_mut().for_each(|code| *code &= mask);
            // The standard deviation of evenly distributed codes is steps / sqrt(12).
            let steps = f32::from(mask) + 1.0;
            let scale = bf16::from_f32(DEVIATION * 12f32.sqrt() / steps).to_f32();
            let bias = bf16::from_f32(-scale * f32::from(mask) / 2.0).to_f32();
            let groups = elements / usize::from(group_size);
            sink(
                rows,
                RowData::Affine { codes: &codes, scales: &vec![scale; groups], biases: &vec![bias; groups] },
            )
        }
    }
}

fn random_bytes(generator: &mut Generator, count: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(count + 8);
    while bytes.len() < count {
        bytes.extend(generator.0.bits().to_le_bytes());
    }
    bytes.truncate(count);
    bytes
}

/// The f16 scales of blocks of random levels. The second, if the format has one, makes the mean 0.
struct BlockScales([f16; 2]);

impl BlockScales {
    fn put(&self, format: BlockFormat, block: &mut [u8]) {
        for (at, scale) in format.scale_offsets().iter().zip(self.0) {
            block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
        if format == BlockFormat::MXFP4 {
            // The scale is an exponent, 2^-7; the levels have a deviation of three.
            block[0] = 120;
        }
    }
}

/// Scales that give random levels mean 0 and the common standard deviation.
fn random_scales(generator: &mut Generator, format: BlockFormat) -> BlockScales {
    const SAMPLE: usize = 64;
    let bytes = random_bytes(generator, SAMPLE * format.bytes());
    let moments = |scales: [f32; 2]| {
        let mut bytes = bytes.clone();
        let scales = BlockScales(scales.map(f16::from_f32));
        bytes.chunks_exact_mut(format.bytes()).for_each(|block| scales.put(format, block));
        let mut values = vec![0.0; SAMPLE * format.values()];
        format.decode(&bytes, &mut values);
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let square = values.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / values.len() as f32;
        (mean, square.sqrt())
    };
    let ((mean, deviation), (offset, _)) = (moments([1.0, 0.0]), moments([0.0, 1.0]));
    let scale = DEVIATION / deviation;
    let balance = if offset == 0.0 { 0.0 } else { -scale * mean / offset };
    BlockScales([f16::from_f32(scale), f16::from_f32(balance)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use keel_array::Compute;

    #[test]
    fn random_blocks_have_the_deviation_of_all_values() {
        for format in BlockFormat::ALL {
            let (rows, cols) = (64, 768);
            let spec = WeightSpec {
                experts: 1,
                rows,
                cols,
                format: WeightFormat::Blocks(format),
                compute: Compute::Auto,
            };
            let mut values = vec![0.0; rows * cols];
            let mut decode = |_: usize, data: RowData<'_>| {
                let RowData::Blocks(bytes) = data else { panic!("blocks were asked for") };
                format.decode(bytes, &mut values);
                Ok(())
            };
            random_block(&mut Generator::of_name("weight"), &spec, rows, &mut decode).expect("whole blocks");
            let mean = values.iter().sum::<f32>() / values.len() as f32;
            let square = values.iter().map(|x| x * x).sum::<f32>() / values.len() as f32;
            // Codings without an offset have one more level below zero than above.
            assert!(mean.abs() < 0.15 * DEVIATION, "{format}: mean {mean}");
            assert!((square.sqrt() / DEVIATION - 1.0).abs() < 0.2, "{format}: {}", square.sqrt());
        }
    }
}
