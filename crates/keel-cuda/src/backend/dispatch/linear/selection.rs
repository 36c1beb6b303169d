//! Which kernel multiplies. In the fast mode the number of rows decides. In the deterministic mode the regime decides,
//! so that the order of a row's sums does not depend on the other rows.

use super::half_operands::splits_x;
use super::panels::parts;
use super::{Arithmetic, FEW_ROWS, arithmetic};
use crate::backend::weights::keeps_fp8;
use crate::backend::{Determinism, Mode};
use keel_array::{Compute, Kernel, Regime, WeightFormat, WeightSpec};

/// The most rows for `linear_panels`, which widens the weight in registers again for each panel. With more rows
/// cuBLASLt is faster: for it the weight is widened once, in memory. The second limit is for prompts in 8-bit floats.
const ROWS_IN_PANELS_MAX: usize = 1024;
const ROWS_IN_PANELS_MAX_WITH_PROMPTS_8: usize = 256;

/// The same for a weight that is kept in 8-bit floats, too, where cuBLASLt need not wait for it to be widened.
const ROWS_IN_PANELS_MAX_BEFORE_8: usize = 128;

/// The quantity that selects the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backend::dispatch) enum SelectBy {
    /// The number of rows.
    Rows,
    /// The regime alone.
    Regime(Regime),
    /// The same, and a device that holds some rows of a weight computes the bits of the whole: neither the kernel nor
    /// the order of sums depends on the number of the weight's rows.
    RegimeOnDevices(Regime),
}

impl SelectBy {
    /// The quantity for a kernel. A program without a regime is not a step of decoding.
    pub fn of(kernel: &Kernel, mode: Mode) -> SelectBy {
        let regime = kernel.regime.unwrap_or(Regime::Prefill);
        match mode.determinism {
            Determinism::Off => SelectBy::Rows,
            Determinism::Steps => SelectBy::Regime(regime),
            Determinism::Devices => SelectBy::RegimeOnDevices(regime),
        }
    }

    /// Whether several devices may hold the rows of a weight.
    pub fn spans_devices(self) -> bool {
        matches!(self, SelectBy::RegimeOnDevices(_))
    }

    fn is_few(self, rows: usize) -> bool {
        match self {
            SelectBy::Rows => rows <= FEW_ROWS,
            SelectBy::Regime(regime) | SelectBy::RegimeOnDevices(regime) => regime == Regime::Decode,
        }
    }
}

/// How a product is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinearKernel {
    /// `exact_rows`, [`FEW_ROWS`] at a time.
    ExactRows,
    /// `exact_tiled`.
    ExactTiled,
    /// `linear_rows`, [`FEW_ROWS`] at a time.
    FewRows,
    /// `linear_panels`, with `parts` parts of K.
    Panels { parts: usize },
    /// `linear_half`.
    Half,
    /// cuBLASLt.
    Blas,
}

/// How a product is run.
pub(super) fn linear_kernel(weight: &WeightSpec, rows: usize, by: SelectBy) -> LinearKernel {
    let few = by.is_few(rows);
    match (arithmetic(weight, by), by) {
        (Arithmetic::Exact | Arithmetic::ManyHalf, _) if few => LinearKernel::ExactRows,
        (Arithmetic::Exact, _) => LinearKernel::ExactTiled,
        (Arithmetic::Codes | Arithmetic::Half, _) if few => LinearKernel::FewRows,
        (Arithmetic::Codes | Arithmetic::WidenedCodes, SelectBy::Rows)
            if rows <= rows_in_panels_max(weight) =>
        {
            LinearKernel::Panels { parts: parts(weight, rows) }
        }
        (_, SelectBy::Rows) => LinearKernel::Blas,
        (Arithmetic::Codes | Arithmetic::WidenedCodes, _) => LinearKernel::Panels { parts: 1 },
        _ => LinearKernel::Half,
    }
}

fn rows_in_panels_max(weight: &WeightSpec) -> usize {
    match weight.compute {
        _ if keeps_fp8(weight) => ROWS_IN_PANELS_MAX_BEFORE_8,
        Compute::PrefillFp8 | Compute::Fp8 => ROWS_IN_PANELS_MAX_WITH_PROMPTS_8,
        _ => ROWS_IN_PANELS_MAX,
    }
}

/// Whether every device needs x in 16 bits alone: it is multiplied in 16 bits, and if cuBLASLt does so, it takes the
/// shape.
pub(in crate::backend::dispatch) fn takes_x_in_half(
    weight: &WeightSpec,
    kernel: &Kernel,
    mode: Mode,
) -> bool {
    let even = |extent: usize| extent >= 256 && extent.is_multiple_of(64);
    let rows = kernel.inputs[0].layout.shape.elements() / weight.cols;
    let in_half = match linear_kernel(weight, rows, SelectBy::of(kernel, mode)) {
        LinearKernel::Blas => true,
        LinearKernel::Panels { .. } => !mode.is_deterministic(),
        LinearKernel::ExactRows | LinearKernel::ExactTiled | LinearKernel::FewRows | LinearKernel::Half => {
            false
        }
    };
    in_half && !splits_x(weight) && rows > FEW_ROWS && even(weight.rows) && even(weight.cols)
}

/// Whether cuBLASLt multiplies all rows at once on every device, by a weight as it is stored. It can then add a bias.
pub(in crate::backend::dispatch) fn blas_takes_stored_weight(
    weight: &WeightSpec,
    kernel: &Kernel,
    mode: Mode,
) -> bool {
    matches!(weight.format, WeightFormat::Dense(_)) && takes_x_in_half(weight, kernel, mode)
}

