//! `keel generate`: answers or continues a text.

use std::io::{IsTerminal, stdout};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use keel_engine::{
    EarlySteps, Engine, EngineError, EngineOptions, FinishReason, GenerateOptions, TokenIterator,
};
use keel_text::{ChatTemplate, GenerationDefaults, Message};
use serde_json::json;

use crate::args::{
    DeviceArgs, EngineArgs, FormArgs, ModelArgs, PictureArgs, PromptArgs, PromptMode, SamplingArgs,
    SpeculateArgs, count,
};
use crate::failure::usage;
use crate::placed_model::{PlacedModel, ResolvedOptions};
use crate::report::{Memory, Timing};
use crate::session::{self, Session, check_ids, close};
use crate::speculation::SpeculationReport;
use crate::vision::{self, Prepared};
use crate::{output, progress};
use evenkeel::ModelFiles;
use evenkeel::TokenOptions;
use evenkeel::context_for;
use evenkeel::{ModelText, TextStream};

/// Answer a text, or continue it.
///
/// A model with a chat template answers the text; with --raw it continues the text. A model without a template
/// continues the text. The built-in model continues the text; with --chat it answers. Only the text goes to standard
/// output. Speed and memory go to standard error.
#[derive(Debug, Args)]
#[command(mut_arg("speculate_optimistic", |arg| arg.conflicts_with_all(["schema", "grammar", "one_by_one"])))]
pub struct GenerateArgs {
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten, next_help_heading = "Pictures")]
    pictures: PictureArgs,
    #[command(flatten, next_help_heading = "Model")]
    model: ModelArgs,
    /// Tokens of prompt and text together. Memory is planned for this number, rounded up to pages of 256. By default as
    /// many as the prompt and --max-tokens need.
    #[arg(long, short = 'c', aliases = ["ctx", "ctx-size", "num-ctx"], value_name = "N", value_parser = count, help_heading = "Memory and arithmetic")]
    context: Option<usize>,
    #[command(flatten, next_help_heading = "Sampling")]
    sampling: SamplingArgs,
    #[command(flatten, next_help_heading = "Form of the text")]
    form: FormArgs,
    #[command(flatten, next_help_heading = "Speculation")]
    speculate: SpeculateArgs,
    #[command(flatten, next_help_heading = "Memory and arithmetic")]
    engine: EngineArgs,
    #[command(flatten, next_help_heading = "Device")]
    pub device: DeviceArgs,
    /// Run every token of the prompt in the decode regime, for comparisons.
    #[arg(long, help_heading = "Memory and arithmetic", conflicts_with_all = ["schema", "grammar"])]
    one_by_one: bool,
    /// Print one JSON object on standard output at the end.
    #[arg(long, help_heading = "Output")]
    json: bool,
    /// Print the prompt before the text that continues it. By default it is printed only on a terminal.
    #[arg(long, help_heading = "Output", conflicts_with = "json")]
    echo: bool,
    /// Print no speed and memory on standard error.
    #[arg(long, short, conflicts_with = "json", help_heading = "Output")]
    pub quiet: bool,
}

/// The settings of a run, checked before the model is loaded.
struct RunSettings {
    how: TokenOptions,
    stream: Option<TextStream>,
}

impl RunSettings {
    fn new(
        args: &GenerateArgs,
        model: &ModelFiles,
        text: Option<&ModelText>,
        prompt: &Prompt,
    ) -> Result<RunSettings> {
        let defaults = text.map_or(GenerationDefaults::default(), |text| text.defaults.clone());
        let end_tokens = text.filter(|_| !args.sampling.ignore_eos).map_or(Vec::new(), ModelText::end_tokens);
        let mut options = GenerateOptions {
            max_tokens: args.sampling.max_tokens,
            sampler: args.sampling.options(&defaults)?,
            end_tokens,
            speculation: None,
            one_by_one: args.one_by_one,
            seen: Vec::new(),
            disposable: true,
        };
        if text.is_none() && !args.sampling.stop.is_empty() {
            return Err(usage("--stop needs a tokenizer, and this model has none"));
        }
        let stream = text
            .map(|text| TextStream::new(&text.tokenizer, &args.sampling.stop))
            .transpose()
            .context("--stop")?;
        let form = match (args.form.read()?, text) {
            (None, _) => None,
            (Some(source), Some(text)) => Some(text.grammar(model, &source, &prompt.ids)?),
            (Some(_), None) => {
                return Err(usage("--schema and --grammar need a tokenizer, and this model has none"));
            }
        };
        if form.is_some() && args.speculate.is_asked_for() {
            return Err(usage(
                "--speculate: a text that follows a schema or a grammar makes no drafts; use --speculate off",
            ));
        }
        if args.one_by_one && args.speculate.is_asked_for() {
            return Err(usage(
                "--speculate: the multi-token-prediction head needs prefill, which --one-by-one does not run; use \
                 --speculate off",
            ));
        }
        let speculation = args.speculate.for_model(model, &args.device, &args.sampling)?;
        options.speculation = speculation.filter(|_| !args.one_by_one && form.is_none());
        Ok(RunSettings { how: TokenOptions { options, grammar: form }, stream })
    }
}

