//! `keel generate`: continues a text.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use keel_engine::{Engine, EngineError, EngineOptions, FinishReason, GenerateOptions, SpeculationOptions};
use keel_text::{GenerationDefaults, Message};
use serde_json::json;

use crate::args::{DeviceArgs, EngineArgs, IdArgs, ModelArgs, SamplingArgs, SpeculateArgs, drafts_max};
use crate::failure::usage;
use crate::report::{Memory, Timing};
use crate::session::{Session, check_ids, close, context_for};
use crate::source::Model;
use crate::speculation::SpeculationReport;
use crate::text::{ModelText, TextStream};
use crate::tokens::Tokens;
use crate::{output, progress, source};

/// Continue a text, or answer it in the model's chat template.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// The text.
    #[arg(conflicts_with_all = ["ids", "ids_file", "prompt_file"])]
    prompt: Option<String>,
    /// Read the text from a file.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["ids", "ids_file"])]
    prompt_file: Option<PathBuf>,
    #[command(flatten)]
    ids: IdArgs,
    #[command(flatten)]
    model: ModelArgs,
    /// Wrap the text as a user's turn in the chat template of the checkpoint.
    #[arg(long, conflicts_with_all = ["ids", "ids_file"])]
    chat: bool,
    /// Tokens of prompt and text together to plan memory for, rounded up to pages of 256; by default as many as the
    /// prompt and --max-tokens need.
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Run every token of the prompt through the decode regime, to compare.
    #[arg(long)]
    one_by_one: bool,
    #[command(flatten)]
    speculate: SpeculateArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object, when all is done.
    #[arg(long)]
    json: bool,
    /// Print the text alone.
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

/// How it is continued, checked before the model is loaded.
struct How {
    options: GenerateOptions,
    speculation: Option<SpeculationOptions>,
    stream: Option<TextStream>,
}

impl How {
    fn new(args: &GenerateArgs, model: &Model, text: Option<&ModelText>) -> Result<How> {
        let defaults = text.map_or(GenerationDefaults::default(), |text| text.defaults.clone());
        let end_tokens = text.filter(|_| !args.sampling.ignore_eos).map_or(Vec::new(), ModelText::end_tokens);
        let options = GenerateOptions {
            max_tokens: args.sampling.max_tokens,
            sampler: args.sampling.options(&defaults)?,
            end_tokens,
            one_by_one: args.one_by_one,
            seen: Vec::new(),
            disposable: true,
        };
        if text.is_none() && !args.sampling.stop.is_empty() {
            return Err(usage("--stop needs a tokenizer, and this model has none"));
        }
        let stream = text.map(|text| TextStream::new(&text.tokenizer, &args.sampling.stop)).transpose()?;
        // The head is filled while the prompt is run in the prefill regime.
        let speculation = args.speculate.for_model(model, args.device.device(), &args.sampling)?;
        let speculation = speculation.filter(|_| !args.one_by_one);
        Ok(How { options, speculation, stream })
    }
}

/// What came of it.
struct Outcome {
    text: String,
    tokens: Vec<u32>,
    finish: FinishReason,
    timing: Timing,
    speculation: Option<SpeculationReport>,
    memory: Memory,
}

/// What is continued.
struct Prompt {
    ids: Vec<u32>,
    /// What is printed before the continuation, so that the whole can be read.
    echo: String,
}

/// Runs the command.
pub fn run(args: &GenerateArgs) -> Result<()> {
    let model = source::open(args.model.model.as_deref())?;
    let given = args.ids.read()?;
    let text = open_text(&model, given.is_some())?;
    let prompt = match given {
        Some(ids) => Prompt { ids, echo: String::new() },
        None => encode(args, text.as_ref().context("a text needs a tokenizer")?)?,
    };
    if prompt.ids.is_empty() {
        bail!("the prompt is empty: there is nothing to continue");
    }
    check_ids(&model.config, &prompt.ids)?;
    let how = How::new(args, &model, text.as_ref())?;
    let options = EngineOptions {
        context: context(args, &model, prompt.ids.len())?,
        drafts: drafts_max(how.speculation),
        ..args.engine.options()
    };
    let mut session = Session::load(&args.device, &model, options)?;
    close(model);
    let outcome = generate(args, &mut session, &prompt, how)?;
    report(args, &outcome)
}

/// As much context as was asked for, or as is needed.
fn context(args: &GenerateArgs, model: &Model, prompt_tokens: usize) -> Result<usize> {
    if let Some(context) = args.context {
        let context = context_for(&model.config, context).context("--context")?;
        if prompt_tokens > context {
            return Err(EngineError::Context { needed: prompt_tokens, context }.into());
        }
        return Ok(context);
    }
    let max_tokens = args.sampling.max_tokens;
    context_for(&model.config, prompt_tokens.saturating_add(max_tokens))
        .with_context(|| format!("a prompt of {prompt_tokens} tokens and --max-tokens {max_tokens}"))
}

