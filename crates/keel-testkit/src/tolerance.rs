//! How far a backend may be from the oracle, relative to the largest element of the result.

/// f32 products and sums: a few units of rounding (6e-8) for sums cut into chunks of at most 256.
pub const F32: f64 = 3e-6;

/// bf16 dot instructions round twice in a product pair and flush denormals; against an oracle whose inputs
/// were rounded to bf16.
pub const BF16: f64 = 1e-5;

/// Integer dot products are exact; what is left is the f32 sum over groups, whose scaled terms are larger
/// than their sum. Against an oracle whose activations were quantised.
pub const INT8: f64 = 5e-6;

/// Rounding activations to 8 bits in groups, against an oracle that does not: half a step in 127 for
/// each input, averaged over at least 1,000 inputs.
pub const INT8_ACTIVATIONS: f64 = 1e-2;

/// Rounding activations to bf16 (2^-9 of each), against an oracle that does not.
pub const BF16_ACTIVATIONS: f64 = 3e-3;

/// Operands rounded to f16 (2^-12 of each) in up to four products behind each other, against an oracle that does not.
pub const F16_OPERANDS: f64 = 1e-3;

/// A result stored as f16: half a unit in the last of 11 bits.
pub const F16_STORED: f64 = 5e-4;

/// A result stored as bf16: half a unit in the last of 8 bits.
pub const BF16_STORED: f64 = 4e-3;