/// The result of a run.
struct Outcome {
    /// `None` without a tokenizer.
    text: Option<String>,
    tokens: Vec<u32>,
    finish: FinishReason,
    timing: Timing,
    speculation: Option<SpeculationReport>,
    memory: Memory,
}

/// The prompt.
struct Prompt {
    ids: Vec<u32>,
    /// Printed before the continuation, so that the whole text can be read.
    echo: String,
    /// The pictures of the prompt.
    pictures: Option<Prepared>,
}

/// Runs the command.
pub fn run(args: &GenerateArgs) -> Result<()> {
    let model = args.model.open()?;
    let given = args.prompt.read_ids()?;
    let text = open_text(&model, given.is_some())?;
    let prompt = match given {
        Some(ids) if args.echo => {
            let ids_alone = format!("--echo prints a text; the prompt is {} token ids", ids.len());
            return Err(usage(ids_alone));
        }
        Some(ids) => Prompt { ids, echo: String::new(), pictures: None },
        None if args.pictures.are_any() => show_pictures(args, &model, text.as_ref())?,
        None => encode(args, text.as_ref().context("a text needs a tokenizer")?)?,
    };
    if prompt.ids.is_empty() {
        bail!("the prompt is empty: there is nothing to continue");
    }
    check_ids(&model.config, &prompt.ids)?;
    let context = context(args, &model, prompt.ids.len())?;
    let vision = prompt.pictures.as_ref().and_then(Prepared::vision_options);
    let mut settings = RunSettings::new(args, &model, text.as_ref(), &prompt)?;
    let how = &mut settings.how.options;
    let early_steps = EarlySteps::Prompt(prompt.ids.len());
    let options = EngineOptions { context, vision, early_steps, ..args.engine.options() };
    let ResolvedOptions { options, speculation } =
        PlacedModel::new(&args.device, &*model.parameters(), &model.json)
            .resolve_drafting(options, how.speculation)?;
    how.speculation = speculation;
    let mut session = Session::load(&args.device, &model, options)?;
    close(model);
    session.make_rounds_ready()?;
    let outcome = generate(args, &mut session, &prompt, settings)?;
    report(args, &outcome)
}

/// The context that was requested, or else the context that the run needs.
fn context(args: &GenerateArgs, model: &ModelFiles, prompt_tokens: usize) -> Result<usize> {
    if let Some(context) = args.context {
        let context = context_for(&model.config, context).context("--context")?;
        if prompt_tokens > context {
            return Err(EngineError::Context { needed: prompt_tokens, context }.into());
        }
        return Ok(context);
    }
    // The answer ends where the model's context does.
    let room = model.config.context_max.saturating_sub(prompt_tokens);
    let max_tokens = args.sampling.max_tokens.min(room);
    context_for(&model.config, prompt_tokens.saturating_add(max_tokens))
        .with_context(|| format!("a prompt of {prompt_tokens} tokens"))
}

/// Opens the text side of the model. If `optional` (the prompt is ids), the model may lack a tokenizer.
fn open_text(model: &ModelFiles, optional: bool) -> Result<Option<ModelText>> {
    if optional && !model.has_tokenizer() {
        return Ok(None);
    }
    Ok(Some(ModelText::open(model)?))
}

