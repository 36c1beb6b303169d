//! Where pictures come from.
//!
//! A data URI brings its picture along. Files and hosts are read only where the server's options name them: a request
//! must not make the server read data that its sender could not read.

use std::borrow::Cow;
use std::fmt::Debug;
use std::fs::File;
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
use crate::memory::charge::Hold;
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

/// Where pictures may come from, other than the request itself.
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

/// The file of a picture or video, and its charge.
pub(super) struct MediaFile<'a> {
    pub bytes: Vec<u8>,
    _held: Option<Hold<'a>>,
}

impl<'a> MediaFile<'a> {
    /// Charges `bytes_max`, reads, and reduces the charge to the bytes that came.
    fn read(
        bytes_max: u64,
        bounds: &'a Bounds<'_>,
        read: impl FnOnce() -> Result<Vec<u8>, String>,
    ) -> Result<MediaFile<'a>, MediaError> {
        let mut held = bounds.hold(bytes_max)?;
        let bytes = read().map_err(MediaError::Picture)?;
        if let Some(held) = &mut held {
            held.reduce(bytes.len() as u64);
        }
        Ok(MediaFile { bytes, _held: held })
    }
}

/// Reads the file of a picture or video. It is charged before it is read.
pub(super) fn read<'a>(url: &str, bounds: &'a Bounds<'_>) -> Result<MediaFile<'a>, MediaError> {
    WorkLimit::current().check()?;
    let Some(data) = url.strip_prefix("data:") else { return elsewhere(url, bounds) };
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
        return Err(too_large());
    }
    MediaFile::read(base64::decoded_len_estimate(coded.len()) as u64, bounds, || {
        BASE64.decode(&*coded).map_err(|error| format!("its data URI is no base64: {error}"))
    })
}

fn too_large() -> MediaError {
    MediaError::Picture(format!("its file has more than {FILE_BYTES_MAX} bytes"))
}

/// It does not tell whether there is such a file elsewhere.
const MISSING: &str = "there is no such file in the folders of --allow-image-files";

fn elsewhere<'a>(url: &str, bounds: &'a Bounds<'_>) -> Result<MediaFile<'a>, MediaError> {
    let refused = |problem: &str| Err(MediaError::Picture(problem.into()));
    let none = PictureSources::default();
    let sources = bounds.sources.unwrap_or(&none);
    let is_web = ["http://", "https://"].iter().any(|scheme| url.starts_with(scheme));
    if is_web {
        let Some(fetch) = &sources.fetch else {
            return refused(
                "this server fetches no URLs: send a data URI (data:image/png;base64,...), or start the server \
                 with --allow-image-urls HOST",
            );
        };
        let time = WorkLimit::current().left_of(sources.fetch_time);
        // The length is not known before all of it is there.
        let limits = FetchLimits { bytes: FILE_BYTES_MAX, time };
        return MediaFile::read(FILE_BYTES_MAX as u64, bounds, || fetch.fetch(url, limits));
    }
    let path = match url.strip_prefix("file://") {
        Some(rest) => {
            let local = rest.strip_prefix("localhost").filter(|path| path.starts_with('/'));
            percent_decode_str(local.unwrap_or(rest)).decode_utf8_lossy()
        }
        None => Cow::Borrowed(url),
    };
    if path.contains("://") {
        return refused("its URL is none of data:, http:, https: and file:");
    }
    if sources.folders.is_empty() {
        return refused(
            "this server reads no files: send a data URI (data:image/png;base64,...), or start the server with \
             --allow-image-files FOLDER",
        );
    }
    let found = sources.folders.iter().find_map(|folder| open(folder, Path::new(&*path)));
    let Some((file, len)) = found else { return refused(MISSING) };
    if len > FILE_BYTES_MAX as u64 {
        return Err(too_large());
    }
    MediaFile::read(len, bounds, || {
        let mut bytes = Vec::with_capacity(len as usize);
        // A file that grows meanwhile is cut off.
        file.take(len).read_to_end(&mut bytes).map_err(|_| MISSING)?;
        Ok(bytes)
    })
}

