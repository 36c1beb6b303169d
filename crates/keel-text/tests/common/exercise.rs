//! Opens the files of a checkpoint and uses the results. The smoke test and the fuzz target share this module.

use keel_text::{
    ChatRequest, ChatTemplate, GenerationDefaults, Message, SpecialTokens, StopMatcher, TextError, TextFiles,
    Tokenizer,
};

/// The files of a checkpoint. An empty file counts as absent.
#[derive(Clone, Debug, Default)]
pub struct Input {
    pub tokenizer: Vec<u8>,
    pub tokenizer_config: Vec<u8>,
    pub config: Vec<u8>,
    pub generation_config: Vec<u8>,
    pub template: Vec<u8>,
}

/// Calls every function that reads a file. Returns whether all of them succeeded.
///
/// # Panics
/// If a function panics, or caught a panic of a library.
pub fn exercise(input: &Input) -> bool {
    let mut files = TextFiles::in_memory(&input.tokenizer);
    if !input.tokenizer_config.is_empty() {
        files = files.with_tokenizer_config(&input.tokenizer_config);
    }
    if !input.config.is_empty() {
        files = files.with_config(&input.config);
    }
    if !input.generation_config.is_empty() {
        files = files.with_generation_config(&input.generation_config);
    }
    if !input.template.is_empty() {
        files = files.with_chat_template(&input.template);
    }
    let mut opened = no_panic(SpecialTokens::new(&files)).is_some();
    opened &= no_panic(GenerationDefaults::new(&files)).is_some();
    if !input.tokenizer.is_empty() {
        opened &= no_panic(Tokenizer::new(&files)).map(|tokenizer| use_tokenizer(&tokenizer)).is_some();
    }
    opened
        & no_panic(ChatTemplate::new(&files))
            .map(|found| found.map(|template| use_template(&template)))
            .is_some()
}

/// The value, or `None` if there was an error. A caught panic is also an error, but one that must be fixed.
fn no_panic<T>(result: Result<T, TextError>) -> Option<T> {
    match result {
        Err(TextError::Panicked { op, reason }) => panic!("{op}: caught a panic: {reason}"),
        Err(err) => {
            assert!(!err.to_string().is_empty());
            None
        }
        Ok(value) => Some(value),
    }
}

fn use_tokenizer(tokenizer: &Tokenizer) {
    for text in ["", " the girl's 12 é你👍\n\n", "<|im_start|><bos> <think>\u{301} <0x41>"] {
        let Some(ids) = no_panic(tokenizer.encode(text, true)) else { continue };
        let mut stream = tokenizer.stream(true);
        let mut stops = StopMatcher::new(&["girl", "👍"]).expect("two short stop strings");
        for id in ids.iter().copied().chain([0, 200, 353, u32::MAX]) {
            if let Some(piece) = no_panic(stream.push(id)) {
                stops.push(piece);
            }
        }
        no_panic(stream.finish());
        no_panic(tokenizer.decode(&ids, false));
    }
}

fn use_template(template: &ChatTemplate) {
    let messages =
        [Message::new("system", "s"), Message::new("user", "hi <b>"), Message::new("assistant", "a")];
    for messages in [&messages[..], &messages[1..2]] {
        no_panic(template.render(&ChatRequest::new(messages)));
    }
}
