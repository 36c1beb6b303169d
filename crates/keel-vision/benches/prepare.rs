//! Speed of preparing a picture: `cargo bench -p keel-vision --bench prepare -- [THREADS [RUNS]]`, by default 2 and 9.
//!
//! A JPEG of 4,000 by 3,000 pixels (3.5 MB), read at 1 Mi pixels. The
//! goal on 2 cores is 250 ms. Floors and figures: docs/notebook/vision.md.

use std::time::{Duration, Instant};

use image::codecs::jpeg::JpegEncoder;
use keel_vision::{DecodeLimits, ProcessorFiles, decode};
use serde_json::{Map, json};

const WIDTH: u32 = 4000;
const HEIGHT: u32 = 3000;

/// A picture with smooth parts, edges and noise, about as hard to code as a photograph.
fn photo() -> Vec<u8> {
    let mut state = 1u32;
    let mut rgb = Vec::with_capacity((WIDTH * HEIGHT * 3) as usize);
    for y in 0..HEIGHT {
        for x in 0..WIDTH {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let noise = (state >> 27) as i32;
            let wave = |p: u32| {
                ((f64::from(x) / f64::from(p)).sin() * (f64::from(y) / f64::from(p)).cos() * 60.0) as i32
            };
            let edge = if (x / 97 + y / 61).is_multiple_of(3) { 40 } else { 0 };
            for base in [120, 100, 90] {
                rgb.push((base + wave(37) + wave(211) + edge + noise).clamp(0, 255) as u8);
            }
        }
    }
    let mut bytes = Vec::new();
    let mut coder = JpegEncoder::new_with_quality(&mut bytes, 85);
    coder.encode(&rgb, WIDTH, HEIGHT, image::ExtendedColorType::Rgb8).expect("coded");
    bytes
}

fn main() {
    let mut numbers = std::env::args().filter_map(|arg| arg.parse::<usize>().ok());
    let (threads, runs) = (numbers.next().unwrap_or(2), numbers.next().unwrap_or(9));
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().expect("the first pool");
    let bytes = photo();
    let file =
        json!({"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 1 << 20}});
    let processor = ProcessorFiles::new(None, Some(file), None).image(&Map::new()).expect("sound");
    let limits = DecodeLimits::default();
    let picture = decode(&bytes, limits).expect("decodes");
    assert_eq!((picture.width, picture.height), (WIDTH as usize, HEIGHT as usize));
    let one = processor.process(&picture).expect("fits").swap_remove(0);
    assert!(one.grid.h * one.grid.w * 256 <= 1 << 20 && one.values.iter().all(|value| value.abs() <= 3.0));
    println!("{} threads, a JPEG of {} bytes, {} x {} patches", threads, bytes.len(), one.grid.h, one.grid.w);
    let decoded = fastest(runs, || drop(decode(&bytes, limits)));
    let prepared = fastest(runs, || drop(processor.process(&picture)));
    let show = |what: &str, time: Duration| println!("{what:<10}{:8.1} ms", time.as_secs_f64() * 1e3);
    show("decode", decoded);
    show("prepare", prepared);
    show("together", decoded + prepared);
}

fn fastest(runs: usize, mut work: impl FnMut()) -> Duration {
    let time = |_| {
        let start = Instant::now();
        work();
        start.elapsed()
    };
    (0..runs.max(1)).map(time).min().expect("it ran")
}
