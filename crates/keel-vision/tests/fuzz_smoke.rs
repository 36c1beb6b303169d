//! Runs the functions of the fuzz targets on seeded mutations of valid files, for machines without a fuzzer.

#[path = "../fuzz/checks.rs"]
mod checks;

use std::path::Path;

use keel_testkit::random::{Random, mutate, mutations};
use keel_vision::{DecodeLimits, decode};

const MUTATED_FILES: u64 = 400;

fn data(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)).expect("readable")
}

/// Byte strings with a meaning for the decoders.
const WORDS: [&[u8]; 9] =
    [b"\0\0\0\0", b"\xff\xff\xff\xff", b"IDAT", b"eXIf", b"VP8X", b"\xff\xda", b"null", b"-1", b"1e999"];

fn survive(sound: &[u8], check: fn(&[u8]) -> bool) {
    assert!(check(sound));
    let mut refused = 0;
    let files = mutations(MUTATED_FILES);
    for seed in 1..=files {
        let mut file = sound.to_vec();
        let mut random = Random::of_case(seed);
        for _ in 0..1 + random.below(3) {
            mutate(&mut file, &WORDS, &mut random);
        }
        refused += u64::from(!check(&file));
    }
    assert!(refused > files / 20, "{refused} refused");
}

#[test]
fn mutated_pictures_never_panic() {
    for name in ["bilevel.png", "palette_trns.png", "progressive_420.jpg"] {
        survive(&data(name), checks::picture);
    }
    survive(&lossless(), checks::picture);
    survive(&gif(1), checks::picture);
}

/// A lossless WebP picture.
fn lossless() -> Vec<u8> {
    let mut file = std::io::Cursor::new(Vec::new());
    let pixels = image::RgbImage::from_fn(40, 30, |x, y| image::Rgb([(x * y) as u8, x as u8, y as u8]));
    pixels.write_to(&mut file, image::ImageFormat::WebP).expect("it is written");
    file.into_inner()
}

#[test]
fn mutated_processor_files_never_panic() {
    survive(
        br#"{"image_processor": {"patch_size": 16, "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "resample": 3,
        "size": {"shortest_edge": 8192, "longest_edge": 24576}, "temporal_patch_size": 2, "fps": 2, "do_resize": true}}"#,
        checks::processor,
    );
}

/// A GIF of some frames, each with its own colours.
fn gif(frames: u8) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = image::codecs::gif::GifEncoder::new(&mut file);
    for number in 0..frames {
        let pixels = image::RgbaImage::from_fn(9, 7, |x, y| {
            image::Rgba([number.wrapping_mul(40), (x * 20) as u8, (y * 30) as u8, 255])
        });
        encoder.encode_frame(image::Frame::new(pixels)).expect("it is written");
    }
    drop(encoder);
    file
}

#[test]
fn mutated_films_never_panic() {
    survive(&gif(3), checks::film);
}

#[test]
fn truncated_files_are_refused() {
    for name in ["bilevel.png", "palette_trns.png", "progressive_420.jpg"] {
        let sound = data(name);
        for end in [0, 1, 20, sound.len() / 2, sound.len() * 9 / 10] {
            let message = decode(&sound[..end], DecodeLimits::default()).expect_err(name).to_string();
            assert!(!message.is_empty() && !message.contains('\n'), "{name} cut at {end}: {message}");
        }
    }
}

/// A PNG with a header that claims this size, and without data.
fn claimed(width: u32, height: u32) -> Vec<u8> {
    let mut file = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".to_vec();
    file.extend(width.to_be_bytes());
    file.extend(height.to_be_bytes());
    file.extend([8, 2, 0, 0, 0]);
    let crc = !file[12..29].iter().fold(!0u32, |crc, byte| {
        (0..8).fold(
            crc ^ u32::from(*byte),
            |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 },
        )
    });
    file.extend(crc.to_be_bytes());
    file.extend(b"\0\0\0\0IDAT\x35\xaf\x06\x1e");
    file
}

#[test]
fn bombs_are_refused_by_the_size_that_they_claim() {
    let refused = |w, h| decode(&claimed(w, h), DecodeLimits::default()).expect_err("a bomb").to_string();
    assert!(refused(50_000, 50_000).contains("50000 x 50000"), "{}", refused(50_000, 50_000));
    assert!(refused(1, 1).contains("1 x 1"), "{}", refused(1, 1));
    let small = DecodeLimits { file_bytes: 10, ..DecodeLimits::default() };
    let message = decode(&data("bilevel.png"), small).expect_err("too large").to_string();
    assert!(message.contains("at most 10"), "{message}");
}
