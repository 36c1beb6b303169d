//! Output that must follow a grammar: computes which tokens may come next.

mod memory;

use std::fmt::Display;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::api::{StopReason, TopLevelGrammar};
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{CancellationHandle, ParserFactory, TokenParser};
use serde_json::{Map, Value, json};

use crate::grammar::memory::{bytes_of_grammar, bytes_of_tables, bytes_of_text};
use crate::panics::{catch_panics, guarded_on_stack};
use crate::{TextError, TextFiles, Tokenizer};

/// Largest size of a schema or grammar as text.
const SOURCE_BYTES_MAX: usize = 256 << 10;
/// The compiler recurses along the nesting of a schema, and from rule to rule. Measured: it takes up to 920 bytes of
/// stack per byte of source.
const STACK_BYTES_BASE: usize = 64 << 20;
const STACK_BYTES_PER_SOURCE_BYTE: usize = 1024;
/// Heap that the compiler takes: the syntax tree, and tables that are dropped at its end.
const HEAP_BYTES_BASE: usize = 256 << 10;
const HEAP_BYTES_PER_SOURCE_BYTE: usize = 512;

/// Bound on the work for a grammar's regular expressions, at 50,000 units per millisecond. The largest published
/// schemas need 500,000.
const LEXER_FUEL: u64 = 1_000_000;
/// Bound on the states of a grammar's lexer, of 1 to 2 KB each.
const LEXER_STATES: usize = 50_000;
/// Bound on the symbols in a grammar's rules. The largest published schemas have 200,000.
const GRAMMAR_SYMBOLS: usize = 250_000;

/// Bound on the work for the regular expressions of one mask, at 14,000 units per millisecond.
const MASK_FUEL: u64 = 200_000;
/// Bound on the parser's items for one mask, at 20,000 per millisecond. With [`MASK_FUEL`] a mask takes some 20 ms at
/// most.
const MASK_ITEMS: usize = 50_000;

/// A tool as a grammar of calls knows it.
#[derive(Clone, Debug)]
pub struct ToolSignature {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments.
    pub arguments: Value,
}

/// The form that an output must have.
#[derive(Clone, Debug, PartialEq)]
pub enum GrammarSource {
    /// A JSON value that follows a schema.
    JsonSchema(Value),
    /// A grammar in llguidance's variant of Lark.
    Lark(String),
    /// A regular expression.
    Regex(String),
}

impl GrammarSource {
    /// Any JSON object.
    pub fn json_object() -> GrammarSource {
        GrammarSource::JsonSchema(json!({"type": "object"}))
    }

    /// Calls of tools, in a notation that [`crate::AnswerParser`] reads.
    pub fn tool_calls(tools: &[ToolSignature], several: bool) -> GrammarSource {
        GrammarSource::Lark(format!("start: calls\n{}", call_rules(tools, several)))
    }

    /// A JSON value that follows a schema, or calls of tools in its place.
    pub fn value_or_calls(schema: Value, tools: &[ToolSignature], several: bool) -> GrammarSource {
        let (schema, calls) = (with_plain_spacing(schema), call_rules(tools, several));
        GrammarSource::Lark(format!("start: calls | value\nvalue: %json {schema}\n{calls}"))
    }

    fn to_grammar(&self) -> TopLevelGrammar {
        match self {
            GrammarSource::JsonSchema(schema) => {
                TopLevelGrammar::from_json_schema(with_plain_spacing(schema.clone()))
            }
            GrammarSource::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
            GrammarSource::Regex(text) => TopLevelGrammar::from_regex(text),
        }
    }

    /// The most bytes that compiling takes, of stack and heap.
    pub fn compile_bytes(&self) -> usize {
        // A larger source is refused.
        let bytes = self.bytes().min(SOURCE_BYTES_MAX);
        HEAP_BYTES_BASE + bytes * (STACK_BYTES_PER_SOURCE_BYTE + HEAP_BYTES_PER_SOURCE_BYTE)
    }

    fn bytes(&self) -> usize {
        match self {
            GrammarSource::JsonSchema(schema) => schema.to_string().len(),
            GrammarSource::Lark(text) | GrammarSource::Regex(text) => text.len(),
        }
    }
}

