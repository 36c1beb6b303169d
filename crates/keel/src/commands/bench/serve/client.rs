//! A minimal HTTP client for the load: one request per connection, chunked answers.

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::events::{Events, PIECE_BYTES_MAX};
use super::load::Planned;

/// Most bytes of a line of a head, or of the line before a piece.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// Most bytes of an answer that is read whole.
const BODY_BYTES_MAX: usize = 16 << 20;

/// The target of the load.
pub struct Client {
    authority: String,
    key: Option<String>,
    model: String,
}

/// An answer, with the times of its tokens.
pub struct Answer {
    pub text: String,
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub completion_tokens: usize,
    /// Seconds from the request's arrival to the first text.
    pub first_s: f64,
    /// When each piece of text came.
    pub pieces: Vec<Instant>,
    /// Seconds from the request's arrival to the end.
    pub total_s: f64,
    asked: Instant,
}

impl Answer {
    /// The answer before its first token.
    pub fn asked_at(asked: Instant) -> Answer {
        Answer {
            text: String::new(),
            prompt_tokens: 0,
            cached_tokens: 0,
            completion_tokens: 0,
            first_s: 0.0,
            pieces: Vec::new(),
            total_s: 0.0,
            asked,
        }
    }

    /// Adds the wait before sending, so that times count from the request's arrival.
    pub fn waited(&mut self, arrived: Instant) {
        let wait_s = self.asked.saturating_duration_since(arrived).as_secs_f64();
        self.first_s += wait_s;
        self.total_s += wait_s;
    }
}

type Reader = BufReader<TcpStream>;

/// A response whose body is not read yet.
struct Response {
    reader: Reader,
    chunked: bool,
}

impl Client {
    /// Creates a client for a server.
    ///
    /// # Errors
    /// The address does not begin with `http://`.
    pub fn new(url: &str, key: Option<String>) -> Result<Client> {
        let Some(rest) = url.strip_prefix("http://") else {
            bail!("--url {url}: expected an address that begins with http://");
        };
        let authority = rest.split('/').next().unwrap_or_default();
        let authority = if authority.contains(':') { authority.into() } else { format!("{authority}:80") };
        Ok(Client { authority, key, model: String::new() })
    }

    /// Selects the model.
    pub fn set_model(&mut self, model: String) {
        self.model = model;
    }

    /// The first model in the server's list.
    ///
    /// # Errors
    /// The server does not answer, or lists no model.
    pub async fn first_model(&self) -> Result<String> {
        let models = self.get("/v1/models").await?;
        Ok(models["data"][0]["id"].as_str().context("the server names no model")?.to_string())
    }

    /// Peak bytes of the server's memory categories, if it reports them.
    pub async fn memory(&self) -> Option<Value> {
        let status = self.get("/status").await.ok()?;
        status.get("peak").cloned()
    }

