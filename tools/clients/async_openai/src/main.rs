//! The async-openai client: models, completions, chats, streams, tools, schemas, responses, errors. Requests and
//! answers pass through the client's own types; it stops at the first that is wrong.

use std::error::Error;

use async_openai::Client;
use async_openai::config::OpenAIConfig;
use async_openai::error::OpenAIError;
use async_openai::types::chat::{ChatCompletionMessageToolCalls, FinishReason};
use async_openai::types::responses::ResponseStreamEvent;
use futures_util::StreamExt;
use serde_json::{Value, from_value, json};

type Outcome = Result<(), Box<dyn Error>>;

struct Script {
    client: Client<OpenAIConfig>,
    model: String,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Outcome {
    let variable = |name, default: &str| std::env::var(name).unwrap_or_else(|_| default.into());
    let url = variable("KEEL_URL", "http://127.0.0.1:8080");
    let config = OpenAIConfig::new()
        .with_api_base(format!("{url}/v1"))
        .with_api_key(variable("KEEL_API_KEY", "none"));
    let client = Client::with_config(config);
    let model = client.models().list().await?.data[0].id.clone();
    assert_eq!(client.models().retrieve(&model).await?.id, model);
    let script = Script { client, model };
    script.completions().await?;
    script.chats().await?;
    script.tools().await?;
    script.schema().await?;
    script.responses().await?;
    script.errors().await?;
    println!("async-openai works");
    Ok(())
}

impl Script {
    /// A request to the model, greedy, with what `more` says.
    fn request(&self, more: Value) -> Value {
        let mut request = json!({"model": self.model, "temperature": 0});
        for (name, value) in more.as_object().into_iter().flatten() {
            request[name] = value.clone();
        }
        request
    }

    fn chat(&self, more: Value) -> Value {
        let mut request = self.request(more);
        request["messages"] = json!([{"role": "user", "content": "Tell me a story about a dog."}]);
        request
    }

    async fn completions(&self) -> Outcome {
        let request = self.request(json!({"prompt": "Once upon a time", "max_tokens": 20}));
        let whole = self.client.completions().create(from_value(request.clone())?).await?;
        assert_eq!(whole.usage.as_ref().map(|u| u.completion_tokens), Some(20));
        let mut stream = self.client.completions().create_stream(from_value(request)?).await?;
        let mut text = String::new();
        while let Some(chunk) = stream.next().await {
            text.extend(chunk?.choices.into_iter().map(|c| c.text));
        }
        assert_eq!(text, whole.choices[0].text);
        assert!(text.len() > 10, "{text:?}");
        Ok(())
    }

    async fn chats(&self) -> Outcome {
        let chat = self.chat(json!({"max_completion_tokens": 30}));
        let whole = self.client.chat().create(from_value(chat)?).await?;
        let streamed =
            self.chat(json!({"max_completion_tokens": 30, "stream": true, "stream_options": {"include_usage": true}}));
        let mut stream = self.client.chat().create_stream(from_value(streamed)?).await?;
        let (mut text, mut usage) = (String::new(), None);
        while let Some(chunk) = stream.next().await {
            let chunk = chunk?;
            usage = chunk.usage.or(usage);
            text.extend(chunk.choices.into_iter().filter_map(|c| c.delta.content));
        }
        assert_eq!(Some(&text), whole.choices[0].message.content.as_ref());
        let tokens = usage.map(|u| u.completion_tokens);
        assert_eq!(tokens, whole.usage.map(|u| u.completion_tokens));

        let several = self.chat(json!({
            "max_completion_tokens": 10, "n": 3, "seed": 5, "temperature": 1.2, "logprobs": true, "top_logprobs": 2
        }));
        let several = self.client.chat().create(from_value(several)?).await?;
        assert_eq!(several.choices.len(), 3);
        let logprobs = several.choices[0].logprobs.as_ref().and_then(|l| l.content.as_ref());
        assert_eq!(logprobs.map(|tokens| tokens[0].top_logprobs.len()), Some(2));
        Ok(())
    }

