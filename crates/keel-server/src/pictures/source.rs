//! Where pictures come from.
//!
//! A data URI brings its picture along. Files and hosts are read only where the server's options name them: a request
//! must not make the server read what its sender could not.

use std::borrow::Cow;
use std::fmt::Debug;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use keel_vision::WorkLimit;
use percent_encoding::percent_decode_str;

use super::MediaError;
use crate::text::Bounds;

/// Base64 with and without padding at its end.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);
/// Bytes of a picture's file at most.
pub(super) const FILE_BYTES_MAX: usize = 32 << 20;
/// Pixels of a picture's file at most.
pub(super) const PIXELS_MAX: u64 = 16 << 20;

/// Bounds of a download.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchLimits {
    /// Bytes at most.
    pub bytes: usize,
    /// Time for all of it.
    pub time: Duration,
}

/// Downloads pictures from hosts that it knows to be allowed.
pub trait Fetch: Debug + Send + Sync {
    /// The bytes of a URL.
    ///
    /// # Errors
    /// A sentence for the user: a host that is not allowed, or why nothing came.
    fn fetch(&self, url: &str, limits: FetchLimits) -> Result<Vec<u8>, String>;
}

/// Where pictures may come from besides the request itself.
#[derive(Clone, Debug)]
pub struct PictureSources {
    /// Folders whose files may be shown.
    pub folders: Vec<PathBuf>,
    /// Downloads, where any are allowed.
    pub fetch: Option<Arc<dyn Fetch>>,
    /// Time for a download.
    pub fetch_time: Duration,
    /// Time for all pictures and videos of a request: downloads, decoding, preparing.
    pub request_time: Duration,
}

impl Default for PictureSources {
    fn default() -> PictureSources {
        PictureSources {
            folders: Vec::new(),
            fetch: None,
            fetch_time: Duration::from_secs(10),
            request_time: Duration::from_secs(120),
        }
    }
}

/// The bytes of a picture.
pub(super) fn read(url: &str, bounds: &Bounds<'_>) -> Result<Vec<u8>, MediaError> {
    WorkLimit::current().check()?;
    let Some(data) = url.strip_prefix("data:") else {
        let none = PictureSources::default();
        return elsewhere(url, bounds.sources.unwrap_or(&none)).map_err(MediaError::Picture);
    };
    let coded = data.split_once(',').filter(|(kind, _)| kind.ends_with(";base64"));
    let Some((_, coded)) = coded else {
        return Err(MediaError::Picture("its data URI is not of the form data:image/png;base64,...".into()));
    };
    // Some clients break lines.
    let is_broken = coded.bytes().any(|byte| byte.is_ascii_whitespace());
    let coded = match is_broken {
        true => Cow::Owned(coded.split_ascii_whitespace().collect::<String>()),
        false => Cow::Borrowed(coded),
    };
    if coded.len() / 4 * 3 > FILE_BYTES_MAX {
        let problem = format!("its file has more than {FILE_BYTES_MAX} bytes");
        return Err(MediaError::Picture(problem));
    }
    BASE64.decode(&*coded).map_err(|error| MediaError::Picture(format!("its data URI is no base64: {error}")))
}

fn elsewhere(url: &str, sources: &PictureSources) -> Result<Vec<u8>, String> {
    let is_web = ["http://", "https://"].iter().any(|scheme| url.starts_with(scheme));
    if is_web {
        let Some(fetch) = &sources.fetch else {
            return Err("this server fetches no URLs: send a data URI (data:image/png;base64,...), or start the server \
                        with --allow-image-urls HOST"
                .into());
        };
        let time = WorkLimit::current().left_of(sources.fetch_time);
        return fetch.fetch(url, FetchLimits { bytes: FILE_BYTES_MAX, time });
    }
    let path = match url.strip_prefix("file://") {
        Some(rest) => {
            let local = rest.strip_prefix("localhost").filter(|path| path.starts_with('/'));
            percent_decode_str(local.unwrap_or(rest)).decode_utf8_lossy()
        }
        None => Cow::Borrowed(url),
    };
    if path.contains("://") {
        return Err("its URL is none of data:, http:, https: and file:".into());
    }
    if sources.folders.is_empty() {
        return Err("this server reads no files: send a data URI (data:image/png;base64,...), or start the server with \
                    --allow-image-files FOLDER"
            .into());
    }
    sources.folders.iter().find_map(|folder| file(folder, Path::new(&*path))).unwrap_or_else(|| {
        // The answer does not tell whether there is such a file elsewhere.
        Err("there is no such file in the folders of --allow-image-files".into())
    })
}

