//! The text of one sequence, piece by piece.

use std::collections::VecDeque;

use keel_engine::{FinishReason, SpeculationCounters, TokenIterator};
use keel_text::{AnswerForm, AnswerParser, AnswerPart};

use crate::{Error, Result, Sequence, TextStream};

/// The text that a model writes, in pieces of whole characters. Dropping it gives the memory back.
///
/// ```
/// use evenkeel::{LoadOptions, Model, Request, engine::FinishReason};
/// let mut model = Model::built_in(&LoadOptions::default())?;
/// let mut answer = model.stream("Once upon a time", Request { max_tokens: Some(8), ..Request::default() })?;
/// let mut shown = String::new();
/// for piece in answer.by_ref() {
///     shown += &piece?;
/// }
/// assert_eq!(answer.text(), shown);
/// assert_eq!(answer.tokens().len(), 8);
/// assert_eq!(answer.finish_reason(), Some(FinishReason::Length));
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub struct Answer<'m> {
    /// `None` once the sequence is given away.
    tokens: Option<TokenIterator<'m>>,
    stream: TextStream,
    /// The prompt and everything before it, then the tokens drawn.
    ids: Vec<u32>,
    prompt_len: usize,
    has_ended: bool,
    /// Whether it ended with an error.
    has_failed: bool,
}

impl<'m> Answer<'m> {
    pub(crate) fn new(tokens: TokenIterator<'m>, stream: TextStream, prompt: Vec<u32>) -> Answer<'m> {
        let prompt_len = prompt.len();
        Answer { tokens: Some(tokens), stream, ids: prompt, prompt_len, has_ended: false, has_failed: false }
    }

    /// The tokens drawn so far.
    pub fn tokens(&self) -> &[u32] {
        &self.ids[self.prompt_len..]
    }

    /// All text so far.
    pub fn text(&self) -> &str {
        self.stream.text()
    }

    /// Why the text ended, if it has ended. A text that failed has no reason.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        if self.has_failed {
            return None;
        }
        if self.stream.is_stopped() {
            return Some(FinishReason::Stop);
        }
        self.tokens.as_ref().and_then(TokenIterator::finish_reason)
    }

    /// The counters of speculation, if the request asked for drafts.
    ///
    /// ```
    /// use evenkeel::engine::{EngineOptions, SpeculationOptions};
    /// use evenkeel::{LoadOptions, Model, Request};
    /// let engine = EngineOptions { drafts: 2, ..EngineOptions::default() };
    /// let mut model = Model::built_in(&LoadOptions { engine, ..LoadOptions::default() })?;
    /// let speculation = Some(SpeculationOptions::default());
    /// let request = Request { max_tokens: Some(8), speculation, ..Request::default() };
    /// let mut answer = model.stream("Once upon a time", request)?;
    /// answer.by_ref().try_for_each(|piece| piece.map(drop))?;
    /// assert!(answer.counters().is_some_and(|counters| counters.rounds > 0));
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn counters(&self) -> Option<&SpeculationCounters> {
        self.tokens.as_ref().and_then(TokenIterator::counters)
    }

    /// Draws the rest of the text, then returns the sequence, to continue or to save it.
    ///
    /// # Errors
    /// A step fails. The sequence is then released. [`Error::FailedText`] if one has failed before.
    ///
    /// See the example of [`Sequence`].
    pub fn into_sequence(mut self) -> Result<Sequence> {
        self.by_ref().try_for_each(|piece| piece.map(drop))?;
        if self.has_failed {
            return Err(Error::FailedText);
        }
        match self.tokens.take() {
            Some(tokens) => {
                Ok(Sequence { cache: tokens.into_sequence(), tokens: std::mem::take(&mut self.ids) })
            }
            None => unreachable!("the sequence is given away only here"),
        }
    }

    /// Whether something but the model ended the text: the limit of tokens, or a stop string.
    fn is_cut_off(&self) -> bool {
        self.stream.is_stopped() || self.finish_reason() == Some(FinishReason::Length)
    }

    /// The next piece, which may be empty; `None` at the end.
    fn piece(&mut self) -> Result<Option<String>> {
        let Some(tokens) = self.tokens.as_mut().filter(|_| !self.has_ended) else { return Ok(None) };
        let piece = match tokens.next().transpose()? {
            Some(id) => {
                self.ids.push(id);
                self.stream.push(id)?.to_string()
            }
            None => {
                self.has_ended = true;
                self.stream.finish()?.to_string()
            }
        };
        self.has_ended |= self.stream.is_stopped();
        Ok(Some(piece))
    }
}

impl Iterator for Answer<'_> {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Result<String>> {
        loop {
            match self.piece() {
                Ok(Some(piece)) if piece.is_empty() => {}
                Ok(piece) => return piece.map(Ok),
                Err(error) => {
                    (self.has_ended, self.has_failed) = (true, true);
                    return Some(Err(error));
                }
            }
        }
    }
}

/// The parts of an answer to messages: reasoning, text and calls of tools. A call that `max_tokens` or a stop string
/// cuts off is left out.
///
/// ```
/// use evenkeel::text::{AnswerPart, Message};
/// use evenkeel::{LoadOptions, Model, Request};
/// let mut model = Model::built_in(&LoadOptions::default())?;
/// let messages = [Message::new("user", "Tell me a story.")];
/// let mut chat = model.chat(&messages, &[], Request { max_tokens: Some(16), ..Request::default() })?;
/// let mut shown = String::new();
/// for part in chat.by_ref() {
///     match part? {
///         AnswerPart::Text(text) => shown += &text,
///         AnswerPart::Reasoning(text) => eprint!("{text}"),
///         AnswerPart::ToolCall { name, arguments } => println!("{name}({arguments})"),
///     }
/// }
/// assert_eq!(chat.answer().text(), shown, "this model neither reasons nor calls tools");
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub struct Chat<'m> {
    answer: Answer<'m>,
    /// `None` once the answer has ended or failed.
    parser: Option<AnswerParser>,
    ready: VecDeque<AnswerPart>,
}

