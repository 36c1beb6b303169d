//! `keel chat`: a conversation in the terminal.
//!
//! The conversation is one sequence. Of each further prompt only what the cache does not hold yet is run: the cache
//! goes back to its latest checkpoint within what both have in common.

use std::io::{BufRead, IsTerminal, stdin, stdout};

use anyhow::{Context, Result};
use clap::Args;
use keel_cache::SequenceCache;
use keel_engine::{EngineOptions, GenerateOptions, PREFILL_GRID, SamplerOptions, SpeculationOptions};
use keel_text::{ChatTemplate, Message};

use crate::args::{DeviceArgs, EngineArgs, ModelArgs, SamplingArgs, SpeculateArgs, drafts_max};
use crate::placement::settle;
use crate::session::{Session, close, context_for};
use crate::speculation::SpeculationReport;
use crate::text::{ModelText, TextStream};
use crate::tokens::{How, Tokens};
use crate::{output, progress, source};

/// Where the context of a conversation ends, unless another is asked for or the model's own is shorter.
const CONTEXT_DEFAULT: usize = 8192;

/// Slots saved to go back to: the end of the last prompt, and that of the one before, in case a template rewrites
/// the last answer.
const CHECKPOINTS: usize = 2;

/// Talk with the model. `/reset` starts anew, `/memory` prints the memory report, `/speculation` what speculation came to,
/// `/exit` or Ctrl-D ends.
#[derive(Debug, Args)]
pub struct ChatArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// What the model is told before the first turn.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Tokens of the whole conversation to plan memory for, rounded up to pages of 256; by default 8192, or the
    /// model's context if that is shorter.
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    speculate: SpeculateArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Runs the command.
pub fn run(args: &ChatArgs) -> Result<()> {
    let model = source::open(args.model.model.as_deref())?;
    let text = ModelText::open(&model)?;
    let template = text.template()?;
    let wanted = args.context.unwrap_or(model.config.context_max.min(CONTEXT_DEFAULT));
    let context = context_for(&model.config, wanted).context("--context")?;
    let speculation = |device| args.speculate.for_model(&model, device, &args.sampling);
    let options =
        |drafts| EngineOptions { context, checkpoints: CHECKPOINTS, drafts, ..args.engine.options() };
    settle(&args.device, &*model.parameters(), &model.json, |device| {
        Ok(options(drafts_max(speculation(device.device())?)))
    });
    let speculation = speculation(args.device.device())?;
    let options = options(drafts_max(speculation));
    let sampler = args.sampling.options(&text.defaults)?;
    TextStream::new(&text.tokenizer, &args.sampling.stop)?;
    let session = Session::load(&args.device, &model, options)?;
    close(model);
    Conversation::new(args, (sampler, speculation), text, template, session).talk()
}

/// What a line of input asks for.
#[derive(Debug, PartialEq)]
enum Input<'a> {
    Nothing,
    Say(&'a str),
    Reset,
    Memory,
    Speculation,
    Exit,
    Unknown(&'a str),
}

impl Input<'_> {
    fn parse(line: &str) -> Input<'_> {
        match line.trim() {
            "" => Input::Nothing,
            "/reset" => Input::Reset,
            "/memory" => Input::Memory,
            "/speculation" => Input::Speculation,
            "/exit" | "/quit" => Input::Exit,
            command if command.starts_with('/') => Input::Unknown(command),
            text => Input::Say(text),
        }
    }
}

struct Conversation<'a> {
    args: &'a ChatArgs,
    sampler: SamplerOptions,
    /// Of all turns, where there is any.
    speculation: Option<SpeculationReport>,
    text: ModelText,
    template: ChatTemplate,
    session: Session,
    messages: Vec<Message>,
    /// The sequence, between turns, and the ids that it holds.
    cached: Option<SequenceCache>,
    cached_ids: Vec<u32>,
}

