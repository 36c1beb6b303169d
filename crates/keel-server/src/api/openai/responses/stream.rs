//! The events of a streamed response.

use axum::response::sse::Event;
use keel_text::AnswerPart;
use serde_json::{Value, json};

use super::{ChunkHeader, Kind, call_item, status};
use crate::answer::{Answer, AnswerEvent};
use crate::collect::Outbox;
use crate::error::{Result, ServerError};
use crate::http::body::error_json;
use crate::shared::fresh_id;

/// The item that is being streamed.
struct Open {
    kind: Kind,
    id: String,
    text: String,
}

struct Stream {
    head: ChunkHeader,
    outbox: Outbox,
    sequence: usize,
    output: Vec<Value>,
    open: Option<Open>,
}

impl Stream {
    async fn send(&mut self, kind: &str, fields: Value) -> Result<()> {
        let mut event = json!({"type": kind, "sequence_number": self.sequence});
        self.sequence += 1;
        if let (Value::Object(event), Value::Object(fields)) = (&mut event, fields) {
            event.extend(fields);
        }
        self.outbox.text(Event::default().event(kind), event.to_string()).await
    }

    fn index(&self) -> usize {
        self.output.len()
    }

    async fn add(&mut self, item: Value) -> Result<()> {
        let fields = json!({"output_index": self.index(), "item": item});
        self.send("response.output_item.added", fields).await
    }

    async fn done(&mut self, item: Value) -> Result<()> {
        let fields = json!({"output_index": self.index(), "item": item});
        self.send("response.output_item.done", fields).await?;
        self.output.push(item);
        Ok(())
    }

    async fn text(&mut self, kind: Kind, delta: &str) -> Result<()> {
        if self.open.as_ref().is_none_or(|open| open.kind != kind) {
            self.close("completed").await?;
            let id = fresh_id(if kind == Kind::Message { "msg_" } else { "rs_" });
            self.add(kind.item(&id, "", "in_progress")).await?;
            let mut fields = self.place(&id);
            fields["part"] = kind.part("");
            self.send("response.content_part.added", fields).await?;
            self.open = Some(Open { kind, id, text: String::new() });
        }
        let Some(open) = &mut self.open else { return Ok(()) };
        open.text.push_str(delta);
        let id = open.id.clone();
        let mut fields = self.place(&id);
        fields["delta"] = json!(delta);
        self.send_text(kind, "delta", fields).await
    }

    /// Where an item's part stands.
    fn place(&self, id: &str) -> Value {
        json!({"item_id": id, "output_index": self.index(), "content_index": 0})
    }

    async fn send_text(&mut self, kind: Kind, event: &str, mut fields: Value) -> Result<()> {
        if kind == Kind::Message {
            fields["logprobs"] = json!([]);
        }
        self.send(&format!("response.{}.{event}", kind.part_type()), fields).await
    }

    async fn call(&mut self, name: &str, arguments: &str) -> Result<()> {
        self.close("completed").await?;
        let (id, call_id) = (fresh_id("fc_"), fresh_id("call_"));
        self.add(call_item(&id, &call_id, name, "", "in_progress")).await?;
        let index = self.index();
        let delta = json!({"item_id": id, "output_index": index, "delta": arguments});
        self.send("response.function_call_arguments.delta", delta).await?;
        let whole = json!({"item_id": id, "output_index": index, "name": name, "arguments": arguments});
        self.send("response.function_call_arguments.done", whole).await?;
        self.done(call_item(&id, &call_id, name, arguments, "completed")).await
    }

    /// Ends the open item.
    async fn close(&mut self, status: &str) -> Result<()> {
        let Some(Open { kind, id, text }) = self.open.take() else { return Ok(()) };
        let place = self.place(&id);
        let (mut whole, mut part) = (place.clone(), place);
        whole["text"] = json!(text);
        self.send_text(kind, "done", whole).await?;
        part["part"] = kind.part(&text);
        self.send("response.content_part.done", part).await?;
        self.done(kind.item(&id, &text, status)).await
    }

    /// Sends an answer. Its parts, which are kept until its end, are charged to the request.
    async fn answer(&mut self, answer: &mut Answer) -> Result<()> {
        let begun = json!({"response": self.head.response("in_progress", &[], None)});
        self.send("response.created", begun.clone()).await?;
        self.send("response.in_progress", begun).await?;
        while let Some(event) = answer.next().await? {
            answer.charge(&event)?;
            match event {
                AnswerEvent::Part(part, _) => match part {
                    AnswerPart::Text(text) => self.text(Kind::Message, &text).await?,
                    AnswerPart::Reasoning(text) => self.text(Kind::Reasoning, &text).await?,
                    AnswerPart::ToolCall { name, arguments } => self.call(&name, &arguments).await?,
                },
                AnswerEvent::Tokens(_) => {}
                AnswerEvent::End(ending, _) => {
                    let state = status(ending);
                    self.close(state).await?;
                    let response = self.head.response(state, &self.output, Some(answer.usage()));
                    self.send(&format!("response.{state}"), json!({"response": response})).await?;
                }
            }
        }
        Ok(())
    }

    /// Reports an error, with the items that were complete before it where there is room for them.
    async fn fail(&mut self, error: &ServerError) -> Result<()> {
        let has_room =
            !matches!(error, ServerError::RequestMemory { .. } | ServerError::RequestTooLarge { .. });
        let output = if has_room { &self.output[..] } else { &[] };
        let mut response = self.head.response("failed", output, None);
        response["error"] = error_json(error)["error"].clone();
        self.send("response.failed", json!({"response": response})).await
    }
}

pub(super) async fn stream(head: ChunkHeader, mut answer: Answer, outbox: Outbox) -> Result<()> {
    let mut stream = Stream { head, outbox, sequence: 0, output: Vec::new(), open: None };
    match stream.answer(&mut answer).await {
        Ok(()) => Ok(()),
        Err(error) => {
            tracing::warn!("{error}");
            stream.fail(&error).await
        }
    }
}
