//! Pictures from other hosts, for a server that was told which.
//!
//! - Only named hosts are asked.
//! - Redirects are not followed.
//! - No proxy of the environment is used.
//! - A name that leads to a private address is refused. Otherwise such a name could make the server read data that only
//!   it can reach.

use std::sync::Arc;

use anyhow::Result;
use keel_server::Fetch;

/// The fetcher of these hosts: names, `.example.org` for all below it, or addresses, with a port or without.
///
/// # Errors
/// If the program was built without downloads.
#[cfg(not(feature = "hub"))]
pub fn fetcher(_: &[String]) -> Result<Arc<dyn Fetch>> {
    anyhow::bail!("--allow-image-urls: this program was built without downloads (feature hub)")
}

/// The fetcher of these hosts: names, `.example.org` for all below it, or addresses, with a port or without.
///
/// # Errors
/// An empty name.
#[cfg(feature = "hub")]
pub fn fetcher(hosts: &[String]) -> Result<Arc<dyn Fetch>> {
    if hosts.iter().any(|host| host.trim().is_empty() || host.contains('/')) {
        return Err(crate::failure::usage(
            "--allow-image-urls takes names of hosts, such as images.example.org,.example.com",
        ));
    }
    Ok(Arc::new(web::Fetcher::new(hosts)))
}

#[cfg(feature = "hub")]
mod web {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    use keel_server::{Fetch, FetchLimits};
    use ureq::Agent;
    use ureq::config::Config;
    use ureq::http::Uri;
    use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
    use ureq::unversioned::transport::{DefaultConnector, NextTimeout};

    /// Downloads from hosts that were named.
    #[derive(Debug)]
    pub struct Fetcher {
        hosts: Vec<String>,
        agent: Agent,
    }

    impl Fetcher {
        pub fn new(hosts: &[String]) -> Fetcher {
            Fetcher::with(hosts, DefaultResolver::default())
        }

        /// As [`Fetcher::new`], with names that `names` finds.
        fn with(hosts: &[String], names: impl Resolver) -> Fetcher {
            let hosts: Vec<String> = hosts.iter().map(|host| host.trim().to_ascii_lowercase()).collect();
            let config = Agent::config_builder()
                .user_agent(concat!("keel/", env!("CARGO_PKG_VERSION")))
                .http_status_as_error(false)
                .max_redirects(0)
                .max_redirects_will_error(false)
                .max_idle_connections(0)
                .proxy(None)
                .build();
            let agent = Agent::with_parts(config, DefaultConnector::default(), Guarded(names));
            Fetcher { hosts, agent }
        }

        fn allows(&self, host: &str, port: Option<u16>) -> bool {
            let with_port = port.map(|port| format!("{host}:{port}"));
            self.hosts.iter().any(|allowed| match allowed.strip_prefix('.') {
                Some(domain) => host.strip_suffix(domain).is_some_and(|rest| rest.ends_with('.')),
                None => allowed == host || with_port.as_ref() == Some(allowed),
            })
        }
    }

    impl Fetch for Fetcher {
        fn fetch(&self, url: &str, limits: FetchLimits) -> Result<Vec<u8>, String> {
            let uri: Uri = url.parse().map_err(|_| "its URL is none".to_string())?;
            let authority = uri.authority().filter(|authority| !authority.as_str().contains('@'));
            let Some(authority) = authority else {
                return Err("its URL has no host, or a name in front of it".into());
            };
            let host = authority.host().to_ascii_lowercase();
            if !self.allows(&host, authority.port_u16()) {
                return Err(format!("{host:?} is not one of the hosts of --allow-image-urls"));
            }
            let request = self.agent.get(uri).config().timeout_global(Some(limits.time)).build();
            let failed = |error: ureq::Error| match error {
                ureq::Error::BodyExceedsLimit(bytes) => format!("its file has more than {bytes} bytes"),
                ureq::Error::Timeout(_) => {
                    format!("{host} gave nothing within {} s", limits.time.as_secs_f64())
                }
                other => format!("{host} cannot be reached: {other}"),
            };
            let response = request.call().map_err(failed)?;
            match response.status().as_u16() {
                200 => response
                    .into_body()
                    .into_with_config()
                    .limit(limits.bytes as u64)
                    .read_to_vec()
                    .map_err(failed),
                status @ 300..400 => {
                    Err(format!("{host} redirects (status {status}), which is not followed"))
                }
                status => Err(format!("{host} answered with status {status}")),
            }
        }
    }

