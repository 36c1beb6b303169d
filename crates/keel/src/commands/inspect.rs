//! `keel inspect`: facts about a checkpoint.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use clap::Args;
use keel_array::Category;
use keel_engine::EngineOptions;
use keel_models::{HybridConfig, MixerKind, has_mtp_head};
use keel_text::ChatTemplate;
use keel_weights::gguf::{GgmlType, GgufFile};
use keel_weights::{Checkpoint, TensorSource};
use serde_json::{Value, json};

use crate::args::{DeviceArgs, TowerArgs};
use crate::failure::usage;
use crate::placed_model::PlacedModel;
use crate::{output, source};
use evenkeel::human_bytes;
use evenkeel::{ModelFiles, WeightFiles};
use evenkeel::{context_for, is_vision};

/// Print facts about a checkpoint: architecture, tensors, bits per weight, memory.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// A folder, a weights file or a hub name. Without it, the built-in model.
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    path: Option<String>,
    /// The same as the argument, as an option.
    #[arg(long, short, value_name = "MODEL")]
    model: Option<String>,
    #[command(flatten)]
    tower: TowerArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &InspectArgs) -> Result<()> {
    args.device.split.refuse()?;
    if args.device.is_limited() {
        return Err(usage(
            "--memory-limit: nothing is loaded here; keel fit --limit shows what fits in a number of bytes",
        ));
    }
    let model = source::open(args.path.as_deref().or(args.model.as_deref()), args.tower.mmproj.as_deref())?;
    let facts = facts(&model, &args.device)?;
    if args.json {
        return output::json(&facts);
    }
    for (name, value) in facts.as_object().into_iter().flatten() {
        output::line(&format!("{:<24}{}", name.replace('_', " "), words(name, value)))?;
    }
    Ok(())
}

/// All facts, in the order in which they are printed.
fn facts(model: &ModelFiles, device: &DeviceArgs) -> Result<Value> {
    let config = &model.config;
    let count = match &model.weights {
        WeightFiles::Checkpoint(checkpoint) => Count::of(checkpoint)?,
        WeightFiles::Gguf(file) => Count::of_gguf(file),
    };
    let options = EngineOptions { context: context_for(config, 1)?, ..EngineOptions::default() };
    let parameters = model.parameters();
    let planned = PlacedModel::new(device, &*parameters, &model.json).plan(options)?;
    let mut facts = json!({
        "path": model.path.display().to_string(),
        "model_type": config.model_type,
        "layers": layers(config),
        "hidden_size": config.hidden,
        "vocabulary": config.vocab,
        "context": config.context_max,
        "experts": config.moe.as_ref().map(|moe| json!({"of_a_layer": moe.experts, "for_a_token": moe.chosen})),
        "mtp_layers": if has_mtp_head(config, &*parameters) { config.mtp_layers } else { 0 },
        "files": match &model.weights {
            WeightFiles::Checkpoint(checkpoint) => checkpoint.files().len(),
            WeightFiles::Gguf(file) => file.paths().count(),
        },
        "tensors": model.tensors().names().count(),
        "vision_tensors": count.vision_tensors,
        "dtypes": count.dtypes,
        "parameters": count.parameters,
        "weights_file_bytes": count.bytes,
        "bits_per_weight": (800.0 * count.bytes as f64 / count.parameters.max(1) as f64).round() / 100.0,
        "weights_memory_bytes": planned.get(Category::Weights),
        "tokenizer": model.has_tokenizer(),
        "chat_template": has_template(model),
        "licence": licence(model),
    });
    if let Some(object) = facts.as_object_mut() {
        object.retain(|_, value| !value.is_null());
    }
    Ok(facts)
}

fn layers(config: &HybridConfig) -> Value {
    let of_kind = |kind| config.layers.iter().filter(|layer| **layer == kind).count();
    let counts = [
        ("gated_delta", MixerKind::GatedDelta),
        ("attention", MixerKind::Attention),
        ("sliding_attention", MixerKind::SlidingAttention),
    ];
    let present = counts.into_iter().filter(|(_, kind)| of_kind(*kind) > 0);
    present.map(|(name, kind)| (name.to_string(), Value::from(of_kind(kind)))).collect()
}

/// Sums over the tensors of the text model.
#[derive(Default)]
struct Count {
    vision_tensors: usize,
    dtypes: BTreeMap<String, usize>,
    parameters: u64,
    bytes: u64,
}

impl Count {
    fn of_gguf(file: &GgufFile) -> Count {
        let mut count = Count::default();
        for (_, entry) in file.entries() {
            let kind = entry.kind.map_or_else(GgmlType::describe_unread, |kind| kind.to_string());
            *count.dtypes.entry(kind).or_default() += 1;
            count.parameters += entry.shape.iter().product::<usize>() as u64;
            count.bytes += entry.range.len() as u64;
        }
        count
    }

    fn of(checkpoint: &Checkpoint) -> Result<Count> {
        let mut count = Count::default();
        let mut quantised: BTreeSet<&str> = BTreeSet::new();
        for name in checkpoint.names() {
            let Ok(info) = checkpoint.info(name) else { continue };
            if is_vision(name) {
                count.vision_tensors += 1;
                continue;
            }
            *count.dtypes.entry(info.dtype.to_string()).or_default() += 1;
            count.bytes += info.bytes() as u64;
            let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
            if !checkpoint.contains(&format!("{module}.scales")) {
                count.parameters += info.shape.iter().product::<usize>() as u64;
            } else if quantised.insert(module) {
                let linear = checkpoint.linear_info(module)?;
                count.parameters += (linear.experts.unwrap_or(1) * linear.rows * linear.cols) as u64;
            }
        }
        Ok(count)
    }
}

/// Whether there is a chat template. For a broken one, the error.
fn has_template(model: &ModelFiles) -> Value {
    if !model.has_tokenizer() {
        return false.into();
    }
    match model.text_files().and_then(|files| Ok(ChatTemplate::new(&files)?)) {
        Ok(template) => template.is_some().into(),
        Err(error) => error.to_string().into(),
    }
}

/// The licence that the weights file, the config or the model card names.
fn licence(model: &ModelFiles) -> Option<String> {
    let checkpoint = match &model.weights {
        WeightFiles::Checkpoint(checkpoint) => checkpoint,
        WeightFiles::Gguf(file) => return Some(file.metadata().get("general.license")?.as_str()?.into()),
    };
    let keys = ["license", "licence"];
    let in_header = keys.iter().find_map(|key| checkpoint.metadata().get(*key).cloned());
    let in_config = || keys.iter().find_map(|key| Some(checkpoint.config()[*key].as_str()?.to_string()));
    in_header.or_else(in_config).or_else(|| {
        let card = keel_weights::read_regular(&checkpoint.folder().join("README.md"), 1 << 20).ok()?;
        let card = String::from_utf8(card).ok()?;
        let front = card.strip_prefix("---")?.split("\n---").next()?;
        let named = |line: &str| Some(line.strip_prefix("license:")?.trim().to_string());
        front.lines().find_map(named)
    })
}

/// Formats a value for people.
fn words(name: &str, value: &Value) -> String {
    match value {
        Value::Object(parts) => {
            parts.iter().map(|(k, v)| format!("{} {v}", k.replace('_', " "))).collect::<Vec<_>>().join(", ")
        }
        Value::Bool(yes) => if *yes { "yes" } else { "no" }.into(),
        Value::String(text) => text.clone(),
        Value::Number(bytes) if name.ends_with("_bytes") => {
            format!("{bytes} ({})", human_bytes(bytes.as_u64().unwrap_or_default()))
        }
        other => other.to_string(),
    }
}