/// Whether rows of a quantised weight are sorted by expert.
pub(in crate::backend::dispatch) fn is_grouped(weight: &WeightSpec, kernel: &Kernel, mode: Mode) -> bool {
    let (rows, by) = (kernel.inputs[2].layout.shape.elements(), SelectBy::of(kernel, mode));
    matches!(arithmetic(weight, by), Arithmetic::Codes | Arithmetic::WidenedCodes)
        && takes_groups(weight, rows, by)
}

/// The most experts by which rows are sorted. `group_rows` has shared memory for 512 counts.
const GROUPED_EXPERTS_MAX: usize = 512;

/// Whether rows with an expert each are sorted by expert and multiplied together. That takes many rows, and no more
/// experts than the sort handles.
pub(super) fn takes_groups(weight: &WeightSpec, rows: usize, by: SelectBy) -> bool {
    let many = match by {
        SelectBy::Rows => rows > 8 * FEW_ROWS,
        SelectBy::Regime(regime) | SelectBy::RegimeOnDevices(regime) => regime == Regime::Prefill,
    };
    let many = many || arithmetic(weight, by) == Arithmetic::WidenedCodes;
    many && weight.experts <= GROUPED_EXPERTS_MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use keel_array::{BlockFormat, DType};

    fn weights() -> Vec<WeightSpec> {
        let formats = [
            WeightFormat::Affine { bits: 4, group_size: 64, scale_dtype: DType::BF16 },
            WeightFormat::Blocks(BlockFormat::Q4K),
            WeightFormat::Dense(DType::BF16),
            WeightFormat::Dense(DType::F16),
            WeightFormat::Dense(DType::F32),
        ];
        let shapes = [(1, 32, 2560), (1, 2560, 9216), (1, 18_432, 2560), (128, 1536, 2048), (512, 512, 2048)];
        let computes = [Compute::Auto, Compute::F32, Compute::Bf16];
        let each = formats.into_iter().flat_map(|format| shapes.map(|shape| (format, shape)));
        each.flat_map(|(format, (experts, rows, cols))| {
            computes.map(|compute| WeightSpec { experts, rows, cols, format, compute })
        })
        .collect()
    }

    const ROWS: [usize; 9] = [1, 7, 16, 17, 20, 64, 100, 256, 4096];

    #[test]
    fn many_rows_meet_a_dense_weight_of_16_bits_on_tensor_cores() {
        for dtype in [DType::BF16, DType::F16] {
            let spec = WeightSpec {
                experts: 1,
                rows: 1152,
                cols: 4304,
                format: WeightFormat::Dense(dtype),
                compute: Compute::Auto,
            };
            assert_eq!(linear_kernel(&spec, 4096, SelectBy::Rows), LinearKernel::Blas, "{dtype}");
            let exact = WeightSpec { compute: Compute::F32, ..spec };
            assert_eq!(linear_kernel(&exact, 4096, SelectBy::Rows), LinearKernel::ExactTiled, "{dtype}");
        }
    }

    #[test]
    fn in_a_regime_every_number_of_rows_goes_the_same_way() {
        for weight in weights() {
            let regimes = [Regime::Prefill, Regime::Decode].into_iter();
            let selectors = regimes.flat_map(|of| [SelectBy::Regime(of), SelectBy::RegimeOnDevices(of)]);
            for by in selectors {
                let ways = ROWS.map(|rows| linear_kernel(&weight, rows, by));
                assert!(ways.iter().all(|way| *way == ways[0]), "{weight:?}, {by:?}: {ways:?}");
                assert!(!ways.contains(&LinearKernel::Blas));
                let grouped = ROWS.map(|rows| takes_groups(&weight, rows, by));
                assert!(grouped.iter().all(|takes| *takes == grouped[0]));
            }
        }
    }

    #[test]
    fn in_the_fast_mode_rows_decide() {
        let large = |weight: &WeightSpec| weight.compute == Compute::Auto && weight.rows == 2560;
        let weight = weights().into_iter().find(large).expect("a quantised weight");
        let ways = [16, 17, 1024, 1025].map(|rows| linear_kernel(&weight, rows, SelectBy::Rows));
        assert!(matches!(
            ways,
            [
                LinearKernel::FewRows,
                LinearKernel::Panels { .. },
                LinearKernel::Panels { .. },
                LinearKernel::Blas
            ]
        ));
        let with_prompts_8 = WeightSpec { compute: Compute::PrefillFp8, ..weight };
        let in_blocks = WeightSpec { format: WeightFormat::Blocks(BlockFormat::Q4K), ..weight };
        let kept_in_8 = WeightSpec { compute: Compute::Fp8, ..weight };
        for (other, most) in [(with_prompts_8, 256), (kept_in_8, 128), (in_blocks, 1024)] {
            assert!(
                matches!(linear_kernel(&other, most, SelectBy::Rows), LinearKernel::Panels { .. }),
                "{other:?}"
            );
            assert_eq!(linear_kernel(&other, most + 1, SelectBy::Rows), LinearKernel::Blas, "{other:?}");
        }
        let wide = WeightSpec { compute: Compute::Bf16, ..weight };
        assert!(
            matches!(linear_kernel(&wide, 1, SelectBy::Rows), LinearKernel::Panels { .. }),
            "x never in 8 bits"
        );
    }
}
