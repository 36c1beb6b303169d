//! Compares every picture and video of the fixtures with the reference to the bit.

use std::path::Path;

use keel_testkit::fixtures::{VLM, vlm_fixture};
use keel_vision::{
    DecodeLimits, ImageSpan, Picture, Placeholders, ProcessorFiles, VideoSpan, decode, expand, timestamps,
};
use keel_weights::{SafetensorsFile, TensorSource};
use serde_json::{Map, Value};

struct Case {
    json: Value,
    expected: SafetensorsFile,
}

/// How many comparisons were made.
#[derive(Debug, Default, PartialEq)]
struct Compared {
    decoded: usize,
    resized: usize,
    /// Pixel values of pictures and videos.
    values: usize,
}

/// The comparisons for which a folder has data of the reference.
fn expected_of(folder: &str) -> Compared {
    match folder {
        "vlm_qwen3_5" => Compared { decoded: 10, resized: 21, values: 2 },
        "vlm_gemma3" => Compared { decoded: 0, resized: 19, values: 2 },
        _ => Compared { decoded: 0, resized: 15, values: 2 },
    }
}

/// The only picture that this crate decodes differently: the reference clips 16-bit grey values to 255, and this crate
/// keeps their upper 8 bits.
const CLIPPED: &str = "e_gray16";

fn cases(folder: &Path) -> Vec<Case> {
    let text = std::fs::read_to_string(folder.join("cases.json")).expect("readable");
    let all: Value = serde_json::from_str(&text).expect("JSON");
    let all = all["cases"].as_array().expect("a list").clone();
    let open = |json: Value| {
        let name = json["name"].as_str().expect("named");
        let path = folder.join(format!("expected_{name}.safetensors"));
        Case { expected: SafetensorsFile::open(&path).expect("opens"), json }
    };
    all.into_iter().map(open).collect()
}

/// Tokens per picture, if the processor file fixes the number.
fn image_seq_length(folder: &Path) -> Option<usize> {
    let text = std::fs::read_to_string(folder.join("processor_config.json")).ok()?;
    let json: Value = serde_json::from_str(&text).expect("JSON");
    json["image_seq_length"].as_u64().map(|n| n as usize)
}

fn load(folder: &Path, name: &Value) -> Picture {
    let path = folder.join("images").join(name.as_str().expect("a name"));
    decode(&std::fs::read(path).expect("readable"), DecodeLimits::default()).expect("decodes")
}

/// A picture of 16-bit grey values, clipped as the reference does.
fn load_clipped(folder: &Path, name: &Value) -> Picture {
    let path = folder.join("images").join(name.as_str().expect("a name"));
    let image::DynamicImage::ImageLuma16(grey) = image::open(path).expect("decodes") else {
        panic!("{name} has no 16-bit grey values")
    };
    let rgb = grey.iter().flat_map(|&value| [u8::try_from(value).unwrap_or(u8::MAX); 3]).collect();
    Picture { width: grey.width() as usize, height: grey.height() as usize, rgb }
}

fn largest_difference(got: &[u8], want: &[u8]) -> u8 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(a, b)| a.abs_diff(*b)).max().unwrap_or(0)
}

fn floats(bytes: &[f32]) -> Vec<u32> {
    bytes.iter().map(|x| x.to_bits()).collect()
}

impl Case {
    fn name(&self) -> &str {
        self.json["name"].as_str().expect("named")
    }

    fn bytes(&self, tensor: &str) -> Option<Vec<u8>> {
        self.expected.contains(tensor).then(|| self.expected.tensor(tensor).expect("there").bytes().to_vec())
    }

    fn numbers(&self, tensor: &str) -> Option<Vec<f32>> {
        self.expected
            .contains(tensor)
            .then(|| self.expected.tensor(tensor).expect("there").to_f32().expect("f32"))
    }

    fn settings(&self) -> Map<String, Value> {
        self.json["processor_kwargs"].as_object().cloned().unwrap_or_default()
    }

