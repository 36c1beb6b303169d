//! Turns the events of one request into the parts of its answer.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use keel_engine::FinishReason;
use keel_engine::batch::{BatchEvent, TokenLogprobs};
use keel_text::{AnswerForm, AnswerParser, AnswerPart, StopMatcher, StreamDetokenizer, Tokenizer};

use crate::access::caller::Caller;
use crate::error::{Result, ServerError};
use crate::events::Events;
use crate::memory::requests::{Listing, bytes_of_body, bytes_of_part};
use crate::metrics::RequestTimer;

/// A token with its log probabilities.
#[derive(Clone, Debug)]
pub struct TokenInfo {
    /// The token's id.
    pub id: u32,
    /// The token's own bytes. Those of a part of a character are no text.
    pub bytes: Vec<u8>,
    /// Log probabilities at the token's position. [`TokenInfo::top_bytes`] has the bytes of the most probable tokens.
    pub logprobs: TokenLogprobs,
    /// Bytes of the tokens of `logprobs.top`.
    pub top_bytes: Vec<Vec<u8>>,
    /// Number of characters before the token in an answer that has only text.
    pub text_offset: usize,
}

impl TokenInfo {
    /// The bytes of all listed tokens.
    fn listed(&self) -> impl Iterator<Item = &[u8]> {
        self.top_bytes.iter().chain([&self.bytes]).map(Vec::as_slice)
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ending {
    /// An end token or a stop string came.
    #[default]
    Stop,
    /// The limit of tokens was reached.
    Length,
    /// The model called tools.
    ToolCalls,
}

/// An event of an answer.
#[derive(Clone, Debug)]
pub enum AnswerEvent {
    /// Text, reasoning or a tool call, with the tokens up to its end that no event had before. There are only tokens if
    /// log probabilities were requested.
    Part(AnswerPart, Vec<TokenInfo>),
    /// Tokens whose text is held back or left out.
    Tokens(Vec<TokenInfo>),
    /// The end, with the stop string that caused it, if any. No event follows.
    End(Ending, Option<String>),
}

/// Token counts of a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens of the prompt that were reused from an earlier request.
    pub cached: usize,
    /// Tokens of the answer.
    pub completion: usize,
    /// Tokens of the answer that are reasoning.
    pub reasoning: usize,
}

/// Tokens wait for text that is held back until they list this many tokens, alternatives included. They are not charged
/// to the request while they wait, and an event with them is small.
const HELD_ENTRIES_MAX: usize = 60;

/// How the tokens of an answer become parts.
#[derive(Clone)]
pub struct AnswerStyle {
    /// Finds the strings that end the answer.
    pub stops: StopMatcher,
    /// The parts that the answer may have.
    pub form: AnswerForm,
    /// The answer ends after its first tool call.
    pub one_call: bool,
    /// How tokens are reported with their log probabilities, if they are.
    pub(crate) listing: Option<Listing>,
}

/// A running answer. Dropping it ends the sequence. An answer has ended when [`Answer::next`] returns `None`: all of
/// its events were charged and sent. One that is dropped before counts as cancelled, unless its request has failed:
/// then it ended for that reason.
pub struct Answer {
    events: Events,
    tokenizer: Tokenizer,
    detokenizer: StreamDetokenizer,
    stops: StopMatcher,
    parser: AnswerParser,
    one_call: bool,
    listing: Option<Listing>,
    ready: VecDeque<AnswerEvent>,
    /// Tokens that wait for their text.
    held: Vec<TokenInfo>,
    /// Number of characters that the detokenizer has returned, and of those that are in events as text.
    decoded_chars: usize,
    text_chars: usize,
    called_tools: bool,
    reasoned: bool,
    /// Set when the last events are in `ready`.
    ending: Option<Ending>,
    usage: Usage,
    timer: RequestTimer,
    /// Keeps the request's memory charged until the answer is dropped.
    caller: Arc<Caller>,
}

impl Answer {
    /// Charges the request for a part of the answer that is kept.
    ///
    /// # Errors
    /// There is no memory left for it.
    pub(crate) fn charge(&self, event: &AnswerEvent) -> Result<()> {
        let of_part = |part: &AnswerPart| match part {
            AnswerPart::Text(text) | AnswerPart::Reasoning(text) => bytes_of_part(text),
            AnswerPart::ToolCall { name, arguments } => {
                bytes_of_part(name) + bytes_of_part(arguments) + bytes_of_body(arguments.as_bytes())
            }
        };
        let of_token = |token: &TokenInfo| self.listing.map_or(0, |listing| listing.bytes(token.listed()));
        let of_tokens = |tokens: &[TokenInfo]| tokens.iter().map(of_token).sum::<u64>();
        let bytes = match event {
            AnswerEvent::Part(part, tokens) => of_part(part) + of_tokens(tokens),
            AnswerEvent::Tokens(tokens) => of_tokens(tokens),
            AnswerEvent::End(..) => 0,
        };
        self.caller.meter.take(bytes).map_err(|refused| self.caller.failed(refused.into()))
    }

