//! Videos over HTTP: lists of frames and GIFs, and refusals.

use std::path::Path;

use crate::common::{Running, cpu, engine_options};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use image::codecs::gif::GifEncoder;
use image::{Delay, DynamicImage, Frame, ImageFormat, Rgba, RgbaImage};
use keel_array::Compute;
use keel_engine::{EngineOptions, VisionOptions};
use keel_server::ServerOptions;
use keel_testkit::fixtures::{VLM, vlm_fixture};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn start(folder: &Path) -> Running {
    let options = EngineOptions {
        compute: Compute::F32,
        drafts: 0,
        context: 512,
        pool_pages: Some(16),
        vision: Some(VisionOptions { patches: 256, pictures: 3, piece_tokens: 512 }),
        ..engine_options()
    };
    Running::of(folder, cpu(), options, ServerOptions { model_id: "sees".into(), ..ServerOptions::default() })
}

fn uri(kind: &str, bytes: &[u8]) -> String {
    format!("data:{kind};base64,{}", STANDARD.encode(bytes))
}

fn user(part: Value) -> Value {
    json!({"messages": [{"role": "user", "content": [part, {"type": "text", "text": "What moves?"}]}],
        "max_tokens": 24, "temperature": 0})
}

fn file(url: &str) -> Value {
    user(json!({"type": "video_url", "video_url": {"url": url}}))
}

fn said(reply: &Value) -> &str {
    reply["choices"][0]["message"]["content"].as_str().unwrap_or_default()
}

/// The cases of the fixtures whose videos are lists of frames, with the placeholder replaced with its wrapper.
#[test]
fn answers_about_videos_are_those_of_the_reference() {
    for name in VLM {
        let Some(folder) = vlm_fixture(name) else { continue };
        let text = std::fs::read_to_string(folder.join("cases.json")).expect("there");
        let all: Value = serde_json::from_str(&text).expect("JSON");
        let cases = all["cases"].as_array().expect("a list");
        let Some(case) = cases.iter().find(|case| case["name"] == "f_video_no_outer_wrapper") else {
            continue;
        };
        let frame = |file: &Value| {
            let path = folder.join("images").join(file.as_str().expect("a name"));
            uri("image/png", &std::fs::read(path).expect("there"))
        };
        let video = &case["video"];
        let frames: Vec<String> = video["frames"].as_array().expect("frames").iter().map(frame).collect();
        let mut messages = case["messages"].clone();
        for part in messages[0]["content"].as_array_mut().expect("parts") {
            if part["type"] == "video" {
                *part = json!({"type": "video", "video": frames, "fps": video["fps"]});
            }
        }
        let server = start(&folder);
        let ask = || server.ask(CHAT, &json!({"messages": messages, "max_tokens": 24, "temperature": 0}));
        let reply = ask();
        let tokens = &case["tensors"]["input_ids"][1][0];
        assert_eq!(&reply["usage"]["prompt_tokens"], tokens, "{name}");
        let greedy = case["greedy_text"].as_str().expect("text");
        let whole: Vec<&str> = greedy.split(['<', char::REPLACEMENT_CHARACTER]).collect();
        assert!(said(&reply).starts_with(whole[0]) && !said(&reply).is_empty(), "{name}: {reply} {greedy}");
        // The same video again is known by its frames.
        let again = ask();
        assert_eq!(said(&again), said(&reply), "{name}");
        assert_eq!(server.model.engine.status().pictures.encoded, 1, "{name}");
        assert_eq!(server.model.memory.used(), 0);
        server.assert_all_is_back();
    }
}

/// Frames of few colours, which a palette keeps.
fn frames() -> Vec<RgbaImage> {
    let pixel = |i: u32, x: u32, y: u32| match (x + 12 * i) / 16 % 2 == y / 16 % 2 {
        true => Rgba([200, 40, 10 * i as u8, 255]),
        false => Rgba([0, 0, 90, 255]),
    };
    (0..6).map(|i| RgbaImage::from_fn(96, 64, |x, y| pixel(i, x, y))).collect()
}

