//! The matrix products of a chunk; rows past its last row are zeros.

use super::scratch::Scratch;
use super::{CHUNK, STRIP};
use crate::kernels::small_gemm::{Matrix, SmallGemm, Start};
use crate::simd::{LANES, Simd, exp, lanes};

/// `u[i] = beta[i] (v[i] - e^G[i] k[i] S)`
#[inline(always)]
pub(super) fn right_hand_sides<S: Simd>(s: S, padded: usize, m: &mut Scratch<'_>) {
    let (dk, dv) = (m.dk, m.dv);
    let gemm = SmallGemm {
        m: padded,
        n: dv,
        k: dk,
        a: Matrix::new(&*m.k, dk),
        b: Matrix::new(&*m.state, dv),
        start: Start::Zero,
    };
    gemm.run(s, m.u, dv);
    for i in 0..padded {
        let (factor, beta) = (s.splat(m.from_start[i]), s.splat(m.beta[i]));
        let row = i * dv..(i + 1) * dv;
        let (u, _) = m.u[row.clone()].as_chunks_mut::<LANES>();
        let (v, _) = m.u_decayed[row].as_chunks::<LANES>();
        for (u, v) in u.iter_mut().zip(v) {
            let difference = s.fnma(factor, s.load(u), s.load(v));
            s.store(s.mul(beta, difference), u);
        }
    }
}

/// Fills the transpose of k, rows in whole vectors: those past `padded` become zero.
#[inline(always)]
pub(super) fn transpose_keys<S: Simd>(s: S, padded: usize, m: &mut Scratch<'_>) {
    let dk = m.dk;
    for i in (0..padded).step_by(LANES) {
        for d in (0..dk).step_by(LANES) {
            let columns = LANES.min(dk - d);
            let mut tile = [s.splat(0.0); LANES];
            for (row, tile) in tile.iter_mut().enumerate().take(padded - i) {
                *tile = s.load_partial(&m.k[(i + row) * dk + d..][..columns]);
            }
            let tile = s.transpose(tile);
            for (column, tile) in tile.into_iter().enumerate().take(columns) {
                s.store_at(tile, m.k_transposed, (d + column) * CHUNK + i);
            }
        }
    }
}

/// `a - b`, where each is a sum stored as two floats.
#[inline(always)]
pub(super) fn difference<S: Simd>(s: S, a_high: f32, a_low: f32, b_high: S::V, b_low: S::V) -> S::V {
    s.add(s.sub(s.splat(a_high), b_high), s.sub(s.splat(a_low), b_low))
}

/// The numbers `start`, `start + 1`, ... as lanes.
#[inline(always)]
fn lane_numbers<S: Simd>(s: S, start: usize) -> S::V {
    s.load(&std::array::from_fn(|i| (start + i) as f32))
}

/// Fills D: `e^(G[i] - G[j])` for `j <= i` in the chunk's rows, else zero.
#[inline(always)]
pub(super) fn decays_between<S: Simd>(s: S, rows: usize, padded: usize, m: &mut Scratch<'_>) {
    for i in 0..padded {
        let row = &mut m.between[i * CHUNK..(i + 1) * CHUNK];
        if i >= rows {
            row.fill(0.0);
            continue;
        }
        let (own_high, own_low) = (m.log_high[i], m.log_low[i]);
        lanes!(s, row, [high = m.log_high, low = m.log_low] =>
            exp(s, difference(s, own_high, own_low, high, low)));
        row[i + 1..].fill(0.0);
    }
}

