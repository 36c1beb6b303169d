//! Requests to the hub.

use std::io::Read;
use std::time::Duration;

use serde::Deserialize;
use ureq::Agent;
use ureq::config::RedirectAuthHeaders;

use super::settings::Settings;
use crate::source::hub_name::{HubName, is_commit};

/// Timeout for connecting, and for the start of an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest time without a byte of a file.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Largest size of a list of files. The longest lists have some thousands of entries of 300 bytes.
const LISTING_BYTES_MAX: u64 = 32 << 20;

/// Why the hub did not deliver.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error("it has no such model or revision (or it is private: then set HF_TOKEN)")]
    NotFound,
    #[error(
        "it wants to know who asks (status {0}): accept the model's terms on its page, and set HF_TOKEN to a token that may \
         read it"
    )]
    Denied(u16),
    #[error("it answered with status {0}")]
    Status(u16),
    #[error("it cannot be reached: {0}")]
    Unreachable(String),
    #[error("its answer cannot be used: {0}")]
    Nonsense(String),
}

impl HubError {
    /// Whether a repetition may succeed later.
    pub fn is_passing(&self) -> bool {
        match self {
            HubError::Unreachable(_) => true,
            HubError::Status(status) => *status >= 500 || *status == 429,
            _ => false,
        }
    }
}

/// One file of a model on the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    /// Path of the file inside the model.
    pub path: String,
    /// Size in bytes, if the hub reports it.
    pub size: Option<u64>,
    /// Hash of the contents, for large files.
    pub sha256: Option<String>,
    /// The hub's name of the contents: the SHA-256 of a large file, git's hash of a small file.
    pub blob: Option<String>,
}

/// The files of a revision.
#[derive(Debug)]
pub struct Listing {
    /// The revision's current commit.
    pub commit: String,
    pub files: Vec<RemoteFile>,
}

#[derive(Deserialize)]
struct Info {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

/// A file's bytes from some position on.
pub struct Tail {
    /// Position of the first byte: the requested one, or 0 if the hub sends the whole file.
    pub start: u64,
    pub body: Box<dyn Read>,
}

/// A client of one hub.
pub struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
}

impl Client {
    pub fn new(settings: &Settings) -> Client {
        let config = Agent::config_builder()
            .user_agent(concat!("keel/", env!("CARGO_PKG_VERSION")))
            .http_status_as_error(false)
            // Files are on other hosts, which must not receive the token.
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_connect(Some(ANSWER_TIMEOUT))
            .timeout_recv_response(Some(ANSWER_TIMEOUT))
            .timeout_per_read(Some(STALL_TIMEOUT))
            .build();
        Client {
            agent: config.new_agent(),
            endpoint: settings.endpoint.clone(),
            token: settings.token.clone(),
        }
    }

    /// The files of a model's revision.
    ///
    /// # Errors
    /// The hub does not have the model, refuses it, or sends an invalid answer.
    pub fn listing(&self, name: &HubName) -> Result<Listing, HubError> {
        let revision = name.revision().replace('/', "%2F");
        let url =
            format!("{}/api/models/{}/revision/{revision}?blobs=true", self.endpoint, name.repository());
        let response = self.get(&url, None)?;
        let text = response
            .into_body()
            .into_with_config()
            .limit(LISTING_BYTES_MAX)
            .read_to_string()
            .map_err(|error| HubError::Nonsense(error.to_string()))?;
        let info: Info = serde_json::from_str(&text).map_err(|e| HubError::Nonsense(e.to_string()))?;
        if !is_commit(&info.sha) {
            return Err(HubError::Nonsense(format!("{:?} is not a commit", info.sha)));
        }
        let files = info.siblings.into_iter().filter(|file| is_safe(&file.rfilename)).map(RemoteFile::from);
        Ok(Listing { commit: info.sha, files: files.collect() })
    }