    /// Creates an answer to `caller` from `events`.
    pub(crate) fn new(
        events: Events,
        tokenizer: &Tokenizer,
        style: AnswerStyle,
        prompt_tokens: usize,
        timer: RequestTimer,
        caller: Arc<Caller>,
    ) -> Answer {
        Answer {
            events,
            tokenizer: tokenizer.clone(),
            detokenizer: tokenizer.answer_stream(&style.form),
            stops: style.stops,
            parser: AnswerParser::new(style.form),
            one_call: style.one_call,
            listing: style.listing,
            ready: VecDeque::new(),
            held: Vec::new(),
            decoded_chars: 0,
            text_chars: 0,
            called_tools: false,
            reasoned: false,
            ending: None,
            usage: Usage { prompt: prompt_tokens, ..Usage::default() },
            timer,
            caller,
        }
    }

    /// Waits until the request starts to run.
    ///
    /// # Errors
    /// The request fails before it runs.
    pub async fn started(&mut self) -> Result<()> {
        match self.events.recv().await {
            Ok((_, BatchEvent::Started { cached_tokens, queued })) => {
                self.note_start(cached_tokens, queued);
                Ok(())
            }
            Ok(_) => unreachable!("a request starts first"),
            Err(error) => Err(self.failed(error)),
        }
    }

    fn note_start(&mut self, cached_tokens: usize, queued: Duration) {
        self.usage.cached = cached_tokens;
        self.timer.started(cached_tokens, queued);
    }

