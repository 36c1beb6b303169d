//! Loads pictures from files and data URIs.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use evenkeel::{FreeMemory, human_bytes};
use keel_vision::{DecodeLimits, Measured, Picture, decode, measure};
use keel_weights::open_regular;

/// Memory for a picture or a video where the system does not say how much is free.
const WORK_BYTES_MAX: u64 = 4 << 30;

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

/// The memory that work on a picture or a video may take: all memory that is free now. The work is in no plan, and a
/// small file may need much of it.
pub fn room() -> u64 {
    FreeMemory::of_host().map_or(WORK_BYTES_MAX, |free| free.bytes)
}

/// Refuses work that takes more than `room` bytes.
///
/// # Errors
/// It takes more.
pub fn expect_room(what: &str, work_bytes: u64, room: u64) -> Result<()> {
    if work_bytes > room {
        let [takes, free] = [work_bytes, room].map(human_bytes);
        bail!("{what} takes {takes} of memory to prepare, and {free} are free: make it smaller");
    }
    Ok(())
}

/// Decodes the picture. `work_bytes` says how much memory the next work takes on a picture of a width and a height, in
/// addition to the picture itself. All of it must fit into `room` bytes.
///
/// # Errors
/// - The file cannot be read, is too large, or is not a picture.
/// - It takes too much memory; an error of `work_bytes`.
pub fn picture(
    origin: &Origin,
    room: u64,
    work_bytes: impl FnOnce(usize, usize) -> keel_vision::Result<u64>,
) -> Result<Picture> {
    let limits = DecodeLimits::default();
    with_bytes(origin, limits.file_bytes, |bytes| {
        let Measured { width, height, decode_bytes } = measure(bytes, limits)?;
        let preparing = 3 * width as u64 * height as u64 + work_bytes(width, height)?;
        expect_room(&format!("a picture of {width} x {height}"), decode_bytes.max(preparing), room)?;
        Ok(decode(bytes, limits)?)
    })
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
    use keel_vision::ImageProcessor;
    use serde_json::json;

    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn a_picture_without_end_is_refused() {
        let endless = Origin::File("/dev/zero".into());
        let refused = picture(&endless, u64::MAX, |_, _| Ok(0)).expect_err("it has no end");
        assert!(format!("{refused:#}").contains("not a regular file"), "{refused:#}");
    }

    /// A grey PNG with a header that claims this size, and without data.
    fn claimed(width: u32, height: u32) -> Vec<u8> {
        let mut file = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".to_vec();
        file.extend(width.to_be_bytes());
        file.extend(height.to_be_bytes());
        file.extend([8, 0, 0, 0, 0]);
        let next = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
        let crc = !file[12..29].iter().fold(!0u32, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), next));
        file.extend(crc.to_be_bytes());
        file.extend(b"\0\0\0\0IDAT\x35\xaf\x06\x1e");
        file
    }

    /// A file of 65 KB can hold such a strip. Resampling it takes gigabytes.
    #[test]
    fn a_picture_that_takes_more_than_there_is_is_refused_before_it_is_decoded() {
        let json =
            json!({"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}});
        let processor = ImageProcessor::from_json("p.json", &json).expect("sound");
        let read = |width, height, room| {
            let origin = Origin::Bytes(claimed(width, height));
            let read = picture(&origin, room, |width, height| processor.work_bytes(width, height));
            format!("{:#}", read.expect_err("it has no data"))
        };
        let refused = read(1 << 26, 1, 4 << 30);
        assert!(refused.starts_with("a picture of 67108864 x 1 takes "), "{refused}");
        assert!(
            refused.ends_with(" of memory to prepare, and 4.0 GiB are free: make it smaller"),
            "{refused}"
        );
        let refused = read(4000, 3000, 1 << 20);
        assert!(refused.starts_with("a picture of 4000 x 3000 takes "), "{refused}");
        let decoded = read(4000, 3000, 4 << 30);
        assert!(!decoded.contains("are free"), "{decoded}");
    }
}
