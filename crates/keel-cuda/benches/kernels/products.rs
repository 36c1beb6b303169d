//! Products of weights, a whole mixture of experts, and drawing a token from the last product's logits.

use super::{Bench, Floor};
use keel_array::sampling::Draw;
use keel_array::{
    Array, Compute, DType, Result, Routing, RowBlock, RowData, Runtime, SharedExpert, Weight, WeightFormat,
    WeightSpec,
};
use keel_testkit::random::Random;
use std::cell::Cell;

/// Random rows of a weight; the other rows repeat them.
const MADE_UP: usize = 256;

pub fn time(bench: &Bench) -> Result<()> {
    let affine = |bits| WeightFormat::Affine { bits, group_size: 64, scale_dtype: DType::BF16 };
    let (four_bits, bf16) = (affine(4), WeightFormat::Dense(DType::BF16));
    let products = [
        (four_bits, 2560, 248_320, 1),
        (four_bits, 2560, 18_432, 1),
        (four_bits, 9216, 2560, 1),
        (four_bits, 4096, 24_576, 1),
        (affine(8), 2560, 18_432, 1),
        (bf16, 2560, 18_432, 1),
        (four_bits, 2560, 18_432, 4),
        (four_bits, 2560, 18_432, 16),
        (four_bits, 2560, 18_432, 32),
        (four_bits, 9216, 2560, 32),
        (four_bits, 2560, 18_432, 64),
        (four_bits, 2560, 18_432, 4096),
    ];
    for (format, cols, outputs, rows) in products {
        product(bench, format, (cols, outputs), rows)?;
    }
    mixture(bench, four_bits)?;
    draws(bench, "greedy", Draw::GREATEST)?;
    draws(
        bench,
        "top-k 20, top-p 0.95",
        Draw { temperature: 0.7, top_k: 20, top_p: 0.95, min_p: 0.0, uniform: 0.4 },
    )
}

fn product(bench: &Bench, format: WeightFormat, (cols, outputs): (usize, usize), rows: usize) -> Result<()> {
    let coding = match format {
        WeightFormat::Affine { bits, .. } => format!("{bits} bits"),
        _ => "bf16".to_owned(),
    };
    let bytes = bytes_of(bench, format, outputs, cols);
    let needed = bytes + 4 * rows * (cols + outputs);
    let floor = if rows > 256 {
        Floor::Operations(2.0 * (rows * cols * outputs) as f64, rows)
    } else {
        Floor::Bytes(needed)
    };
    let data = || Ok((weight(&bench.runtime, format, 1, outputs, cols)?, bench.random(&[rows, cols])?));
    bench.time(
        &format!("product {coding}, {cols} to {outputs}, {rows} rows"),
        floor,
        needed,
        data,
        |(weight, x)| x.linear(weight),
    )
}

/// Norm, router, chosen experts, the shared one and their combination, of the 35b-a3b shape, for one row.
fn mixture(bench: &Bench, format: WeightFormat) -> Result<()> {
    const EXPERTS: usize = 256;
    const CHOICES: usize = 8;
    const WIDTH: usize = 2048;
    const INNER: usize = 512;
    let stack = |experts, rows, cols| weight(&bench.runtime, format, experts, rows, cols);
    let bytes = |rows, cols| bytes_of(bench, format, rows, cols);
    let needed = bytes(EXPERTS + 1, WIDTH) + (CHOICES + 1) * (bytes(2 * INNER, WIDTH) + bytes(WIDTH, INNER));
    let name = format!("mixture of {EXPERTS} experts of {INNER}, {CHOICES} chosen and one shared");
    let scale = bench.random(&[WIDTH])?;
    // Each row chooses its own experts.
    let stacks = [
        (stack(EXPERTS, 2 * INNER, WIDTH)?, stack(EXPERTS, WIDTH, INNER)?),
        (stack(EXPERTS, 2 * INNER, WIDTH)?, stack(EXPERTS, WIDTH, INNER)?),
    ];
    let made = Cell::new(0);
    let data = || {
        made.set(made.get() + 1);
        let seed = made.get();
        let x = Random::new(seed as u64).uniforms(WIDTH, -1.0, 1.0);
        let x = Array::from_slice(&bench.runtime, &x, [1, WIDTH])?;
        let router = random_weight(&bench.runtime, format, (1, EXPERTS + 1, WIDTH), false)?;
        Ok((x, seed % 2, router, stack(1, 2 * INNER, WIDTH)?, stack(1, WIDTH, INNER)?))
    };
    bench.time(&name, Floor::Bytes(needed), needed, data, |(x, i, router, shared_gate_up, shared_down)| {
        let (gate_up, down) = &stacks[*i];
        let normed = x.rms_norm(&scale, 1e-6)?;
        let routed = normed.linear(router)?;
        let Routing { weights, experts: chosen } =
            routed.slice_axis(-1, 0, EXPERTS)?.route_top_k(CHOICES, true)?;
        let outputs = normed.gather_linear(gate_up, &chosen)?.swiglu()?.gather_linear(down, &chosen)?;
        let always = normed.linear(shared_gate_up)?.swiglu()?.linear(shared_down)?;
        let gate = routed.slice_axis(-1, EXPERTS, EXPERTS + 1)?;
        outputs.combine_experts(&weights, Some(x), Some(SharedExpert { output: &always, gate: &gate }))
    })
}

