use super::*;
use serde_json::json;

#[test]
fn the_nested_file_comes_first() {
    let nested =
        json!({"image_processor": {"patch_size": 16, "size": {"shortest_edge": 64, "longest_edge": 4096}}});
    let older = json!({"patch_size": 14, "min_pixels": 100, "max_pixels": 200});
    let layout = |files: &ProcessorFiles| files.image(&Map::new()).expect("sound").layout;
    let both = ProcessorFiles::new(Some(nested), Some(older.clone()), None);
    let expected =
        Layout::Patches { side: 16, merge: 2, frames: 2, pixels: PixelBounds { least: 64, most: 4096 } };
    assert_eq!(layout(&both), expected);
    let own = ProcessorFiles::new(Some(json!({"processor_class": "x"})), Some(older), None);
    let expected =
        Layout::Patches { side: 14, merge: 2, frames: 2, pixels: PixelBounds { least: 100, most: 200 } };
    assert_eq!(layout(&own), expected);
}

#[test]
fn pictures_are_cut_only_if_the_caller_asks() {
    let file = json!({"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28},
        "do_pan_and_scan": true, "pan_and_scan_min_crop_size": 20});
    let files = ProcessorFiles::new(None, Some(file), None);
    let picture = Picture { width: 90, height: 30, rgb: vec![9; 90 * 30 * 3] };
    let pieces = |instead: Value| {
        let processor = files.image(instead.as_object().expect("an object")).expect("sound");
        processor.process(&picture).expect("fits").len()
    };
    assert_eq!((pieces(json!({})), pieces(json!({"do_pan_and_scan": true}))), (1, 4));
}

#[test]
fn a_limit_lowers_the_largest_size() {
    let json = json!({"patch_size": 16, "size": {"shortest_edge": 1024, "longest_edge": 65536}});
    let processor = ImageProcessor::from_json("f.json", &json).expect("sound");
    let picture = Picture { width: 400, height: 300, rgb: vec![9; 400 * 300 * 3] };
    let patches = |processor: &ImageProcessor| processor.process(&picture).expect("fits")[0].grid.patches();
    let limited = processor.clone().limited_to(16384).expect("above the least");
    assert!(patches(&processor) > 64 && patches(&limited) <= 64);
    assert_ne!(limited.settings, processor.settings);
    assert_eq!(processor.clone().limited_to(1 << 20).expect("no limit"), processor);
    assert!(processor.limited_to(1000).expect_err("below the least").to_string().contains("1024"));
}

#[test]
fn the_key_follows_pixels_size_and_settings() {
    let key = |json: Value, width, height, value| {
        let processor = ImageProcessor::from_json("f.json", &json).expect("sound");
        let picture = Picture { width, height, rgb: vec![value; width * height * 3] };
        processor.process(&picture).expect("fits")[0].key(&processor)
    };
    let json = |std| json!({"patch_size": 2, "do_resize": false, "image_std": std});
    let one = key(json(0.5), 8, 4, 9);
    assert_eq!(one, key(json(0.5), 8, 4, 9));
    for other in [key(json(0.5), 8, 4, 8), key(json(0.5), 4, 8, 9), key(json(0.25), 8, 4, 9)] {
        assert_ne!(one, other);
    }
}

#[test]
fn wrong_values_are_named() {
    for (json, key) in [
        (json!({"patch_size": 0}), "patch_size"),
        (json!({"patch_size": "big"}), "patch_size"),
        (json!({"merge_size": 1_000_000}), "merge_size"),
        (json!({"resample": 1}), "resample"),
        (json!({"image_std": [0.5, 0.5]}), "image_std"),
        (json!({"image_std": 0}), "image_std"),
        (json!({"min_pixels": 10, "max_pixels": 5}), "10"),
        (
            json!({"min_pixels": 1 << 27, "max_pixels": 1 << 28}),
            "min_pixels is 134217728, expected at most 67108864",
        ),
        (json!({"size": {"shortest_edge": 1 << 27, "longest_edge": 1 << 28}}), "shortest_edge is 134217728"),
        (json!({"size": {"height": 8193, "width": 16}}), "height is 8193, expected at most 8192"),
        (json!({"size": {"height": 16, "width": 1u64 << 32}}), "width is 4294967296"),
        (json!({"do_resize": 3}), "do_resize"),
    ] {
        let message = ImageProcessor::from_json("f.json", &json).expect_err("unsound").to_string();
        assert!(message.contains(key) && message.starts_with("f.json"), "{message}");
    }
    let none = ProcessorFiles::default().image(&Map::new()).expect_err("no file").to_string();
    assert!(none.contains("preprocessor_config.json"), "{none}");
}

#[test]
fn a_picture_that_is_not_resized_must_fit() {
    let json = json!({"patch_size": 2, "do_resize": false});
    let processor = ImageProcessor::from_json("f.json", &json).expect("sound");
    let picture = |width, height| Picture { width, height, rgb: vec![9; width * height * 3] };
    let one = &processor.process(&picture(8, 4)).expect("fits")[0];
    assert_eq!((one.grid, one.values.len()), (Grid { t: 1, h: 2, w: 4 }, 8 * 24));
    let message = processor.process(&picture(8, 5)).expect_err("does not fit").to_string();
    assert!(message.contains("8 x 5") && message.contains("multiples of 4"), "{message}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_processor_file_without_end_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join(IMAGE);
    std::os::unix::fs::symlink("/dev/zero", &file).expect("made");
    let refused = ProcessorFiles::read(folder.path()).expect_err("it has no end").to_string();
    assert!(refused.contains("not a regular file"), "{refused}");
    std::fs::remove_file(&file).expect("removed");
    std::fs::write(&file, vec![b' '; FILE_BYTES_MAX as usize + 1]).expect("written");
    let refused = ProcessorFiles::read(folder.path()).expect_err("too large").to_string();
    assert!(refused.contains("more than 1048576 bytes"), "{refused}");
}