    /// Token counts so far.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// Returns the next event, or `None` after the end.
    ///
    /// # Errors
    /// The engine fails at the request, or the deadline passes.
    pub async fn next(&mut self) -> Result<Option<AnswerEvent>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(Some(event));
            }
            if let Some(ending) = self.ending {
                // Only now is it certain that the last event was charged and sent.
                self.timer.ended(ending, self.usage);
                return Ok(None);
            }
            match self.events.recv().await {
                Ok((sent, BatchEvent::Token { id, logprobs })) => {
                    self.timer.token(sent);
                    self.take(id, logprobs)?;
                }
                Ok((_, BatchEvent::Finished(reason))) => self.finish(reason)?,
                Ok((_, BatchEvent::Started { cached_tokens, queued })) => {
                    self.note_start(cached_tokens, queued);
                }
                Ok(_) => {}
                Err(error) => return Err(self.failed(error)),
            }
        }
    }

    fn failed(&mut self, error: ServerError) -> ServerError {
        self.timer.failed(error.reply().code);
        self.caller.failed(error)
    }

    fn take(&mut self, id: u32, logprobs: Option<TokenLogprobs>) -> Result<()> {
        self.usage.completion += 1;
        if self.listing.is_some()
            && let Some(logprobs) = logprobs
        {
            let info = self.token_info(id, logprobs)?;
            self.held.push(info);
        }
        let piece = self.detokenizer.push(id)?;
        if self.listing.is_some() {
            self.decoded_chars += piece.chars().count();
        }
        let step = self.stops.push(piece);
        let mut parts = Vec::new();
        self.parser.push(step.emit, &mut parts);
        let stopped = step.stopped;
        self.put(parts);
        if stopped || self.has_its_call() {
            self.end(Ending::Stop);
            self.events.close();
        } else if self.held.iter().map(|token| token.listed().count()).sum::<usize>() >= HELD_ENTRIES_MAX {
            self.ready.push_back(AnswerEvent::Tokens(std::mem::take(&mut self.held)));
        }
        Ok(())
    }

    fn token_info(&self, id: u32, logprobs: TokenLogprobs) -> Result<TokenInfo> {
        let bytes = |id: u32| self.tokenizer.token_bytes(id);
        let top_bytes = logprobs.top.iter().map(|&(id, _)| bytes(id)).collect::<Result<_, _>>()?;
        Ok(TokenInfo { id, bytes: bytes(id)?, logprobs, top_bytes, text_offset: self.decoded_chars })
    }

    fn finish(&mut self, reason: FinishReason) -> Result<()> {
        let step = self.stops.push(self.detokenizer.finish()?);
        let mut parts = Vec::new();
        self.parser.push(step.emit, &mut parts);
        let ending = if step.stopped || reason == FinishReason::Stop { Ending::Stop } else { Ending::Length };
        if !step.stopped {
            let rest = self.stops.finish().to_string();
            self.parser.push(&rest, &mut parts);
        }
        self.put(parts);
        self.end(ending);
        Ok(())
    }

    fn put(&mut self, parts: Vec<AnswerPart>) {
        for part in parts {
            if self.has_its_call() {
                break;
            }
            match &part {
                AnswerPart::ToolCall { .. } => self.called_tools = true,
                AnswerPart::Reasoning(_) => self.reasoned = true,
                AnswerPart::Text(text) if self.listing.is_some() => self.text_chars += text.chars().count(),
                AnswerPart::Text(_) => {}
            }
            self.ready.push_back(AnswerEvent::Part(part, std::mem::take(&mut self.held)));
        }
        if self.reasoned && self.parser.is_reasoning() {
            self.usage.reasoning = self.usage.completion;
        }
    }

    /// Whether the only call that it may have has come.
    fn has_its_call(&self) -> bool {
        self.one_call && self.called_tools
    }

    fn end(&mut self, ending: Ending) {
        let mut rest = Vec::new();
        // A stop string within a call cuts it off, as the limit of tokens does.
        match ending == Ending::Length || self.stops.matched().is_some() {
            true => self.parser.cut_off(&mut rest),
            false => self.parser.finish(&mut rest),
        }
        self.put(rest);
        if !self.held.is_empty() {
            let mut tokens = std::mem::take(&mut self.held);
            // Their text may be that of a stop string, which is no part of the answer.
            tokens.iter_mut().for_each(|token| token.text_offset = token.text_offset.min(self.text_chars));
            self.ready.push_back(AnswerEvent::Tokens(tokens));
        }
        let ending = if self.called_tools && ending == Ending::Stop { Ending::ToolCalls } else { ending };
        let stop = self.stops.matched().map(str::to_string);
        self.ready.push_back(AnswerEvent::End(ending, stop));
        self.ending = Some(ending);
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if let Some(code) = self.caller.failure() {
            self.timer.failed(code);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use axum::body::Body;
    use axum::extract::Request;
    use keel_text::TextFiles;
    use serde_json::json;
    use tokio::sync::mpsc;

    use super::*;
    use crate::collect::collect;
    use crate::collected::Collected;
    use crate::events::waiting_bytes;
    use crate::memory::requests::RequestMemory;
    use crate::metrics::Metrics;

    const CALL: &str = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";

    /// The whole answer of a model that writes `text` and ends for `reason`.
    async fn collected(text: &str, one_call: bool, reason: FinishReason) -> Collected {
        let files = TextFiles::read(&keel_testkit::fixtures::demo()).expect("there");
        let tokenizer = Tokenizer::new(&files).expect("sound");
        let memory = RequestMemory::new(1 << 20, 0);
        let caller = Arc::new(Caller::new(&Request::new(Body::empty()), &memory));
        let meter = Arc::new(caller.meter.part());
        let (sender, receiver) = mpsc::unbounded_channel();
        for id in tokenizer.encode(text, false).expect("encodes") {
            let token = BatchEvent::Token { id, logprobs: None };
            // As the engine's thread does. The answer gives these bytes back.
            meter.take(waiting_bytes(&token)).expect("there is room");
            sender.send((Instant::now(), Ok(token))).expect("somebody listens");
        }
        sender.send((Instant::now(), Ok(BatchEvent::Finished(reason)))).expect("somebody listens");
        let tools = vec![json!({"function": {"name": "f"}})];
        let form = AnswerForm { tools, joins_texts: true, ..AnswerForm::default() };
        let stops = StopMatcher::new::<String>(&[]).expect("none");
        let timer = RequestTimer::new(Metrics::new(), tracing::Span::none(), 1, Instant::now());
        let style = AnswerStyle { stops, form, one_call, listing: None };
        let answer = Answer::new(Events { receiver, meter }, &tokenizer, style, 1, timer, caller);
        collect(vec![answer]).await.expect("an answer").swap_remove(0)
    }

    #[tokio::test]
    async fn an_answer_that_may_have_one_call_ends_after_it() {
        for (one_call, calls, text) in [(false, 2, "and more"), (true, 1, "")] {
            let answer = format!("{CALL}\n{CALL} and more");
            let whole = collected(&answer, one_call, FinishReason::Stop).await;
            let got = (whole.calls().count(), whole.text(), whole.ending);
            assert_eq!(got, (calls, text.to_string(), Ending::ToolCalls), "{one_call}");
        }
    }

    #[tokio::test]
    async fn joined_texts_keep_the_line_break_between_them() {
        for (answer, text) in
            [(format!("First\n{CALL}\nthen"), "First\nthen"), (format!("First {CALL} then"), "Firstthen")]
        {
            assert_eq!(collected(&answer, false, FinishReason::Stop).await.text(), text);
        }
    }

    #[tokio::test]
    async fn parts_keep_their_order_and_a_call_that_is_cut_off_is_left_out() {
        let call = AnswerPart::ToolCall { name: "f".into(), arguments: "{}".into() };
        let text = |text: &str| AnswerPart::Text(text.into());
        let answer = format!("First {CALL} then {CALL} at last <tool_call>{{\"name\": \"f\"");
        let cut = collected(&answer, false, FinishReason::Length).await;
        assert_eq!(cut.parts, [text("First"), call.clone(), text("then"), call, text("at last")]);
        assert_eq!(cut.ending, Ending::Length);
        // A model that ends its answer itself meant it so.
        let ended = collected("<tool_call>{", false, FinishReason::Stop).await;
        assert_eq!(ended.parts, [text("<tool_call>{")]);
    }
}
