//! API keys: their names and their limits.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use axum::http::{HeaderMap, header};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::{Result, ServerError, setting};

/// Largest size of a key. Every comparison takes as long as for a key of this size.
const KEY_BYTES_MAX: usize = 256;
const NAME_BYTES_MAX: usize = 64;

/// Limits of one key. Requests that only read (`GET`) do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyLimits {
    /// Requests per minute. After a minute without requests, all of them may come at once.
    pub per_minute: Option<u32>,
    /// Requests in progress at once.
    pub at_once: Option<u32>,
}

/// A key with its name and limits. The name may be logged; the key never is.
#[derive(Clone)]
pub struct ApiKey {
    name: Arc<str>,
    padded: [u8; KEY_BYTES_MAX],
    length: u64,
    limits: KeyLimits,
}

impl std::fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiKey")
            .field("name", &self.name)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl ApiKey {
    /// A key without limits.
    ///
    /// # Errors
    /// [`ServerError::Setting`] if the key is empty, too long, or has bytes that a header cannot contain.
    pub fn new(name: &str, key: &str) -> Result<ApiKey> {
        let wrong = |problem: String| Err(setting("API key", format!("{name:?} {problem}")));
        if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(setting(
                "API key",
                format!("its name {name:?} is not 1 to {NAME_BYTES_MAX} visible characters"),
            ));
        }
        if key.is_empty() {
            return wrong("is empty; leave it out to ask for no key".into());
        }
        if key.len() > KEY_BYTES_MAX {
            return wrong(format!("has {} bytes, at most {KEY_BYTES_MAX} are accepted", key.len()));
        }
        if !key.bytes().all(|b| b.is_ascii_graphic()) {
            return wrong("has spaces or characters that are not ASCII".into());
        }
        let (padded, length) = pad(key.as_bytes());
        Ok(ApiKey { name: name.into(), padded, length, limits: KeyLimits::default() })
    }

    /// The same key with limits.
    #[must_use]
    pub fn with_limits(self, limits: KeyLimits) -> ApiKey {
        ApiKey { limits, ..self }
    }

    /// Parses keys, one per line: a name, the key, and optional limits `per-minute=N` and `at-once=N`. Empty lines and
    /// lines that begin with `#` are skipped. `limits` applies where a line has no limit of its own.
    ///
    /// # Errors
    /// [`ServerError::Setting`] with the number of the line.
    pub fn parse_list(text: &str, limits: KeyLimits) -> Result<Vec<ApiKey>> {
        let mut keys: Vec<ApiKey> = Vec::new();
        for (number, line) in text.lines().enumerate().map(|(i, line)| (i + 1, line.trim())) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let key = Self::parse_line(line, limits)
                .map_err(|problem| setting("API key file", format!("line {number}: {problem}")))?;
            key.check_new(&keys)
                .map_err(|problem| setting("API key file", format!("line {number}: {problem}")))?;
            keys.push(key);
        }
        if keys.is_empty() {
            return Err(setting("API key file", "there is no key in it"));
        }
        Ok(keys)
    }

    fn parse_line(line: &str, mut limits: KeyLimits) -> std::result::Result<ApiKey, String> {
        let mut words = line.split_whitespace();
        let (Some(name), Some(key)) = (words.next(), words.next()) else {
            return Err("expected NAME KEY".into());
        };
        for word in words {
            let (what, number) = word.split_once('=').unwrap_or((word, ""));
            let number = number.parse::<u32>().ok().filter(|&n| n > 0);
            let number =
                number.ok_or_else(|| format!("{what:?} needs a number above 0, such as {what}=10"))?;
            match what {
                "per-minute" => limits.per_minute = Some(number),
                "at-once" => limits.at_once = Some(number),
                _ => return Err(format!("{what:?} is no limit; expected per-minute=N or at-once=N")),
            }
        }
        let key = ApiKey::new(name, key).map_err(|error| error.to_string())?;
        Ok(key.with_limits(limits))
    }

    /// Refuses keys of which two have the same name, or are the same: a request with such a key has no one holder.
    ///
    /// # Errors
    /// [`ServerError::Setting`] with the names.
    pub fn check_distinct(keys: &[ApiKey]) -> Result<()> {
        for (at, key) in keys.iter().enumerate() {
            key.check_new(&keys[..at]).map_err(|problem| setting("API keys", problem))?;
        }
        Ok(())
    }

    fn check_new(&self, known: &[ApiKey]) -> std::result::Result<(), String> {
        if known.iter().any(|other| other.name == self.name) {
            return Err(format!("the name {:?} comes twice", self.name));
        }
        match known.iter().find(|other| bool::from(other.is(&self.padded, self.length))) {
            Some(other) => Err(format!("{:?} has the same key as {:?}", self.name, other.name)),
            None => Ok(()),
        }
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn is(&self, padded: &[u8; KEY_BYTES_MAX], length: u64) -> Choice {
        self.padded.ct_eq(padded) & self.length.ct_eq(&length)
    }
}