    async fn tools(&self) -> Outcome {
        let schema = json!({"type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}},
            "required": ["city"], "additionalProperties": false});
        let request = self.chat(json!({
            "max_completion_tokens": 80,
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": schema}}],
            "tool_choice": "required",
            "parallel_tool_calls": false
        }));
        let answer = self.client.chat().create(from_value(request.clone())?).await?;
        assert_eq!(answer.choices[0].finish_reason, Some(FinishReason::ToolCalls));
        let calls = answer.choices[0].message.tool_calls.as_ref().ok_or("no calls")?;
        let ChatCompletionMessageToolCalls::Function(call) = &calls[0] else { return Err("no function".into()) };
        assert_eq!(call.function.name, "weather");
        let arguments: Value = call.function.arguments.parse()?;
        assert!(arguments["city"] == "Bern" || arguments["city"] == "Rome", "{arguments}");

        let mut stream = self.client.chat().create_stream(from_value(request.clone())?).await?;
        let mut streamed = String::new();
        while let Some(chunk) = stream.next().await {
            let deltas = chunk?.choices.into_iter().filter_map(|c| c.delta.tool_calls).flatten();
            streamed.extend(deltas.filter_map(|call| call.function?.arguments));
        }
        assert_eq!(streamed.parse::<Value>()?, arguments);

        let mut next = self.chat(json!({"max_completion_tokens": 10}));
        let messages = next["messages"].as_array_mut().ok_or("no messages")?;
        messages.push(json!({"role": "assistant", "tool_calls": calls}));
        messages.push(json!({"role": "tool", "tool_call_id": call.id, "content": "sunny"}));
        let answered = self.client.chat().create(from_value(next)?).await?;
        assert!(answered.choices[0].message.content.is_some());
        Ok(())
    }

    async fn schema(&self) -> Outcome {
        let schema = json!({"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"enum": [2, 4]}},
            "required": ["kind", "legs"], "additionalProperties": false});
        let format = json!({"type": "json_schema", "json_schema": {"name": "animal", "schema": schema, "strict": true}});
        let request = self.chat(json!({"max_completion_tokens": 60, "response_format": format}));
        let answer = self.client.chat().create(from_value(request)?).await?;
        let animal: Value = answer.choices[0].message.content.as_ref().ok_or("no text")?.parse()?;
        assert!(animal["legs"] == 2 || animal["legs"] == 4, "{animal}");
        Ok(())
    }

    async fn responses(&self) -> Outcome {
        let request = self.request(json!({"input": "Tell me about a cat.", "max_output_tokens": 20}));
        let whole = self.client.responses().create(from_value(request.clone())?).await?;
        let mut stream = self.client.responses().create_stream(from_value(request)?).await?;
        let (mut text, mut ended) = (String::new(), false);
        while let Some(event) = stream.next().await {
            match event? {
                ResponseStreamEvent::ResponseOutputTextDelta(event) => text.push_str(&event.delta),
                ResponseStreamEvent::ResponseCompleted(_) | ResponseStreamEvent::ResponseIncomplete(_) => ended = true,
                _ => {}
            }
        }
        assert!(ended && !text.is_empty());
        assert_eq!(Some(text), whole.output_text());
        Ok(())
    }

    async fn errors(&self) -> Outcome {
        let mut other = self.chat(json!({}));
        other["model"] = json!("other");
        // More tokens than the context holds are no error: the answer ends with `length` where the context does.
        let wrong = [other, self.chat(json!({"top_p": 2})), self.chat(json!({"temperature": -1}))];
        for request in wrong {
            match self.client.chat().create(from_value(request)?).await {
                Err(OpenAIError::ApiError(error)) => println!("refused: {error}"),
                other => return Err(format!("an error was expected: {other:?}").into()),
            }
        }
        Ok(())
    }
}
