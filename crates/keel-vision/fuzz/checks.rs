//! Properties that hold for arbitrary bytes. The fuzz targets and `tests/fuzz_smoke.rs` share them.

#![allow(dead_code, reason = "each target uses one of these functions")]

use keel_vision::{
    DecodeLimits, Measured, Picture, ProcessorFiles, VideoFile, VideoFileLimits, VisionError, decode, measure,
};
use serde_json::{Map, Value, json};

/// Small limits, so that a fuzzer spends its time on the parsers.
const LIMITS: DecodeLimits = DecodeLimits { file_bytes: 1 << 20, pixels: 1 << 18 };

/// Measures `file` as a picture, then decodes and prepares it. Returns whether it was accepted.
pub fn picture(file: &[u8]) -> bool {
    let decoded =
        measure(file, LIMITS).and_then(|measured| Ok::<_, VisionError>((measured, decode(file, LIMITS)?)));
    let (Measured { width, height, decode_bytes }, picture) = match decoded {
        Ok(both) => both,
        Err(problem) => {
            assert!(!problem.to_string().is_empty());
            return false;
        }
    };
    assert_eq!((picture.width, picture.height), (width, height));
    assert_eq!(picture.rgb.len(), width * height * 3);
    assert!(decode_bytes >= picture.rgb.len() as u64);
    let patches = json!({"patch_size": 8, "size": {"shortest_edge": 1024, "longest_edge": 4096}});
    let whole = json!({"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 24, "width": 16},
        "do_pan_and_scan": true, "pan_and_scan_min_crop_size": 4});
    for file in [patches, whole] {
        let files = ProcessorFiles::new(None, Some(file), None);
        let processor = files.image(&Map::new()).expect("sound");
        for one in processor.process(&picture).into_iter().flatten() {
            assert!(one.values.iter().all(|value| value.abs() <= 3.0));
            assert_eq!(one.resized.rgb.len(), one.resized.width * one.resized.height * 3);
        }
    }
    true
}

/// Reads `file` as each of the processor files and prepares a small picture. Returns whether it was accepted.
pub fn processor(file: &[u8]) -> bool {
    let Ok(json) = serde_json::from_slice::<Value>(file) else { return false };
    let files = ProcessorFiles::new(Some(json.clone()), Some(json.clone()), Some(json));
    let picture = Picture { width: 5, height: 3, rgb: (0..45).collect() };
    let image = files.image(&Map::new());
    if let Ok(video) = files.video(&Map::new()) {
        assert!(video.sample(7, 2.0).expect("frames").iter().all(|&frame| frame < 7));
    }
    match image {
        Ok(processor) => {
            // A file may ask for a size that takes gigabytes. Callers compare this number with their memory first.
            let work = processor.work_bytes(picture.width, picture.height);
            if work.is_ok_and(|bytes| bytes < 1 << 25) {
                let _ = processor.process(&picture);
            }
            true
        }
        Err(problem) => {
            assert!(!problem.to_string().is_empty());
            false
        }
    }
}

/// Counts the frames of `file` as a GIF and decodes some. Returns whether it was accepted. Other kinds of videos are
/// read by another program.
pub fn film(file: &[u8]) -> bool {
    if !file.starts_with(b"GIF8") {
        return false;
    }
    let small = VideoFileLimits {
        file_bytes: 1 << 20,
        pixels: 1 << 16,
        frames: 64,
        drawn_pixels: 1 << 19,
        ..VideoFileLimits::default()
    };
    let film = match VideoFile::open(file, small) {
        Ok(film) => film,
        Err(problem) => {
            assert!(!problem.to_string().is_empty());
            return false;
        }
    };
    let (width, height) = film.size();
    assert!(film.fps() > 0.0 && film.frames() > 0 && film.frame_bytes() >= (width * height) as u64);
    let mut numbers = vec![0, film.frames() / 2, film.frames() - 1];
    numbers.dedup();
    let mut taken = 0;
    let outcome = film.take(&numbers, &mut |frame| {
        assert_eq!((frame.width, frame.height, frame.rgb.len()), (width, height, width * height * 3));
        taken += 1;
        Ok(())
    });
    assert!(taken == numbers.len() || outcome.is_err(), "{taken} of {} frames", numbers.len());
    outcome.is_ok()
}