/// The rule `calls`, and those that it needs.
fn call_rules(tools: &[ToolSignature], several: bool) -> String {
    let repeat = if several { "(\"\\n\" call)*" } else { "" };
    let names: Vec<String> = (0..tools.len()).map(|i| format!("tool_{i}")).collect();
    let mut grammar = format!(
        "calls: call {repeat}\ncall: \"<tool_call>\\n\" ({}) \"}}\\n</tool_call>\"\n",
        names.join(" | ")
    );
    // Each schema is a document of its own, so that its references begin at its own root.
    for (i, ToolSignature { name, arguments }) in tools.iter().enumerate() {
        let begin = format!("{{\"name\": {}, \"arguments\": ", Value::from(name.as_str()));
        let schema = with_plain_spacing(arguments.clone());
        grammar += &format!("tool_{i}: {} arguments_{i}\n", Value::from(begin));
        grammar += &format!("arguments_{i}: %json {schema}\n");
    }
    grammar
}

/// Allows one space after commas and colons, and no other white space. With free white space a model can go on forever
/// without content.
fn with_plain_spacing(schema: Value) -> Value {
    let mut schema = match schema {
        Value::Object(schema) => schema,
        Value::Bool(true) => Map::new(),
        other => return other,
    };
    schema.insert(
        "x-guidance".into(),
        json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "}),
    );
    Value::Object(schema)
}

/// Starts grammars over the vocabulary of one tokenizer. It is read-only and may be used from any thread.
pub struct GrammarFactory(ParserFactory);

impl GrammarFactory {
    /// Prepares a vocabulary.
    ///
    /// # Errors
    /// [`TextError::Grammar`] if the tokens are not made of bytes, or if there is no token that ends a text.
    pub fn new(files: &TextFiles<'_>, tokenizer: &Tokenizer) -> Result<GrammarFactory, TextError> {
        catch_panics("prepare grammars", || {
            let json: Value = serde_json::from_slice(&files.tokenizer.bytes)
                .map_err(|source| TextError::Json { file: files.tokenizer.name.clone(), source })?;
            let mut words = llguidance::token_bytes_from_tokenizer_json(&json).map_err(refused)?;
            correct_added(&mut words, &json, tokenizer)?;
            // Configs may name ids that are no tokens.
            let ends = || tokenizer.eos_ids().iter().copied().filter(|&id| (id as usize) < words.len());
            let named = tokenizer.special_tokens().eos.as_deref().and_then(|eos| tokenizer.token_to_id(eos));
            let end = ends().find(|&id| Some(id) == named).or_else(|| ends().next());
            let end =
                end.ok_or_else(|| TextError::Grammar { reason: "the model has no end token".into() })?;
            // A token that ends a text must not be matched as part of the text.
            for &id in tokenizer.eos_ids() {
                if let Some(word) = words.get_mut(id as usize).filter(|word| word.first() != Some(&0xff)) {
                    word.insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
                }
            }
            let info = TokRxInfo {
                vocab_size: words.len() as u32,
                tok_eos: end,
                tok_bos: None,
                tok_pad: None,
                tok_unk: None,
                tok_end_of_turn: None,
            };
            let environment: TokEnv = Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &words)));
            let slices = llguidance::earley::SlicedBiasComputer::general_slices();
            let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)
                .map_err(refused)?;
            let limits = factory.quiet().limits_mut();
            limits.verbose_errors = false;
            limits.initial_lexer_fuel = LEXER_FUEL;
            limits.step_lexer_fuel = MASK_FUEL;
            limits.step_max_items = MASK_ITEMS;
            limits.max_lexer_states = LEXER_STATES;
            limits.max_grammar_size = GRAMMAR_SYMBOLS;
            Ok(GrammarFactory(factory))
        })
    }

    /// Compiles a grammar and returns its start state.
    ///
    /// # Errors
    /// [`TextError::Grammar`] if it is malformed, not supported or too large.
    pub fn start(&self, source: &GrammarSource) -> Result<GrammarState, TextError> {
        let bytes = source.bytes();
        if bytes > SOURCE_BYTES_MAX {
            let reason = format!("it has {bytes} bytes, at most {SOURCE_BYTES_MAX} are accepted");
            return Err(TextError::Grammar { reason });
        }
        let stack_bytes = STACK_BYTES_BASE + bytes * STACK_BYTES_PER_SOURCE_BYTE;
        guarded_on_stack("compile a grammar", stack_bytes, || {
            let mut parser = self.0.create_parser(source.to_grammar()).map_err(refused)?;
            parser.start_without_prompt();
            parser.enable_cancellation();
            let fixed_bytes = bytes_of_grammar(&parser, bytes)?;
            let bytes = fixed_bytes + bytes_of_tables(&parser);
            Ok(GrammarState { parser, fixed_bytes, text_bytes: 0, bytes })
        })
    }
}

