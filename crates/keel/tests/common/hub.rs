//! A local hub for tests, with configurable faults.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use ring::digest::{SHA256, digest};
use serde_json::{Value, json};

/// The commit of every branch and tag.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Files of at least this size count as large: the hub reports their SHA-256.
const LARGE_BYTES: usize = 10_000;

/// A request that the hub received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    pub path: String,
    /// The first requested byte.
    pub start: Option<usize>,
    pub token: Option<String>,
}

/// Behaviour of the hub.
#[derive(Clone, Debug, Default)]
pub struct Manners {
    /// Requires this token.
    pub token: Option<&'static str>,
    /// Ends each answer after this number of bytes.
    pub cut_after: Option<usize>,
    /// Reports wrong hashes.
    pub lies: bool,
    /// Redirects requests for large files to another host.
    pub redirects: bool,
    /// Does not answer requests for this file until its behaviour changes.
    pub holds_back: Option<&'static str>,
}

/// A hub with one model, `owner/name`. It lives as long as the process.
pub struct Hub {
    pub endpoint: String,
    asked: Arc<Mutex<Vec<Asked>>>,
    manners: Arc<Mutex<Manners>>,
}

struct Shelf {
    files: Vec<(String, Vec<u8>)>,
    port: u16,
    asked: Arc<Mutex<Vec<Asked>>>,
    manners: Arc<Mutex<Manners>>,
}

impl Hub {
    /// Starts a hub with these files.
    pub fn start(files: Vec<(String, Vec<u8>)>, manners: Manners) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let port = listener.local_addr().expect("bound").port();
        let (asked, manners) = (Arc::default(), Arc::new(Mutex::new(manners)));
        let shelf = Shelf { files, port, asked: Arc::clone(&asked), manners: Arc::clone(&manners) };
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // A client that disconnects does not matter to the hub.
                let _ = shelf.answer(stream);
            }
        });
        Hub { endpoint: format!("http://127.0.0.1:{port}"), asked, manners }
    }

    /// Requests since the last call.
    pub fn take_asked(&self) -> Vec<Asked> {
        std::mem::take(&mut *lock(&self.asked))
    }

    /// Changes the behaviour.
    pub fn behave(&self, manners: Manners) {
        *lock(&self.manners) = manners;
    }

    /// Runs keel with this hub, and with its cache in `home`.
    pub fn keel(&self, home: &Path, args: &[&str], variables: &[(&str, &str)]) -> Output {
        keel_with_hub(&self.endpoint, home, args, variables)
    }
}

/// Runs keel with a hub, and with its cache in `home`.
pub fn keel_with_hub(endpoint: &str, home: &Path, args: &[&str], variables: &[(&str, &str)]) -> Output {
    command_with_hub(endpoint, home, args).envs(variables.iter().copied()).output().expect("keel starts")
}

/// The command that runs keel with a hub, and with its cache in `home`.
pub fn command_with_hub(endpoint: &str, home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_keel"));
    command
        .args(args)
        .env_remove("HF_TOKEN")
        .env_remove("HF_HUB_CACHE")
        .env_remove("HF_HUB_OFFLINE")
        .env("HF_ENDPOINT", endpoint)
        .env("HF_HOME", home)
        .env("KEEL_DEVICE", "cpu")
        .stdin(Stdio::null());
    command
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(|e| e.into_inner())
}

/// The SHA-256 of bytes, in the hub's format.
pub fn sha256(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn read_request(stream: &TcpStream) -> std::io::Result<Asked> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().unwrap_or(Ok(String::new()))?;
    let path = request.split(' ').nth(1).unwrap_or_default().to_string();
    let mut asked = Asked { path, start: None, token: None };
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(':') else { break };
        match name.to_ascii_lowercase().as_str() {
            "range" => {
                let bytes = value.trim().strip_prefix("bytes=").expect("bytes");
                asked.start = bytes.split('-').next().expect("a start").parse().ok();
            }
            "authorization" => asked.token = value.trim().strip_prefix("Bearer ").map(str::to_string),
            _ => {}
        }
    }
    Ok(asked)
}

impl Shelf {
    fn answer(&self, stream: TcpStream) -> std::io::Result<()> {
        let asked = read_request(&stream)?;
        lock(&self.asked).push(asked.clone());
        let manners = lock(&self.manners).clone();
        let is_elsewhere = asked.path.starts_with("/elsewhere/");
        if !is_elsewhere && manners.token.is_some_and(|token| asked.token.as_deref() != Some(token)) {
            let header = "x-error-code: GatedRepo\r\n";
            return respond(stream, "401 Unauthorized", header, b"", usize::MAX);
        }
        if asked.path.starts_with("/api/models/owner/name/revision/") {
            return respond(stream, "200 OK", "", self.listing(&manners).as_bytes(), usize::MAX);
        }
        let resolve = format!("/owner/name/resolve/{COMMIT}/");
        let file = asked.path.strip_prefix(&resolve).or(asked.path.strip_prefix("/elsewhere/"));
        let Some((name, bytes)) = file.and_then(|file| self.files.iter().find(|(name, _)| name == file))
        else {
            return respond(stream, "404 Not Found", "", b"", usize::MAX);
        };
        while lock(&self.manners).holds_back == Some(name.as_str()) {
            std::thread::sleep(Duration::from_millis(5));
        }
        if manners.redirects && !is_elsewhere && bytes.len() >= LARGE_BYTES {
            let header = format!("Location: http://localhost:{}/elsewhere/{name}\r\n", self.port);
            return respond(stream, "302 Found", &header, b"", usize::MAX);
        }
        let cut = manners.cut_after.unwrap_or(usize::MAX);
        match asked.start {
            None => respond(stream, "200 OK", "", bytes, cut),
            Some(start) => {
                let header = format!("Content-Range: bytes {start}-{}/{}\r\n", bytes.len() - 1, bytes.len());
                respond(stream, "206 Partial Content", &header, &bytes[start..], cut)
            }
        }
    }

    fn listing(&self, manners: &Manners) -> String {
        let sibling = |(name, bytes): &(String, Vec<u8>)| {
            let blob = &sha256(name.as_bytes())[..40];
            let mut sibling = json!({"rfilename": name, "size": bytes.len(), "blobId": blob});
            if bytes.len() >= LARGE_BYTES {
                let hash = if manners.lies { sha256(b"something else") } else { sha256(bytes) };
                sibling["lfs"] = json!({"sha256": hash, "size": bytes.len(), "pointerSize": 134});
            }
            sibling
        };
        let siblings: Vec<Value> = self.files.iter().map(sibling).collect();
        json!({"siblings": siblings, "sha": COMMIT}).to_string()
    }
}

/// Announces the whole body, but sends at most `cut` bytes of it.
fn respond(
    mut stream: TcpStream,
    status: &str,
    headers: &str,
    body: &[u8],
    cut: usize,
) -> std::io::Result<()> {
    let length = body.len();
    write!(stream, "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n")?;
    stream.write_all(&body[..cut.min(length)])
}
