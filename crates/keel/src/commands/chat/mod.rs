//! `keel chat`: a conversation in the terminal.
//!
//! The conversation is one sequence. For each further prompt the cache rewinds to its latest checkpoint within the
//! common prefix. Only the tokens after that checkpoint are run.

mod conversation;
mod input;
mod interrupt;
mod lines;
mod settings;

use anyhow::{Context, Result};
use clap::Args;
use keel_engine::EngineOptions;

use crate::args::{DeviceArgs, EngineArgs, ModelArgs, SamplingArgs, SpeculateArgs, count};
use crate::output;
use crate::placed_model::{PlacedModel, ResolvedOptions};
use crate::session::{Session, close};
use crate::speculation::SpeculationReport;
use crate::vision::ChatImages;
use conversation::{AnswerSettings, Conversation};
use evenkeel::context_for;
use evenkeel::{ModelText, TextStream};
use input::Input;
use interrupt::Interrupt;
use lines::{Line, Lines};
use settings::Settings;

/// Default context of a conversation, unless the model's own is shorter.
const CONTEXT_DEFAULT: usize = 8192;

/// Checkpoints to rewind to: at the end of the last prompt, and at the end of the prompt before it. The second is used
/// if a template rewrites the last answer.
const CHECKPOINTS: usize = 2;

/// Talk with the model.
///
/// On a terminal, lines are edited as in a shell, with completion of commands and a history in
/// $XDG_STATE_HOME/keel/chat_history. """ begins and ends a turn of several lines. /help lists the commands. Ctrl-C
/// stops an answer, Ctrl-D ends the program. Without a terminal, each line of standard input is a turn.
#[derive(Debug, Args)]
pub struct ChatArgs {
    #[command(flatten, next_help_heading = "Model")]
    model: ModelArgs,
    /// System text, which comes before the first turn.
    #[arg(long, short = 's', alias = "system-prompt", value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,
    /// Also load the vision tower, so that /image FILE shows the model a picture.
    #[arg(long)]
    images: bool,
    /// Tokens of the whole conversation. Memory is planned for this number, rounded up to pages of 256. By default
    /// 8192, or the model's context if that is shorter.
    #[arg(long, short = 'c', aliases = ["ctx", "ctx-size", "num-ctx"], value_name = "N", value_parser = count, help_heading = "Memory and arithmetic")]
    context: Option<usize>,
    #[command(flatten, next_help_heading = "Sampling")]
    sampling: SamplingArgs,
    #[command(flatten, next_help_heading = "Speculation")]
    speculate: SpeculateArgs,
    #[command(flatten, next_help_heading = "Memory and arithmetic")]
    engine: EngineArgs,
    #[command(flatten, next_help_heading = "Device")]
    pub device: DeviceArgs,
}

/// Runs the command.
pub fn run(args: &ChatArgs) -> Result<()> {
    let model = args.model.open()?;
    let text = ModelText::open(&model)?;
    let template = text.template().context("use keel generate --raw")?;
    let chat_images =
        if args.images { Some(ChatImages::open(&model, &text).context("--images")?) } else { None };
    let vision = chat_images.as_ref().map(ChatImages::options);
    let wanted = args.context.unwrap_or(model.config.context_max.min(CONTEXT_DEFAULT));
    let context = context_for(&model.config, wanted).context("--context")?;
    let speculation = args.speculate.for_model(&model, &args.device, &args.sampling)?;
    let options = EngineOptions { context, checkpoints: CHECKPOINTS, vision, ..args.engine.options() };
    let ResolvedOptions { options, speculation } =
        PlacedModel::new(&args.device, &*model.parameters(), &model.json)
            .resolve_drafting(options, speculation)?;
    let settings =
        Settings { sampler: args.sampling.options(&text.defaults)?, max_tokens: args.sampling.max_tokens };
    TextStream::new(&text.tokenizer, &args.sampling.stop).context("--stop")?;
    let mut session = Session::load(&args.device, &model, options)?;
    close(model);
    session.make_rounds_ready()?;
    let end_tokens = if args.sampling.ignore_eos { Vec::new() } else { text.end_tokens() };
    let reuses_answers = !args.device.is_deterministic();
    let answers =
        AnswerSettings { stop: args.sampling.stop.clone(), end_tokens, speculation, reuses_answers };
    let lines = Lines::open()?;
    let interrupt = if lines.is_terminal() { Interrupt::listen()? } else { Interrupt::default() };
    let mut conversation =
        Conversation::new(session, text, chat_images, template, answers, settings, interrupt);
    conversation.set_system(args.system.as_deref().unwrap_or_default());
    talk(&mut conversation, lines)
}

fn talk(conversation: &mut Conversation, mut lines: Lines) -> Result<()> {
    if lines.is_terminal() {
        output::aside("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends the program\n");
    }
    loop {
        let line = match lines.next()? {
            Line::Text(line) => line,
            Line::Dropped => {
                output::aside("(Ctrl-D or /exit ends)\n");
                continue;
            }
            Line::End => return Ok(()),
        };
        match Input::parse(&line) {
            Input::Say(said) => conversation.say(said)?,
            Input::Retry => conversation.retry()?,
            Input::Exit => return Ok(()),
            command => obey(conversation, &command)?,
        }
    }
}

/// Executes a command that needs no answer from the model.
fn obey(conversation: &mut Conversation, command: &Input<'_>) -> Result<()> {
    let done = match *command {
        Input::Help => Ok(input::help()),
        Input::System("") => {
            Ok(format!("{}\n", conversation.system().unwrap_or("there is no system prompt")))
        }
        Input::System(text) => {
            conversation.set_system(text);
            Ok(String::new())
        }
        Input::Set("") => Ok(conversation.settings.show()),
        Input::Set(text) => conversation.settings.set(text).map(|()| String::new()),
        Input::Image(file) => conversation.show(file),
        Input::Undo if conversation.undo() => Ok(String::new()),
        Input::Undo => Ok("there is no turn to take back\n".into()),
        Input::Reset => {
            conversation.reset();
            Ok(String::new())
        }
        Input::Save(file) => conversation.save(file).map(|()| format!("saved as {file}\n")),
        Input::Load(file) => conversation.load(file).map(|count| format!("{count} messages of {file}\n")),
        Input::Memory => Ok(conversation.session.memory().to_table()),
        Input::Speculation => {
            let report = conversation.speculation.as_ref().map(SpeculationReport::to_line);
            Ok(format!("{}\n", report.unwrap_or("there is no speculation".into())))
        }
        Input::Unknown(line) => Ok(format!("{line}: there is no such command; /help lists them\n")),
        Input::Nothing | Input::Say(_) | Input::Retry | Input::Exit => Ok(String::new()),
    };
    // A command's error is printed, and the conversation goes on.
    output::text(&done.unwrap_or_else(|error| format!("{error:#}\n")))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        chat: ChatArgs,
    }

    #[test]
    fn a_system_text_may_begin_with_a_dash() {
        let cli = Cli::try_parse_from(["keel", "-s", "- Be brief."]).expect("a text");
        assert_eq!(cli.chat.system.as_deref(), Some("- Be brief."));
    }
}
