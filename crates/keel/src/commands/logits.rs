//! `keel logits`: the logits of every token of a prompt, for comparisons.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use keel_array::DType;
use keel_engine::{EngineError, EngineOptions, LogitSink};
use keel_weights::{SafetensorsWriter, TensorSpec};

use crate::args::{DeviceArgs, EngineArgs, IdArgs, ModelArgs};
use crate::failure::usage;
use crate::placement::settle;
use crate::session::{Session, check_ids, context_for};
use crate::{output, source};

/// Write the logits of every token of a prompt to a safetensors file.
///
/// The file holds `logits`, f32 [T, V], and for models with a multi-token-prediction head `mtp_logits`,
/// f32 [T-1, V]: row t is the head's draft for token t+2, from the hidden state of token t and token t+1.
#[derive(Debug, Args)]
pub struct LogitsArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    ids: IdArgs,
    /// The file to write.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Run every token through the decode regime.
    #[arg(long)]
    one_by_one: bool,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Runs the command.
pub fn run(args: &LogitsArgs) -> Result<()> {
    let Some(ids) = args.ids.read()? else { return Err(usage("no tokens: give --ids or --ids-file")) };
    let model = source::open(args.model.model.as_deref())?;
    check_ids(&model.config, &ids)?;
    let options = EngineOptions {
        context: context_for(&model.config, ids.len())?,
        // The head's layers are run in a sequence of their own.
        sequences: 2,
        all_logits: true,
        ..args.engine.options()
    };
    settle(&args.device, &*model.parameters(), &model.json, |_| Ok(options));
    let mut session = Session::load(&args.device, &model, options)?;
    let shapes = write_logits(&mut session, &ids, args)?;
    output::line(&format!("{}: {}", args.out.display(), shapes.join(", ")))
}

/// Runs the prompt and writes rows as they come; returns what was written, in words.
fn write_logits(session: &mut Session, ids: &[u32], args: &LogitsArgs) -> Result<Vec<String>> {
    let vocab = session.engine.model().config.vocab;
    let with_head = session.engine.model().mtp.is_some() && ids.len() > 1;
    let spec =
        |name: &str, rows| TensorSpec { name: name.into(), dtype: DType::F32, shape: vec![rows, vocab] };
    let mut tensors = vec![spec("logits", ids.len())];
    if with_head {
        tensors.push(spec("mtp_logits", ids.len() - 1));
    }
    let mut sequence = session.engine.open()?;
    let writer = RefCell::new(SafetensorsWriter::create(&args.out, &tensors, &BTreeMap::new())?);
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
    Ok(tensors.iter().map(|t| format!("{} f32 {:?}", t.name, t.shape)).collect())
}