impl<'a> Conversation<'a> {
    fn new(
        args: &'a ChatArgs,
        (sampler, speculation): (SamplerOptions, Option<SpeculationOptions>),
        text: ModelText,
        template: ChatTemplate,
        session: Session,
    ) -> Conversation<'a> {
        let mut conversation = Conversation {
            args,
            sampler,
            speculation: speculation
                .map(|options| SpeculationReport { options, counters: Default::default() }),
            text,
            template,
            session,
            messages: Vec::new(),
            cached: None,
            cached_ids: Vec::new(),
        };
        conversation.reset();
        conversation
    }

    fn talk(&mut self) -> Result<()> {
        let is_terminal = stdin().is_terminal() && stdout().is_terminal();
        let mut line = String::new();
        loop {
            if is_terminal {
                output::text("> ")?;
            }
            line.clear();
            if stdin().lock().read_line(&mut line).context("cannot read standard input")? == 0 {
                return Ok(());
            }
            match Input::parse(&line) {
                Input::Nothing => {}
                Input::Say(said) => self.turn(said)?,
                Input::Reset => self.reset(),
                Input::Memory => output::text(&self.session.memory().to_table())?,
                Input::Speculation => {
                    let report = self.speculation.as_ref().map(SpeculationReport::to_line);
                    output::line(&report.unwrap_or("there is no speculation".into()))?;
                }
                Input::Exit => return Ok(()),
                Input::Unknown(command) => {
                    output::line(&format!("{command}: there are /reset, /memory, /speculation and /exit"))?;
                }
            }
        }
    }

    /// Forgets the conversation, and what the cache holds of it.
    fn reset(&mut self) {
        self.messages.clear();
        self.messages.extend(self.args.system.as_deref().map(|text| Message::new("system", text)));
        self.cached_ids.clear();
        if let Some(sequence) = self.cached.take() {
            self.session.engine.release(sequence);
        }
    }

    /// One question and its answer. A turn that does not fit is refused, and the conversation stays as it was.
    fn turn(&mut self, said: &str) -> Result<()> {
        self.messages.push(Message::new("user", said));
        let prompt = self.text.encode_chat(&self.template, &self.messages)?;
        let context = self.session.engine.options().context;
        if prompt.len() >= context {
            self.messages.pop();
            return output::line(&format!(
                "this turn makes the conversation {} tokens long, its context is {context}: /reset starts anew",
                prompt.len()
            ));
        }
        let answer = self.answer(prompt)?;
        self.messages.push(Message::new("assistant", answer));
        output::line("")
    }

    /// Runs what the cache lacks of the prompt, then draws the answer.
    fn answer(&mut self, prompt: Vec<u32>) -> Result<String> {
        let mut sequence = match self.cached.take() {
            Some(sequence) => sequence,
            None => self.session.engine.open()?,
        };
        let mut common = common_len(&self.cached_ids, &prompt) / PREFILL_GRID * PREFILL_GRID;
        if !self.session.engine.can_grow(&sequence, prompt.len()) {
            common = 0;
        }
        let at = self.session.engine.cache_mut().rewind(&mut sequence, common)?;
        tracing::debug!("{at} of {} tokens are in the cache", prompt.len());
        let options = GenerateOptions {
            max_tokens: self.args.sampling.max_tokens,
            sampler: self.sampler.clone(),
            end_tokens: self.text.end_tokens(),
            one_by_one: false,
            seen: prompt[..at].to_vec(),
            // The next turn begins with going back to the grid.
            disposable: true,
        };
        let mut stream = TextStream::new(&self.text.tokenizer, &self.args.sampling.stop)?;
        let bar = progress::tokens("prompt", prompt.len());
        let speculation = self.speculation.as_ref().map(|report| report.options);
        let how = How { options, speculation, form: None };
        let mut tokens =
            Tokens::start(&mut self.session.engine, sequence, &prompt[at..], how, &mut |done| {
                bar.set_position((at + done) as u64);
            })?;
        bar.finish_and_clear();
        self.cached_ids = prompt;
        for id in tokens.by_ref() {
            let id = id?;
            self.cached_ids.push(id);
            output::text(stream.push(id)?)?;
            if stream.is_stopped() {
                break;
            }
        }
        output::text(stream.finish()?)?;
        if let (Some(report), Some(counters)) = (&mut self.speculation, tokens.counters()) {
            report.counters.add(counters);
        }
        let sequence = tokens.into_sequence();
        // The last token was drawn but not run.
        self.cached_ids.truncate(sequence.len());
        assert_eq!(self.cached_ids.len(), sequence.len(), "the cache holds what was run");
        self.cached = Some(sequence);
        Ok(stream.text().to_string())
    }
}

/// Tokens that both begin with, but not the prompt's last: its logits are wanted.
fn common_len(cached: &[u32], prompt: &[u32]) -> usize {
    let same = cached.iter().zip(prompt).take_while(|(a, b)| a == b).count();
    same.min(prompt.len().saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_of_a_prompt_is_always_run() {
        assert_eq!(common_len(&[1, 2, 3], &[1, 2, 4]), 2);
        assert_eq!(common_len(&[1, 2, 3], &[1, 2, 3]), 2);
        assert_eq!(common_len(&[1, 2, 3, 4], &[1, 2, 3]), 2);
        assert_eq!(common_len(&[], &[5]), 0);
    }

    #[test]
    fn lines_are_commands_or_turns() {
        assert_eq!(Input::parse(" hi /reset\n"), Input::Say("hi /reset"));
        assert_eq!(Input::parse("/reset\r\n"), Input::Reset);
        assert_eq!(Input::parse("  \n"), Input::Nothing);
        assert_eq!(Input::parse("/help"), Input::Unknown("/help"));
    }
}
