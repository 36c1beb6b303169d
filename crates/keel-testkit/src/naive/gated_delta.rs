//! Gated delta rule, token by token.

/// Sizes of the heads.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Hk
    pub key_heads: usize,
    /// Hv
    pub value_heads: usize,
    /// Dk
    pub key_size: usize,
    /// Dv
    pub value_size: usize,
}

/// The inputs of the rule: `qkv` `[T, 2 Hk Dk + Hv Dv]`, `a` and `b` `[T, Hv]`, `a_log` and `dt_bias` `[Hv]`.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    /// Queries, keys, values, after the convolution.
    pub qkv: &'a [f32],
    /// Input of the decay.
    pub a: &'a [f32],
    /// Input of beta.
    pub b: &'a [f32],
    /// Logarithm of the decay's rate.
    pub a_log: &'a [f32],
    /// Bias of the decay's input.
    pub dt_bias: &'a [f32],
}

/// Results of the rule.
#[derive(Clone, Debug)]
pub struct Outputs {
    /// `[T, Hv, Dv]`
    pub y: Vec<f64>,
    /// `[T, Hk Dk + Hv Dv + Hv]`: the record of each row, `(k, u, g)`.
    pub records: Vec<f64>,
}

/// Runs all rows in order. `state` `[Hv, Dk, Dv]` is updated in place.
pub fn gated_delta(shape: Shape, inputs: Inputs<'_>, state: &mut [f64]) -> Outputs {
    gated_delta_kept(shape, inputs, state, |x| x)
}

/// As [`gated_delta`], with a state that is `kept` in another form after each row.
pub fn gated_delta_kept(
    shape: Shape,
    inputs: Inputs<'_>,
    state: &mut [f64],
    kept: impl Fn(f64) -> f64,
) -> Outputs {
    let Shape { key_heads, value_heads, key_size, value_size } = shape;
    let row_len = 2 * key_heads * key_size + value_heads * value_size;
    let rows = inputs.qkv.len() / row_len;
    let mut y = vec![0.0; rows * value_heads * value_size];
    let record_len = key_heads * key_size + value_heads * (value_size + 1);
    let mut records = vec![0.0; rows * record_len];
    for t in 0..rows {
        let row: Vec<f64> =
            inputs.qkv[t * row_len..(t + 1) * row_len].iter().map(|&x| f64::from(x)).collect();
        let (keys, rest) = records[t * record_len..(t + 1) * record_len].split_at_mut(key_heads * key_size);
        let (updates, log_decays) = rest.split_at_mut(value_heads * value_size);
        for h in 0..value_heads {
            let key_head = h / (value_heads / key_heads);
            let q = l2_norm(&row[key_head * key_size..][..key_size]);
            let k = l2_norm(&row[(key_heads + key_head) * key_size..][..key_size]);
            let v = &row[2 * key_heads * key_size + h * value_size..][..value_size];
            let beta = 1.0 / (1.0 + (-f64::from(inputs.b[t * value_heads + h])).exp());
            let gate = f64::from(inputs.a[t * value_heads + h]) + f64::from(inputs.dt_bias[h]);
            log_decays[h] = -f64::from(inputs.a_log[h]).exp() * gate.exp().ln_1p();
            keys[key_head * key_size..][..key_size].copy_from_slice(&k);
            let s = &mut state[h * key_size * value_size..(h + 1) * key_size * value_size];
            for x in s.iter_mut() {
                *x *= log_decays[h].exp();
            }
            for j in 0..value_size {
                let seen: f64 = (0..key_size).map(|i| k[i] * s[i * value_size + j]).sum();
                let u = beta * (v[j] - seen);
                updates[h * value_size + j] = u;
                for i in 0..key_size {
                    s[i * value_size + j] += k[i] * u;
                }
                let sum: f64 = (0..key_size).map(|i| q[i] * s[i * value_size + j]).sum();
                y[(t * value_heads + h) * value_size + j] = sum / (key_size as f64).sqrt();
            }
            s.iter_mut().for_each(|x| *x = kept(*x));
        }
    }
    Outputs { y, records }
}

fn l2_norm(x: &[f64]) -> Vec<f64> {
    let norm = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
    x.iter().map(|x| x / norm).collect()
}