/// A file within a folder, wherever links lead; `None` if it is not there.
fn file(folder: &Path, path: &Path) -> Option<Result<Vec<u8>, String>> {
    let folder = folder.canonicalize().ok()?;
    let path = folder.join(path).canonicalize().ok().filter(|path| path.starts_with(&folder))?;
    // Opening a pipe would wait for somebody to write.
    if !path.metadata().ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).ok()?;
    file.take(FILE_BYTES_MAX as u64 + 1).read_to_end(&mut bytes).ok()?;
    if bytes.len() > FILE_BYTES_MAX {
        return Some(Err(format!("its file has more than {FILE_BYTES_MAX} bytes")));
    }
    Some(Ok(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_within_the_folders_are_read() {
        let outer = tempfile::tempdir().expect("a folder");
        let (inner, secret) = (outer.path().join("shown"), outer.path().join("secret.png"));
        std::fs::create_dir(&inner).expect("made");
        std::fs::write(inner.join("a.png"), b"picture").expect("written");
        std::fs::write(&secret, b"secret").expect("written");
        let sources = PictureSources { folders: vec![inner.clone()], ..PictureSources::default() };
        let shown = inner.join("a.png");
        for url in ["a.png".to_string(), shown.display().to_string(), format!("file://{}", shown.display())] {
            assert_eq!(elsewhere(&url, &sources).as_deref(), Ok(&b"picture"[..]), "{url}");
        }
        std::fs::write(inner.join("b c%.png"), b"spaced").expect("written");
        for escaped in ["b%20c%25.png", "%62%20c%.png"] {
            let url = format!("file://localhost{}", inner.join(escaped).display());
            assert_eq!(elsewhere(&url, &sources).as_deref(), Ok(&b"spaced"[..]), "{url}");
        }
        assert!(elsewhere("b%20c%25.png", &sources).is_err(), "a path is no URL");
        let outside = format!("file://{}/%2e%2e/secret.png", inner.display());
        assert!(elsewhere(&outside, &sources).expect_err("outside").contains("no such file"));
        #[cfg(unix)]
        std::os::unix::fs::symlink(&secret, inner.join("link.png")).expect("linked");
        let secret = secret.display().to_string();
        for url in ["../secret.png", "link.png", &secret, "b.png", ".", "/etc/passwd"] {
            let problem = elsewhere(url, &sources).expect_err("outside");
            assert!(problem.contains("no such file"), "{url}: {problem}");
        }
        assert!(elsewhere("a.png", &PictureSources::default()).expect_err("none").contains("reads no files"));
        assert!(elsewhere("http://x/a.png", &sources).expect_err("none").contains("--allow-image-urls"));
        assert!(elsewhere("ftp://x/a.png", &sources).expect_err("unknown").contains("none of"));
    }

    #[test]
    fn a_data_uri_may_leave_out_the_padding() {
        let (context, context_max) = (1, 1);
        let bounds = Bounds {
            vocab: 1,
            context,
            context_max,
            answer_min: 0,
            choices_max: 1,
            sources: None,
            meter: None,
        };
        for coded in ["YWI=", "YWI", "YW\nI"] {
            let bytes = read(&format!("data:image/png;base64,{coded}"), &bounds);
            assert_eq!(bytes.ok().as_deref(), Some(&b"ab"[..]), "{coded}");
        }
        assert!(read("data:image/png;base64,YWI*", &bounds).is_err());
    }
}