/// Fills -L and P.
#[inline(always)]
pub(super) fn triangles<S: Simd>(s: S, padded: usize, m: &mut Scratch<'_>) {
    let dk = m.dk;
    for start in (0..padded).step_by(STRIP) {
        // Columns past the strip's last row are above the diagonal.
        let n = (start + STRIP).next_multiple_of(LANES);
        let keys = Matrix::new(&*m.k_transposed, CHUNK);
        let product = |a| SmallGemm { m: STRIP, n, k: dk, a, b: keys, start: Start::Zero };
        product(Matrix::new(&m.k[start * dk..], dk)).run(s, &mut m.lower[start * CHUNK..], CHUNK);
        product(Matrix::new(&m.q[start * dk..], dk)).run(s, &mut m.scores[start * CHUNK..], CHUNK);
        for i in start..start + STRIP {
            let (between, _) = m.between[i * CHUNK..i * CHUNK + n].as_chunks::<LANES>();
            let (lower, _) = m.lower[i * CHUNK..i * CHUNK + n].as_chunks_mut::<LANES>();
            let (scores, _) = m.scores[i * CHUNK..i * CHUNK + n].as_chunks_mut::<LANES>();
            let minus_beta = s.splat(-m.beta[i]);
            for (c, ((between, lower), scores)) in between.iter().zip(lower).zip(scores).enumerate() {
                let between = s.load(between);
                s.store(s.mul(between, s.load(scores)), scores);
                let entry = s.mul(minus_beta, s.mul(between, s.load(lower)));
                let below = s.select_lt(lane_numbers(s, c * LANES), s.splat(i as f32), entry, s.splat(0.0));
                s.store(below, lower);
            }
        }
    }
}

/// Solves `(1 + L) U = R` in place, strip by strip: first the contributions of earlier strips, then its own rows in
/// order.
#[inline(always)]
pub(super) fn solve<S: Simd>(s: S, padded: usize, m: &mut Scratch<'_>) {
    let dv = m.dv;
    for start in (0..padded).step_by(STRIP) {
        let (solved, strip) = m.u.split_at_mut(start * dv);
        let a = Matrix::new(&m.lower[start * CHUNK..], CHUNK);
        let gemm = SmallGemm {
            m: STRIP,
            n: dv,
            k: start,
            a,
            b: Matrix::new(&*solved, dv),
            start: Start::Scaled(1.0),
        };
        gemm.run(s, strip, dv);
        for i in 1..STRIP {
            let (above, row) = strip.split_at_mut(i * dv);
            let a = Matrix::new(&m.lower[(start + i) * CHUNK + start..], CHUNK);
            let gemm =
                SmallGemm { m: 1, n: dv, k: i, a, b: Matrix::new(&*above, dv), start: Start::Scaled(1.0) };
            gemm.run(s, row, dv);
        }
    }
}

/// `Y = e^G q S + P U`
#[inline(always)]
pub(super) fn outputs<S: Simd>(s: S, padded: usize, m: &mut Scratch<'_>) {
    let (dk, dv) = (m.dk, m.dv);
    let gemm = SmallGemm {
        m: padded,
        n: dv,
        k: dk,
        a: Matrix::new(&*m.q, dk),
        b: Matrix::new(&*m.state, dv),
        start: Start::Zero,
    };
    gemm.run(s, m.y, dv);
    for start in (0..padded).step_by(STRIP) {
        let a = Matrix::new(&m.scores[start * CHUNK..], CHUNK);
        let factors = Start::Rows(&m.from_start[start..]);
        let gemm =
            SmallGemm { m: STRIP, n: dv, k: start + STRIP, a, b: Matrix::new(&*m.u, dv), start: factors };
        gemm.run(s, &mut m.y[start * dv..], dv);
    }
}

/// `S = e^G[last] S + sum_j e^(G[last] - G[j]) k[j] u[j]^T`
#[inline(always)]
pub(super) fn update_state<S: Simd>(s: S, rows: usize, m: &mut Scratch<'_>) {
    let (dk, dv) = (m.dk, m.dv);
    for (i, decayed) in m.u_decayed.chunks_exact_mut(dv).enumerate().take(rows) {
        let factor = s.splat(m.to_end[i]);
        lanes!(s, decayed, [u = &m.u[i * dv..(i + 1) * dv]] => s.mul(u, factor));
    }
    let start = Start::Scaled(m.from_start[rows - 1]);
    let gemm = SmallGemm {
        m: dk,
        n: dv,
        k: rows,
        a: Matrix::new(&*m.k_transposed, CHUNK),
        b: Matrix::new(&*m.u_decayed, dv),
        start,
    };
    gemm.run(s, m.state, dv);
}
