//! Decides by a request's Host and Origin whether it may reach the server.
//!
//! Any web page can make a browser send requests to loopback addresses: by a form, by `fetch`, or under a name of its
//! own site that the site points to 127.0.0.1 (DNS rebinding). Two headers that pages cannot choose distinguish such
//! requests from the user's own: `Host` is the name that the browser connects to, `Origin` is the site of the page.

use std::net::{IpAddr, SocketAddr};

use axum::http::uri::Authority;
use axum::http::{HeaderMap, Uri, Version, header};

use crate::error::{Result, ServerError};
use crate::options::ServerOptions;

/// The names and sites that the server accepts.
#[derive(Clone, Debug)]
pub(crate) struct HostCheck {
    /// Whether only this machine can connect.
    is_local: bool,
    /// Whether any host name is accepted. It is safe with keys, because pages of other sites have no key.
    any_host: bool,
    hosts: Vec<String>,
    origins: Vec<String>,
}

impl HostCheck {
    /// The gate of a server that listens on this address.
    pub fn new(listens: SocketAddr, options: &ServerOptions) -> HostCheck {
        let is_local = listens.ip().is_loopback();
        let named_all = options.hosts.iter().any(|host| host == "*");
        HostCheck {
            is_local,
            any_host: named_all || (!is_local && !options.keys.is_empty()),
            hosts: options.hosts.iter().map(|host| plain(host)).collect(),
            origins: options.cors_origins.iter().map(|origin| plain_origin(origin)).collect(),
        }
    }

    /// Checks whether a request is accepted.
    ///
    /// # Errors
    /// [`ServerError::ForeignHost`] and [`ServerError::ForeignOrigin`].
    pub fn check(&self, version: Version, uri: &Uri, headers: &HeaderMap) -> Result<()> {
        let host = self.host(version, uri, headers)?;
        let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
        let text = origin.to_str().unwrap_or_default();
        if headers.get_all(header::ORIGIN).iter().count() == 1 && self.knows_origin(text, host.as_ref()) {
            return Ok(());
        }
        Err(ServerError::ForeignOrigin { origin: String::from_utf8_lossy(origin.as_bytes()).into_owned() })
    }

    /// The host that the client connects to. `None` for old clients that send no host.
    fn host(&self, version: Version, uri: &Uri, headers: &HeaderMap) -> Result<Option<Authority>> {
        let mut named = headers.get_all(header::HOST).iter();
        let refused = |host: &[u8]| ServerError::ForeignHost { host: String::from_utf8_lossy(host).into() };
        let given = match (named.next(), named.next()) {
            (None, _) if version < Version::HTTP_11 => return Ok(None),
            (None, _) => return Err(refused(b"")),
            (Some(one), None) => one.as_bytes(),
            (Some(_), Some(two)) => return Err(refused(two.as_bytes())),
        };
        let authority = Authority::try_from(given).map_err(|_| refused(given))?;
        // A request target in absolute form also contains the host.
        for authority in [Some(&authority), uri.authority()].into_iter().flatten() {
            if !self.knows_host(authority) {
                return Err(refused(authority.as_str().as_bytes()));
            }
        }
        Ok(Some(authority))
    }

    fn knows_host(&self, authority: &Authority) -> bool {
        if authority.as_str().contains('@') {
            return false;
        }
        let host = plain(authority.host());
        if self.any_host || host == "localhost" || host.ends_with(".localhost") || self.hosts.contains(&host)
        {
            return true;
        }
        // DNS rebinding needs a name. A browser that uses an address connects to that address.
        match host.parse::<IpAddr>() {
            Ok(address) => !self.is_local || address.is_loopback(),
            Err(_) => false,
        }
    }

    fn knows_origin(&self, origin: &str, host: Option<&Authority>) -> bool {
        let named = |known: &String| known == "*" || known.eq_ignore_ascii_case(origin);
        self.origins.iter().any(named) || host.is_some_and(|host| is_same_site(origin, host))
    }
}