    /// Leads names to public addresses alone.
    #[derive(Debug)]
    struct Guarded<R>(R);

    impl<R: Resolver> Resolver for Guarded<R> {
        fn resolve(
            &self,
            uri: &Uri,
            config: &Config,
            timeout: NextTimeout,
        ) -> Result<ResolvedSocketAddrs, ureq::Error> {
            let found = self.0.resolve(uri, config, timeout)?;
            let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
            // An address or localhost is fetched if the user has allowed it by name.
            if host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok() {
                return Ok(found);
            }
            match found.iter().find(|address| !is_public(address.ip())) {
                None => Ok(found),
                Some(_) => Err(ureq::Error::Other("its name leads to a private address".into())),
            }
        }
    }

    /// Whether an address is reachable from the whole internet.
    pub fn is_public(address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => is_public_v4(address),
            IpAddr::V6(address) => is_public_v6(address),
        }
    }

    fn is_public_v4(address: Ipv4Addr) -> bool {
        let [a, b, c, _] = address.octets();
        let is_shared = a == 100 && (64..128).contains(&b);
        let is_for_tests = a == 198 && matches!(b, 18 | 19);
        let is_of_protocols = (a, b, c) == (192, 0, 0);
        !(a == 0
            || a >= 224
            || address.is_private()
            || address.is_loopback()
            || address.is_link_local()
            || address.is_documentation()
            || is_shared
            || is_for_tests
            || is_of_protocols)
    }

    fn is_public_v6(address: Ipv6Addr) -> bool {
        if let Some(mapped) = address.to_ipv4_mapped() {
            return is_public_v4(mapped);
        }
        let [first, second, ..] = address.segments();
        // Global unicast, except 6to4 and Teredo, which lead to IPv4, and documentation.
        (first & 0xe000) == 0x2000 && first != 0x2002 && !(first == 0x2001 && matches!(second, 0 | 0xdb8))
    }

    #[cfg(test)]
    mod tests {
        use std::io::{Read, Write};
        use std::net::{SocketAddr, TcpListener};
        use std::time::Duration;

        use super::*;

        /// A host that gives every connection the same answer.
        fn host(answer: Vec<u8>, pause: Duration) -> SocketAddr {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
            let address = listener.local_addr().expect("bound");
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    let Ok(mut stream) = stream else { return };
                    let _ = stream.read(&mut [0; 4096]);
                    std::thread::sleep(pause);
                    let _ = stream.write_all(&answer);
                }
            });
            address
        }

        fn answer(status: &str, headers: &str, body: &[u8]) -> Vec<u8> {
            let head = format!(
                "HTTP/1.1 {status}\r\n{headers}content-length: {}\r\nconnection: close\r\n\r\n",
                body.len()
            );
            [head.as_bytes(), body].concat()
        }

        fn fetch(hosts: &[&str], url: &str) -> Result<Vec<u8>, String> {
            let hosts: Vec<String> = hosts.iter().map(|host| host.to_string()).collect();
            let limits = FetchLimits { bytes: 100, time: Duration::from_millis(500) };
            Fetcher::new(&hosts).fetch(url, limits)
        }

        #[test]
        fn named_hosts_are_asked_and_no_others() {
            let address = host(answer("200 OK", "", b"picture"), Duration::ZERO);
            let url = format!("http://{address}/a.png");
            assert_eq!(fetch(&["127.0.0.1"], &url), Ok(b"picture".to_vec()));
            assert_eq!(fetch(&["a.org", &address.to_string()], &url), Ok(b"picture".to_vec()));
            for (hosts, url) in [
                (&["a.org"][..], url.clone()),
                (&["127.0.0.1:1"], url.clone()),
                (&["a.org"], format!("http://a.org@{address}/")),
                (&["a.org"], "http://b.a.org/".into()),
                (&[".a.org"], "http://a.org.b/".into()),
                (&[".a.org"], "http://xa.org/".into()),
            ] {
                let problem = fetch(hosts, &url).expect_err("refused");
                assert!(
                    problem.contains("--allow-image-urls") || problem.contains("in front"),
                    "{url}: {problem}"
                );
            }
        }

        /// Names as a hosts file has them.
        #[derive(Debug)]
        struct Names(Vec<(&'static str, Vec<SocketAddr>)>);

        impl Resolver for Names {
            fn resolve(
                &self,
                uri: &Uri,
                _: &Config,
                _: NextTimeout,
            ) -> Result<ResolvedSocketAddrs, ureq::Error> {
                let (_, addresses) = self
                    .0
                    .iter()
                    .find(|(name, _)| uri.host() == Some(name))
                    .ok_or(ureq::Error::HostNotFound)?;
                let mut found = self.empty();
                addresses.iter().for_each(|address| found.push(*address));
                Ok(found)
            }
        }

        #[test]
        fn a_name_that_leads_to_a_private_address_is_refused_before_anybody_is_asked() {
            let address = host(answer("200 OK", "", b"picture"), Duration::ZERO);
            let public: SocketAddr = "8.8.8.8:80".parse().expect("an address");
            let names = [
                ("rebound.test", vec![address]),
                ("mixed.test", vec![public, address]),
                ("inner.test", vec!["[::ffff:10.0.0.1]:80".parse().expect("an address")]),
                ("localhost", vec![address]),
            ];
            let hosts: Vec<String> = names.iter().map(|(name, _)| name.to_string()).collect();
            let fetcher = Fetcher::with(&hosts, Names(names.to_vec()));
            let limits = FetchLimits { bytes: 100, time: Duration::from_secs(5) };
            for name in ["rebound.test", "mixed.test", "inner.test"] {
                let problem = fetcher.fetch(&format!("http://{name}/a.png"), limits).expect_err("refused");
                assert!(problem.contains("its name leads to a private address"), "{name}: {problem}");
            }
            // The user has allowed localhost by name. The same answer shows that the names above were found.
            assert_eq!(fetcher.fetch("http://localhost/a.png", limits), Ok(b"picture".to_vec()));
        }

        #[test]
        fn redirects_sizes_and_times_have_their_limits() {
            let limits = [
                (
                    answer("302 Found", "location: http://127.0.0.1:1/\r\n", b""),
                    Duration::ZERO,
                    "not followed",
                ),
                (answer("404 Not Found", "", b""), Duration::ZERO, "status 404"),
                (answer("200 OK", "", &[7; 101]), Duration::ZERO, "more than 100 bytes"),
                (answer("200 OK", "", b"late"), Duration::from_secs(2), "within 0.5 s"),
            ];
            for (answer, pause, expected) in limits {
                let url = format!("http://{}/", host(answer, pause));
                let problem = fetch(&["127.0.0.1"], &url).expect_err("refused");
                assert!(problem.contains(expected), "{problem}");
            }
        }

        #[test]
        fn private_addresses_are_told_from_public_ones() {
            for private in [
                "127.0.0.1",
                "10.1.2.3",
                "172.16.0.1",
                "192.168.1.1",
                "169.254.169.254",
                "0.0.0.0",
                "100.64.0.1",
                "224.0.0.1",
                "255.255.255.255",
                "198.18.0.1",
                "::1",
                "::",
                "fe80::1",
                "fd00::1",
                "ff02::1",
                "::ffff:127.0.0.1",
                "64:ff9b::1",
                "2002:7f00:1::",
                "2001:db8::1",
                "2001::1",
            ] {
                assert!(!is_public(private.parse().expect("an address")), "{private}");
            }
            for public in ["8.8.8.8", "100.63.0.1", "172.32.0.1", "2606:4700::1111", "2001:4860::8888"] {
                assert!(is_public(public.parse().expect("an address")), "{public}");
            }
        }
    }
}
