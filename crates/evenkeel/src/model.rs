//! A loaded model that answers one text at a time.

use std::path::Path;

use keel_array::{Category, MemoryReport};
use keel_cache::SequenceCache;
use keel_engine::batch::BatchOptions;
use keel_engine::split::PlacedPart;
use keel_engine::{Engine, GenerateOptions, LoadProgress, PREFILL_GRID, SamplerOptions, SpeculationOptions};
use keel_text::{AnswerForm, GrammarSource, Message};
use serde_json::Value;

use crate::answer::{Answer, Chat};
use crate::loading::PlacedLoad;
use crate::{
    Batch, Error, LoadOptions, ModelFiles, ModelText, Result, TextStream, TokenOptions, check_and_limit,
};

/// A request for a text. The default asks for as many tokens as fit, drawn as the checkpoint recommends.
///
/// ```
/// use evenkeel::{LoadOptions, Model, Request};
/// let mut model = Model::built_in(&LoadOptions::default())?;
/// let request = Request { max_tokens: Some(16), stop: vec![".".into()], ..Request::default() };
/// let story: String = model.stream("Once upon a time", request)?.collect::<Result<_, _>>()?;
/// assert!(!story.contains('.'));
/// # Ok::<(), evenkeel::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Tokens at most; by default as many as fit into the context. A text also ends where the context does.
    pub max_tokens: Option<usize>,
    /// How tokens are drawn; by default as the checkpoint's generation_config.json recommends, with another seed for
    /// each text.
    pub sampler: Option<SamplerOptions>,
    /// The text ends before any of these strings.
    pub stop: Vec<String>,
    /// Do not end at the model's end tokens.
    pub ignore_end: bool,
    /// A schema or grammar that the text follows.
    pub grammar: Option<GrammarSource>,
    /// Draft with the model's multi-token-prediction head. Under a grammar and in [`Model::resume`] it has no effect.
    /// Otherwise it is refused if [`keel_engine::EngineOptions::drafts`] is 0. A batch always refuses it, because it
    /// drafts by [`BatchOptions::speculation`].
    pub speculation: Option<SpeculationOptions>,
}

/// A sequence whose tokens are in the cache, to continue it or to save it. Dropping it gives its memory back.
///
/// ```
/// use evenkeel::{LoadOptions, Model, Request};
/// let mut model = Model::built_in(&LoadOptions::default())?;
/// let answer = model.stream("Once upon a time", Request { max_tokens: Some(4), ..Request::default() })?;
/// let sequence = answer.into_sequence()?;
/// assert_eq!(sequence.tokens().len(), 4 + 4, "the prompt and the answer");
/// drop(sequence); // its memory is free again
/// # Ok::<(), evenkeel::Error>(())
/// ```
#[derive(Debug)]
pub struct Sequence {
    pub(crate) cache: SequenceCache,
    /// The tokens in the cache, then those that were drawn and not run.
    pub(crate) tokens: Vec<u32>,
}

impl Sequence {
    /// Its tokens. The last one may have been drawn but not run.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Forgets the tokens that were drawn and not run, as [`Model::save`] does.
    ///
    /// ```
    /// use evenkeel::{LoadOptions, Model, Request};
    /// let mut model = Model::built_in(&LoadOptions::default())?;
    /// let answer = model.stream("Once upon a time", Request { max_tokens: Some(4), ..Request::default() })?;
    /// let mut sequence = answer.into_sequence()?;
    /// sequence.forget_last();
    /// assert_eq!(sequence.tokens().len(), 4 + 3, "the last token was drawn and not run");
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn forget_last(&mut self) {
        self.tokens.truncate(self.cache.len());
    }
}