/// Prepares a prompt with pictures. It always uses the chat template.
fn show_pictures(args: &GenerateArgs, model: &ModelFiles, text: Option<&ModelText>) -> Result<Prompt> {
    if args.echo || args.one_by_one {
        return Err(usage("--echo and --one-by-one are only for prompts without pictures"));
    }
    let text = text.context("a text needs a tokenizer")?;
    let written = args.prompt.read_text()?;
    let conversation = args.pictures.conversation(args.prompt.system.as_deref(), &written)?;
    let pictures = vision::prepare(model, text, &conversation)?;
    Ok(Prompt { ids: pictures.tokens.clone(), echo: String::new(), pictures: Some(pictures) })
}

fn encode(args: &GenerateArgs, text: &ModelText) -> Result<Prompt> {
    let written = args.prompt.read_text()?;
    let Some(template) = template(args, text)? else {
        let shows = args.echo || (stdout().is_terminal() && !args.quiet);
        let echo = if shows { written.clone() } else { String::new() };
        return Ok(Prompt { ids: text.encode_text(&written)?, echo, pictures: None });
    };
    if args.echo {
        return Err(usage(
            "--echo is for a text that is continued, but this text is answered; use --raw to continue it",
        ));
    }
    let system = args.prompt.system.iter().map(|system| Message::new("system", system.clone()));
    let messages: Vec<Message> = system.chain([Message::new("user", written)]).collect();
    Ok(Prompt { ids: text.encode_chat(&template, &messages)?, echo: String::new(), pictures: None })
}

/// The chat template for the text, if one is used. Logs a line if the model has none.
fn template(args: &GenerateArgs, text: &ModelText) -> Result<Option<ChatTemplate>> {
    let template = match args.prompt.asking(args.model.model.is_none()) {
        PromptMode::Raw => return Ok(None),
        PromptMode::Template => Some(text.template()?),
        PromptMode::TemplateIfAny => {
            text.find_template().context("--raw continues the text without the chat template")?
        }
    };
    if template.is_none() {
        tracing::info!("this model has no chat template, as base models do: it continues the text");
    }
    Ok(template)
}

fn generate(
    args: &GenerateArgs,
    session: &mut Session,
    prompt: &Prompt,
    settings: RunSettings,
) -> Result<Outcome> {
    let RunSettings { how, mut stream } = settings;
    let speculation = how.options.speculation;
    let mut tokens = start(&mut session.engine, prompt, how)?;
    let prefill = tokens.prefill_time();
    show(args, &prompt.echo)?;
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
        text: stream.map(|stream| stream.text().to_string()),
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

/// Runs the prompt, with a progress bar.
fn start<'e>(engine: &'e mut Engine, prompt: &Prompt, how: TokenOptions) -> Result<TokenIterator<'e>> {
    let vision_inputs = match &prompt.pictures {
        Some(pictures) => pictures.vision_inputs(&pictures.encode(engine)?)?,
        None => None,
    };
    let bar = progress::tokens("prompt", prompt.ids.len());
    let mut sequence = engine.open()?;
    sequence.set_vision_inputs(vision_inputs);
    let runtimes: Vec<_> = engine.runtimes().cloned().collect();
    let tokens = how.start(engine, sequence, &prompt.ids, &mut |done| bar.set_position(done as u64));
    bar.finish_and_clear();
    session::release_idle_memory(&runtimes);
    Ok(tokens?)
}

fn show(args: &GenerateArgs, piece: &str) -> Result<()> {
    if args.json || piece.is_empty() {
        return Ok(());
    }
    output::text(piece)
}

fn report(args: &GenerateArgs, outcome: &Outcome) -> Result<()> {
    let text = outcome.text.as_deref().unwrap_or_default();
    if args.json {
        let mut object = json!({
            "text": text,
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
    if outcome.text.is_none() {
        let ids: Vec<String> = outcome.tokens.iter().map(u32::to_string).collect();
        output::text(&ids.join(","))?;
    }
    if !text.ends_with('\n') {
        output::line("")?;
    }
    if args.quiet {
        return Ok(());
    }
    output::aside(&format!("\n{}\n", outcome.timing.to_line()));
    if let Some(speculation) = &outcome.speculation {
        output::aside(&format!("{}\n", speculation.to_line()));
    }
    output::aside(&outcome.memory.to_table());
    Ok(())
}
