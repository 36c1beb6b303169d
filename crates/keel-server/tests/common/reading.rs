//! Parses bodies as the endpoints do. The smoke test and the fuzz targets share this module.

use std::path::Path;
use std::sync::LazyLock;

use keel_server::ServedText;
use keel_server::requests::{Endpoint, read};
use keel_text::TextFiles;

/// The text side of the built-in model.
static TEXT: LazyLock<ServedText> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().find(|f| f.join("models/demo").is_dir());
    let folder = folder.expect("the model lies in the repository").join("models/demo");
    ServedText::new(&TextFiles::read(&folder).expect("its files are there")).expect("they are right")
});

/// At least the number of ids of the built-in model.
const VOCAB: usize = 1 << 16;

/// Most tokens per byte of a body. No token is made from nothing, and templates repeat little.
const TOKENS_PER_BYTE_MAX: usize = 64;

/// Returns whether the body is a valid request.
///
/// # Panics
/// If the body causes an error of the server, or gives more tokens than its bytes explain.
pub fn exercise(endpoint: Endpoint, body: &[u8]) -> bool {
    match read(endpoint, body, &TEXT, VOCAB) {
        Ok(tokens) => {
            let most = TOKENS_PER_BYTE_MAX * (body.len() + 64);
            assert!(tokens <= most, "{tokens} tokens of {} bytes", body.len());
            true
        }
        Err(error) => {
            let status = error.reply().status;
            assert!(status.is_client_error(), "{endpoint:?}: {status}: {error}");
            assert!(!error.public_message().is_empty());
            false
        }
    }
}
