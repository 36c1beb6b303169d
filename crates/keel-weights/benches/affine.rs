//! Speed of the affine codec: `cargo bench -p keel-weights --bench affine`.
//!
//! Rows of 4096 values; one thread decodes, all threads encode. The target: a disk that reads 2 GB/s of bf16 delivers
//! 1 Gvalue/s, and neither direction should be much slower than that. The floor of encoding, with the four lanes of the
//! baseline instruction set, is its division: 4 values in 5 cycles.

use std::time::{Duration, Instant};

use keel_weights::affine::{AFFINE_BITS, AffineFormat, dequantize_row, quantize_rows};

const COLS: usize = 4096;
const ROWS: usize = 512;
const VALUES: usize = ROWS * COLS;

fn main() {
    let values: Vec<f32> =
        (0..VALUES as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0).collect();
    println!("bits  group   encode Gvalues/s   decode Gvalues/s");
    for bits in AFFINE_BITS {
        let format = AffineFormat::new(bits, 64).expect("it exists");
        measure(format, &values);
    }
}

fn measure(format: AffineFormat, values: &[f32]) {
    let groups = COLS / format.group_size();
    let row_bytes = format.packed_bytes(COLS);
    let mut packed = vec![0; ROWS * row_bytes];
    let (mut scales, mut biases) = (vec![0.0; ROWS * groups], vec![0.0; ROWS * groups]);
    let encode = fastest(|| quantize_rows(format, COLS, values, &mut packed, &mut scales, &mut biases));
    let mut row = vec![0.0; COLS];
    let decode_row = |i: usize, row: &mut [f32]| {
        let (scales, biases) = (&scales[i * groups..][..groups], &biases[i * groups..][..groups]);
        dequantize_row(format, &packed[i * row_bytes..][..row_bytes], scales, biases, row);
    };
    for i in 0..ROWS {
        decode_row(i, &mut row);
        let step = 2.0 / f32::from(format.code_max());
        let is_close = |(a, b): (&f32, &f32)| (a - b).abs() <= step * 1.01;
        assert!(row.iter().zip(&values[i * COLS..]).all(is_close), "row {i} of {format} is wrong");
    }
    let decode = fastest(|| (0..ROWS).for_each(|i| decode_row(i, &mut row)));
    let rate = |time: Duration| VALUES as f64 / time.as_secs_f64() / 1e9;
    println!("{:4} {:6} {:18.2} {:18.2}", format.bits(), format.group_size(), rate(encode), rate(decode));
}

fn fastest(mut work: impl FnMut()) -> Duration {
    let time = |_| {
        let start = Instant::now();
        work();
        start.elapsed()
    };
    (0..15).map(time).min().expect("it ran")
}