fn gif() -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = GifEncoder::new(&mut bytes);
    for image in frames() {
        let frame = Frame::from_parts(image, 0, 0, Delay::from_numer_denom_ms(250, 1));
        encoder.encode_frame(frame).expect("coded");
    }
    drop(encoder);
    bytes
}

#[test]
fn a_gif_is_shown_like_the_list_of_its_frames() {
    let Some(folder) = vlm_fixture("vlm_qwen3_5") else { return };
    let server = start(&folder);
    let listed: Vec<String> = frames()
        .into_iter()
        .map(|image| {
            let mut bytes = std::io::Cursor::new(Vec::new());
            DynamicImage::ImageRgba8(image).write_to(&mut bytes, ImageFormat::Png).expect("coded");
            uri("image/png", bytes.get_ref())
        })
        .collect();
    let of_list = server.ask(CHAT, &user(json!({"type": "video", "video": listed, "fps": 4})));
    let of_file = server.ask(CHAT, &file(&uri("image/gif", &gif())));
    assert_eq!(said(&of_file), said(&of_list));
    assert_eq!(of_file["usage"]["prompt_tokens"], of_list["usage"]["prompt_tokens"]);
    assert_eq!(server.model.engine.status().pictures.encoded, 1, "frames and sizes are the same");
    // More of its frames are read.
    let mut more = file(&uri("image/gif", &gif()));
    more["messages"][0]["content"][0]["fps"] = json!(4);
    let more = server.ask(CHAT, &more)["usage"]["prompt_tokens"].as_u64();
    assert!(more > of_file["usage"]["prompt_tokens"].as_u64());
    server.assert_all_is_back();
}

#[test]
fn videos_that_cannot_be_shown_are_refused_in_a_sentence() {
    let Some(folder) = vlm_fixture("vlm_qwen3_5") else { return };
    let server = start(&folder);
    let sound = gif();
    let mut bomb = sound.clone();
    bomb[6..10].copy_from_slice(&[0x60, 0xea, 0x60, 0xea]);
    let with_fps = |fps: Value| {
        let mut body = file(&uri("image/gif", &sound));
        body["messages"][0]["content"][0]["fps"] = fps;
        body
    };
    let cases = [
        (file(&uri("image/gif", &bomb)), "60000 x 60000"),
        (file(&uri("image/gif", &sound[..sound.len() / 2])), "ends before"),
        (file(&uri("video/mp4", b"\0\0\0\x18ftypisom and nothing else")), "ffmpeg"),
        (file(&uri("video/mp4", b"#EXTM3U\nfile:///etc/passwd")), "no video that can be read"),
        (file("http://127.0.0.1:1/a.mp4"), "--allow-image-urls"),
        (file("/etc/passwd"), "--allow-image-files"),
        (with_fps(json!(0)), "its fps is 0"),
        (user(json!({"type": "video", "video": []})), "no frames"),
        (user(json!({"type": "video", "video": vec!["x"; 3000]})), "at most 2048 are listed"),
        (user(json!({"type": "video_url", "video_url": {}})), "has no URL"),
        (
            user(json!({"type": "video", "video": [uri("image/png", b"none"), "x"]})),
            "not a picture in a supported format",
        ),
    ];
    for (body, expected) in cases {
        let reply = server.post(CHAT, &body);
        let message = reply.json()["error"]["message"].as_str().unwrap_or_default().to_string();
        assert_eq!(reply.status, 400, "{expected}: {message}");
        assert!(message.contains(expected), "{expected}: {message}");
    }
    assert_eq!(server.model.memory.used(), 0, "what was refused holds nothing");
    server.assert_all_is_back();
    let Some(folder) = vlm_fixture("vlm_gemma3") else { return };
    let reply = start(&folder).post(CHAT, &file(&uri("image/gif", &sound)));
    assert!(reply.status == 400 && reply.body.contains("not shown videos"), "{}", reply.body);
}
