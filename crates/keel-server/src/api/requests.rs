//! Parses requests as the endpoints do, up to the call of the engine. The fuzz targets and the test with seeded
//! mutations use it.

use keel_engine::{LogitsRow, Sampler};
use keel_text::StopMatcher;

use crate::api::anthropic;
use crate::api::openai::{chat, completions, embeddings, responses};
use crate::api::rerank;
use crate::api::tokenize::{DetokenizeBody, TokenizeBody};
use crate::error::Result;
use crate::http::body::parse;
use crate::loaded_model::EngineRequest;
use crate::memory::requests::RequestMemory;
use crate::options::ServerOptions;
use crate::text::{Bounds, ServedText};

/// An endpoint that reads a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
    /// `/v1/responses`.
    Responses,
    /// `/v1/messages`, and its token count.
    Messages,
    /// `/v1/embeddings`.
    Embeddings,
    /// `/v1/rerank`.
    Rerank,
    /// `/tokenize`.
    Tokenize,
    /// `/detokenize`.
    Detokenize,
}

/// Parses a body and prepares everything that a request needs before it runs: prompts, sampler, stop strings and
/// grammar. Draws the first tokens of the grammar. Returns the number of prompt tokens.
///
/// # Errors
/// The body's defect. It is always an error of the client, never of the server.
pub fn read(endpoint: Endpoint, body: &[u8], text: &ServedText, vocab: usize) -> Result<usize> {
    let choices_max = ServerOptions::default().choices_max;
    let (context, context_max) = (usize::MAX, usize::MAX);
    let bounds =
        Bounds { vocab, context, context_max, answer_min: 1, choices_max, sources: None, meter: None };
    let asks = match endpoint {
        Endpoint::Chat => vec![chat::engine_request(text, &bounds, parse(body)?)?],
        Endpoint::Responses => vec![chat::engine_request(text, &bounds, responses::chat(parse(body)?)?)?],
        Endpoint::Messages => vec![chat::engine_request(text, &bounds, anthropic::chat(parse(body)?)?)?],
        Endpoint::Completions => completions::engine_requests(text, &bounds, parse(body)?)?.0,
        Endpoint::Embeddings => {
            let prompts = embeddings::prompts(text, &bounds, &parse(body)?)?;
            return Ok(prompts.iter().map(Vec::len).sum());
        }
        Endpoint::Rerank => {
            let prompts = rerank::readout_request(text, &bounds, &parse(body)?)?.prompts;
            return Ok(prompts.iter().map(Vec::len).sum());
        }
        Endpoint::Tokenize => {
            let body: TokenizeBody = parse(body)?;
            return Ok(text.tokenizer.encode(body.text()?, body.add_special_tokens)?.len());
        }
        Endpoint::Detokenize => {
            let body: DetokenizeBody = parse(body)?;
            text.tokenizer.decode(body.tokens(vocab)?, false)?;
            return Ok(body.tokens.len());
        }
    };
    for ask in &asks {
        prepare(ask, text, vocab)?;
    }
    Ok(asks.iter().map(|ask| ask.prompt.len()).sum())
}

/// Number of tokens to draw from a grammar.
const DRAWN: usize = 4;

fn prepare(ask: &EngineRequest, text: &ServedText, vocab: usize) -> Result<()> {
    StopMatcher::new(&ask.stop)?;
    // The batch refuses ids out of range before it creates a sampler.
    let known: Vec<u32> = ask.prompt.iter().copied().filter(|&id| (id as usize) < vocab).collect();
    let mut sampler = Sampler::new(ask.sampler.clone(), &known)?;
    let Some(grammar) = &ask.grammar else { return Ok(()) };
    let compiled = text.grammars.compile(grammar, RequestMemory::new(u64::MAX, 0).meter())?;
    let (mut constraint, _tables) = text.grammars.constraint(compiled, &ask.form);
    for _ in 0..DRAWN {
        let mut logits = LogitsRow::from(vec![0.0; vocab]);
        if constraint.is_complete() || constraint.mask(&mut logits.values).is_err() {
            break;
        }
        let token = sampler.sample(&mut logits);
        if constraint.accept(token).is_err() {
            break;
        }
    }
    Ok(())
}