/// Gives added tokens the bytes that the decoder makes of them. The library takes their spelling. In SentencePiece's
/// vocabularies a token of two spaces is spelled with two `\u{2581}`. Special tokens keep their spelling after a
/// marker, because no text has them.
fn correct_added(words: &mut [Vec<u8>], json: &Value, tokenizer: &Tokenizer) -> Result<(), TextError> {
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        let id = token["id"].as_u64().and_then(|id| u32::try_from(id).ok());
        let Some(id) = id.filter(|_| token["special"] != true) else { continue };
        if let Some(word) = words.get_mut(id as usize) {
            *word = tokenizer.token_bytes(id)?;
        }
    }
    Ok(())
}

/// A position within a grammar.
pub struct GrammarState {
    parser: TokenParser,
    /// Heap bytes that never change.
    fixed_bytes: usize,
    /// Heap bytes that the parser keeps of the tokens so far.
    text_bytes: usize,
    /// All heap bytes, as of the last mask.
    bytes: usize,
}

/// A clone shares no tables with the original, so neither waits for the other. It takes less time than compiling again.
impl Clone for GrammarState {
    fn clone(&self) -> GrammarState {
        GrammarState { parser: self.parser.deep_clone(), ..*self }
    }
}

/// Ends the work on a mask of one [`GrammarState`], from any thread.
pub struct MaskCanceller(Option<CancellationHandle>);

impl MaskCanceller {
    /// A mask that is being computed fails soon, as does everything that is asked of the state from now on.
    pub fn cancel(&self) {
        self.0.iter().for_each(CancellationHandle::cancel);
    }
}

impl GrammarState {
    /// Ends the work of this state. Its clones go on.
    pub fn canceller(&self) -> MaskCanceller {
        MaskCanceller(self.parser.cancellation_handle())
    }

    /// Sets the logit of a token to negative infinity if the grammar does not allow the token next.
    ///
    /// # Errors
    /// [`TextError::Grammar`] if the grammar exceeds its bounds.
    pub fn mask(&mut self, logits: &mut [f32]) -> Result<(), TextError> {
        self.allowed()?.apply(logits);
        Ok(())
    }

    /// The tokens that the grammar allows next. This may take long.
    ///
    /// # Errors
    /// [`TextError::Grammar`] if the grammar exceeds its bounds.
    pub fn allowed(&mut self) -> Result<GrammarMask, TextError> {
        let mask = self.run(|parser| match parser.stop_reason() {
            StopReason::NoExtension | StopReason::EndOfSentence => {
                Ok(parser.token_env.tok_trie().eos_token_set())
            }
            _ => parser.compute_mask(),
        })?;
        self.bytes = self.fixed_bytes + self.text_bytes + bytes_of_tables(&self.parser);
        Ok(GrammarMask(mask))
    }

    /// Advances by a token.
    ///
    /// # Errors
    /// [`TextError::Grammar`] if the grammar forbids the token.
    pub fn accept(&mut self, token: u32) -> Result<(), TextError> {
        let before = self.parser.parser_stats().clone();
        self.run(|parser| parser.consume_token(token))?;
        // A token that is taken back later keeps its room.
        self.text_bytes += bytes_of_text(&self.parser.parser_stats().delta(&before));
        self.run(TokenParser::check_stop)?;
        Ok(())
    }

    /// Undoes the last `tokens` accepted tokens.
    ///
    /// # Errors
    /// [`TextError::Grammar`] if fewer tokens were accepted.
    pub fn rollback(&mut self, tokens: usize) -> Result<(), TextError> {
        self.run(|parser| parser.rollback(tokens))
    }

    /// Whether the grammar allows no further token.
    pub fn is_complete(&self) -> bool {
        self.parser.stopped() || self.parser.cancellation_handle().is_some_and(|handle| handle.is_cancelled())
    }

    /// The most heap bytes that this state holds, as of its last mask. Each clone counts the rules, though clones share
    /// them.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Runs a step of the parser. After an error, or a panic of the library, all later steps fail.
    fn run<T, E: Display>(
        &mut self,
        step: impl FnOnce(&mut TokenParser) -> Result<T, E>,
    ) -> Result<T, TextError> {
        let parser = &mut self.parser;
        let done = catch_unwind(AssertUnwindSafe(|| Ok(step(parser).map_err(refused))));
        done.unwrap_or_else(|panic| Err(refused(panic))).inspect_err(|_| self.canceller().cancel())
    }
}

/// The tokens that a grammar allows at a position.
#[derive(Clone, Debug)]
pub struct GrammarMask(SimpleVob);

impl GrammarMask {
    /// Sets the logits of the other tokens to negative infinity.
    pub fn apply(&self, logits: &mut [f32]) {
        for (id, logit) in logits.iter_mut().enumerate() {
            if id >= self.0.len() || !self.0.get(id) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

fn refused(error: impl Display) -> TextError {
    TextError::Grammar { reason: error.to_string() }
}
