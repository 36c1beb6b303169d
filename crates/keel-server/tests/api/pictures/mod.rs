//! Pictures over HTTP: the answers of the reference by every API, prefixes, and refusals.

mod fetching;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::{Running, cpu, engine_options, read, send, wait_for};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use keel_array::Compute;
use keel_engine::{EngineOptions, VisionOptions};
use keel_server::{PictureSources, ServerOptions};
use keel_testkit::fixtures::{VLM, vlm_fixture};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn exact() -> EngineOptions {
    EngineOptions {
        compute: Compute::F32,
        drafts: 0,
        context: 512,
        pool_pages: Some(16),
        vision: Some(VisionOptions { patches: 256, pictures: 3, piece_tokens: VisionOptions::WHOLE }),
        ..engine_options()
    }
}

fn server_of(folder: &Path, sources: PictureSources) -> Running {
    let options = ServerOptions { model_id: "sees".into(), pictures: sources, ..ServerOptions::default() };
    Running::of(folder, cpu(), exact(), options)
}

fn start(name: &str) -> Option<(PathBuf, Running)> {
    let folder = vlm_fixture(name)?;
    let running = server_of(&folder, PictureSources::default());
    Some((folder, running))
}

fn data_uri(file: &Path) -> String {
    let kind = if file.extension().is_some_and(|e| e == "jpg") { "jpeg" } else { "png" };
    format!("data:image/{kind};base64,{}", STANDARD.encode(std::fs::read(file).expect("there")))
}

struct Case {
    name: String,
    /// In OpenAI's form.
    messages: Value,
    greedy: String,
    margin: f64,
    tokens: u64,
}

fn cases(folder: &Path) -> Vec<Case> {
    let text = std::fs::read_to_string(folder.join("cases.json")).expect("there");
    let all: Value = serde_json::from_str(&text).expect("JSON");
    let case = |case: &Value| {
        let mut messages = case["messages"].clone();
        for message in messages.as_array_mut()? {
            for part in message["content"].as_array_mut().into_iter().flatten() {
                if part["type"] == "video" {
                    return None;
                }
                if part["type"] == "image" {
                    let file = folder.join("images").join(part["image"].as_str()?);
                    *part =
                        json!({"type": "image_url", "image_url": {"url": data_uri(&file), "detail": "auto"}});
                }
            }
        }
        Some(Case {
            name: case["name"].as_str()?.into(),
            messages,
            greedy: case["greedy_text"].as_str()?.into(),
            margin: case["min_margin"].as_f64()?,
            tokens: case["tensors"]["input_ids"]["shape"][0]
                .as_u64()
                .or(case["tensors"]["input_ids"][1][0].as_u64())?,
        })
    };
    all["cases"].as_array().expect("a list").iter().filter_map(case).collect()
}

fn body(messages: &Value) -> Value {
    json!({"messages": messages, "max_tokens": 24, "temperature": 0})
}

fn said(reply: &Value) -> &str {
    reply["choices"][0]["message"]["content"].as_str().unwrap_or_default()
}

/// Whether texts are the same. Where bytes of a token are no character, the reference replaces its neighbours, too:
/// the rest of it must come in order.
fn is_alike(text: &str, reference: &str) -> bool {
    let mut rest = text;
    reference.split(char::REPLACEMENT_CHARACTER).filter(|part| !part.is_empty()).all(|part| {
        match rest.find(part) {
            Some(at) => {
                rest = &rest[at + part.len()..];
                true
            }
            None => false,
        }
    })
}

/// Cases that a server leaves alone: 16-bit values are scaled here, crops and other settings are not asked for.
fn is_comparable(case: &Case) -> bool {
    case.name != "e_gray16" && case.name != "h_pan_and_scan" && case.margin > 1e-3
}