/// Pads to the full size. A longer value is cut; its length still differs.
fn pad(bytes: &[u8]) -> ([u8; KEY_BYTES_MAX], u64) {
    let mut padded = [0; KEY_BYTES_MAX];
    let kept = bytes.len().min(KEY_BYTES_MAX);
    padded[..kept].copy_from_slice(&bytes[..kept]);
    (padded, bytes.len() as u64)
}

/// The keys of a server, with their current use.
pub(crate) struct Keys(Vec<Holder>);

struct Holder {
    key: ApiKey,
    allowance: Mutex<Allowance>,
    seats: Option<Arc<Semaphore>>,
}

/// A token bucket of requests, which fills with time.
struct Allowance {
    requests: f64,
    as_of: Instant,
}

/// The permission to run a request. Dropping it frees the key's seat.
#[derive(Debug)]
pub(crate) struct Permit {
    /// Name of the key.
    pub name: Arc<str>,
    _seat: Option<OwnedSemaphorePermit>,
}

impl Keys {
    pub fn new(keys: &[ApiKey]) -> Keys {
        let holder = |key: &ApiKey| Holder {
            allowance: Mutex::new(Allowance {
                requests: key.limits.per_minute.unwrap_or(0).into(),
                as_of: Instant::now(),
            }),
            seats: key.limits.at_once.map(|n| Arc::new(Semaphore::new(n as usize))),
            key: key.clone(),
        };
        Keys(keys.iter().map(holder).collect())
    }

    /// Checks a request's key and limits. Returns `None` if the server has no keys.
    ///
    /// # Errors
    /// [`ServerError::Unauthorized`], [`ServerError::KeyRate`], [`ServerError::KeyBusy`].
    pub fn enter(&self, headers: &HeaderMap, is_counted: bool, now: Instant) -> Result<Option<Permit>> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let (padded, length) = pad(given(headers));
        // All keys are compared, so that the time reveals neither the matching key nor the first different byte.
        let (mut found, mut matches) = (0u64, Choice::from(0));
        for (at, holder) in (0u64..).zip(&self.0) {
            let same = holder.key.is(&padded, length);
            found.conditional_assign(&at, same);
            matches |= same;
        }
        if !bool::from(matches) {
            return Err(ServerError::Unauthorized);
        }
        self.0[found as usize].enter(is_counted, now).map(Some)
    }
}

impl Holder {
    fn enter(&self, is_counted: bool, now: Instant) -> Result<Permit> {
        let name = Arc::clone(&self.key.name);
        if !is_counted {
            return Ok(Permit { name, _seat: None });
        }
        let seat = match &self.seats {
            Some(seats) => Some(
                Arc::clone(seats)
                    .try_acquire_owned()
                    .map_err(|_| ServerError::KeyBusy { limit: self.key.limits.at_once.unwrap_or(0) })?,
            ),
            None => None,
        };
        if let Some(per_minute) = self.key.limits.per_minute {
            self.allowance.lock().unwrap_or_else(|e| e.into_inner()).take(per_minute, now)?;
        }
        Ok(Permit { name, _seat: seat })
    }
}

impl Allowance {
    fn take(&mut self, per_minute: u32, now: Instant) -> Result<()> {
        let per_second = f64::from(per_minute) / 60.0;
        let passed = now.saturating_duration_since(self.as_of).as_secs_f64();
        self.requests = (self.requests + passed * per_second).min(per_minute.into());
        self.as_of = now;
        if self.requests >= 1.0 {
            self.requests -= 1.0;
            return Ok(());
        }
        let seconds = ((1.0 - self.requests) / per_second).ceil().max(1.0) as u32;
        Err(ServerError::KeyRate { limit: per_minute, seconds })
    }
}