    /// A file of a commit, from `start` on if the hub supports that.
    ///
    /// # Errors
    /// As [`Client::listing`].
    pub fn file(&self, name: &HubName, commit: &str, path: &str, start: u64) -> Result<Tail, HubError> {
        let path: Vec<String> = path.split('/').map(encoded).collect();
        let url = format!("{}/{}/resolve/{commit}/{}", self.endpoint, name.repository(), path.join("/"));
        let range = (start > 0).then(|| format!("bytes={start}-"));
        let response = self.get(&url, range.as_deref())?;
        let begins = if response.status().as_u16() == 206 {
            let header = response.headers().get("content-range").and_then(|value| value.to_str().ok());
            let begins = header.and_then(|text| text.strip_prefix("bytes ")?.split('-').next()?.parse().ok());
            begins.ok_or_else(|| HubError::Nonsense("a part of a file without its range".into()))?
        } else {
            0
        };
        Ok(Tail { start: begins, body: Box::new(response.into_body().into_reader()) })
    }

    fn get(&self, url: &str, range: Option<&str>) -> Result<ureq::http::Response<ureq::Body>, HubError> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if let Some(range) = range {
            request = request.header("Range", range);
        }
        let response = request.call().map_err(|error| HubError::Unreachable(error.to_string()))?;
        match response.status().as_u16() {
            200 | 206 => Ok(response),
            // The partial file on disk does not belong to this file, so the whole file is requested.
            416 if range.is_some() => self.get(url, None),
            // Without a token, the hub answers the same for missing and for private models.
            401 if self.token.is_none() && !is_gated(&response) => Err(HubError::NotFound),
            404 => Err(HubError::NotFound),
            status @ (401 | 403) => Err(HubError::Denied(status)),
            status => Err(HubError::Status(status)),
        }
    }
}

/// Whether the hub requires accepting the model's terms first.
fn is_gated<B>(response: &ureq::http::Response<B>) -> bool {
    response.headers().get("x-error-code").is_some_and(|code| code == "GatedRepo")
}

impl From<Sibling> for RemoteFile {
    fn from(file: Sibling) -> RemoteFile {
        let (sha256, lfs_size) = file.lfs.map_or((None, None), |lfs| (lfs.sha256, lfs.size));
        let is_hash = |text: &String| !text.is_empty() && text.chars().all(|c| c.is_ascii_hexdigit());
        let sha256 = sha256.map(|hash| hash.to_ascii_lowercase()).filter(is_hash);
        let blob = sha256.clone().or(file.blob_id.filter(is_hash));
        RemoteFile { path: file.rfilename, size: lfs_size.or(file.size), sha256, blob }
    }
}

/// Whether a path from the hub stays inside its folder.
fn is_safe(path: &str) -> bool {
    let is_part = |part: &str| {
        !part.is_empty()
            && part != "."
            && part != ".."
            && !part.contains(['\\', ':'])
            && !part.contains(char::is_control)
    };
    path.split('/').all(is_part)
}

/// Percent-encodes a part of a URL.
fn encoded(part: &str) -> String {
    let byte = |b: u8| match b {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => (b as char).to_string(),
        _ => format!("%{b:02X}"),
    };
    part.bytes().map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_below_their_folder() {
        for path in ["config.json", "sub/model.gguf", "a b.json"] {
            assert!(is_safe(path), "{path}");
        }
        for path in ["../x", "/etc/passwd", "a/../b", "a//b", "", "a\\b", "C:x", "a\nb"] {
            assert!(!is_safe(path), "{path:?}");
        }
    }

    #[test]
    fn names_are_encoded() {
        assert_eq!(encoded("a b#?.json"), "a%20b%23%3F.json");
    }

    #[test]
    fn a_large_file_is_known_by_its_hash_and_a_small_one_by_gits() {
        let read = |json: &str| RemoteFile::from(serde_json::from_str::<Sibling>(json).expect("a file"));
        let large = read(r#"{"rfilename":"m","size":9,"blobId":"ab","lfs":{"sha256":"CD","size":10}}"#);
        assert_eq!(
            (large.size, large.sha256.as_deref(), large.blob.as_deref()),
            (Some(10), Some("cd"), Some("cd"))
        );
        let small = read(r#"{"rfilename":"m","size":9,"blobId":"ab"}"#);
        assert_eq!((small.size, small.sha256, small.blob.as_deref()), (Some(9), None, Some("ab")));
        assert_eq!(read(r#"{"rfilename":"m","blobId":"../x"}"#).blob, None, "never a path");
    }
}
