//! `keel logits`: writes the logits of every token of a prompt, for comparisons.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use keel_array::DType;
use keel_engine::{EngineError, EngineOptions, LogitSink};
use keel_models::vision::{TowerKind, VisionConfig};
use keel_vision::{Grid, Picture};
use keel_weights::{SafetensorsWriter, TensorSpec};

use crate::args::{DeviceArgs, EngineArgs, IdArgs, ModelArgs};
use crate::failure::usage;
use crate::output;
use crate::session::{Session, check_ids};
use crate::signals::Signals;
use crate::vision::{self, Conversation, EncodedMedia, Prepared};
use evenkeel::ModelText;
use evenkeel::context_for;

/// Write the logits of every token of a prompt to a safetensors file.
///
/// The file holds `logits`, f32 [T, V], and for models with a multi-token-prediction head `mtp_logits`,
/// f32 [T-1, V]: row t is the head's draft for token t+2, from the hidden state of token t and token t+1.
///
/// With --messages it also holds the prepared conversation: `input_ids [T]`; for models whose positions have three axes
/// `position_ids [3, T]` and `rope_deltas [1]`; for pictures `resized_u8.i [h, w, 3]`, `pixel_values`,
/// `image_grid_thw`, `image_features` and `deepstack_features.k`; for videos `resized_u8_video`, `pixel_values_videos`,
/// `video_grid_thw`, `video_features` and `deepstack_video_features.k`.
#[derive(Debug, Args)]
pub struct LogitsArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    ids: IdArgs,
    /// File with a conversation in OpenAI's form, {"messages": [...]}. Pictures are data URIs, or paths relative to the
    /// file.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["ids", "ids_file"])]
    messages: Option<PathBuf>,
    /// The file to write.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Run every token in the decode regime.
    #[arg(long)]
    one_by_one: bool,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

/// A tensor that is known before the prompt is run.
struct Known {
    spec: TensorSpec,
    bytes: Vec<u8>,
}

/// Runs the command.
pub fn run(args: &LogitsArgs) -> Result<()> {
    // A signal removes the file that is being written.
    let _signals = Signals::watch()?;
    let model = args.model.open()?;
    let prepared = match &args.messages {
        None => None,
        Some(path) => {
            let conversation = Conversation::read(path)?;
            Some(vision::prepare(&model, &ModelText::open(&model)?, &conversation)?)
        }
    };
    let ids = match &prepared {
        Some(prepared) => prepared.tokens.clone(),
        None => match args.ids.read()? {
            Some(ids) => ids,
            None => return Err(usage("no tokens: give --ids, --ids-file or --messages")),
        },
    };
    check_ids(&model.config, &ids)?;
    let options = EngineOptions {
        context: context_for(&model.config, ids.len())?,
        // The MTP head's layers run in a second sequence.
        sequences: 2,
        all_logits: true,
        vision: prepared.as_ref().and_then(Prepared::vision_options),
        ..args.engine.options()
    };
    let mut session = Session::load(&args.device, &model, options)?;
    let encoded = prepared.as_ref().map(|prepared| prepared.encode(&mut session.engine)).transpose()?;
    let shapes = write_logits(&mut session, &ids, prepared.as_ref().zip(encoded.as_ref()), args)?;
    output::line(&format!("{}: {}", args.out.display(), shapes.join(", ")))
}

/// Runs the prompt and writes rows as they are computed. Returns a description of the contents.
fn write_logits(
    session: &mut Session,
    ids: &[u32],
    pictures: Option<(&Prepared, &EncodedMedia)>,
    args: &LogitsArgs,
) -> Result<Vec<String>> {
    let vocab = session.engine.model().config.vocab;
    let with_head = session.engine.model().mtp.is_some() && ids.len() > 1;
    let spec =
        |name: &str, rows| TensorSpec { name: name.into(), dtype: DType::F32, shape: vec![rows, vocab] };
    let known = pictures.map_or(Ok(Vec::new()), |(prepared, encoded)| known_tensors(prepared, encoded))?;
    let mut tensors: Vec<_> = known.iter().map(|tensor| tensor.spec.clone()).collect();
    tensors.push(spec("logits", ids.len()));
    if with_head {
        tensors.push(spec("mtp_logits", ids.len() - 1));
    }
    let mut sequence = session.engine.open()?;
    if let Some((prepared, encoded)) = pictures {
        sequence.set_vision_inputs(prepared.vision_inputs(encoded)?);
    }
    let mut writer = SafetensorsWriter::create(&args.out, &tensors, &BTreeMap::new())?;
    for Known { spec, bytes } in &known {
        writer.append(&spec.name, bytes)?;
    }
    let writer = RefCell::new(writer);
    let append = |name: &'static str| {
        let writer = &writer;
        move |row: &[f32]| {
            let bytes: Vec<u8> = row.iter().flat_map(|logit| logit.to_le_bytes()).collect();
            writer.borrow_mut().append(name, &bytes).map_err(|error| EngineError::Model(error.into()))
        }
    };
    let (mut sink, mut mtp_sink) = (append("logits"), append("mtp_logits"));
    let mtp_sink: Option<&mut LogitSink<'_>> = if with_head { Some(&mut mtp_sink) } else { None };
    session.engine.all_logits(&mut sequence, ids, args.one_by_one, &mut sink, mtp_sink)?;
    session.engine.release(sequence);
    writer.into_inner().finish()?;
    Ok(tensors.iter().map(|t| format!("{} {} {:?}", t.name, t.dtype, t.shape)).collect())
}

