//! Reads bodies as the endpoints do. Shared by the smoke test and the fuzz targets.

use std::path::Path;
use std::sync::LazyLock;

use keel_server::ModelText;
use keel_server::requests::{Endpoint, read};
use keel_text::TextFiles;

/// The text side of the built-in model.
static TEXT: LazyLock<ModelText> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().find(|f| f.join("models/demo").is_dir());
    let folder = folder.expect("the model lies in the repository").join("models/demo");
    ModelText::new(&TextFiles::read(&folder).expect("its files are there")).expect("they are right")
});

/// Ids of the built-in model, or more.
const VOCAB: usize = 1 << 16;

/// Bytes of text for one token at least: no token is made of nothing, and templates repeat little.
const TOKENS_PER_BYTE_MAX: usize = 64;

/// Whether the body is a request.
///
/// # Panics
/// If it makes the server fail rather than the request, or becomes more tokens than its bytes explain.
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
