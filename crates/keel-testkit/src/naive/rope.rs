//! Rotary position embedding of half-split pairs.

/// Rotates `x` `[T, heads, D]`: pair `i` of row `t` by `angles[t * pairs + i]`. Values after the pairs do not change.
pub fn rope(x: &[f64], heads: usize, head_dim: usize, angles: &[f64], pairs: usize) -> Vec<f64> {
    let mut y = x.to_vec();
    for (t, row) in y.chunks_exact_mut(heads * head_dim).enumerate() {
        for head in row.chunks_exact_mut(head_dim) {
            for i in 0..pairs {
                let (sin, cos) = angles[t * pairs + i].sin_cos();
                let (a, b) = (head[i], head[i + pairs]);
                head[i] = a * cos - b * sin;
                head[i + pairs] = b * cos + a * sin;
            }
        }
    }
    y
}
