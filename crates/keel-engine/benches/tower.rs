//! Speed of a vision tower, and of the first token of a question about a picture:
//! `cargo bench -p keel-engine --bench tower -- [DEVICE [SHAPE [SIDE [RUNS]]]]`, by default `cpu qwen3.5-0.8b 512 3`.
//! For a GPU: `cuda qwen3.5-4b 1024 9`.
//!
//! The text model has the shape of that name, and the tower is that of the published 4B model, whose rows are as wide
//! as the text model's. Weights are random bf16 values. Every run shows another picture, so nothing is remembered. The
//! tower's time is that of a picture to its features, less that of copies of the same sizes between host and device,
//! which are timed apart. Runs of the tower and of a prompt of text take turns, so a machine that is shared slows both.
//! Figures: docs/notebook/vision.md.

use std::sync::Arc;
use std::time::{Duration, Instant};

use keel_array::{Array, Backend, DType, Runtime, RuntimeOptions, WeightFormat};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_cuda::{CudaBackend, CudaOptions};
use keel_engine::batch::{
    BatchEvent, BatchOptions, BatchRequest, Batcher, PictureInput, RequestVision, SequenceEvent,
};
use keel_engine::{Engine, EngineOptions, PatchGrid, VisionOptions};
use keel_models::loading::RandomParameters;
use keel_models::vision::VisionConfig;
use keel_testkit::random::Random;
use serde_json::{Value, json};

/// Tokens of a prompt of text.
const TEXT: usize = 512;

/// Tokens of a question next to its picture.
const QUESTION: usize = 24;

/// The config of the text model with the published tower.
fn config(shape: &str) -> Value {
    let mut config = keel_models::shape(shape).expect("a published shape");
    let hidden = config["hidden_size"].clone();
    let tokens = ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"];
    for (i, key) in tokens.into_iter().enumerate() {
        config[key] = (7 + i).into();
    }
    config["vision_config"] = json!({"depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096,
        "num_position_embeddings": 2304, "out_hidden_size": hidden, "patch_size": 16});
    config
}

fn backend(device: &str) -> Arc<dyn Backend> {
    match device {
        "cuda" => Arc::new(CudaBackend::new(&CudaOptions::default()).expect("a GPU")),
        _ => Arc::new(CpuBackend::new(CpuOptions::default())),
    }
}

/// Requests of one batch, each of which is its own.
struct Asking {
    batcher: Batcher,
    grid: PatchGrid,
    asked: u64,
}

impl Asking {
    /// The time from the request to its first token.
    fn first_token(&mut self, request: BatchRequest) -> Duration {
        let start = Instant::now();
        self.batcher.submit(request, start).expect("it fits");
        loop {
            for SequenceEvent { event, .. } in self.batcher.step(Instant::now()) {
                match event {
                    BatchEvent::Token { .. } => {
                        let time = start.elapsed();
                        while !self.batcher.is_idle() {
                            drop(self.batcher.step(Instant::now()));
                        }
                        return time;
                    }
                    BatchEvent::Failed(error) => panic!("{error}"),
                    _ => {}
                }
            }
        }
    }

    fn number(&mut self) -> u64 {
        self.asked += 1;
        self.asked
    }

    /// A prompt of text.
    fn text(&mut self) -> BatchRequest {
        let number = self.number();
        let mut random = Random::new(number);
        BatchRequest::new(number, (0..TEXT).map(|_| 100 + random.below(1000) as u32).collect(), 1)
    }

    /// A question about a picture that was not shown before.
    fn question(&mut self) -> BatchRequest {
        let (number, config) = (self.number(), self.batcher.engine().vision().expect("it sees").clone());
        let rows = config.rows_of(self.grid.h, self.grid.w);
        let mut tokens = vec![config.tokens.start];
        tokens.extend(vec![config.tokens.image; rows]);
        tokens.push(config.tokens.end);
        tokens.extend((0..QUESTION as u32).map(|i| 100 + i));
        let mut key = [0; 32];
        key[..8].copy_from_slice(&number.to_le_bytes());
        let values = Arc::new(values(&config, self.grid, number));
        let input = PictureInput { key, values, grid: self.grid, is_video: false };
        let vision = RequestVision::new(&config, &tokens, vec![input]).expect("the tokens fit");
        BatchRequest { vision: Some(vision), ..BatchRequest::new(number, tokens, 1) }
    }
}

