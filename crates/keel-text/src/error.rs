//! Errors between text and token ids.

/// Why a text file of a checkpoint, or a request on it, was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The operating system could not read a file.
    #[error("{file}: cannot be read: {source}")]
    Read {
        /// The file's path as requested.
        file: String,
        /// The operating system's reason.
        source: std::io::Error,
    },

    /// A file is larger than the limit for its kind.
    #[error("{file}: {bytes} bytes, but at most {limit} bytes are accepted for this file")]
    TooLarge {
        /// The file's path as requested.
        file: String,
        /// Its size.
        bytes: u64,
        /// The largest size accepted.
        limit: u64,
    },

    /// A file is not JSON, or not JSON of the expected form.
    #[error("{file}: not valid: {source}")]
    Json {
        /// The file's path as requested.
        file: String,
        /// The parser's reason, with line and column.
        source: serde_json::Error,
    },

    /// A value of a JSON file has the wrong type or lies outside its range.
    #[error("{file}: {field} is {found}, expected {expected}")]
    Field {
        /// The file's path as requested.
        file: String,
        /// Path of the value inside the file, such as `text_config.eos_token_id`.
        field: String,
        /// The value found, shortened.
        found: String,
        /// The accepted type or range.
        expected: &'static str,
    },

    /// `tokenizer.json` is well-formed but describes no usable tokenizer.
    #[error("{file}: {reason}")]
    Tokenizer {
        /// The file's path as requested.
        file: String,
        /// The contradiction in the file.
        reason: String,
    },

    /// A text could not be encoded, or ids could not be decoded.
    #[error("{op}: {reason}")]
    Tokenize {
        /// `encode` or `decode`.
        op: &'static str,
        /// The tokenizer's reason.
        reason: String,
    },

    /// A chat template could not be compiled or rendered.
    #[error("chat template {name:?}: {reason}")]
    Template {
        /// Name of the template; `default` unless the checkpoint has several.
        name: String,
        /// The engine's reason, with the line where there is one.
        reason: String,
    },

    /// The process that renders chat templates could not be started or reached.
    #[error("the process that renders chat templates: {source}")]
    Renderer {
        /// The operating system's reason.
        source: std::io::Error,
    },

    /// A schema or grammar for the output cannot be used.
    #[error("the schema or grammar cannot be used: {reason}")]
    Grammar {
        /// The defect.
        reason: String,
    },

    /// The chat template itself refused the conversation with `raise_exception`.
    #[error("the chat template refuses this conversation: {message}")]
    Refused {
        /// The template's message.
        message: String,
    },

    /// A stop string cannot be matched.
    #[error("stop string {index} of {count}: {reason}")]
    StopString {
        /// Position in the list, from 1.
        index: usize,
        /// Length of the list.
        count: usize,
        /// Why it cannot be matched.
        reason: String,
    },

    /// The result is no longer needed.
    #[error("cancelled")]
    Cancelled,

    /// The operating system could not create a thread.
    #[error("{op}: no thread with a stack of {stack_bytes} bytes of address space: {source}")]
    Stack {
        /// The operation that needed the thread.
        op: &'static str,
        /// Requested address space. Little of it becomes memory.
        stack_bytes: usize,
        /// The operating system's reason.
        source: std::io::Error,
    },

    /// A library in use panicked on its input. The panic was caught.
    #[error("{op}: the library that reads the input panicked ({reason}); the file is probably damaged")]
    Panicked {
        /// The operation that failed.
        op: &'static str,
        /// The panic's message.
        reason: String,
    },
}
