//! Encodes prompts, and decodes ids while they are drawn.

use std::hash::{BuildHasher, RandomState};
use std::time::SystemTime;

use keel_engine::SamplerOptions;
use keel_text::{
    AnswerForm, ChatRequest, ChatTemplate, GenerationDefaults, GrammarFactory, GrammarSource, GrammarState,
    Message, ReasoningMarkers, Recommended, StopMatcher, StreamDetokenizer, TextFiles, Tokenizer,
};
use serde_json::Value;

use crate::constrained::GrammarConstraint;
use crate::{Error, ModelFiles, Result};

/// Number of tokens at a prompt's end that are checked for the beginning of reasoning.
const TAIL_TOKENS: usize = 4;

/// The text side of a checkpoint.
///
/// ```
/// let text = evenkeel::ModelText::open(&evenkeel::ModelFiles::built_in()?)?;
/// let ids = text.encode_text("Once upon a time")?;
/// assert_eq!(text.tokenizer.decode(&ids, false)?, "Once upon a time");
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub struct ModelText {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Recommended sampling settings.
    pub defaults: GenerationDefaults,
    files: TextFiles<'static>,
    /// Made for the first grammar and kept, because it takes time: see [`ModelText::compile`].
    grammars: Option<GrammarFactory>,
}

impl ModelText {
    /// Reads the tokenizer and its settings.
    ///
    /// # Errors
    /// A file is missing or broken.
    ///
    /// ```
    /// let text = evenkeel::ModelText::open(&evenkeel::ModelFiles::built_in()?)?;
    /// assert_eq!(text.defaults.top_k, Some(40));
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn open(model: &ModelFiles) -> Result<ModelText> {
        let mut text = ModelText::open_for_grammars(model)?;
        text.files.forget_tokenizer();
        Ok(text)
    }

    /// As [`ModelText::open`]. The tokenizer's file stays in memory until [`ModelText::compile`] has used it.
    pub(crate) fn open_for_grammars(model: &ModelFiles) -> Result<ModelText> {
        let files = model.text_files()?;
        let tokenizer = Tokenizer::new(&files)?;
        Ok(ModelText { tokenizer, defaults: GenerationDefaults::new(&files)?, files, grammars: None })
    }

    /// The chat template.
    ///
    /// # Errors
    /// There is none, or it is broken.
    ///
    /// ```
    /// let text = evenkeel::ModelText::open(&evenkeel::ModelFiles::built_in()?)?;
    /// assert!(text.template().is_ok());
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn template(&self) -> Result<ChatTemplate> {
        match self.find_template()? {
            Some(template) => Ok(template),
            None => Err(Error::NoChatTemplate),
        }
    }

    /// The chat template, if the checkpoint has one.
    ///
    /// # Errors
    /// It is broken.
    ///
    /// ```
    /// let text = evenkeel::ModelText::open(&evenkeel::ModelFiles::built_in()?)?;
    /// assert!(text.find_template()?.is_some());
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn find_template(&self) -> Result<Option<ChatTemplate>> {
        Ok(ChatTemplate::new(&self.files)?)
    }