/// A model with all its memory.
///
/// ```
/// use evenkeel::{LoadOptions, Model, Request};
/// let mut model = Model::built_in(&LoadOptions::default())?;
/// let mut story = String::new();
/// for piece in model.stream("Once upon a time", Request { max_tokens: Some(16), ..Request::default() })? {
///     story += &piece?;
/// }
/// assert!(!story.is_empty());
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub struct Model {
    engine: Engine,
    text: Option<ModelText>,
    planned: MemoryReport,
    /// Names the model in cache files.
    identity: String,
    placement: Option<String>,
}

impl Model {
    /// Loads a checkpoint folder, a weights file or a GGUF file.
    ///
    /// # Errors
    /// There is no such model; it cannot be used; [`Error::OutOfMemory`] before anything is loaded.
    ///
    /// ```
    /// use evenkeel::{LoadOptions, Model};
    /// let model = Model::open("../../models/demo", &LoadOptions::default())?; // or "file.gguf"
    /// assert_eq!(model.text()?.encode_text("Once upon a time")?.len(), 4);
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn open(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Model> {
        Model::load(&ModelFiles::open(path)?, options, &|_| ())
    }

    /// Loads the built-in model.
    ///
    /// # Errors
    /// As [`Model::open`].
    ///
    /// See the example of [`Model`].
    pub fn built_in(options: &LoadOptions) -> Result<Model> {
        Model::load(&ModelFiles::built_in()?, options, &|_| ())
    }

    /// Loads an opened model. `progress` is told how the load goes on.
    ///
    /// # Errors
    /// As [`Model::open`].
    ///
    /// ```
    /// use evenkeel::{LoadOptions, Model, ModelFiles, array::Category, engine::LoadProgress};
    /// let (files, read) = (ModelFiles::built_in()?, std::cell::Cell::new(0));
    /// let model = Model::load(&files, &LoadOptions::default(), &|progress| {
    ///     if let LoadProgress::Read(bytes) = progress {
    ///         read.set(read.get() + bytes);
    ///     }
    /// })?;
    /// assert!(0 < read.get() && read.get() <= model.planned().get(Category::Weights));
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn load(files: &ModelFiles, options: &LoadOptions, progress: &dyn Fn(LoadProgress)) -> Result<Model> {
        let PlacedLoad { device, engine, planned, placement } = PlacedLoad::new(files, options)?;
        let options = *engine.options();
        let runtime = device.runtime(options.compute)?;
        check_and_limit(&device, &runtime, &planned, &options)?;
        let text = files.has_tokenizer().then(|| ModelText::open_for_grammars(files)).transpose()?;
        let devices = [PlacedPart::whole(runtime)];
        Ok(Model {
            engine: Engine::load_planned(
                engine,
                &devices,
                None,
                &*files.parameters(),
                &files.json,
                progress,
            )?,
            text,
            planned,
            identity: files.identity(options.compute)?,
            placement,
        })
    }

    /// The tokenizer, the chat template and the recommended sampling.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`].
    ///
    /// See the example of [`Model::open`].
    pub fn text(&self) -> Result<&ModelText> {
        self.text.as_ref().ok_or(Error::NoTokenizer)
    }

    /// The engine.
    ///
    /// ```
    /// use evenkeel::{LoadOptions, Model};
    /// let model = Model::built_in(&LoadOptions { context: Some(512), ..LoadOptions::default() })?;
    /// assert_eq!(model.engine().options().context, 512);
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The engine, to run its steps directly.
    ///
    /// See the example of [`TokenOptions`].
    pub fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// The bytes of every category that were planned. The engine allocates exactly these.
    ///
    /// ```
    /// use evenkeel::{LoadOptions, Model, array::Category};
    /// let model = Model::built_in(&LoadOptions::default())?;
    /// assert_eq!(model.allocated(Category::Weights), model.planned().get(Category::Weights));
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn planned(&self) -> &MemoryReport {
        &self.planned
    }

    /// The bytes of a category that are allocated now.
    ///
    /// See the example of [`Model::planned`].
    pub fn allocated(&self, category: Category) -> u64 {
        self.engine.runtime().ledger().active().get(category)
    }

    /// Why this device was chosen, if the options left the choice open.
    ///
    /// ```
    /// use evenkeel::{Device, DeviceOptions, LoadOptions, Model};
    /// let model = Model::built_in(&LoadOptions::default())?;
    /// assert!(model.placement().is_some_and(|why| why.starts_with("running on ")));
    /// let device = DeviceOptions { device: Some(Device::Cpu), ..DeviceOptions::default() };
    /// let model = Model::built_in(&LoadOptions { device, ..LoadOptions::default() })?;
    /// assert_eq!(model.placement(), None, "there was no choice");
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn placement(&self) -> Option<&str> {
        self.placement.as_deref()
    }

    /// Continues a text. The prompt runs before this returns; then each piece of text comes as its token is drawn.
    ///
    /// # Errors
    /// The prompt is empty or does not fit; options out of range; a grammar that cannot be used.
    ///
    /// See the example of [`Model`].
    pub fn stream(&mut self, prompt: &str, request: Request) -> Result<Answer<'_>> {
        let prompt = self.text()?.encode_text(prompt)?;
        let cache = self.engine.open()?;
        self.answer(cache, Vec::new(), prompt, &AnswerForm::default(), request)
    }