/// All tensors of the conversation except the logits.
fn known_tensors(prepared: &Prepared, encoded: &EncodedMedia) -> Result<Vec<Known>> {
    let mut known =
        vec![words("input_ids", vec![prepared.tokens.len()], prepared.tokens.iter().map(|&id| id as i32))];
    let Some(config) = &prepared.vision else { return Ok(known) };
    let vision_inputs = prepared.vision_inputs(encoded)?;
    if let (Some(vision_inputs), TowerKind::Qwen { .. }) = (&vision_inputs, &config.kind) {
        let axes = (0..3).flat_map(|axis| vision_inputs.positions.iter().map(move |place| place[axis]));
        known.push(words("position_ids", vec![3, prepared.tokens.len()], axes));
        known.push(words("rope_deltas", vec![1], [vision_inputs.delta]));
    }
    for (i, image) in prepared.images.iter().enumerate() {
        known.push(bytes(&format!("resized_u8.{i}"), &[&image.resized], false));
    }
    if !prepared.images.is_empty() {
        let values = prepared.images.iter().flat_map(|image| &image.values);
        let count: usize = prepared.images.iter().map(|image| image.values.len()).sum();
        let shape = match config.kind {
            TowerKind::Qwen { .. } => vec![count / config.patch_values(), config.patch_values()],
            TowerKind::Siglip { image_size, .. } => vec![prepared.images.len(), 3, image_size, image_size],
        };
        known.push(floats("pixel_values", shape, values));
        known.extend(grids("image_grid_thw", config, prepared.images.iter().map(|image| image.grid)));
        known.extend(features(
            "image_features",
            "deepstack_features",
            config,
            prepared.images.len(),
            &encoded.images.levels,
        ));
    }
    for (i, video) in prepared.videos.iter().enumerate() {
        let number = if prepared.videos.len() > 1 { format!(".{i}") } else { String::new() };
        known.push(bytes(
            &format!("resized_u8_video{number}"),
            &video.resized.iter().collect::<Vec<_>>(),
            true,
        ));
    }
    if !prepared.videos.is_empty() {
        let values = prepared.videos.iter().flat_map(|video| &video.values);
        let count: usize = prepared.videos.iter().map(|video| video.values.len()).sum();
        known.push(floats(
            "pixel_values_videos",
            vec![count / config.patch_values(), config.patch_values()],
            values,
        ));
        known.extend(grids("video_grid_thw", config, prepared.videos.iter().map(|video| video.grid)));
        known.extend(features(
            "video_features",
            "deepstack_video_features",
            config,
            prepared.videos.len(),
            &encoded.videos.levels,
        ));
    }
    Ok(known)
}

fn words(name: &str, shape: Vec<usize>, values: impl IntoIterator<Item = i32>) -> Known {
    let bytes = values.into_iter().flat_map(i32::to_le_bytes).collect();
    Known { spec: TensorSpec { name: name.into(), dtype: DType::I32, shape }, bytes }
}

fn floats<'a>(name: &str, shape: Vec<usize>, values: impl Iterator<Item = &'a f32>) -> Known {
    let bytes = values.flat_map(|value| value.to_le_bytes()).collect();
    Known { spec: TensorSpec { name: name.into(), dtype: DType::F32, shape }, bytes }
}

/// Pictures of one size as one tensor. For a video it has an additional axis, the frames.
fn bytes(name: &str, pictures: &[&Picture], is_video: bool) -> Known {
    let (height, width) = pictures.first().map_or((0, 0), |picture| (picture.height, picture.width));
    let frames = if is_video { vec![pictures.len()] } else { Vec::new() };
    let shape = frames.into_iter().chain([height, width, 3]).collect();
    let bytes = pictures.iter().flat_map(|picture| picture.rgb.iter().copied()).collect();
    Known { spec: TensorSpec { name: name.into(), dtype: DType::U8, shape }, bytes }
}

fn grids(name: &str, config: &VisionConfig, grids: impl Iterator<Item = Grid>) -> Option<Known> {
    let TowerKind::Qwen { .. } = config.kind else { return None };
    let values: Vec<i32> = grids.flat_map(|grid| [grid.t, grid.h, grid.w].map(|n| n as i32)).collect();
    Some(words(name, vec![values.len() / 3, 3], values))
}

/// The features of each level. The first level has its own name, the others are numbered.
fn features<'a>(
    first: &'a str,
    further: &'a str,
    config: &'a VisionConfig,
    pictures: usize,
    levels: &'a [Vec<f32>],
) -> impl Iterator<Item = Known> + 'a {
    levels.iter().enumerate().map(move |(i, level)| {
        let name = if i == 0 { first.to_string() } else { format!("{further}.{}", i - 1) };
        let rows = level.len() / config.text_hidden;
        let shape = match config.kind {
            TowerKind::Qwen { .. } => vec![rows, config.text_hidden],
            TowerKind::Siglip { .. } => vec![pictures, rows / pictures.max(1), config.text_hidden],
        };
        floats(&name, shape, level.iter())
    })
}