    /// Encodes a text that the model continues.
    ///
    /// # Errors
    /// The vocabulary cannot express it.
    ///
    /// ```
    /// let text = evenkeel::ModelText::open(&evenkeel::ModelFiles::built_in()?)?;
    /// assert_eq!(text.encode_text("Once upon a time")?.len(), 4);
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode(text, true)?)
    }

    /// Encodes a conversation that the model answers.
    ///
    /// # Errors
    /// The template refuses it.
    ///
    /// ```
    /// use evenkeel::{ModelFiles, ModelText, text::Message};
    /// let text = ModelText::open(&ModelFiles::built_in()?)?;
    /// let ids = text.encode_chat(&text.template()?, &[Message::new("user", "Tell me a story.")])?;
    /// assert!(!ids.is_empty());
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn encode_chat(&self, template: &ChatTemplate, messages: &[Message]) -> Result<Vec<u32>> {
        let prompt = template.render(&ChatRequest::new(messages))?;
        Ok(self.tokenizer.encode(&prompt, false)?)
    }

    /// As [`ModelText::encode_chat`], with the tools that the model may call, in OpenAI's form. Also returns the parts
    /// that the answer may have. `has_grammar`: the answer follows a grammar.
    pub(crate) fn encode_request(
        &self,
        messages: &[Message],
        tools: &[Value],
        has_grammar: bool,
    ) -> Result<(Vec<u32>, AnswerForm)> {
        refuse_pictures(messages)?;
        let given = Some(tools).filter(|tools| !tools.is_empty());
        let request = ChatRequest { tools: given, ..ChatRequest::new(messages) };
        let prompt = self.template()?.render(&request)?;
        let form = AnswerForm::of_chat(&self.tokenizer, &prompt, tools.to_vec(), has_grammar);
        Ok((self.tokenizer.encode(&prompt, false)?, form))
    }

    /// The sampling that the checkpoint recommends. A checkpoint that does not ask for sampling is decoded greedily.
    ///
    /// ```
    /// use evenkeel::{ModelFiles, ModelText};
    /// assert_eq!(ModelText::open(&ModelFiles::built_in()?)?.sampling().top_k, 40);
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn sampling(&self) -> SamplerOptions {
        recommended(&self.defaults)
    }

    /// As [`ModelText::sampling`], with a seed that differs for each call.
    pub(crate) fn fresh_sampling(&self) -> SamplerOptions {
        SamplerOptions { seed: RandomState::new().hash_one(SystemTime::now()), ..self.sampling() }
    }

    /// Compiles a schema or grammar for the answer to `prompt`.
    ///
    /// # Errors
    /// The grammar is refused, or no grammar can be used with the vocabulary.
    ///
    /// ```
    /// use evenkeel::text::GrammarSource;
    /// let files = evenkeel::ModelFiles::built_in()?;
    /// let text = evenkeel::ModelText::open(&files)?;
    /// let schema = GrammarSource::JsonSchema(serde_json::json!({"type": "boolean"}));
    /// let grammar = text.grammar(&files, &schema, &[])?;
    /// assert!(!grammar.state.is_complete(), "a value has to come");
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn grammar(
        &self,
        model: &ModelFiles,
        source: &GrammarSource,
        prompt: &[u32],
    ) -> Result<GrammarConstraint> {
        self.constraint(GrammarFactory::new(&model.text_files()?, &self.tokenizer)?.start(source)?, prompt)
    }

    /// Compiles a schema or grammar with a factory that is kept. The text was opened for grammars.
    pub(crate) fn compile(&mut self, source: &GrammarSource) -> Result<GrammarState> {
        let factory = match self.grammars.take() {
            Some(factory) => factory,
            None => {
                let factory = GrammarFactory::new(&self.files, &self.tokenizer)?;
                self.files.forget_tokenizer();
                factory
            }
        };
        Ok(self.grammars.insert(factory).start(source)?)
    }

    /// A compiled grammar for the answer to `prompt`.
    pub(crate) fn constraint(&self, state: GrammarState, prompt: &[u32]) -> Result<GrammarConstraint> {
        Ok(GrammarConstraint::new(state, end_of_reasoning(&self.tokenizer, prompt)?))
    }

    /// Ids that end a text.
    ///
    /// ```
    /// let text = evenkeel::ModelText::open(&evenkeel::ModelFiles::built_in()?)?;
    /// assert!(text.end_tokens().contains(&4095));
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn end_tokens(&self) -> Vec<u32> {
        self.tokenizer.eos_ids().to_vec()
    }
}

/// Templates write a marker for a picture, and nothing here replaces it by the picture.
fn refuse_pictures(messages: &[Message]) -> Result<()> {
    for (message, Message { content, .. }) in messages.iter().enumerate() {
        for part in content.as_array().into_iter().flatten() {
            let keys = part.as_object().into_iter().flatten().map(|(key, _)| key.as_str());
            let mut names = part["type"].as_str().into_iter().chain(keys);
            if let Some(kind) = names.find(|name| name.contains("image") || name.contains("video")) {
                return Err(Error::Picture { message, kind: kind.into() });
            }
        }
    }
    Ok(())
}

