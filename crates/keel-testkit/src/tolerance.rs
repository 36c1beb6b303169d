//! Tolerances: the largest distance between a backend's and the oracle's result, relative to the result's largest
//! element. For functions of one element it is relative to each element.

/// f32 products and sums: a few rounding errors (6e-8 each) for sums cut into chunks of at most 256.
pub const F32: f64 = 3e-6;

/// bf16 dot instructions round twice in a pair of products, and flush denormals. The oracle's inputs are rounded to
/// bf16, too.
pub const BF16: f64 = 1e-5;

/// Integer dot products are exact. The error is that of the f32 sum over groups, whose scaled terms are larger than
/// their sum. The oracle's activations are quantised, too.
pub const INT8: f64 = 5e-6;

/// Rounding activations to 8 bits in groups; the oracle does not round. The error is half a step in 127 for each input,
/// averaged over at least 1,000 inputs.
pub const INT8_ACTIVATIONS: f64 = 1e-2;

/// The mean distance from the nearest oracle, relative to a typical sum of products. There is an oracle that rounds
/// activations to 8 bits in the groups that a backend may choose, and one that does not round. A backend that rounds as
/// one of them differs in ties alone, about 0.01%; f16 operands lose 0.03%. With one bit of the activations lost the
/// distance is 0.7%.
pub const OF_THE_NEAREST: f64 = 2e-3;

/// Relative to a typical sum of products. Wide enough for activations of 8 bits in groups (0.4% of a typical sum in the
/// mean, 2% in the worst of many sums), and far below the error of 8-bit floats (4% in the mean, 17% in the worst).
pub const ONE_OF_TWO_ROUNDINGS: f64 = 3e-2;

/// Rounding activations to bf16 (relative error 2^-9 each); the oracle does not round.
pub const BF16_ACTIVATIONS: f64 = 3e-3;

/// Activations as the sum of two bf16, which keep 16 bits of them; the oracle does not round. The larger part of the
/// error is that of f32 sums on tensor cores, which cut off instead of rounding: up to 1e-5 for 2,568 columns. With one
/// bf16 alone it is 5e-4 and more.
pub const TWO_BF16: f64 = 3e-5;

/// Rounding operands to f16 (relative error 2^-12 each) in up to four consecutive products; the oracle does not round.
pub const F16_OPERANDS: f64 = 1e-3;

/// A result stored as f16: half a unit in the last of 11 bits.
pub const F16_STORED: f64 = 5e-4;

/// A state rounded to f16 after each row or each 64 rows, where the oracle rounds after each row: units in the last of
/// 11 bits, which decay and add up.
pub const F16_STATE: f64 = 4e-3;

/// A result stored as bf16: half a unit in the last of 8 bits.
pub const BF16_STORED: f64 = 4e-3;