/// The key in the headers: `Authorization: Bearer KEY` (the scheme in any case), or `x-api-key: KEY`.
fn given(headers: &HeaderMap) -> &[u8] {
    let authorization = headers.get(header::AUTHORIZATION).map_or(&b""[..], |value| value.as_bytes());
    let (scheme, rest) = authorization.split_at(authorization.len().min(6));
    let bearer =
        (scheme.eq_ignore_ascii_case(b"bearer") && rest.starts_with(b" ")).then(|| rest.trim_ascii());
    bearer.or(headers.get("x-api-key").map(|value| value.as_bytes())).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::http::HeaderValue;

    use super::*;

    fn with(value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, HeaderValue::from_str(value).expect("visible"));
        headers
    }

    #[test]
    fn keys_that_would_let_all_in_are_refused() {
        for key in ["", "a b", "\u{e9}", "a\n", &"x".repeat(257)] {
            assert!(ApiKey::new("a", key).is_err(), "{key:?}");
        }
        let text = "# who\n\nalice  k-1\nbob k-2 per-minute=2 at-once=1\n";
        let keys = ApiKey::parse_list(text, KeyLimits::default()).expect("right");
        assert_eq!((keys[0].name(), keys[1].name()), ("alice", "bob"));
        assert_eq!(keys[1].limits, KeyLimits { per_minute: Some(2), at_once: Some(1) });
        for wrong in [
            "",
            "# none",
            "alice",
            "a k\na l",
            "a k rate=1",
            "a k per-minute=0",
            "a k at-once",
            "a k1\nb k\nc k",
        ] {
            assert!(ApiKey::parse_list(wrong, KeyLimits::default()).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn the_right_holder_is_found() {
        let text = "alice first\nbob second\ncarol third";
        let keys = Keys::new(&ApiKey::parse_list(text, KeyLimits::default()).expect("right"));
        let name = |value: &str| {
            keys.enter(&with(value), true, Instant::now()).map(|pass| pass.expect("a key is asked for").name)
        };
        for (value, holder) in
            [("Bearer first", "alice"), ("bearer second", "bob"), ("BEARER  third", "carol")]
        {
            assert_eq!(&*name(value).expect("known"), holder);
        }
        for wrong in ["", "Bearer", "Bearer ", "Bearerfirst", "Basic first", "Bearer firs", "Bearer firstt"] {
            assert!(matches!(name(wrong), Err(ServerError::Unauthorized)), "{wrong}");
        }
        assert!(Keys::new(&[]).enter(&HeaderMap::new(), true, Instant::now()).expect("open").is_none());
    }

    #[test]
    fn keys_that_come_twice_are_refused_and_never_lead_to_another_holder() {
        let key = |name, key| ApiKey::new(name, key).expect("a key");
        let keys = [key("a", "k1"), key("b", "same"), key("c", "same")];
        let refused = ApiKey::check_distinct(&keys).expect_err("a key comes twice").to_string();
        assert!(refused.contains("\"c\" has the same key as \"b\""), "{refused}");
        assert!(ApiKey::check_distinct(&[key("a", "k1"), key("a", "k2")]).is_err());
        assert!(ApiKey::check_distinct(&keys[..2]).is_ok());
        let pass = Keys::new(&keys).enter(&with("Bearer same"), true, Instant::now()).expect("known");
        assert!(["b", "c"].contains(&&*pass.expect("a key is asked for").name));
    }

    #[test]
    fn a_key_has_a_rate_and_a_number_at_once() {
        let text = "a k per-minute=2 at-once=1";
        let keys = Keys::new(&ApiKey::parse_list(text, KeyLimits::default()).expect("right"));
        let (headers, start) = (with("Bearer k"), Instant::now());
        let enter = |seconds| keys.enter(&headers, true, start + Duration::from_secs(seconds));
        let first = enter(0).expect("the first");
        assert!(matches!(enter(0), Err(ServerError::KeyBusy { limit: 1 })));
        assert!(keys.enter(&headers, false, start).is_ok(), "reading is not counted");
        drop(first);
        drop(enter(0).expect("the second"));
        assert!(matches!(enter(0), Err(ServerError::KeyRate { limit: 2, seconds: 30 })));
        assert!(matches!(enter(29), Err(ServerError::KeyRate { seconds: 1, .. })));
        drop(enter(30).expect("one a half minute"));
    }
}