/// The token that ends the reasoning, if the prompt ends inside it.
fn end_of_reasoning(tokenizer: &Tokenizer, prompt: &[u32]) -> Result<Option<u32>> {
    let tail = tokenizer.decode(&prompt[prompt.len().saturating_sub(TAIL_TOKENS)..], false)?;
    Ok(ReasoningMarkers::begun_at_end(&tail).and_then(|markers| markers.end_token(tokenizer)))
}

/// The checkpoint's recommended sampling. The penalty holds with and without sampling.
///
/// ```
/// use evenkeel::{recommended, text::GenerationDefaults};
/// let defaults = GenerationDefaults { do_sample: Some(true), top_p: Some(0.9), ..GenerationDefaults::default() };
/// assert_eq!((recommended(&defaults).temperature, recommended(&defaults).top_p), (1.0, 0.9));
/// assert_eq!(recommended(&GenerationDefaults::default()).temperature, 0.0);
/// ```
pub fn recommended(defaults: &GenerationDefaults) -> SamplerOptions {
    let Recommended { temperature, top_k, top_p, min_p, repetition_penalty } = defaults.recommended();
    SamplerOptions { temperature, top_k, top_p, min_p, repetition_penalty, ..SamplerOptions::default() }
}

/// Decodes ids while they are drawn, up to a stop string.
///
/// ```
/// let text = evenkeel::ModelText::open(&evenkeel::ModelFiles::built_in()?)?;
/// let mut stream = evenkeel::TextStream::new(&text.tokenizer, &[])?;
/// let mut shown = String::new();
/// for id in text.encode_text("Once upon a time")? {
///     shown += stream.push(id)?;
/// }
/// shown += stream.finish()?;
/// assert_eq!(shown, "Once upon a time");
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub struct TextStream {
    detokenizer: StreamDetokenizer,
    stops: StopMatcher,
    text: String,
    stopped: bool,
}

impl TextStream {
    /// A stream that ends before any of `stops`.
    ///
    /// # Errors
    /// A stop string is empty or too long.
    ///
    /// ```
    /// let text = evenkeel::ModelText::open(&evenkeel::ModelFiles::built_in()?)?;
    /// let mut stream = evenkeel::TextStream::new(&text.tokenizer, &["time".into()])?;
    /// for id in text.encode_text("Once upon a time")? {
    ///     stream.push(id)?;
    /// }
    /// assert_eq!(stream.text(), "Once upon a ");
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn new(tokenizer: &Tokenizer, stops: &[String]) -> Result<TextStream> {
        TextStream::of_answer(tokenizer, &AnswerForm::default(), stops)
    }

    /// As [`TextStream::new`]. The special tokens around the answer's parts belong to the text.
    pub(crate) fn of_answer(
        tokenizer: &Tokenizer,
        form: &AnswerForm,
        stops: &[String],
    ) -> Result<TextStream> {
        let detokenizer = tokenizer.answer_stream(form);
        Ok(TextStream { detokenizer, stops: StopMatcher::new(stops)?, text: String::new(), stopped: false })
    }

    /// Takes an id. Returns the text that is now certain, which may be empty.
    ///
    /// # Errors
    /// The decoder refuses the id.
    ///
    /// ```
    /// let text = evenkeel::ModelText::open(&evenkeel::ModelFiles::built_in()?)?;
    /// let mut stream = evenkeel::TextStream::new(&text.tokenizer, &[])?;
    /// assert_eq!(stream.push(text.encode_text("Once")?[0])?, "Once");
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn push(&mut self, id: u32) -> Result<&str> {
        let piece = self.detokenizer.push(id)?;
        let step = self.stops.push(piece);
        let start = self.text.len();
        self.text.push_str(step.emit);
        self.stopped = step.stopped;
        Ok(&self.text[start..])
    }

