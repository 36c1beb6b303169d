//! The bytes of heap that pictures and videos take are those that were foretold: at least the peak, at most 1.5 times
//! it. The test counts the heap.

use std::alloc::System;
use std::io::Cursor;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use image::codecs::gif::GifEncoder;
use image::codecs::jpeg::JpegEncoder;
use image::codecs::png::PngEncoder;
use image::codecs::webp::WebPEncoder;
use image::metadata::Orientation;
use image::{DynamicImage, Frame, ImageEncoder, ImageFormat, Rgb, RgbImage};
use keel_vision::{
    DecodeLimits, ImageProcessor, Measured, VideoBuilder, VideoFile, VideoFileLimits, VideoProcessor, decode,
    measure,
};
use serde_json::json;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static HEAP: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Repeats of work whose peak was not seen.
const REPEATS_MAX: usize = 40;

fn heap_bytes() -> usize {
    let stats = HEAP.stats();
    stats.bytes_allocated.saturating_sub(stats.bytes_deallocated)
}

/// The highest heap while `work` runs, above that before it.
fn peak_of<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let ends = Arc::new(AtomicBool::new(false));
    let end = Arc::clone(&ends);
    let (ready, is_ready) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let (before, mut most) = (heap_bytes(), 0);
        ready.send(()).expect("somebody waits");
        while !end.load(Ordering::Acquire) {
            most = most.max(heap_bytes().saturating_sub(before));
            std::thread::sleep(Duration::from_micros(20));
        }
        most as u64
    });
    is_ready.recv().expect("it begins");
    let result = work();
    ends.store(true, Ordering::Release);
    (result, thread.join().expect("it counts"))
}

/// Compares the predicted bytes with the highest heap while `work` runs. A short peak may fall between two samples, so
/// work that seems to take too little is repeated.
fn assert_foretold<T>(what: &str, foretold: u64, work: impl Fn() -> T) {
    let mut most = 0;
    for _ in 0..REPEATS_MAX {
        most = most.max(peak_of(&work).1);
        assert!(foretold >= most, "{what}: {foretold} bytes were foretold, {most} were taken");
        if most * 3 >= foretold * 2 {
            return;
        }
    }
    panic!("{what}: {foretold} bytes were foretold, only {most} were taken");
}

fn photo(width: u32, height: u32) -> DynamicImage {
    let pixel = |x: u32, y: u32| Rgb([((x * 7) ^ y) as u8, (x + 3 * y) as u8, (y / 2) as u8]);
    DynamicImage::ImageRgb8(RgbImage::from_fn(width, height, pixel))
}

fn coded(image: &DynamicImage, format: ImageFormat) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    image.write_to(&mut bytes, format).expect("coded");
    bytes.into_inner()
}

/// A JPEG with an orientation in EXIF.
fn turned(image: &DynamicImage) -> Vec<u8> {
    let mut exif = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0".to_vec();
    exif.extend([Orientation::Rotate90.to_exif(), 0, 0, 0, 0, 0, 0]);
    let mut bytes = Vec::new();
    let mut encoder = JpegEncoder::new_with_quality(&mut bytes, 90);
    encoder.set_exif_metadata(exif).expect("supported");
    encoder.encode_image(image).expect("coded");
    bytes
}

/// A PNG whose colour profile takes 64 MiB when it is unpacked.
fn with_profile(image: &DynamicImage) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = PngEncoder::new(&mut bytes);
    encoder.set_icc_profile(vec![0; 64 << 20]).expect("supported");
    encoder
        .write_image(image.as_bytes(), image.width(), image.height(), image.color().into())
        .expect("coded");
    bytes
}

/// A PNG with a text and EXIF of 4 MiB each after its header. A byte of the text takes two in the decoder.
fn with_texts(image: &DynamicImage) -> Vec<u8> {
    const HEADER_BYTES: usize = 8 + 25;
    let mut file = coded(image, ImageFormat::Png);
    for kind in [b"tEXt", b"eXIf"] {
        let mut chunk = [&kind[..], b"Comment\0"].concat();
        chunk.resize(4 << 20, 0xff);
        let next = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
        let crc = !chunk.iter().fold(!0u32, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), next));
        let size = (chunk.len() as u32 - 4).to_be_bytes();
        drop(file.splice(HEADER_BYTES..HEADER_BYTES, [&size[..], &chunk, &crc.to_be_bytes()].concat()));
    }
    file
}

/// A GIF with data of an application of 8 MiB before its frame.
fn with_application_data(mut file: Vec<u8>) -> Vec<u8> {
    let first = file.windows(2).position(|at| at == [0x21, 0xf9]).expect("its frame has a time");
    let block = [&[255][..], &[7; 255]].concat().repeat(8 << 12);
    drop(file.splice(first..first, [&b"\x21\xff\x0bXMP DataXMP"[..], &block, &[0]].concat()));
    file
}