/// A file within a folder, wherever links lead, and its length; `None` if it is not there.
fn open(folder: &Path, path: &Path) -> Option<(File, u64)> {
    let folder = folder.canonicalize().ok()?;
    let path = folder.join(path).canonicalize().ok().filter(|path| path.starts_with(&folder))?;
    // Opening a pipe would wait for somebody to write.
    if !path.metadata().ok()?.is_file() {
        return None;
    }
    let file = File::open(path).ok()?;
    let len = file.metadata().ok()?.len();
    Some((file, len))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::error::ServerError;
    use crate::memory::requests::{Meter, RequestMemory};

    fn bounds<'a>(sources: &'a PictureSources, meter: Option<&'a Meter>) -> Bounds<'a> {
        Bounds {
            vocab: 1,
            context: 1,
            context_max: 1,
            answer_min: 0,
            choices_max: 1,
            sources: Some(sources),
            meter,
        }
    }

    #[test]
    fn only_files_within_the_folders_are_read() {
        let outer = tempfile::tempdir().expect("a folder");
        let (inner, secret) = (outer.path().join("shown"), outer.path().join("secret.png"));
        std::fs::create_dir(&inner).expect("made");
        std::fs::write(inner.join("a.png"), b"picture").expect("written");
        std::fs::write(&secret, b"secret").expect("written");
        let sources = PictureSources { folders: vec![inner.clone()], ..PictureSources::default() };
        let elsewhere = |url: &str, sources: &PictureSources| match read(url, &bounds(sources, None)) {
            Ok(file) => Ok(file.bytes),
            Err(MediaError::Picture(problem)) => Err(problem),
            Err(MediaError::Request(error)) => panic!("{url}: {error}"),
        };
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
        let sources = PictureSources::default();
        let bounds = bounds(&sources, None);
        for coded in ["YWI=", "YWI", "YW\nI"] {
            let bytes = read(&format!("data:image/png;base64,{coded}"), &bounds);
            assert_eq!(bytes.ok().map(|file| file.bytes).as_deref(), Some(&b"ab"[..]), "{coded}");
        }
        assert!(read("data:image/png;base64,YWI*", &bounds).is_err());
    }
    /// Gives a file of 100 bytes. Notes how many bytes of the request are charged meanwhile.
    #[derive(Debug)]
    struct Noting(RequestMemory, AtomicU64);

    impl Fetch for Noting {
        fn fetch(&self, _: &str, _: FetchLimits) -> Result<Vec<u8>, String> {
            self.1.store(self.0.used(), Ordering::Release);
            Ok(vec![0; 100])
        }
    }

    #[test]
    fn files_are_charged_before_they_are_read() {
        let memory = RequestMemory::new(2 * FILE_BYTES_MAX as u64, 0);
        let (meter, folder) = (memory.meter(), tempfile::tempdir().expect("a folder"));
        std::fs::write(folder.path().join("a.png"), vec![0; 3 << 20]).expect("written");
        let fetch = Arc::new(Noting(memory.clone(), AtomicU64::new(0)));
        let sources = PictureSources {
            folders: vec![folder.path().into()],
            fetch: Some(Arc::clone(&fetch) as _),
            ..PictureSources::default()
        };
        let bounds = bounds(&sources, Some(&meter));
        for (url, bytes) in [("a.png", 3 << 20), ("http://x/a.png", 100), ("data:image/png;base64,YWI", 2)] {
            let file = read(url, &bounds).unwrap_or_else(|error| panic!("{url}: {error:?}"));
            assert_eq!((file.bytes.len() as u64, memory.used()), (bytes, bytes), "{url}");
            drop(file);
            assert_eq!(memory.used(), 0, "{url}");
        }
        assert_eq!(fetch.1.load(Ordering::Acquire), FILE_BYTES_MAX as u64);
        // Other requests have all but 2 MiB.
        let others = memory.meter();
        others.take(54 << 20).expect("there is room");
        for url in ["a.png", "http://x/a.png", &format!("data:image/png;base64,{}", "A".repeat(4 << 20))] {
            let refused = read(url, &bounds).map(|file| file.bytes.len());
            assert!(
                matches!(refused, Err(MediaError::Request(ServerError::RequestMemory { .. }))),
                "{url}: {refused:?}"
            );
        }
    }
}