    /// Ends the stream. Returns the text that was held back.
    ///
    /// # Errors
    /// The decoder refuses the last ids.
    ///
    /// ```
    /// let text = evenkeel::ModelText::open(&evenkeel::ModelFiles::built_in()?)?;
    /// let mut stream = evenkeel::TextStream::new(&text.tokenizer, &[])?;
    /// assert_eq!(stream.finish()?, "");
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn finish(&mut self) -> Result<&str> {
        let start = self.text.len();
        if !self.stopped {
            let step = self.stops.push(self.detokenizer.finish()?);
            self.stopped = step.stopped;
            self.text.push_str(step.emit);
            if !self.stopped {
                self.text.push_str(self.stops.finish());
            }
        }
        Ok(&self.text[start..])
    }

    /// Whether a stop string was reached.
    ///
    /// ```
    /// let text = evenkeel::ModelText::open(&evenkeel::ModelFiles::built_in()?)?;
    /// assert!(!evenkeel::TextStream::new(&text.tokenizer, &["time".into()])?.is_stopped());
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// All text so far.
    ///
    /// ```
    /// let text = evenkeel::ModelText::open(&evenkeel::ModelFiles::built_in()?)?;
    /// assert_eq!(evenkeel::TextStream::new(&text.tokenizer, &[])?.text(), "");
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn text(&self) -> &str {
        &self.text
    }
}

#[cfg(test)]
mod tests {
    use keel_text::{AnswerParser, AnswerPart, TokenKind, Vocabulary};

    use super::*;

    fn tokenizer(control: [&str; 2]) -> Tokenizer {
        let mut tokens: Vec<_> = control.map(|text| (text, TokenKind::Control)).into();
        tokens.extend(["a", "b"].map(|text| (text, TokenKind::Normal)));
        let vocabulary = Vocabulary { model: "gpt2", pre: "tekken", tokens, ..Vocabulary::default() };
        let files = TextFiles::from_vocabulary(&vocabulary).expect("known");
        Tokenizer::new(&files).expect("sound")
    }

    #[test]
    fn a_grammar_begins_after_the_reasoning_in_either_notation() {
        for markers in [["<think>", "</think>"], ["[THINK]", "[/THINK]"]] {
            let tokenizer = tokenizer(markers);
            let end = |prompt: &[u32]| end_of_reasoning(&tokenizer, prompt).expect("it decodes");
            assert_eq!((end(&[2, 3, 0]), end(&[0, 2, 1]), end(&[])), (Some(1), None, None), "{markers:?}");
        }
    }

    /// The server makes the form with the same function.
    #[test]
    fn reasoning_needs_no_token_of_its_own() {
        let files = ModelFiles::built_in().and_then(|files| files.text_files()).expect("it is there");
        let files = files.with_chat_template(b"{{ messages[0].content }}<think>\n");
        let tokenizer = Tokenizer::new(&files).expect("sound");
        assert_eq!(tokenizer.token_to_id("</think>"), None);
        let text = ModelText { tokenizer, defaults: GenerationDefaults::default(), files, grammars: None };
        let parts = |has_grammar: bool| {
            let request = text.encode_request(&[Message::new("user", "Hi")], &[], has_grammar);
            let (mut parser, mut parts) = (AnswerParser::new(request.expect("it renders").1), Vec::new());
            parser.push("Hm.</think>Yes.", &mut parts);
            parser.finish(&mut parts);
            parts
        };
        assert_eq!(parts(false), [AnswerPart::Reasoning("Hm.".into()), AnswerPart::Text("Yes.".into())]);
        assert_eq!(parts(true), [AnswerPart::Text("Hm.</think>Yes.".into())]);
    }

    #[test]
    fn special_tokens_around_the_parts_of_an_answer_reach_its_parser() {
        let tokenizer = tokenizer(["[THINK]", "[/THINK]"]);
        let form = AnswerForm { reasoning: true, ..AnswerForm::default() };
        let mut stream = TextStream::of_answer(&tokenizer, &form, &[]).expect("no stop strings");
        let mut parser = AnswerParser::new(form);
        let mut parts = Vec::new();
        for id in [0, 2, 1, 3] {
            parser.push(stream.push(id).expect("it is known"), &mut parts);
        }
        parser.push(stream.finish().expect("all are known"), &mut parts);
        parser.finish(&mut parts);
        assert_eq!(parts, [AnswerPart::Reasoning("a".into()), AnswerPart::Text("b".into())]);
    }
}
