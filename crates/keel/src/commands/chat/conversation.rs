//! The conversation: its messages, and the part of them that the cache holds.

use std::path::Path;

use anyhow::{Context, Result, bail};
use keel_cache::SequenceCache;
use keel_engine::{FinishReason, GenerateOptions, PREFILL_GRID, SpeculationOptions};
use keel_text::{ChatTemplate, Message, TextError};
use serde_json::{Value, json};

use super::interrupt::Interrupt;
use super::settings::Settings;
use crate::session::{self, Session};
use crate::speculation::SpeculationReport;
use crate::vision::{ChatImages, EncodedImage, PromptWithImages};
use crate::{input, output, progress};
use evenkeel::TokenOptions;
use evenkeel::{ModelText, TextStream};

/// How answers start and end, for the whole conversation.
pub struct AnswerSettings {
    pub stop: Vec<String>,
    pub end_tokens: Vec<u32>,
    pub speculation: Option<SpeculationOptions>,
    /// Whether a turn may go on from the answer before it. Otherwise it runs that answer as a part of its prompt, and
    /// has the bits of a first turn with this prompt.
    pub reuses_answers: bool,
}

/// One conversation.
pub struct Conversation {
    pub settings: Settings,
    /// Counters over all turns, if there is speculation.
    pub speculation: Option<SpeculationReport>,
    pub session: Session,
    answers: AnswerSettings,
    text: ModelText,
    chat_images: Option<ChatImages>,
    template: ChatTemplate,
    interrupt: Interrupt,
    /// The pictures of the messages in order, then those of the next turn.
    pictures: Vec<EncodedImage>,
    messages: Vec<Message>,
    /// Number of earlier answers to the last turn. Each answer has a different seed.
    retries: u64,
    /// The sequence between turns. [`Conversation::cached_ids`] are its tokens.
    cached: Option<SequenceCache>,
    cached_ids: Vec<u32>,
    /// How many of them are a prompt.
    prompt_len: usize,
}

impl Conversation {
    /// Creates an empty conversation.
    pub fn new(
        session: Session,
        text: ModelText,
        chat_images: Option<ChatImages>,
        template: ChatTemplate,
        answers: AnswerSettings,
        settings: Settings,
        interrupt: Interrupt,
    ) -> Conversation {
        let report = |options| SpeculationReport { options, counters: Default::default() };
        Conversation {
            settings,
            speculation: answers.speculation.map(report),
            session,
            answers,
            text,
            chat_images,
            pictures: Vec::new(),
            template,
            interrupt,
            messages: Vec::new(),
            retries: 0,
            cached: None,
            cached_ids: Vec::new(),
            prompt_len: 0,
        }
    }

    /// The system text, if there is one.
    pub fn system(&self) -> Option<&str> {
        self.messages.first().filter(|first| first.role == "system")?.content.as_str()
    }

    /// Replaces the system text. An empty text removes it.
    pub fn set_system(&mut self, text: &str) {
        if self.system().is_some() {
            self.messages.remove(0);
        }
        if !text.is_empty() {
            self.messages.insert(0, Message::new("system", text));
        }
    }

    /// Removes all turns, and their tokens from the cache.
    pub fn reset(&mut self) {
        self.messages.retain(|message| message.role == "system");
        self.pictures.clear();
        self.cached_ids.clear();
        if let Some(sequence) = self.cached.take() {
            self.session.engine.release(sequence);
        }
    }

    /// Shows the model a picture with the next turn. Returns a line that tells the user so.
    ///
    /// # Errors
    /// A conversation without a vision tower; a file that cannot be read or shown.
    pub fn show(&mut self, file: &str) -> Result<String> {
        if file.is_empty() {
            bail!("/image needs the name of a file");
        }
        let Some(chat_images) = &mut self.chat_images else {
            bail!("pictures need the vision tower: start keel chat with --images")
        };
        let picture = chat_images.encode_picture(&mut self.session.engine, file, self.pictures.len())?;
        self.pictures.push(picture);
        Ok(format!("{file} goes with the next turn\n"))
    }

    /// Number of pictures of the messages.
    fn shown_pictures(&self) -> usize {
        let parts = self.messages.iter().filter_map(|message| message.content.as_array());
        parts.flatten().filter(|part| part["type"] == "image").count()
    }

    /// The index of the last turn among the messages.
    fn last_turn(&self) -> Option<usize> {
        self.messages.iter().rposition(|message| message.role == "user")
    }

    /// Removes the last turn and its answer. Returns whether there was one.
    pub fn undo(&mut self) -> bool {
        let Some(at) = self.last_turn() else { return false };
        self.messages.truncate(at);
        self.pictures.truncate(self.shown_pictures());
        true
    }