    /// Answers messages by the model's chat template. `tools` are in OpenAI's form; the model may call them.
    ///
    /// The template is a program of the checkpoint. It runs in this process, where its steps and its output are
    /// bounded, but not its memory. For models of unknown origin call [`keel_text::render_in_process`] before:
    /// templates then run in another process, which calls [`keel_text::render_for_parent`].
    ///
    /// # Errors
    /// As [`Model::stream`]; [`Error::NoChatTemplate`]; [`Error::Picture`]; the template refuses the messages.
    ///
    /// See the example of [`Chat`].
    pub fn chat(&mut self, messages: &[Message], tools: &[Value], request: Request) -> Result<Chat<'_>> {
        let (prompt, form) = self.text()?.encode_request(messages, tools, request.grammar.is_some())?;
        let cache = self.engine.open()?;
        Ok(Chat::new(self.answer(cache, Vec::new(), prompt, &form, request)?, form))
    }

    /// Continues a sequence, with `text` after its tokens. Drafts are not made.
    ///
    /// # Errors
    /// As [`Model::stream`]. The sequence's memory is then free.
    ///
    /// ```
    /// use evenkeel::{LoadOptions, Model, Request};
    /// let mut model = Model::built_in(&LoadOptions::default())?;
    /// let request = Request { max_tokens: Some(4), ..Request::default() };
    /// let sequence = model.stream("Once upon a time", request.clone())?.into_sequence()?;
    /// let before = sequence.tokens().to_vec();
    /// let longer = model.resume(sequence, " Then", request)?.into_sequence()?;
    /// assert!(longer.tokens().starts_with(&before));
    /// assert!(longer.tokens().len() > before.len() + 4, "with the tokens of the text");
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn resume(&mut self, sequence: Sequence, text: &str, request: Request) -> Result<Answer<'_>> {
        let Sequence { mut cache, mut tokens } = sequence;
        let mut prompt = tokens.split_off(cache.len());
        prompt.extend(self.text()?.tokenizer.encode(text, false)?);
        let done = self.run_to_grid(&mut cache, &prompt)?;
        tokens.extend(prompt.drain(..done));
        let request = Request { speculation: None, ..request };
        self.answer(cache, tokens, prompt, &AnswerForm::default(), request)
    }

    /// Prefill begins on a grid. Runs the tokens before the next point of the grid one by one, but not the last token
    /// of the prompt. Returns how many.
    fn run_to_grid(&mut self, cache: &mut SequenceCache, prompt: &[u32]) -> Result<usize> {
        let to_grid = cache.len().next_multiple_of(PREFILL_GRID) - cache.len();
        let count = to_grid.min(prompt.len().saturating_sub(1));
        for token in &prompt[..count] {
            self.engine.decode(&mut [cache], &[*token])?;
        }
        self.engine.commit(cache)?;
        Ok(count)
    }

    /// Writes a sequence to a file, so that a later process can continue it. The last token, which was drawn and not
    /// run, is not saved.
    ///
    /// # Errors
    /// An error of the disk.
    ///
    /// ```
    /// use evenkeel::{LoadOptions, Model, Request};
    /// let file = std::env::temp_dir().join(format!("evenkeel-save-{}.safetensors", std::process::id()));
    /// let mut model = Model::built_in(&LoadOptions::default())?;
    /// let answer = model.stream("Once upon a time", Request { max_tokens: Some(4), ..Request::default() })?;
    /// let mut sequence = answer.into_sequence()?;
    /// model.save(&mut sequence, &file)?;
    /// sequence.forget_last();
    /// let saved = sequence.tokens().to_vec();
    /// drop(sequence); // its place is free for the restored one
    /// assert_eq!(model.restore(&file)?.tokens(), saved);
    /// # std::fs::remove_file(&file).ok();
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn save(&mut self, sequence: &mut Sequence, path: impl AsRef<Path>) -> Result<()> {
        self.engine.commit(&mut sequence.cache)?;
        let tokens = &sequence.tokens[..sequence.cache.len()];
        Ok(self.engine.cache().save(&sequence.cache, tokens, &self.identity, path.as_ref())?)
    }

    /// Reads a sequence from a file of [`Model::save`].
    ///
    /// # Errors
    /// The file is damaged, belongs to another model, or does not fit.
    ///
    /// See the example of [`Model::save`].
    pub fn restore(&mut self, path: impl AsRef<Path>) -> Result<Sequence> {
        let (cache, tokens) = self.engine.cache_mut().load(&self.identity, path.as_ref())?;
        Ok(Sequence { cache, tokens })
    }

    /// Turns the model into a batch: many requests at once. `queue_timeout` is not used: a request waits until it runs
    /// or is cancelled.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`].
    ///
    /// See the example of [`Batch`].
    pub fn into_batch(self, options: BatchOptions) -> Result<Batch> {
        let text = self.text.ok_or(Error::NoTokenizer)?;
        Ok(Batch::new(self.engine, text, options))
    }

    /// Runs `prompt` after the tokens of `cache`.
    fn answer(
        &mut self,
        cache: SequenceCache,
        seen: Vec<u32>,
        prompt: Vec<u32>,
        form: &AnswerForm,
        request: Request,
    ) -> Result<Answer<'_>> {
        let stream = TextStream::of_answer(&self.text()?.tokenizer, form, &request.stop)?;
        let mut how = self.prepare(&seen, &prompt, request)?;
        how.options.one_by_one = !cache.len().is_multiple_of(PREFILL_GRID);
        let tokens = how.start(&mut self.engine, cache, &prompt, &mut |_| ())?;
        Ok(Answer::new(tokens, stream, [seen, prompt].concat()))
    }

    fn prepare(&mut self, seen: &[u32], prompt: &[u32], request: Request) -> Result<TokenOptions> {
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let text = self.text.as_mut().ok_or(Error::NoTokenizer)?;
        let compiled = request.grammar.as_ref().map(|source| text.compile(source)).transpose()?;
        let grammar = compiled.map(|state| text.constraint(state, prompt)).transpose()?;
        let options = GenerateOptions {
            max_tokens: request.max_tokens.unwrap_or(usize::MAX),
            sampler: request.sampler.unwrap_or_else(|| text.fresh_sampling()),
            end_tokens: if request.ignore_end { Vec::new() } else { text.end_tokens() },
            speculation: request.speculation,
            seen: seen.to_vec(),
            ..GenerateOptions::default()
        };
        Ok(TokenOptions { options, grammar })
    }
}
