//! Loads pictures from files and data URIs.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use keel_vision::{DecodeLimits, Picture, decode};
use keel_weights::open_regular;

/// The location of a picture.
pub enum Origin {
    /// In a file.
    File(PathBuf),
    /// The bytes of a file, in memory.
    Bytes(Vec<u8>),
}

/// Interprets a URL or path. Nothing is fetched from the network.
///
/// # Errors
/// The URL is neither a data URI nor a path, or the data URI is broken.
pub fn origin(url: &str, folder: &Path) -> Result<Origin> {
    if let Some(data) = url.strip_prefix("data:") {
        let Some((kind, coded)) = data.split_once(',') else { bail!("a data URI has no comma") };
        if !kind.ends_with(";base64") {
            bail!("a data URI is not in base64");
        }
        let bytes = STANDARD.decode(coded.trim()).context("a data URI is no base64")?;
        return Ok(Origin::Bytes(bytes));
    }
    if let Some((scheme, _)) = url.split_once("://").filter(|(scheme, _)| *scheme != "file") {
        bail!("a {scheme} URL is not fetched; give a path or a data URI");
    }
    Ok(Origin::File(folder.join(url.strip_prefix("file://").unwrap_or(url))))
}

/// Decodes the picture.
///
/// # Errors
/// The file cannot be read, is too large, or is not a picture.
pub fn picture(origin: &Origin) -> Result<Picture> {
    let limits = DecodeLimits::default();
    with_bytes(origin, limits.file_bytes, |bytes| Ok(decode(bytes, limits)?))
}

/// Calls `read` with the bytes of the file, or with one more than `most` if it has more than these.
///
/// # Errors
/// The file cannot be read; an error of `read`.
pub fn with_bytes<T>(origin: &Origin, most: usize, read: impl FnOnce(&[u8]) -> Result<T>) -> Result<T> {
    match origin {
        Origin::Bytes(bytes) => read(bytes),
        Origin::File(path) => {
            let shown = path.display();
            let mut bytes = Vec::new();
            // It is read more than once, which a pipe does not allow.
            let file = open_regular(path).with_context(|| format!("cannot read {shown}"))?;
            file.take(most as u64 + 1)
                .read_to_end(&mut bytes)
                .with_context(|| format!("cannot read {shown}"))?;
            read(&bytes).with_context(|| shown.to_string())
        }
    }
}

#[cfg(test)]
mod tests {
    #[cfg(target_os = "linux")]
    #[test]
    fn a_picture_without_end_is_refused() {
        let refused = super::picture(&super::Origin::File("/dev/zero".into())).expect_err("it has no end");
        assert!(format!("{refused:#}").contains("not a regular file"), "{refused:#}");
    }
}