    /// Compares the pictures. Returns their spans in the prompt.
    fn check_images(&self, folder: &Path, name: &str, compared: &mut Compared) -> Vec<ImageSpan> {
        let files = ProcessorFiles::read(folder).expect("sound");
        let processor = files.image(&self.settings()).expect("sound");
        let (mut values, mut spans, mut number) = (Vec::new(), Vec::new(), 0);
        for file in self.json["images"].as_array().into_iter().flatten() {
            let is_clipped = self.name() == CLIPPED;
            let picture = if is_clipped { load_clipped(folder, file) } else { load(folder, file) };
            if let Some(want) = self.bytes("decoded_u8").filter(|_| !is_clipped) {
                self.compare(file, &picture.rgb, &want, "decoded");
                compared.decoded += 1;
            }
            let processed = processor.process(&picture).expect("a sound size");
            let merged = processed[0].grid.patches() / 4;
            let tokens = image_seq_length(folder).unwrap_or(merged);
            spans.push(ImageSpan { tokens, crops: processed.len() - 1 });
            for one in processed {
                let want = self.bytes(&format!("resized_u8.{number}")).expect("every picture is there");
                self.compare(file, &one.resized.rgb, &want, &format!("{name}: resized {number}"));
                compared.resized += 1;
                values.extend(one.values);
                number += 1;
            }
        }
        if let Some(want) = self.numbers("pixel_values") {
            assert!(floats(&values) == floats(&want), "{name} {}: pixel values differ", self.name());
            compared.values += 1;
        }
        spans
    }

    fn compare(&self, file: &Value, got: &[u8], want: &[u8], what: &str) {
        let levels = largest_difference(got, want);
        assert_eq!(levels, 0, "{} {what} of {file}", self.name());
    }

    fn check_video(&self, folder: &Path, compared: &mut Compared) -> Vec<VideoSpan> {
        let video = &self.json["video"];
        let Some(frames) = video["frames"].as_array() else { return Vec::new() };
        let mut settings = Map::new();
        settings.insert("do_sample_frames".into(), video["do_sample_frames"].clone());
        let processor = ProcessorFiles::read(folder).expect("sound").video(&settings).expect("sound");
        let fps = video["fps"].as_f64().expect("a number");
        let indices = processor.sample(frames.len(), fps).expect("frames");
        assert_eq!(Value::from(indices.clone()), video["sampled_indices"]);
        let taken: Vec<Picture> = indices.iter().map(|&i| load(folder, &frames[i])).collect();
        let processed = processor.process(&taken).expect("a sound size");
        let rgb: Vec<u8> = processed.resized.iter().flat_map(|frame| frame.rgb.clone()).collect();
        assert_eq!(largest_difference(&rgb, &self.bytes("resized_u8_video").expect("there")), 0);
        compared.resized += 1;
        if let Some(want) = self.numbers("pixel_values_videos") {
            assert!(floats(&processed.values) == floats(&want), "{}: pixel values", self.name());
            compared.values += 1;
        }
        let grid = processed.grid;
        let seconds = timestamps(&indices, fps, processor.frames_per_patch());
        assert_eq!(seconds.len(), grid.t);
        vec![VideoSpan { tokens: grid.h * grid.w / 4, seconds }]
    }
}

fn placeholders(name: &str) -> Placeholders {
    let text = String::from;
    match name {
        "vlm_gemma3" => Placeholders::Gemma {
            image: text("<image_soft_token>"),
            start: text("<start_of_image>"),
            end: text("<end_of_image>"),
        },
        _ => Placeholders::Qwen {
            image: text("<|image_pad|>"),
            video: text("<|video_pad|>"),
            start: text("<|vision_start|>"),
            end: text("<|vision_end|>"),
        },
    }
}

#[test]
fn pictures_videos_and_prompts_are_those_of_the_reference() {
    for name in VLM {
        let Some(folder) = vlm_fixture(name) else { continue };
        let mut compared = Compared::default();
        for case in cases(&folder) {
            let images = case.check_images(&folder, name, &mut compared);
            let videos = case.check_video(&folder, &mut compared);
            let prompt = case.json["prompt"].as_str().expect("text");
            let expanded = expand(prompt, &placeholders(name), &images, &videos).expect("counts fit");
            let want = case.json["expanded_prompt"].as_str().expect("text");
            // The reference keeps the markers around a video's placeholder. This crate replaces them.
            let markers = ("<|vision_start|><0.", "<|vision_end|><|vision_end|>");
            let without = want.replace(markers.0, "<0.").replace(markers.1, "<|vision_end|>");
            assert_eq!(expanded, without, "{name} {}", case.name());
        }
        assert_eq!(compared, expected_of(name), "{name}");
    }
}