fn values(config: &VisionConfig, grid: PatchGrid, seed: u64) -> Vec<f32> {
    Random::new(seed).uniforms(grid.h * grid.w * config.patch_values(), -1.0, 1.0)
}

/// The time of copying a picture's values to the device, and as many bytes as its features have back.
fn copy([values, features]: &[Array; 2], picture: &[f32]) -> Duration {
    for array in [values, features] {
        array.eval().expect("it is in memory");
    }
    let mut back = vec![0; features.bytes()];
    let start = Instant::now();
    values.write(picture).expect("it fits");
    features.read_bytes(0, &mut back).expect("it is there");
    start.elapsed()
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let argument = |i: usize, default: &str| arguments.get(i).cloned().unwrap_or_else(|| default.into());
    let (device, shape) = (argument(0, "cpu"), argument(1, "qwen3.5-0.8b"));
    let side: usize = argument(2, "512").parse().expect("pixels along a side");
    let runs: usize = argument(3, "3").parse().expect("a number of runs");
    let grid = PatchGrid { t: 1, h: side / 16, w: side / 16 };
    let vision = VisionOptions { patches: grid.h * grid.w, pictures: 2, piece_tokens: VisionOptions::WHOLE };
    let options = EngineOptions { context: 8192, vision: Some(vision), ..EngineOptions::default() };
    let runtime = Runtime::new(backend(&device), RuntimeOptions::default());
    let parameters = RandomParameters { format: WeightFormat::Dense(DType::BF16) };
    let json = config(&shape);
    let mut engine = Engine::load(&runtime, &parameters, &json, options, &|_| ()).expect("it loads");
    if device == "cuda" {
        engine.make_ready(&mut |_, _, _| ()).expect("it is made ready");
    }
    let tower = engine.vision().expect("it sees").clone();
    let products: u64 = tower.products_per_block(grid.h * grid.w).iter().sum();
    let text = engine.model().config.products_per_token() * TEXT as u64;
    let batcher = Batcher::new(engine, BatchOptions::default());
    let mut asking = Asking { batcher, grid, asked: 0 };
    // Arrays of the sizes that a look moves between host and device.
    let moved = [grid.h * grid.w * tower.patch_values(), tower.rows_of(grid.h, grid.w) * tower.text_hidden];
    let moved = moved.map(|len| Array::zeros(&runtime, [len], DType::F32).expect("it fits"));
    let (mut looks, mut texts, mut questions, mut copies) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    // The first round is not counted.
    for round in 0..=runs {
        let request = asking.question();
        let question = asking.first_token(request);
        let request = asking.text();
        let prompt = asking.first_token(request);
        let picture = values(&tower, grid, 1000 + round as u64);
        let mut engine = asking.batcher.into_engine();
        let copied = copy(&moved, &picture);
        let start = Instant::now();
        let features = engine.encode_picture(&picture, grid).expect("it encodes");
        let look = start.elapsed();
        assert!(features.levels[0].iter().all(|x| x.is_finite()) && features.levels[0].len() > 1);
        asking.batcher = Batcher::new(engine, BatchOptions::default());
        if round > 0 {
            looks.push(look);
            copies.push(copied);
            texts.push(prompt);
            questions.push(question);
        }
    }
    let rate = |products: u64, time: Duration| 2.0 * products as f64 / time.as_secs_f64() / 1e12;
    let (look, prompt, question) = (median(looks), median(texts), median(questions));
    let copies = median(copies);
    let tower_alone = look.saturating_sub(copies);
    println!("{device}, {shape}, a picture of {side} by {side}, medians of {runs} runs");
    let line = |what: &str, time: Duration, products: u64| {
        println!("{what:<34}{:9.1} ms {:9.3} TFLOP/s", ms(time), rate(products, time));
    };
    println!("a picture to its features{:18.1} ms, of which {:.1} are copies", ms(look), ms(copies));
    line("the tower", tower_alone, products);
    line(&format!("a prompt of {TEXT} tokens"), prompt, text);
    println!("the tower's rate is {:.2} of the prompt's", rate(products, tower_alone) / rate(text, prompt));
    println!("first token of a question{:18.1} ms", ms(question));
}
