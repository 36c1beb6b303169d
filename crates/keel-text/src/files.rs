//! The text files of a checkpoint folder, read with a limit on each size.

use std::borrow::Cow;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use crate::TextError;

/// The largest published `tokenizer.json` files have about 35 MB.
const TOKENIZER_BYTES_MAX: u64 = 256 << 20;
/// `tokenizer_config.json` lists every added token and has up to 2 MB.
const CONFIG_BYTES_MAX: u64 = 32 << 20;
/// The longest templates have about 30 KB.
pub(crate) const TEMPLATE_BYTES_MAX: u64 = 128 << 10;

/// The contents of one file, and its name for messages.
#[derive(Clone, Debug)]
pub struct TextFile<'a> {
    /// The file's name in errors: its path, or its bare name if it was never on disk.
    pub name: String,
    /// The contents.
    pub bytes: Cow<'a, [u8]>,
}

/// The files for the text side of a checkpoint.
///
/// Only `tokenizer.json` is required. [`TextFiles::read`] reads the files from a folder. [`TextFiles::in_memory`] and
/// the `with_` methods take them from memory, for example from the program itself.
#[derive(Clone, Debug)]
pub struct TextFiles<'a> {
    pub(crate) tokenizer: TextFile<'a>,
    pub(crate) tokenizer_config: Option<TextFile<'a>>,
    pub(crate) config: Option<TextFile<'a>>,
    pub(crate) generation_config: Option<TextFile<'a>>,
    pub(crate) chat_template: Option<TextFile<'a>>,
    pub(crate) processor_template: Option<TextFile<'a>>,
}

impl TextFiles<'static> {
    /// Reads `tokenizer.json`, and those of `tokenizer_config.json`, `config.json`, `generation_config.json`,
    /// `chat_template.jinja` and `chat_template.json` that are in the same folder.
    ///
    /// # Errors
    /// [`TextError::Read`] if `tokenizer.json` is missing or a file cannot be read,
    /// [`TextError::TooLarge`] if a file exceeds the limit of its kind.
    pub fn read(folder: &Path) -> Result<TextFiles<'static>, TextError> {
        let optional = |name, limit| match read_file(&folder.join(name), limit) {
            Err(TextError::Read { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
            other => other.map(Some),
        };
        Ok(TextFiles {
            tokenizer: read_file(&folder.join("tokenizer.json"), TOKENIZER_BYTES_MAX)?,
            tokenizer_config: optional("tokenizer_config.json", CONFIG_BYTES_MAX)?,
            config: optional("config.json", CONFIG_BYTES_MAX)?,
            generation_config: optional("generation_config.json", CONFIG_BYTES_MAX)?,
            chat_template: optional("chat_template.jinja", TEMPLATE_BYTES_MAX)?,
            processor_template: optional("chat_template.json", TEMPLATE_BYTES_MAX)?,
        })
    }
}

impl<'a> TextFiles<'a> {
    /// Creates the files from the bytes of a `tokenizer.json`.
    pub fn in_memory(tokenizer_json: &'a [u8]) -> Self {
        TextFiles {
            tokenizer: named("tokenizer.json", tokenizer_json),
            tokenizer_config: None,
            config: None,
            generation_config: None,
            chat_template: None,
            processor_template: None,
        }
    }

    /// Frees the bytes of `tokenizer.json`, which are by far the most. [`Tokenizer::new`](crate::Tokenizer::new),
    /// [`GrammarFactory::new`](crate::GrammarFactory::new) and [`TextFiles::vocabulary`] read them, so they must come
    /// before. The templates and settings stay.
    pub fn forget_tokenizer(&mut self) {
        self.tokenizer.bytes = Cow::Borrowed(&[]);
    }

    /// Adds the bytes of a `tokenizer_config.json`.
    pub fn with_tokenizer_config(mut self, bytes: &'a [u8]) -> Self {
        self.tokenizer_config = Some(named("tokenizer_config.json", bytes));
        self
    }

    /// Adds the bytes of the model's `config.json`.
    pub fn with_config(mut self, bytes: &'a [u8]) -> Self {
        self.config = Some(named("config.json", bytes));
        self
    }

    /// Adds the bytes of a `generation_config.json`.
    pub fn with_generation_config(mut self, bytes: &'a [u8]) -> Self {
        self.generation_config = Some(named("generation_config.json", bytes));
        self
    }

    /// Adds the bytes of a `chat_template.json`, in which processors of older checkpoints have the template. It counts
    /// where no other file has one.
    pub fn with_processor_template(mut self, bytes: &'a [u8]) -> Self {
        self.processor_template = Some(named("chat_template.json", bytes));
        self
    }

    /// Adds the bytes of a `chat_template.jinja`. It takes precedence over a template in `tokenizer_config.json`.
    pub fn with_chat_template(mut self, bytes: &'a [u8]) -> Self {
        self.chat_template = Some(named("chat_template.jinja", bytes));
        self
    }
}

fn named<'a>(name: &str, bytes: &'a [u8]) -> TextFile<'a> {
    TextFile { name: name.to_string(), bytes: Cow::Borrowed(bytes) }
}

/// Reads at most `limit` bytes. The size that the file system reports is not trusted.
pub(crate) fn read_file(path: &Path, limit: u64) -> Result<TextFile<'static>, TextError> {
    let name = path.display().to_string();
    let read = || -> std::io::Result<(Vec<u8>, u64)> {
        // The type is checked before opening, because opening a pipe waits for its other end.
        if !std::fs::metadata(path)?.is_file() {
            return Err(std::io::Error::other("it is not a regular file"));
        }
        let file = File::open(path)?;
        let bytes_claimed = file.metadata()?.len();
        let mut bytes = Vec::new();
        file.take(limit + 1).read_to_end(&mut bytes)?;
        Ok((bytes, bytes_claimed))
    };
    let (bytes, bytes_claimed) = read().map_err(|source| TextError::Read { file: name.clone(), source })?;
    if bytes.len() as u64 > limit {
        let bytes = bytes_claimed.max(bytes.len() as u64);
        return Err(TextError::TooLarge { file: name, bytes, limit });
    }
    Ok(TextFile { name, bytes: Cow::Owned(bytes) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_tokenizer_is_named_with_its_path() {
        let err = TextFiles::read("/nowhere/at/all".as_ref()).unwrap_err();
        assert!(err.to_string().starts_with("/nowhere/at/all/tokenizer.json: cannot be read"), "{err}");
    }

    #[test]
    fn a_file_over_its_limit_is_refused_with_both_sizes() {
        let path = std::env::temp_dir().join(format!("keel-text-limit-{}", std::process::id()));
        std::fs::write(&path, vec![b'x'; 33]).unwrap();
        let over = read_file(&path, 32);
        let exact = read_file(&path, 33);
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(over, Err(TextError::TooLarge { bytes: 33, limit: 32, .. })), "{over:?}");
        assert_eq!(exact.unwrap().bytes.len(), 33);
    }
}
