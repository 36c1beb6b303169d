//! Scales columns, then rotates them in pairs.

/// `x` is one row. For each round, `pairs` and `cos_sin` hold `K` entries: two columns, and their cosine and sine.
pub fn rotate_pairs(x: &[f32], scales: &[f32], pairs: &[u32], cos_sin: &[f32]) -> Vec<f64> {
    let mut y: Vec<f64> = x.iter().zip(scales).map(|(x, s)| f64::from(*x) * f64::from(*s)).collect();
    for (pair, turn) in pairs.chunks_exact(2).zip(cos_sin.chunks_exact(2)) {
        let (a, b) = (pair[0] as usize, pair[1] as usize);
        let (cos, sin) = (f64::from(turn[0]), f64::from(turn[1]));
        (y[a], y[b]) = (y[a] * cos + y[b] * sin, y[b] * cos - y[a] * sin);
    }
    y
}