#[test]
fn answers_are_those_of_the_reference() {
    for name in VLM {
        let Some((folder, mut server)) = start(name) else { continue };
        let mut compared = 0;
        for case in cases(&folder).iter().filter(|case| is_comparable(case)) {
            let reply = server.ask(CHAT, &body(&case.messages));
            assert_eq!(reply["usage"]["prompt_tokens"], case.tokens, "{name} {}", case.name);
            // The reference writes special tokens too, which an answer leaves out.
            if !case.greedy.contains('<') {
                assert!(
                    is_alike(said(&reply), &case.greedy),
                    "{name} {}: {reply} {}",
                    case.name,
                    case.greedy
                );
                compared += 1;
            }
        }
        assert!(compared > 3, "{name}: {compared} cases were compared");
        server.assert_all_is_back();
        server.drain();
        server.join();
    }
}

#[test]
fn every_api_shows_the_same_picture() {
    let Some((folder, server)) = start("vlm_qwen3_5") else { return };
    let uri = data_uri(&folder.join("images/a_photo.png"));
    let (kind, data) =
        uri.strip_prefix("data:").and_then(|rest| rest.split_once(";base64,")).expect("a data URI");
    let text = "What is in this picture?";
    let chat = server.ask(
        CHAT,
        &body(&json!([{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": text}]}])),
    );
    let response = server.ask(
        "/v1/responses",
        &json!({"max_output_tokens": 24, "temperature": 0, "input": [
        {"role": "user", "content": [{"type": "input_image", "image_url": uri, "detail": "low"},
            {"type": "input_text", "text": text}]}]}),
    );
    let messages = json!([{"role": "user", "content": [
        {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}, {"type": "text", "text": text}]}]);
    let message =
        server.ask("/v1/messages", &json!({"max_tokens": 24, "temperature": 0, "messages": messages}));
    let count = server.ask("/v1/messages/count_tokens", &json!({"messages": messages}));
    assert!(!said(&chat).is_empty());
    let of_response =
        &response["output"].as_array().expect("items").last().expect("one")["content"][0]["text"];
    let of_message = &message["content"].as_array().expect("blocks").last().expect("one")["text"];
    assert_eq!(
        (said(&chat), said(&chat)),
        (of_response.as_str().expect("text"), of_message.as_str().expect("text"))
    );
    let tokens = chat["usage"]["prompt_tokens"].as_u64().expect("a number");
    assert!(tokens > 24, "a picture of 24 rows is counted");
    assert_eq!(
        (&count["input_tokens"], &response["usage"]["input_tokens"]),
        (&json!(tokens), &json!(tokens))
    );
    server.assert_all_is_back();
}

/// The page offers the inputs that the model takes.
#[test]
fn a_model_says_whether_it_takes_videos() {
    for name in VLM {
        let Some((_, mut server)) = start(name) else { continue };
        let want =
            if name == "vlm_gemma3" { json!(["text", "image"]) } else { json!(["text", "image", "video"]) };
        assert_eq!(server.get("/v1/models").json()["data"][0]["input_modalities"], want, "{name}");
        server.drain();
        server.join();
    }
}

/// Same size, same text, remembered prefixes: each is answered as a server does that has seen nothing.
#[test]
fn pictures_of_one_size_are_not_taken_for_each_other() {
    for name in ["vlm_qwen3_5", "vlm_qwen3_vl"] {
        let Some((folder, server)) = start(name) else { continue };
        let images = folder.join("images");
        let uris = ["a_photo.png", "d_photo.png", "e_exif.jpg", "e_rgba.png"]
            .map(|file| data_uri(&images.join(file)));
        let ask = |server: &Running, uri: &str| {
            let long = "Say what you see. ".repeat(12);
            server.ask(
                CHAT,
                &body(&json!([{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": long}]}])),
            )
        };
        let fresh: Vec<String> = uris
            .iter()
            .map(|uri| said(&ask(&server_of(&folder, PictureSources::default()), uri)).to_string())
            .collect();
        let mut cached = Vec::new();
        for (turn, i) in [0, 1, 2, 3, 0, 3, 1, 2].into_iter().enumerate() {
            let reply = ask(&server, &uris[i]);
            assert_eq!(said(&reply), fresh[i], "{name}: picture {i} in turn {turn}");
            cached.push(reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0));
        }
        assert!(
            cached[..4].iter().all(|&n| n < 64) && cached[4..].iter().all(|&n| n >= 64),
            "{name}: {cached:?}"
        );
        server.assert_all_is_back();
    }
}

fn picture(url: impl Into<Value>) -> Value {
    body(
        &json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url.into()}}, {"type": "text", "text": "?"}]}]),
    )
}

fn coded(bytes: &[u8]) -> String {
    format!("data:image/png;base64,{}", STANDARD.encode(bytes))
}

/// A PNG that says it is this large, and has next to nothing in it.
fn bomb(width: u32, height: u32) -> Vec<u8> {
    let mut header = Vec::from(*b"IHDR");
    header.extend([width.to_be_bytes(), height.to_be_bytes()].concat());
    header.extend([8, 2, 0, 0, 0]);
    let mut crc = flate2::Crc::new();
    crc.update(&header);
    [
        &b"\x89PNG\r\n\x1a\n"[..],
        &13u32.to_be_bytes(),
        &header,
        &crc.sum().to_be_bytes(),
        &0u32.to_be_bytes(),
        b"IDAT",
        &[0x35, 0xaf, 0x06, 0x1e],
    ]
    .concat()
}

/// A whole PNG of one grey.
fn grey(width: u32, height: u32) -> Vec<u8> {
    use std::io::Write;
    let chunk = |name: &[u8; 4], data: &[u8]| {
        let mut crc = flate2::Crc::new();
        crc.update(name);
        crc.update(data);
        [&(data.len() as u32).to_be_bytes()[..], name, data, &crc.sum().to_be_bytes()].concat()
    };
    let header = [&width.to_be_bytes()[..], &height.to_be_bytes(), &[8, 0, 0, 0, 0]].concat();
    let mut rows = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
    rows.write_all(&vec![0; (width as usize + 1) * height as usize]).expect("written");
    let rows = rows.finish().expect("coded");
    [&b"\x89PNG\r\n\x1a\n"[..], &chunk(b"IHDR", &header), &chunk(b"IDAT", &rows), &chunk(b"IEND", b"")]
        .concat()
}

#[test]
fn what_cannot_be_shown_is_refused_in_a_sentence() {
    let Some((folder, server)) = start("vlm_qwen3_5") else { return };
    let whole = std::fs::read(folder.join("images/a_photo.png")).expect("there");
    let jpeg = std::fs::read(folder.join("images/e_jpeg420.jpg")).expect("there");
    let cases = [
        (picture(coded(&bomb(60_000, 60_000))), "at most"),
        (picture(coded(&grey(20_000, 3))), "20000 x 3"),
        (picture(coded(&whole[..whole.len() / 2])), "cannot be decoded"),
        (picture(coded(&jpeg[..jpeg.len() / 2])), "ends before"),
        (picture(coded(b"not a picture at all")), "not a picture in a supported format"),
        (picture(coded(b"")), "not a picture"),
        (picture(coded(&bomb(1, 1))), "one pixel"),
        (picture("data:image/png;base64,%%%"), "no base64"),
        (picture("data:image/png,abc"), "not of the form"),
        (picture("http://127.0.0.1:1/a.png"), "--allow-image-urls"),
        (picture("file:///etc/passwd"), "--allow-image-files"),
        (picture("/etc/passwd"), "--allow-image-files"),
        (picture(7), "has no URL"),
        (
            body(&json!([{"role": "user", "content": [{"type": "text", "text": "<|image_pad|>"},
            {"type": "image_url", "image_url": {"url": coded(&whole)}}]}])),
            "placeholder",
        ),
        (
            body(&json!([{"role": "user", "content": (0..90).map(|_| {
            json!({"type": "image_url", "image_url": {"url": coded(&whole)}})}).collect::<Vec<_>>()}])),
            "context",
        ),
    ];
    for (body, expected) in cases {
        let reply = server.post(CHAT, &body);
        let message = reply.json()["error"]["message"].as_str().unwrap_or_default().to_string();
        assert_eq!(reply.status, 400, "{expected}: {message}");
        assert!(message.contains(expected), "{expected}: {message}");
    }
    let messages = json!([{"role": "user", "content": [{"type": "image", "source": {"type": "base64"}}]}]);
    let reply = server.post("/v1/messages", &json!({"max_tokens": 5, "messages": messages}));
    assert!(reply.status == 400 && reply.body.contains("no source of the form"), "{}", reply.body);
    assert_eq!(server.model.memory.used(), 0, "what was refused holds nothing");
    server.assert_all_is_back();
}

#[test]
fn a_model_without_eyes_says_so() {
    let server = Running::start();
    let image = json!([{"role": "user", "content": [{"type": "image", "source":
        {"type": "base64", "media_type": "image/png", "data": "AAAA"}}]}]);
    for (path, body) in [
        (CHAT, picture("data:image/png;base64,AAAA")),
        ("/v1/messages", json!({"max_tokens": 5, "messages": image})),
        (
            "/v1/responses",
            json!({"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}]}),
        ),
    ] {
        let reply = server.post(path, &body);
        assert!(
            reply.status == 400 && reply.body.contains("reads only text"),
            "{path}: {} {}",
            reply.status,
            reply.body
        );
    }
    assert_eq!(server.get("/v1/models").json()["data"][0]["input_modalities"], json!(["text"]));
}

#[test]
fn files_of_allowed_folders_are_shown() {
    let Some(folder) = vlm_fixture("vlm_qwen3_5") else { return };
    let sources = PictureSources { folders: vec![folder.join("images")], ..PictureSources::default() };
    let server = server_of(&folder, sources);
    let by_file = server.ask(CHAT, &picture("a_photo.png"));
    let by_uri = server.ask(CHAT, &picture(data_uri(&folder.join("images/a_photo.png"))));
    assert_eq!(said(&by_file), said(&by_uri));
    let reply = server.post(CHAT, &picture("../config.json"));
    assert!(reply.status == 400 && reply.body.contains("no such file"), "{}", reply.body);
}

/// `KEEL_PICTURE_SOAK=500` runs the long form.
#[test]
fn after_many_pictures_nothing_is_left() {
    let Some((folder, mut server)) = start("vlm_qwen3_5") else { return };
    let count = std::env::var("KEEL_PICTURE_SOAK").ok().and_then(|n| n.parse().ok()).unwrap_or(60);
    let images: Vec<Vec<u8>> =
        ["a_photo.png", "b_large.png", "d_photo.png", "e_exif.jpg", "e_palette.png", "c_first.png"]
            .iter()
            .map(|file| std::fs::read(folder.join("images").join(file)).expect("there"))
            .collect();
    let before = server.model.engine.ledger().active();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= count {
                        return;
                    }
                    let mut image = images[i % images.len()].clone();
                    let is_broken = i % 10 == 3;
                    if is_broken {
                        image.truncate(20 + i * 7 % (image.len() / 2));
                    }
                    let mut request = picture(coded(&image));
                    request["stream"] = json!(i.is_multiple_of(3));
                    request["max_tokens"] = json!(1 + i % 20);
                    let connection = send(server.address, "POST", CHAT, &[], request.to_string().as_bytes());
                    if i % 10 == 7 {
                        std::thread::sleep(Duration::from_millis((i % 7) as u64 * 5));
                        drop(connection);
                        continue;
                    }
                    let reply = read(connection);
                    assert_eq!(
                        reply.status,
                        if is_broken { 400 } else { 200 },
                        "request {i}: {}",
                        reply.body
                    );
                }
            });
        }
    });
    server.wait_until_idle();
    assert_eq!(server.model.engine.ledger().active(), before, "live bytes by category");
    assert_eq!(server.model.engine.ledger().peak(), before, "nothing was allocated meanwhile");
    let pictures = server.model.engine.status().pictures;
    assert!(pictures.held_bytes == 0 && pictures.bytes <= pictures.bytes_max, "{pictures:?}");
    wait_for("requests give their memory back", || server.model.memory.used() == 0);
    assert_eq!(server.model.engine.leaks(), 0);
    server.assert_all_is_back();
    server.drain();
    server.join();
}