    /// Answers the last turn again.
    ///
    /// # Errors
    /// As [`Conversation::say`].
    pub fn retry(&mut self) -> Result<()> {
        let Some(at) = self.last_turn() else { return output::line("there is no turn to answer again") };
        let answer = self.messages.split_off(at + 1);
        self.retries += 1;
        if !self.turn()? {
            self.messages.extend(answer);
        }
        Ok(())
    }

    /// Writes the turns to a file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, file: &str) -> Result<()> {
        if file.is_empty() {
            bail!("/save needs the name of a file");
        }
        if self.shown_pictures() > 0 {
            bail!("a conversation with pictures is not saved: the file would not have them");
        }
        let text = serde_json::to_string_pretty(&json!({"messages": self.messages}))?;
        std::fs::write(file, text + "\n").with_context(|| format!("cannot write {file}"))
    }

    /// Continues with the turns of a file. Returns how many messages it has.
    ///
    /// # Errors
    /// The file cannot be read or is not a conversation. The current conversation then stays.
    pub fn load(&mut self, file: &str) -> Result<usize> {
        if file.is_empty() {
            bail!("/load needs the name of a file");
        }
        let text = input::text_of(Path::new(file), input::PROMPT_BYTES_MAX)?;
        let mut value: Value = serde_json::from_str(&text).with_context(|| format!("{file} is no JSON"))?;
        let list = if value.is_object() { value["messages"].take() } else { value };
        let message = |value: &Value| Some(Message::new(value["role"].as_str()?, value["content"].as_str()?));
        let messages: Option<Vec<Message>> =
            list.as_array().and_then(|list| list.iter().map(message).collect());
        let messages = messages.with_context(|| {
            format!(
                "{file} is not a conversation: expected a list of messages, each with a role and a text as content"
            )
        })?;
        // Rendering checks the messages: the template refuses those that it does not support.
        self.text.encode_chat(&self.template, &messages)?;
        self.messages = messages;
        self.pictures.clear();
        Ok(self.messages.len())
    }

    /// Adds a user's turn and answers it. A turn that does not fit, or that the template refuses, is taken back: the
    /// conversation stays unchanged.
    ///
    /// # Errors
    /// Errors of the template, of the engine or of standard output.
    pub fn say(&mut self, said: &str) -> Result<()> {
        let mut message = Message::new("user", said);
        let new = self.pictures.len() - self.shown_pictures();
        if new > 0 {
            let pictures = (0..new).map(|_| json!({"type": "image"}));
            message.content = pictures.chain([json!({"type": "text", "text": said})]).collect();
        }
        self.messages.push(message);
        self.retries = 0;
        if !self.turn()? {
            self.messages.pop();
            self.pictures.truncate(self.shown_pictures());
        }
        Ok(())
    }

    /// Answers the last message. If it cannot be answered, says why and returns false.
    fn turn(&mut self) -> Result<bool> {
        let refuse = |reason: &str| output::line(reason).map(|()| false);
        let prompt = match self.encode() {
            Ok(prompt) => prompt,
            Err(error) if is_refusal(&error) => return refuse(&format!("{error:#}")),
            Err(error) => return Err(error),
        };
        let (tokens, context) = (prompt.tokens.len(), self.session.engine.options().context);
        if tokens >= context {
            return refuse(&format!(
                "this turn makes the conversation {tokens} tokens long, but its context is {context}: /undo removes the \
                 turn before, /reset begins a new conversation"
            ));
        }
        let answer = self.answer(prompt)?;
        self.messages.push(Message::new("assistant", answer));
        output::line("").map(|()| true)
    }

    fn encode(&self) -> Result<PromptWithImages> {
        match &self.chat_images {
            Some(chat_images) => {
                // Others wait for the next turn.
                let shown = &self.pictures[..self.shown_pictures()];
                chat_images.encode(&self.text, &self.template, &self.messages, shown)
            }
            None => {
                let tokens = self.text.encode_chat(&self.template, &self.messages)?;
                Ok(PromptWithImages { key: tokens.clone(), tokens, vision_inputs: None })
            }
        }
    }

    /// Runs the part of the prompt that the cache lacks, then draws the answer. Ctrl-C ends the answer.
    fn answer(&mut self, prompt: PromptWithImages) -> Result<String> {
        self.interrupt.take();
        let mut sequence = match self.cached.take() {
            Some(sequence) => sequence,
            None => self.session.engine.open()?,
        };
        let PromptWithImages { tokens: prompt, key, vision_inputs } = prompt;
        // Keys of long sequences may be rotated by other frequencies than those of short ones.
        let keeps_turns = sequence.is_long() == self.session.engine.is_long(prompt.len());
        let reusable = reusable(&self.cached_ids, self.prompt_len, self.answers.reuses_answers);
        let common = if keeps_turns { common_len(reusable, &key) } else { 0 };
        let common = common / PREFILL_GRID * PREFILL_GRID;
        let at = self.session.engine.cache_mut().rewind(&mut sequence, common)?;
        sequence.set_vision_inputs(vision_inputs);
        tracing::debug!("{at} of {} tokens are in the cache", prompt.len());
        let mut sampler = self.settings.sampler.clone();
        sampler.seed = sampler.seed.wrapping_add(self.retries);
        let options = GenerateOptions {
            max_tokens: self.settings.max_tokens,
            sampler,
            end_tokens: self.answers.end_tokens.clone(),
            speculation: self.answers.speculation,
            one_by_one: false,
            seen: prompt[..at].to_vec(),
            // The next turn rewinds to the prefill grid anyway.
            disposable: true,
        };
        let mut stream = TextStream::new(&self.text.tokenizer, &self.answers.stop)?;
        let how = TokenOptions { options, grammar: None };
        let bar = progress::tokens("prompt", prompt.len());
        let runtimes: Vec<_> = self.session.engine.runtimes().cloned().collect();
        let context = self.session.engine.options().context;
        let tokens = how.start(&mut self.session.engine, sequence, &prompt[at..], &mut |done| {
            bar.set_position((at + done) as u64);
        });
        bar.finish_and_clear();
        session::release_idle_memory(&runtimes);
        let mut tokens = tokens?;
        self.prompt_len = key.len();
        self.cached_ids = key;
        let (mut is_interrupted, mut drawn) = (false, 0);
        for id in tokens.by_ref() {
            let id = id?;
            drawn += 1;
            self.cached_ids.push(id);
            output::text(stream.push(id)?)?;
            is_interrupted = self.interrupt.take();
            if stream.is_stopped() || is_interrupted {
                break;
            }
        }
        output::text(stream.finish()?)?;
        if is_interrupted {
            output::aside("\n(stopped; /retry answers again, /undo removes the turn)");
        } else if !stream.is_stopped() && tokens.finish_reason() == Some(FinishReason::Length) {
            output::aside(&cut_notice(drawn, self.settings.max_tokens, context));
        }
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

/// Says why an answer of this many tokens ends in the middle.
fn cut_notice(drawn: usize, most: usize, context: usize) -> String {
    if drawn < most {
        return format!("\n(cut at the context of {context} tokens; /undo and /reset make room)");
    }
    let more = most.saturating_mul(4);
    format!("\n(cut at --max-tokens {most}; /set max-tokens {more} allows more)")
}

/// Whether the template refuses the conversation. Other errors are those of a broken template.
fn is_refusal(error: &anyhow::Error) -> bool {
    let refuses = |text: &TextError| matches!(text, TextError::Refused { .. });
    match error.downcast_ref::<evenkeel::Error>() {
        Some(error) => matches!(error, evenkeel::Error::Text(text) if refuses(text)),
        None => error.downcast_ref().is_some_and(refuses),
    }
}

/// The cached tokens that a turn may go on from, of which the first `prompt_len` were run as a prompt.
fn reusable(cached: &[u32], prompt_len: usize, reuses_answers: bool) -> &[u32] {
    if reuses_answers { cached } else { &cached[..prompt_len.min(cached.len())] }
}

/// Length of the common prefix, without the prompt's last token: that token must run, because its logits are needed.
fn common_len(cached: &[u32], prompt: &[u32]) -> usize {
    let same = cached.iter().zip(prompt).take_while(|(a, b)| a == b).count();
    same.min(prompt.len().saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_answer_says_what_cut_it() {
        let notice = cut_notice(256, 256, 4096);
        assert_eq!(notice, "\n(cut at --max-tokens 256; /set max-tokens 1024 allows more)");
        assert!(cut_notice(9, 256, 4096).contains("the context of 4096 tokens"));
    }

    #[test]
    fn a_turn_whose_bits_must_not_change_goes_on_from_prompts_alone() {
        let cached = [1, 2, 3, 4];
        assert_eq!(reusable(&cached, 2, true), cached);
        assert_eq!(reusable(&cached, 2, false), [1, 2]);
        assert_eq!(reusable(&[], 2, false), [0u32; 0]);
    }

    #[test]
    fn the_last_token_of_a_prompt_is_always_run() {
        assert_eq!(common_len(&[1, 2, 3], &[1, 2, 4]), 2);
        assert_eq!(common_len(&[1, 2, 3], &[1, 2, 3]), 2);
        assert_eq!(common_len(&[1, 2, 3, 4], &[1, 2, 3]), 2);
        assert_eq!(common_len(&[], &[5]), 0);
    }
}
