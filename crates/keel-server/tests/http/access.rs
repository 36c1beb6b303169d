//! Access control: keys, hosts, origins, and body types that web pages cannot send.

use crate::common::{Reply, Running, engine_options, read, request, send, wait_for};
use keel_server::{ApiKey, KeyLimits, ServerOptions};
use serde_json::json;

fn code(reply: &Reply) -> (u16, String) {
    (reply.status, reply.json()["error"]["code"].as_str().unwrap_or_default().to_string())
}

fn get(server: &Running, headers: &[(&str, &str)]) -> Reply {
    request(server.address, "GET", "/v1/models", headers, b"")
}

fn post(server: &Running, headers: &[(&str, &str)]) -> Reply {
    let body = json!({"prompt": "Once", "max_tokens": 2}).to_string();
    request(server.address, "POST", "/v1/completions", headers, body.as_bytes())
}

#[test]
fn pages_of_other_sites_cannot_drive_a_loopback_server() {
    let server = Running::start();
    let foreign_host = [("host", "attacker.com")];
    assert_eq!(code(&get(&server, &foreign_host)), (403, "host_not_allowed".into()));
    assert_eq!(code(&post(&server, &foreign_host)), (403, "host_not_allowed".into()));
    for path in ["/", "/health", "/status", "/metrics", "/nothing"] {
        assert_eq!(request(server.address, "GET", path, &foreign_host, b"").status, 403, "{path}");
    }
    let foreign_page = [("origin", "https://attacker.com")];
    assert_eq!(code(&post(&server, &foreign_page)), (403, "origin_not_allowed".into()));
    assert_eq!(code(&post(&server, &[("origin", "null")])), (403, "origin_not_allowed".into()));
    assert_eq!(request(server.address, "OPTIONS", "/v1/completions", &foreign_page, b"").status, 403);
    let own_page = [("host", "127.0.0.1:8080"), ("origin", "http://127.0.0.1:8080")];
    assert_eq!(post(&server, &own_page).status, 200);
    server.assert_all_is_back();
}

#[test]
fn bodies_are_declared_as_json() {
    let server = Running::start();
    for kind in ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"] {
        for path in ["/v1/completions", "/v1/messages", "/tokenize"] {
            let reply = request(server.address, "POST", path, &[("content-type", kind)], b"{}");
            assert_eq!(reply.status, 415, "{path} {kind}: {}", reply.body);
        }
    }
    for kind in ["application/json", "Application/JSON; charset=utf-8"] {
        assert_eq!(post(&server, &[("content-type", kind)]).status, 200, "{kind}");
    }
}

#[test]
fn bodies_that_are_compressed_are_refused() {
    let server = Running::start();
    for coding in ["gzip", "identity, br"] {
        let reply = post(&server, &[("content-encoding", coding)]);
        assert_eq!(code(&reply), (415, "unsupported_encoding".into()));
        assert!(reply.body.contains(&format!("encoded as {coding}; send it as it is")), "{}", reply.body);
    }
    let message =
        request(server.address, "POST", "/v1/messages", &[("content-encoding", "gzip")], b"\x1f\x8b");
    assert_eq!((message.status, &message.json()["type"]), (415, &json!("error")));
    assert_eq!(post(&server, &[("content-encoding", "Identity")]).status, 200);
}

#[test]
fn sites_that_are_named_may_call() {
    let options =
        ServerOptions { cors_origins: vec!["https://Example.org/".into()], ..ServerOptions::default() };
    let server = Running::with(engine_options(), options);
    let named = [("origin", "https://example.org")];
    let allowed = get(&server, &named);
    assert_eq!(allowed.header("access-control-allow-origin"), Some("https://example.org"));
    assert_eq!(allowed.header("cross-origin-resource-policy"), None);
    let exposed = allowed.header("access-control-expose-headers").expect("pages may read headers");
    for name in ["x-request-id", "request-id", "retry-after", "x-should-retry"] {
        assert!(exposed.split(',').any(|one| one.trim() == name), "{name}: {exposed}");
    }
    let headers = "authorization,content-type";
    let preflight =
        [named[0], ("access-control-request-method", "POST"), ("access-control-request-headers", headers)];
    let asked = request(server.address, "OPTIONS", "/v1/completions", &preflight, b"");
    assert_eq!(
        (asked.status, asked.header("access-control-allow-origin")),
        (200, Some("https://example.org"))
    );
    assert_eq!(
        asked.header("access-control-allow-headers"),
        Some(headers),
        "`*` does not cover authorization"
    );
    assert_eq!(asked.header("access-control-max-age"), Some("600"));
    assert_eq!(get(&server, &[("origin", "https://example.com")]).status, 403);
}

#[test]
fn answers_tell_browsers_what_not_to_do() {
    let server = Running::start();
    for path in ["/", "/status", "/nothing"] {
        let reply = server.get(path);
        assert_eq!(reply.header("x-content-type-options"), Some("nosniff"), "{path}");
        assert_eq!(reply.header("x-frame-options"), Some("DENY"), "{path}");
        assert_eq!(reply.header("cross-origin-resource-policy"), Some("same-origin"), "{path}");
        assert_eq!(reply.header("referrer-policy"), Some("no-referrer"), "{path}");
    }
}

#[test]
fn no_path_leads_out_of_the_server() {
    let server = Running::start();
    for path in
        ["/../Cargo.toml", "/%2e%2e/Cargo.toml", "/..%2fCargo.toml", "//etc/passwd", "/assets/../../x"]
    {
        assert_eq!(server.get(path).status, 404, "{path}");
    }
}

