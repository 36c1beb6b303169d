//! The page at `/`.

use std::io::Write;
use std::sync::OnceLock;

use axum::body::Bytes;
use axum::extract::{Path, RawQuery};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use flate2::Compression;
use flate2::write::GzEncoder;

/// The page's security policy. The page may run and load files from this server, and call this server. HTML becomes
/// elements only through DOMPurify. The browser tests in `web/` use the same policy.
const POLICY: &str = include_str!("../../assets/page/policy.txt");

/// A browser asks again at each use.
const NO_CACHE: &str = "no-cache";

/// A browser does not ask again for a year.
const FOR_GOOD: &str = "public, max-age=31536000, immutable";

/// A file of the page. It is built from `web/`; the README there says how.
struct Asset {
    name: &'static str,
    kind: &'static str,
    bytes: &'static [u8],
    /// The compressed file, made at the first request for it.
    compressed: OnceLock<Bytes>,
}

macro_rules! asset {
    ($name:literal, $kind:literal) => {
        Asset {
            name: $name,
            kind: $kind,
            bytes: include_bytes!(concat!("../../assets/page/", $name)),
            compressed: OnceLock::new(),
        }
    };
}

static INDEX: Asset = asset!("index.html", "text/html; charset=utf-8");

static ASSETS: [Asset; 4] = [
    asset!("app.js", "text/javascript; charset=utf-8"),
    asset!("app.css", "text/css; charset=utf-8"),
    asset!("icon.svg", "image/svg+xml"),
    asset!("licences.txt", "text/plain; charset=utf-8"),
];

/// The page. It contains no data, so it needs no key.
pub(crate) async fn page(headers: HeaderMap) -> Response {
    // The page names its files with their hashes. So browsers need to ask again only for the page itself.
    INDEX.respond(&headers, NO_CACHE)
}

/// A file of the page. A browser may keep it for good if it asks with the hash of this content. A page of another
/// version asks with another hash. A browser must not keep this content under that hash, because that page would then
/// run with it.
pub(crate) async fn asset(
    Path(name): Path<String>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response {
    let Some(asset) = ASSETS.iter().find(|asset| asset.name == name) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let asked = query.as_deref().and_then(|query| query.strip_prefix("v="));
    let is_of_this_content = asked.is_some() && asked == asset.hash();
    asset.respond(&headers, if is_of_this_content { FOR_GOOD } else { NO_CACHE })
}

impl Asset {
    /// The hash in the name by which the page loads this file; `None` for a file that the page does not load.
    fn hash(&self) -> Option<&'static str> {
        let start = format!("/page/{}?v=", self.name);
        let html = std::str::from_utf8(INDEX.bytes).unwrap_or_default();
        html.split('"').find_map(|part| part.strip_prefix(start.as_str()))
    }

    fn respond(&'static self, headers: &HeaderMap, cache: &'static str) -> Response {
        let common = [
            (header::CONTENT_TYPE, self.kind),
            (header::CACHE_CONTROL, cache),
            (header::VARY, "accept-encoding"),
            (header::CONTENT_SECURITY_POLICY, POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
        ];
        if accepts_gzip(headers) {
            (common, [(header::CONTENT_ENCODING, "gzip")], self.compressed()).into_response()
        } else {
            (common, self.bytes).into_response()
        }
    }

    fn compressed(&self) -> Bytes {
        let compress = || {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
            // Writing to a vector cannot fail.
            let _ = encoder.write_all(self.bytes);
            Bytes::from(encoder.finish().unwrap_or_default())
        };
        self.compressed.get_or_init(compress).clone()
    }
}

/// Whether a client accepts gzip: it names gzip without `q=0`.
fn accepts_gzip(headers: &HeaderMap) -> bool {
    let named = headers.get_all(header::ACCEPT_ENCODING);
    named.iter().filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(',')).any(|coding| {
        let mut parts = coding.split(';').map(str::trim);
        let is_gzip = parts.next().is_some_and(|name| name.eq_ignore_ascii_case("gzip"));
        let is_refused = parts.any(|part| {
            part.strip_prefix("q=").and_then(|q| q.parse::<f32>().ok()).is_some_and(|q| q == 0.0)
        });
        is_gzip && !is_refused
    })
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn gzip_is_sent_to_those_who_take_it() {
        let asks = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static(value));
            accepts_gzip(&headers)
        };
        assert!(asks("gzip, deflate, br") && asks("br;q=1.0, GZIP;q=0.8"));
        assert!(!asks("identity") && !asks("gzip;q=0, br") && !accepts_gzip(&HeaderMap::new()));
    }

    #[test]
    fn the_page_names_files_that_are_there_and_nothing_else() {
        let html = std::str::from_utf8(INDEX.bytes).expect("text");
        let named: Vec<&str> = html.split('"').filter(|part| part.starts_with('/')).collect();
        assert_eq!(named.len(), 3, "{named:?}");
        for path in named {
            let (path, hash) = path.split_once("?v=").expect("a hash");
            let name = path.strip_prefix("/page/").expect("a file of the page");
            assert!(ASSETS.iter().any(|asset| asset.name == name), "{name}");
            assert_eq!(hash.len(), 12);
        }
        let is_inline = |tag: &str| !tag.starts_with(" src=");
        assert!(!html.split("<script").skip(1).any(is_inline), "the policy forbids inline code");
        assert!(!html.contains("<style") && !html.contains(" style="), "the policy forbids inline style");
    }
}
