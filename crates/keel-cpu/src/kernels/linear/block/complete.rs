//! Groups with complete integer dots, which are added to the f32 sums between the dots of the next group.
//!
//! Done all at once, the conversions would leave the dot product units idle: processors do not look far enough ahead to
//! start the next group.

use super::super::lanes::Lanes;
use super::PAIR;

/// A group of `M` rows and two tiles. It adds `scale * dots * c` to the sums, and `offset * row_sum` if there are
/// offsets.
pub(super) struct Complete<S: Lanes, const M: usize> {
    pub dots: [[S::I; PAIR]; M],
    pub scale: [S::F; PAIR],
    pub offset: [S::F; PAIR],
    /// `(c, row_sum)` of each row.
    pub rows: *const [f32; 2],
}

impl<S: Lanes, const M: usize> Complete<S, M> {
    /// An empty group before the first one: sums that start at zero stay zero.
    ///
    /// # Safety
    /// As [`Lanes`].
    #[inline(always)]
    pub(super) unsafe fn nothing(rows: &[[f32; 2]; M]) -> Complete<S, M> {
        // SAFETY: as the caller promises.
        let (dots, zero) = unsafe { ([[S::splat_i(0); PAIR]; M], S::splat(0.0)) };
        Complete { dots, scale: [zero; PAIR], offset: [zero; PAIR], rows: rows.as_ptr() }
    }

    /// Adds share `q` of `quads` of the group to the sums. `offset` is a constant in the caller.
    ///
    /// # Safety
    /// As [`Lanes`]; `rows` has `M` rows.
    #[inline(always)]
    pub(super) unsafe fn add_share(
        &self,
        offset: bool,
        q: usize,
        quads: usize,
        sums: &mut [[S::F; PAIR]; M],
    ) {
        for i in q * M * PAIR / quads..(q + 1) * M * PAIR / quads {
            let (m, t) = (i / PAIR, i % PAIR);
            // SAFETY: as the caller promises.
            unsafe {
                let [row_scale, row_sum] = *self.rows.add(m);
                let scaled = S::mul(S::to_f32(self.dots[m][t]), self.scale[t]);
                sums[m][t] = S::fma(scaled, S::splat(row_scale), sums[m][t]);
                if offset {
                    sums[m][t] = S::fma(self.offset[t], S::splat(row_sum), sums[m][t]);
                }
            }
        }
    }
}