/// The text side of the model. With ids for a prompt, a model without a tokenizer will do.
fn open_text(model: &Model, optional: bool) -> Result<Option<ModelText>> {
    if optional && !model.has_tokenizer() {
        return Ok(None);
    }
    ModelText::open(model).map(Some)
}

fn encode(args: &GenerateArgs, text: &ModelText) -> Result<Prompt> {
    let written = match (&args.prompt, &args.prompt_file) {
        (Some(prompt), _) => prompt.clone(),
        (None, Some(path)) => {
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?
        }
        (None, None) => {
            return Err(usage("nothing to continue: give a text, --prompt-file, --ids or --ids-file"));
        }
    };
    if args.chat {
        let ids = text.encode_chat(&text.template()?, &[Message::new("user", written)])?;
        return Ok(Prompt { ids, echo: String::new() });
    }
    Ok(Prompt { ids: text.encode_text(&written)?, echo: written })
}

fn generate(args: &GenerateArgs, session: &mut Session, prompt: &Prompt, how: How) -> Result<Outcome> {
    let How { options, speculation, mut stream } = how;
    let mut tokens = start(&mut session.engine, &prompt.ids, (options, speculation))?;
    let prefill = tokens.prefill_time();
    if !args.quiet {
        show(args, &prompt.echo)?;
    }
    let decode_start = Instant::now();
    let mut ids = Vec::new();
    for id in tokens.by_ref() {
        let id = id?;
        ids.push(id);
        let Some(stream) = &mut stream else { continue };
        let piece = stream.push(id)?;
        show(args, piece)?;
        if stream.is_stopped() {
            break;
        }
    }
    if let Some(stream) = &mut stream {
        show(args, stream.finish()?)?;
    }
    let decode = decode_start.elapsed();
    let stopped = stream.as_ref().is_some_and(TextStream::is_stopped);
    let finish =
        if stopped { FinishReason::Stop } else { tokens.finish_reason().unwrap_or(FinishReason::Length) };
    let speculation = speculation
        .zip(tokens.counters())
        .map(|(options, counters)| SpeculationReport { options, counters: counters.clone() });
    let sequence = tokens.into_sequence();
    let decode_steps = sequence.len() - prompt.ids.len();
    session.engine.release(sequence);
    Ok(Outcome {
        text: stream.map_or(String::new(), |stream| stream.text().to_string()),
        tokens: ids,
        finish,
        timing: Timing {
            load: session.load_time,
            prefill,
            decode,
            prompt_tokens: prompt.ids.len(),
            decode_steps,
        },
        speculation,
        memory: session.memory(),
    })
}

/// Runs the prompt, with a bar.
fn start<'e>(
    engine: &'e mut Engine,
    prompt: &[u32],
    how: (GenerateOptions, Option<SpeculationOptions>),
) -> Result<Tokens<'e>> {
    let bar = progress::tokens("prompt", prompt.len());
    let sequence = engine.open()?;
    let tokens = Tokens::start(engine, sequence, prompt, how, &mut |done| bar.set_position(done as u64));
    bar.finish_and_clear();
    Ok(tokens?)
}

fn show(args: &GenerateArgs, piece: &str) -> Result<()> {
    if args.json || piece.is_empty() {
        return Ok(());
    }
    output::text(piece)
}

fn report(args: &GenerateArgs, outcome: &Outcome) -> Result<()> {
    if args.json {
        let mut object = json!({
            "text": outcome.text,
            "tokens": outcome.tokens,
            "prompt_tokens": outcome.timing.prompt_tokens,
            "finish_reason": outcome.finish.name(),
            "timing": outcome.timing.to_json(),
            "memory": outcome.memory.to_json(),
        });
        if let Some(speculation) = &outcome.speculation {
            object["speculation"] = speculation.to_json();
        }
        return output::json(&object);
    }
    if outcome.text.is_empty() && !outcome.tokens.is_empty() {
        let ids: Vec<String> = outcome.tokens.iter().map(u32::to_string).collect();
        output::text(&ids.join(","))?;
    }
    if args.quiet {
        return output::line("");
    }
    output::line("\n")?;
    output::line(&outcome.timing.to_line())?;
    if let Some(speculation) = &outcome.speculation {
        output::line(&speculation.to_line())?;
    }
    output::text(&outcome.memory.to_table())
}