fn lossless(image: &DynamicImage) -> Vec<u8> {
    let mut bytes = Vec::new();
    let encoder = WebPEncoder::new_lossless(&mut bytes);
    encoder
        .write_image(image.as_bytes(), image.width(), image.height(), image.color().into())
        .expect("coded");
    bytes
}

/// Bits of a WebP stream, the lowest of a byte first.
#[derive(Default)]
struct BitWriter(Vec<bool>);

impl BitWriter {
    fn write(&mut self, value: usize, count: usize) {
        self.0.extend((0..count).map(|i| value >> i & 1 == 1));
    }

    /// A code of one symbol of 8 bits.
    fn single(&mut self, symbol: usize) {
        self.write(0b101, 3);
        self.write(symbol, 8);
    }

    /// A code whose lengths are 1 to 9, 10 and 10: the decoder's table for it has 1,024 entries.
    fn long(&mut self) {
        self.write(0, 1);
        self.write(14 - 4, 4);
        // Lengths of the codes of the lengths 1 to 10: six times 3 and four times 4.
        for symbol in [17, 18, 0, 1, 2, 3, 4, 5, 16, 6, 7, 8, 9, 10] {
            self.write(
                [0, 3, 4][usize::from((1..=10).contains(&symbol)) + usize::from((7..=10).contains(&symbol))],
                3,
            );
        }
        // 11 lengths are stored.
        self.write(1, 1);
        self.write(1, 3);
        self.write(11 - 2, 4);
        for length in (1..=10).chain([10]) {
            let (code, bits) = if length <= 6 { (length - 1, 3) } else { (12 + length - 7, 4) };
            (0..bits).rev().for_each(|bit| self.write(code >> bit, 1));
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let byte = |bits: &[bool]| (0..).zip(bits).map(|(i, &bit)| u8::from(bit) << i).sum();
        self.0.chunks(8).map(byte).collect()
    }
}

/// A lossless WebP picture of 8 x 8 pixels with this many groups of codes. Its pixels use the last one.
fn many_groups(groups: usize) -> Vec<u8> {
    let mut bits = BitWriter::default();
    bits.write(0x2f, 8);
    bits.write(7, 14);
    bits.write(7, 14);
    // No alpha, version 0, no transform, no remembered colours; groups by blocks of 4 x 4 pixels.
    bits.write(0, 1 + 3 + 1 + 1);
    bits.write(1, 1);
    bits.write(0, 3);
    // The picture of the groups: every pixel has the same number, in its red and green.
    bits.write(0, 1);
    [(groups - 1) % 256, (groups - 1) / 256, 0, 0, 0].into_iter().for_each(|symbol| bits.single(symbol));
    (0..5 * groups).for_each(|_| bits.long());
    // Each value of each pixel is the symbol 0.
    (0..4 * 64).for_each(|_| bits.write(0, 1));
    let payload = bits.bytes();
    let mut file = b"RIFF".to_vec();
    file.extend((12 + payload.len() as u32).to_le_bytes());
    file.extend(b"WEBPVP8L");
    file.extend((payload.len() as u32).to_le_bytes());
    file.extend(payload);
    file.resize(file.len().next_multiple_of(2), 0);
    file
}

fn gif(frames: usize, width: u32, height: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = GifEncoder::new_with_speed(&mut bytes, 30);
    for i in 0..frames as u32 {
        let image = image::RgbaImage::from_fn(width, height, |x, y| {
            image::Rgba([if (x + 40 * i) / 32 % 2 == y / 32 % 2 { 200 } else { 20 }, 0, 0, 255])
        });
        encoder.encode_frame(Frame::new(image)).expect("coded");
    }
    drop(encoder);
    bytes
}

fn pictures() -> Vec<(&'static str, Vec<u8>)> {
    let wide = photo(1500, 1000);
    let png = |image: DynamicImage| coded(&image, ImageFormat::Png);
    vec![
        ("RGB PNG", png(wide.clone())),
        ("RGBA PNG", png(wide.to_rgba8().into())),
        ("gray PNG", png(wide.to_luma8().into())),
        ("gray and alpha PNG", png(wide.to_luma_alpha8().into())),
        ("16-bit gray PNG", png(wide.to_luma16().into())),
        ("16-bit RGB PNG", png(wide.to_rgb16().into())),
        ("16-bit RGBA PNG", png(wide.to_rgba16().into())),
        ("PNG with a profile", with_profile(&wide)),
        ("PNG with texts", with_texts(&wide)),
        ("JPEG", coded(&wide, ImageFormat::Jpeg)),
        ("gray JPEG", coded(&wide.to_luma8().into(), ImageFormat::Jpeg)),
        ("turned JPEG", turned(&wide)),
        ("turned gray JPEG", turned(&wide.to_luma8().into())),
        ("WebP", lossless(&wide)),
        ("WebP with alpha", lossless(&wide.to_rgba8().into())),
        ("WebP with many groups of codes", many_groups(2000)),
        ("lossy WebP", include_bytes!("data/lossy.webp").to_vec()),
        ("lossy WebP with alpha", include_bytes!("data/lossy_alpha.webp").to_vec()),
        ("GIF", gif(1, 1200, 900)),
        ("GIF with data of an application", with_application_data(gif(1, 1200, 900))),
    ]
}

/// This is one test, because the heap of concurrent tests would be counted, too.
#[test]
fn what_is_foretold_is_what_is_taken() {
    // Threads and tables come first.
    decode(&coded(&photo(64, 64), ImageFormat::Jpeg), DecodeLimits::default()).expect("sound");
    decoding();
    preparing();
    of_videos();
}

fn decoding() {
    for (what, bytes) in pictures() {
        let limits = DecodeLimits::default();
        let (measured, peak) = peak_of(|| measure(&bytes, limits).expect("sound"));
        assert!(peak <= measured.decode_bytes, "{what}: {peak} bytes to read its header");
        let picture = decode(&bytes, limits).expect("sound");
        assert_eq!((measured.width, measured.height), (picture.width, picture.height), "{what}");
        drop(picture);
        assert_foretold(what, measured.decode_bytes, || decode(&bytes, limits).expect("sound"));
    }
}

fn preparing() {
    let qwen = |more: serde_json::Value| {
        let mut json = json!({"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 4_000_000}});
        json.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        ImageProcessor::from_json("p.json", &json).expect("sound")
    };
    let gemma =
        json!({"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}});
    let mut pan = gemma.clone();
    pan["do_pan_and_scan"] = json!(true);
    let gemma = |json| ImageProcessor::from_json("p.json", json).expect("sound");
    let pan = gemma(&pan);
    let gemma = gemma(
        &json!({"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}}),
    );
    for (what, processor, width, height) in [
        ("as it is", qwen(json!({})), 1024, 1024),
        ("smaller", qwen(json!({"size": {"shortest_edge": 65536, "longest_edge": 300_000}})), 2000, 1500),
        ("larger", qwen(json!({"size": {"shortest_edge": 2_000_000, "longest_edge": 4_000_000}})), 300, 200),
        ("a strip", qwen(json!({})), 8000, 50),
        ("four frames a patch", qwen(json!({"temporal_patch_size": 4})), 800, 900),
        ("a square", gemma.clone(), 1500, 1000),
        ("a tall strip", gemma.clone(), 30, 30_000),
        ("a wide strip", gemma, 30_000, 30),
        ("pieces", pan, 3000, 1000),
    ] {
        let DynamicImage::ImageRgb8(image) = photo(width, height) else { panic!("RGB") };
        let (width, height) = (width as usize, height as usize);
        let picture = keel_vision::Picture { width, height, rgb: image.into_raw() };
        let foretold = processor.work_bytes(width, height).expect("sound");
        assert_foretold(what, foretold, || processor.process(&picture).expect("sound"));
    }
}

fn of_videos() {
    let processor = |size: [usize; 2]| {
        let json = json!({"patch_size": 16, "size": {"shortest_edge": size[0], "longest_edge": size[1]}});
        VideoProcessor::from_json("v.json", &json).expect("sound")
    };
    for (what, processor, count) in
        [("a long GIF", processor([65536, 8_000_000]), 24), ("a small GIF", processor([4096, 40_000]), 9)]
    {
        let bytes = gif(count, 640, 480);
        let film = VideoFile::open(&bytes, VideoFileLimits::default()).expect("sound");
        let chosen = processor.sample(film.frames(), film.fps()).expect("frames");
        let foretold = film.frame_bytes() + processor.work_bytes(chosen.len(), 640, 480).expect("sound");
        assert_foretold(what, foretold, || {
            let mut builder = VideoBuilder::new(&processor, chosen.len());
            film.take(&chosen, &mut |frame| builder.add(&frame)).expect("decodes");
            builder.finish().expect("frames")
        });
    }
    // Listed frames are decoded one by one.
    let (processor, file) = (processor([65536, 4_000_000]), coded(&photo(640, 480), ImageFormat::Png));
    let Measured { width, height, decode_bytes } = measure(&file, DecodeLimits::default()).expect("sound");
    let foretold = decode_bytes + processor.work_bytes(10, width, height).expect("sound");
    assert_foretold("listed frames", foretold, || {
        let mut builder = VideoBuilder::new(&processor, 10);
        (0..10).for_each(|_| {
            builder.add(&decode(&file, DecodeLimits::default()).expect("sound")).expect("fits");
        });
        builder.finish().expect("frames")
    });
}
