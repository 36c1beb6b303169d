//! Drawing tokens from logits.

use super::Op;
use super::fast::expect_f32_in;
use crate::error::{expect_shape, wrong_shape};
use crate::sampling::Draw;
use crate::{Array, ArrayError, DType, Result, Shape};

impl Array {
    /// A token for each row of logits; [`crate::sampling`] defines it. `draws` holds [`Draw::words`] for each row. The
    /// token of a row with [`Draw::NOTHING`] is undefined.
    ///
    /// # Shapes
    /// logits `[R, V]`, draws `[R, 5]`, tokens `[R]`. V is 1 to [`Draw::WIDTH_MAX`].
    ///
    /// # Dtypes
    /// f32 and f32 to u32; weights are summed in 64-bit integers.
    ///
    /// # Errors
    /// If shapes or types differ from this.
    pub fn sample(&self, draws: &Array) -> Result<Array> {
        const OP: &str = "sample";
        for (operand, array) in [("logits", self), ("draws", draws)] {
            expect_f32_in(OP, operand, array)?;
        }
        let &[rows, width] = &self.shape()[..] else {
            return Err(wrong_shape(OP, "logits", "[rows, vocabulary]", self.shape()));
        };
        if !(1..=Draw::WIDTH_MAX).contains(&width) {
            let reason = format!("rows of {width} logits are not within 1 to {}", Draw::WIDTH_MAX);
            return Err(ArrayError::Argument { op: OP, reason });
        }
        expect_shape(OP, "draws", &[rows, Draw::WORDS], draws.shape())?;
        Array::build(Op::Sample, &[self, draws], Shape::from([rows]), DType::U32)
    }
}