fn draws(bench: &Bench, how: &str, draw: Draw) -> Result<()> {
    const VOCABULARY: usize = 248_320;
    let bytes = 4 * VOCABULARY;
    let words = Array::from_slice(&bench.runtime, &draw.words(), [1, Draw::WORDS])?;
    let data = || bench.random_within(&[1, VOCABULARY], DType::F32, -8.0, 8.0);
    bench.time(&format!("token of {VOCABULARY} logits, {how}"), Floor::Bytes(bytes), bytes, data, |logits| {
        logits.sample(&words)
    })
}

fn spec(format: WeightFormat, experts: usize, rows: usize, cols: usize) -> WeightSpec {
    WeightSpec { experts, rows, cols, format, compute: Compute::Auto }
}

/// Bytes of one matrix.
fn bytes_of(bench: &Bench, format: WeightFormat, rows: usize, cols: usize) -> usize {
    bench.runtime.backend().packed_bytes(&spec(format, 1, rows, cols))
}

pub fn weight(
    runtime: &Runtime,
    format: WeightFormat,
    experts: usize,
    rows: usize,
    cols: usize,
) -> Result<Weight> {
    random_weight(runtime, format, (experts, rows, cols), true)
}

/// A weight of random codes. With `repeated` all rows after the first [`MADE_UP`] repeat these.
fn random_weight(
    runtime: &Runtime,
    format: WeightFormat,
    (experts, rows, cols): (usize, usize, usize),
    repeated: bool,
) -> Result<Weight> {
    let weight = Weight::allocate(runtime, spec(format, experts, rows, cols))?;
    let mut random = Random::new((rows * cols) as u64);
    let mut row = 0;
    while row < rows && !(repeated && row > 0) {
        let count = MADE_UP.min(rows - row);
        let values = random.uniforms(count * cols, -1.0, 1.0);
        match format {
            WeightFormat::Affine { bits, group_size, .. } => {
                let top = f32::from((1u16 << bits) - 1);
                let codes: Vec<u8> = values.iter().map(|x| ((x + 1.0) / 2.0 * (top + 0.99)) as u8).collect();
                let groups = count * cols / usize::from(group_size);
                let (scales, biases) = (random.uniforms(groups, 0.5 / top, 1.0 / top), vec![-0.4; groups]);
                let data = RowData::Affine { codes: &codes, scales: &scales, biases: &biases };
                weight.fill(&RowBlock { expert: 0, first_row: row, rows: count, data })?;
            }
            _ => {
                let bytes: Vec<u8> =
                    values.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect();
                let data = RowData::Dense(&bytes);
                weight.fill(&RowBlock { expert: 0, first_row: row, rows: count, data })?;
            }
        }
        row += count;
    }
    if repeated && (rows > MADE_UP || experts > 1) {
        assert!(weight.repeat(MADE_UP.min(rows)), "the backend repeats rows");
    }
    Ok(weight)
}
