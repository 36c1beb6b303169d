//! OpenAI's API. Only this module knows its JSON.

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod embeddings;
mod messages;
pub(crate) mod responses;
mod tools;

use serde_json::{Value, json};

use crate::answer::{Ending, TokenInfo, Usage};

fn usage_json(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    })
}

/// Sums the usage of several answers. Each group of `choices` answers shares one prompt, which counts once.
fn total(usages: &[Usage], choices: usize) -> Usage {
    let mut sum = Usage::default();
    for answers in usages.chunks(choices.max(1)) {
        sum.prompt += answers[0].prompt;
        sum.cached += answers.iter().map(|a| a.cached).max().unwrap_or(0);
        sum.completion += answers.iter().map(|a| a.completion).sum::<usize>();
        sum.reasoning += answers.iter().map(|a| a.reasoning).sum::<usize>();
    }
    sum
}

fn finish_reason(ending: Ending) -> &'static str {
    match ending {
        Ending::Stop => "stop",
        Ending::Length => "length",
        Ending::ToolCalls => "tool_calls",
    }
}

/// Fields that every object of one response repeats.
struct ChunkHeader {
    id: String,
    created: u64,
    model: String,
    /// The last chunk of a stream has the usage, so the others say that they have none.
    with_usage: bool,
}

impl ChunkHeader {
    fn object(&self, kind: &str, choices: Value) -> Value {
        let mut object = json!({
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        });
        if self.with_usage {
            object["usage"] = Value::Null;
        }
        object
    }
}

/// Most alternatives for each token whose log probabilities may be asked for.
const TOP_LOGPROBS_MAX: usize = 20;

/// JSON has no infinity. OpenAI writes this value for it.
fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}

fn logprob_json(token: &[u8], logprob: f32) -> Value {
    json!({"token": String::from_utf8_lossy(token), "logprob": finite(logprob), "bytes": token})
}

fn chat_logprobs(tokens: &[TokenInfo]) -> Value {
    let token = |info: &TokenInfo| {
        let mut entry = logprob_json(&info.bytes, info.logprobs.drawn);
        let top = info.top_bytes.iter().zip(&info.logprobs.top);
        entry["top_logprobs"] = top.map(|(token, &(_, logprob))| logprob_json(token, logprob)).collect();
        entry
    };
    json!({"content": tokens.iter().map(token).collect::<Vec<_>>()})
}