impl<'m> Chat<'m> {
    pub(crate) fn new(answer: Answer<'m>, form: AnswerForm) -> Chat<'m> {
        Chat { answer, parser: Some(AnswerParser::new(form)), ready: VecDeque::new() }
    }

    /// The answer as plain text with the markers of its parts, for its tokens and its end.
    pub fn answer(&self) -> &Answer<'m> {
        &self.answer
    }
}

impl Iterator for Chat<'_> {
    type Item = Result<AnswerPart, Error>;

    fn next(&mut self) -> Option<Result<AnswerPart>> {
        while self.ready.is_empty() {
            let mut parts = Vec::new();
            match self.answer.next() {
                Some(Ok(piece)) => self.parser.as_mut()?.push(&piece, &mut parts),
                Some(Err(error)) => {
                    // A call that the failure cuts off is not a call.
                    self.parser = None;
                    return Some(Err(error));
                }
                None => {
                    let mut parser = self.parser.take()?;
                    match self.answer.is_cut_off() {
                        true => parser.cut_off(&mut parts),
                        false => parser.finish(&mut parts),
                    }
                }
            }
            self.ready.extend(parts);
        }
        self.ready.pop_front().map(Ok)
    }
}

#[cfg(test)]
mod tests {
    use keel_engine::batch::Constraint;
    use keel_engine::speculation::SamplerChooser;
    use keel_engine::{EngineError, GenerateOptions, Sampler, SamplerOptions};

    use super::*;
    use crate::{LoadOptions, Model};

    /// A call without its end.
    const HALF: &str = r#"<tool_call>{"name": "f", "arguments": {}}"#;

    /// Lets these tokens come one after the other, then fails.
    struct Script(VecDeque<u32>);

    impl Constraint for Script {
        fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
            let next = *self.0.front().ok_or("the script has ended")?;
            logits.fill(f32::NEG_INFINITY);
            logits[next as usize] = 0.0;
            Ok(())
        }

        fn accept(&mut self, _token: u32) -> Result<(), String> {
            self.0.pop_front().map(drop).ok_or_else(|| "the script has ended".into())
        }

        fn is_complete(&self) -> bool {
            false
        }
    }

    /// A text that fails after [`HALF`].
    fn failing<'m>(model: &'m mut Model, form: &AnswerForm) -> Answer<'m> {
        scripted(model, form, HALF, &[])
    }

    /// A text that fails after `script`, if it has none of `stops`.
    fn scripted<'m>(model: &'m mut Model, form: &AnswerForm, script: &str, stops: &[String]) -> Answer<'m> {
        let text = model.text().expect("it has a tokenizer");
        let script = text.tokenizer.encode(script, false).expect("it is known");
        let stream = TextStream::of_answer(&text.tokenizer, form, stops).expect("few stop strings");
        let sampler = Sampler::new(SamplerOptions::default(), &[]).expect("in range");
        let chooser = Box::new(SamplerChooser::new(sampler, Some(Box::new(Script(script.into()))), vec![]));
        let options = GenerateOptions { max_tokens: 100, ..GenerateOptions::default() };
        let engine = model.engine_mut();
        let cache = engine.open().expect("a sequence is free");
        let tokens = TokenIterator::with_chooser(engine, cache, &[509], options, chooser, &mut |_| ());
        Answer::new(tokens.expect("it starts"), stream, vec![509])
    }

    #[test]
    fn a_text_that_failed_has_no_reason_and_no_sequence() {
        let mut model = Model::built_in(&LoadOptions::default()).expect("it loads");
        let mut answer = failing(&mut model, &AnswerForm::default());
        let failure = answer.by_ref().find_map(Result::err).expect("the script ends");
        assert!(matches!(failure, Error::Engine(EngineError::Constraint(_))), "{failure}");
        assert!(answer.next().is_none());
        assert_eq!((answer.text(), answer.finish_reason()), (HALF, None));
        assert!(matches!(answer.into_sequence(), Err(Error::FailedText)));
        assert!(model.engine().cache().is_idle());
    }

    fn form() -> AnswerForm {
        let tools = vec![serde_json::json!({"type": "function", "function": {"name": "f"}})];
        AnswerForm { tools, ..AnswerForm::default() }
    }

    #[test]
    fn a_call_that_a_stop_string_cuts_off_is_left_out() {
        let mut model = Model::built_in(&LoadOptions::default()).expect("it loads");
        let script = "Look.<tool_call>\n<function=f>\n<parameter=text>\nfirst\n</function>END";
        let stops = ["END".to_string()];
        let mut chat = Chat::new(scripted(&mut model, &form(), script, &stops), form());
        let parts: Result<Vec<_>> = chat.by_ref().collect();
        let texts = parts.expect("it stops before the script ends").into_iter().map(|part| match part {
            AnswerPart::Text(text) => text,
            part => panic!("{part:?}"),
        });
        assert_eq!(texts.collect::<String>(), "Look.");
        assert_eq!(chat.answer().finish_reason(), Some(FinishReason::Stop));
    }

    #[test]
    fn a_call_that_a_failure_cuts_off_is_left_out() {
        let mut model = Model::built_in(&LoadOptions::default()).expect("it loads");
        let form = form();
        let chat = Chat::new(failing(&mut model, &form), form);
        let items: Vec<_> = chat.collect();
        assert!(matches!(items[..], [Err(Error::Engine(EngineError::Constraint(_)))]), "{items:?}");
    }
}