/// Whether the page comes from this server.
fn is_same_site(origin: &str, host: &Authority) -> bool {
    let Ok(uri) = origin.parse::<Uri>() else { return false };
    let default_port = match uri.scheme_str() {
        Some("http") => 80,
        Some("https") => 443,
        _ => return false,
    };
    let place = |a: &Authority| (plain(a.host()), a.port_u16().unwrap_or(default_port));
    uri.authority().is_some_and(|authority| place(authority) == place(host))
}

/// A site as browsers send it.
pub(crate) fn plain_origin(origin: &str) -> String {
    origin.trim_end_matches('/').to_ascii_lowercase()
}

/// The name in lower case, without brackets and without the final dot.
fn plain(host: &str) -> String {
    host.trim_matches(['[', ']']).trim_end_matches('.').to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;
    use crate::access::keys::ApiKey;

    fn gate(listens: &str, options: ServerOptions) -> HostCheck {
        HostCheck::new(listens.parse().expect("an address"), &options)
    }

    fn passes(gate: &HostCheck, host: &str, origin: Option<&str>) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, HeaderValue::from_str(host).expect("visible"));
        if let Some(origin) = origin {
            headers.insert(header::ORIGIN, HeaderValue::from_str(origin).expect("visible"));
        }
        gate.check(Version::HTTP_11, &Uri::from_static("/"), &headers).is_ok()
    }

    #[test]
    fn a_loopback_server_answers_to_loopback_names_alone() {
        let gate = gate("127.0.0.1:8080", ServerOptions::default());
        for host in ["127.0.0.1:8080", "localhost", "LOCALHOST:1", "localhost.", "[::1]:8080", "a.localhost"]
        {
            assert!(passes(&gate, host, None), "{host}");
        }
        for host in ["attacker.com", "127.0.0.1.attacker.com", "10.0.0.1", "localhost@attacker.com", "x"] {
            assert!(!passes(&gate, host, None), "{host}");
        }
    }

    #[test]
    fn names_are_added_and_a_key_opens_a_public_server_to_all() {
        let named = ServerOptions { hosts: vec!["Box.lan".into()], ..ServerOptions::default() };
        let public = gate("0.0.0.0:80", named.clone());
        assert!(passes(&public, "box.LAN:80", None) && passes(&public, "192.168.0.7", None));
        assert!(!passes(&public, "attacker.com", None));
        let keys = vec![ApiKey::new("a", "secret").expect("a key")];
        let keyed = ServerOptions { keys, ..ServerOptions::default() };
        assert!(passes(&gate("0.0.0.0:80", keyed.clone()), "api.example.org", None));
        assert!(!passes(&gate("127.0.0.1:80", keyed), "api.example.org", None));
    }

    #[test]
    fn pages_come_from_the_server_or_are_named() {
        let options =
            ServerOptions { cors_origins: vec!["https://a.org/".into()], ..ServerOptions::default() };
        let gate = gate("[::1]:8080", options);
        let host = "localhost:8080";
        for origin in ["http://localhost:8080", "https://a.org", "https://LOCALHOST:8080"] {
            assert!(passes(&gate, host, Some(origin)), "{origin}");
        }
        for origin in ["http://localhost:3000", "https://b.org", "null", "http://a.org", "file://"] {
            assert!(!passes(&gate, host, Some(origin)), "{origin}");
        }
    }

    #[test]
    fn a_name_is_needed_once_and_in_every_place() {
        let gate = gate("127.0.0.1:8080", ServerOptions::default());
        let mut headers = HeaderMap::new();
        let uri = Uri::from_static("/");
        assert!(gate.check(Version::HTTP_10, &uri, &headers).is_ok(), "old clients name none");
        assert!(gate.check(Version::HTTP_11, &uri, &headers).is_err());
        headers.append(header::HOST, HeaderValue::from_static("localhost"));
        let absolute = Uri::from_static("http://attacker.com/");
        assert!(gate.check(Version::HTTP_11, &absolute, &headers).is_err());
        headers.append(header::HOST, HeaderValue::from_static("attacker.com"));
        assert!(gate.check(Version::HTTP_11, &uri, &headers).is_err());
    }
}