#[test]
fn a_key_is_asked_for_everywhere_but_at_health() {
    let keys = vec![ApiKey::new("a", "secret").expect("a key")];
    let server = Running::with(engine_options(), ServerOptions { keys, ..ServerOptions::default() });
    assert_eq!(server.get("/health").status, 200);
    let status = |headers: &[(&str, &str)]| get(&server, headers).status;
    let without = get(&server, &[]);
    assert_eq!((without.status, without.header("www-authenticate")), (401, Some("Bearer")));
    assert_eq!(status(&[("authorization", "Bearer wrong!")]), 401);
    assert_eq!(status(&[("authorization", "Bearer secret")]), 200);
    assert_eq!(status(&[("authorization", "bearer secret")]), 200);
    assert_eq!(status(&[("x-api-key", "secret")]), 200);
    assert_eq!(server.get("/metrics").status, 401);
    // Anthropic's API has a form of its own.
    let message = request(server.address, "POST", "/v1/messages", &[], b"{}");
    let error = json!({"type": "error", "error": {"type": "authentication_error",
        "message": message.json()["error"]["message"]}});
    assert_eq!((message.status, message.header("www-authenticate")), (401, Some("Bearer")));
    assert_eq!(message.json(), error);
    // So have its clients on every path. They send this header.
    let anthropics = [("anthropic-version", "2023-06-01")];
    for path in ["/v1/models", "/v1/models/demo"] {
        let reply = request(server.address, "GET", path, &anthropics, b"");
        assert_eq!((reply.status, reply.json()), (401, error.clone()), "{path}");
    }
    for (method, path, status) in [("GET", "/v1/complete", 404), ("DELETE", "/health", 405)] {
        let reply = request(server.address, method, path, &anthropics, b"");
        assert_eq!((reply.status, &reply.json()["type"]), (status, &json!("error")), "{path}");
        let reply = request(server.address, method, path, &[], b"");
        assert_eq!((reply.status, &reply.json()["type"]), (status, &json!(null)), "{path}");
    }
}

#[test]
fn a_key_has_limits_of_its_own() {
    let text = "busy k-1 at-once=1\nslow k-2 per-minute=2\nfree k-3";
    let keys = ApiKey::parse_list(text, KeyLimits::default()).expect("right");
    let server = Running::with(engine_options(), ServerOptions { keys, ..ServerOptions::default() });
    let with = |key: &'static str| [("x-api-key", key)];
    let long = json!({"prompt": "Once", "max_tokens": 1500, "ignore_eos": true, "stream": true}).to_string();
    let running = send(server.address, "POST", "/v1/completions", &with("k-1"), long.as_bytes());
    wait_for("it runs", || server.model.engine.status().running.len() == 1);
    let second = post(&server, &with("k-1"));
    assert_eq!(code(&second), (429, "key_busy".into()));
    assert!(second.header("retry-after").is_some());
    assert_eq!(get(&server, &with("k-1")).status, 200, "reading is not counted");
    drop(running);
    wait_for("its place is free", || post(&server, &with("k-1")).status == 200);

    let replies: Vec<Reply> = (0..3).map(|_| post(&server, &with("k-2"))).collect();
    assert_eq!((replies[0].status, replies[1].status), (200, 200));
    assert_eq!(code(&replies[2]), (429, "key_rate_limit".into()));
    let seconds = replies[2].header("retry-after").and_then(|s| s.parse::<u32>().ok());
    assert!(seconds.is_some_and(|s| (1..=30).contains(&s)), "{seconds:?}");
    for _ in 0..4 {
        assert_eq!(post(&server, &with("k-3")).status, 200);
    }
    let _ = read(send(server.address, "GET", "/health", &[], b""));
    server.assert_all_is_back();
}

#[test]
fn every_answer_names_its_request() {
    let server = Running::start();
    let name = |headers: &[(&str, &str)]| get(&server, headers).header("x-request-id").map(String::from);
    let (first, second) = (name(&[]).expect("a name"), name(&[]).expect("a name"));
    assert!(first.starts_with("req_") && first != second, "{first} {second}");
    assert_eq!(name(&[("x-request-id", "mine-7")]).as_deref(), Some("mine-7"));
    assert_ne!(name(&[("x-request-id", "two words")]).as_deref(), Some("two words"));
    let nothing = server.get("/nothing");
    assert!(nothing.header("x-request-id").is_some_and(|name| nothing.header("request-id") == Some(name)));
}

#[test]
fn what_is_wrong_with_a_request_is_said_in_json() {
    let server = Running::start();
    let reply = server.get("/v1/models/%ff");
    assert_eq!(code(&reply), (400, "invalid_value".into()));
    for (method, path, allow) in [("GET", "/v1/completions", "POST"), ("DELETE", "/v1/models", "GET,HEAD")] {
        let reply = request(server.address, method, path, &[], b"");
        assert_eq!(code(&reply), (405, "method_not_allowed".into()), "{method} {path}");
        assert_eq!(reply.header("allow"), Some(allow), "{method} {path}");
    }
    // The client sends half of the body and then closes its sending side.
    let stream = send(server.address, "POST", "/v1/completions", &[("expect", "")], b"{}");
    drop(read(stream));
    let mut stream = std::net::TcpStream::connect(server.address).expect("it listens");
    let head = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{";
    std::io::Write::write_all(&mut stream, head.as_bytes()).expect("sent");
    stream.shutdown(std::net::Shutdown::Write).expect("the client's half is closed");
    assert_eq!(code(&read(stream)), (400, "incomplete_body".into()));
}