    /// Requests an answer and streams it.
    ///
    /// # Errors
    /// Errors of the network or of the server.
    pub async fn ask(&self, planned: &Planned) -> Result<Answer> {
        let body = json!({
            "model": self.model,
            "prompt": planned.prompt,
            "max_tokens": planned.max_tokens,
            "temperature": 0,
            "ignore_eos": true,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let asked = Instant::now();
        let mut response = self.send("POST", "/v1/completions", &body.to_string()).await?;
        let mut answer = Answer::asked_at(asked);
        let mut events = Events::default();
        while let Some(chunk) = response.chunk().await? {
            for event in events.push(&chunk)? {
                if let Some(message) = event["error"]["message"].as_str() {
                    bail!("{message}");
                }
                take_usage(&mut answer, &event["usage"]);
                let text = event["choices"][0]["text"].as_str().unwrap_or_default();
                if text.is_empty() {
                    continue;
                }
                let now = Instant::now();
                if answer.pieces.is_empty() {
                    answer.first_s = (now - asked).as_secs_f64();
                }
                answer.pieces.push(now);
                answer.text.push_str(text);
            }
        }
        // A server that reports no usage streams one token per piece.
        if answer.completion_tokens == 0 {
            answer.completion_tokens = answer.pieces.len();
        }
        answer.total_s = asked.elapsed().as_secs_f64();
        Ok(answer)
    }

    async fn get(&self, path: &str) -> Result<Value> {
        let mut response = self.send("GET", path, "").await?;
        Ok(serde_json::from_slice(&response.all().await?)?)
    }

    async fn send(&self, method: &str, path: &str, body: &str) -> Result<Response> {
        let stream = TcpStream::connect(&self.authority)
            .await
            .with_context(|| format!("no server answers at {}", self.authority))?;
        stream.set_nodelay(true)?;
        let mut reader = BufReader::new(stream);
        let key = self.key.as_ref().map_or(String::new(), |key| format!("authorization: Bearer {key}\r\n"));
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n{key}content-type: application/json\r\n\
             content-length: {}\r\n\r\n",
            self.authority,
            body.len()
        );
        reader.get_mut().write_all(head.as_bytes()).await?;
        reader.get_mut().write_all(body.as_bytes()).await?;
        let mut line = String::new();
        read_line(&mut reader, &mut line).await?;
        let status = line.split(' ').nth(1).unwrap_or_default().to_string();
        let mut chunked = false;
        loop {
            line.clear();
            if read_line(&mut reader, &mut line).await? == 0 || line.trim_end().is_empty() {
                break;
            }
            let header = line.trim_end().to_ascii_lowercase();
            chunked |= header.starts_with("transfer-encoding:") && header.ends_with("chunked");
        }
        let mut response = Response { reader, chunked };
        if status != "200" {
            let body = response.all().await?;
            bail!("the server answered {status}: {}", String::from_utf8_lossy(&body));
        }
        Ok(response)
    }
}

fn take_usage(answer: &mut Answer, usage: &Value) {
    let count = |value: &Value| value.as_u64().map(|n| n as usize);
    if let Some(completion) = count(&usage["completion_tokens"]) {
        answer.completion_tokens = completion;
        answer.prompt_tokens = count(&usage["prompt_tokens"]).unwrap_or(0);
        answer.cached_tokens = count(&usage["prompt_tokens_details"]["cached_tokens"]).unwrap_or(0);
    }
}

impl Response {
    /// The next piece of the body, or `None` at its end.
    async fn chunk(&mut self) -> Result<Option<Vec<u8>>> {
        if !self.chunked {
            let mut rest = vec![0; 64 << 10];
            let read = self.reader.read(&mut rest).await?;
            rest.truncate(read);
            return Ok(Some(rest).filter(|rest| !rest.is_empty()));
        }
        let mut line = String::new();
        read_line(&mut self.reader, &mut line).await?;
        let size = usize::from_str_radix(line.trim().split(';').next().unwrap_or_default(), 16);
        let size = size.context("the answer was cut off")?;
        if size > PIECE_BYTES_MAX {
            bail!("the server sent {size} bytes in one piece");
        }
        let mut chunk = vec![0; size + 2];
        self.reader.read_exact(&mut chunk).await?;
        chunk.truncate(size);
        Ok(Some(chunk).filter(|chunk| !chunk.is_empty()))
    }

    async fn all(&mut self) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        while let Some(chunk) = self.chunk().await? {
            body.extend(chunk);
            if body.len() > BODY_BYTES_MAX {
                bail!("the server sent more than {BODY_BYTES_MAX} bytes at once");
            }
        }
        Ok(body)
    }
}

/// Reads a line of a head or of the size of a piece. Returns its bytes.
async fn read_line(reader: &mut Reader, line: &mut String) -> Result<usize> {
    let bytes = reader.take(LINE_BYTES_MAX).read_line(line).await?;
    if bytes as u64 == LINE_BYTES_MAX {
        bail!("the server sent a line of more than {LINE_BYTES_MAX} bytes");
    }
    Ok(bytes)
}
