//! Converts OpenAI's messages to the form for chat templates.

use keel_text::Message;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::api::field_names::other_fields;
use crate::error::{Result, wrong};
use crate::pictures::{MediaSource, VideoInput, VideoSource};

/// A message of a conversation.
#[derive(Debug, Deserialize)]
#[serde(expecting = "a message, an object with a role")]
pub(crate) struct ChatMessage {
    role: String,
    #[serde(default)]
    content: Content,
    #[serde(default)]
    tool_calls: Option<Vec<Value>>,
    #[serde(flatten, deserialize_with = "other_fields")]
    rest: Map<String, Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(untagged, expecting = "content is a text or a list of parts")]
enum Content {
    #[default]
    None,
    Text(String),
    Parts(Vec<Map<String, Value>>),
}

/// A conversation as templates expect it, and its pictures and videos in order.
#[derive(Debug)]
pub(crate) struct Conversation {
    pub messages: Vec<Message>,
    pub pictures: Vec<MediaSource>,
}

/// The messages as templates iterate over them: text parts are joined, and the arguments of calls are objects. A
/// message that shows pictures stays a list of parts. System messages at the start become one, because many templates
/// take only one.
pub(crate) fn to_template(messages: Vec<ChatMessage>) -> Result<Conversation> {
    let (mut pictures, mut converted) = (Vec::new(), Vec::<Message>::new());
    for message in messages {
        let message = one(message, &mut pictures)?;
        match &mut converted[..] {
            [first] if first.role == "system" && message.role == "system" => {
                first.content = joined(first.content.take(), message.content);
            }
            _ => converted.push(message),
        }
    }
    Ok(Conversation { messages: converted, pictures })
}

/// Two contents with a blank line between them. An empty text is left out.
fn joined(first: Value, second: Value) -> Value {
    const BLANK_LINE: &str = "\n\n";
    match (first, second) {
        (Value::String(none), other) | (other, Value::String(none)) if none.is_empty() => other,
        (Value::String(mut text), Value::String(more)) => {
            text.push_str(BLANK_LINE);
            text.push_str(&more);
            Value::String(text)
        }
        (first, second) => {
            let parts = |content: Value| match content {
                Value::Array(parts) => parts,
                text => vec![json!({"type": "text", "text": text})],
            };
            let mut all = parts(first);
            all.push(json!({"type": "text", "text": BLANK_LINE}));
            all.extend(parts(second));
            Value::Array(all)
        }
    }
}

impl ChatMessage {
    /// Whether it shows pictures or videos.
    pub fn shows_pictures(&self) -> bool {
        match &self.content {
            Content::Parts(parts) => parts.iter().any(|part| is_picture(kind_of(part))),
            Content::None | Content::Text(_) => false,
        }
    }
}

fn kind_of(part: &Map<String, Value>) -> &str {
    part.get("type").and_then(Value::as_str).unwrap_or_default()
}

fn is_picture(kind: &str) -> bool {
    matches!(kind, "image_url" | "input_image" | "image") || is_video(kind)
}

fn is_video(kind: &str) -> bool {
    matches!(kind, "video_url" | "input_video" | "video")
}

fn one(message: ChatMessage, pictures: &mut Vec<MediaSource>) -> Result<Message> {
    let role = match message.role.as_str() {
        "developer" => "system",
        "function" => "tool",
        role @ ("system" | "user" | "assistant" | "tool") => role,
        other => return Err(wrong("messages", format!("there is no role {other:?}"))),
    };
    let mut extra = Map::new();
    for key in ["name", "tool_call_id", "reasoning_content"] {
        extra.extend(message.rest.get(key).filter(|v| v.is_string()).map(|v| (key.to_string(), v.clone())));
    }
    if let Some(calls) = message.tool_calls.filter(|calls| !calls.is_empty()) {
        let calls = calls.into_iter().map(call).collect::<Result<Vec<_>>>()?;
        extra.insert("tool_calls".into(), Value::Array(calls));
    }
    Ok(Message { role: role.into(), content: content(message.content, pictures)?, extra })
}

fn content(content: Content, pictures: &mut Vec<MediaSource>) -> Result<Value> {
    Ok(match content {
        Content::None => Value::String(String::new()),
        Content::Text(text) => Value::String(text),
        Content::Parts(parts) if parts.iter().any(|part| is_picture(kind_of(part))) => {
            let part = |part: Map<String, Value>| match kind_of(&part) {
                kind if is_video(kind) => {
                    pictures.push(MediaSource::Video(video(part)?));
                    Ok(json!({"type": "video"}))
                }
                kind if is_picture(kind) => {
                    pictures.push(MediaSource::Picture(picture(part)?));
                    Ok(json!({"type": "image"}))
                }
                _ => Ok(json!({"type": "text", "text": text(&part)?})),
            };
            Value::Array(parts.into_iter().map(part).collect::<Result<_>>()?)
        }
        Content::Parts(parts) => Value::String(parts.iter().map(text).collect::<Result<_>>()?),
    })
}

/// The URL of a picture. It is moved, as it may be the picture itself.
fn picture(mut part: Map<String, Value>) -> Result<String> {
    if part.get("file_id").is_some_and(|id| !id.is_null()) {
        return Err(wrong("messages", "a picture by file_id: files are not stored here; send a data URI"));
    }
    let place = ["image_url", "image", "url"].into_iter().find_map(|key| part.remove(key));
    let url = match place {
        Some(Value::Object(mut object)) => object.remove("url"),
        other => other,
    };
    match url {
        Some(Value::String(url)) => Ok(url),
        _ => Err(wrong(
            "messages",
            "a picture has no URL; expected {\"type\": \"image_url\", \"image_url\": {\"url\": \"data:...\"}}",
        )),
    }
}

/// A video: a file's URL, or a list of the URLs of its frames. They are moved.
fn video(mut part: Map<String, Value>) -> Result<VideoInput> {
    let rate = |object: &Map<String, Value>| match object.get("fps") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Number(fps)) => Ok(fps.as_f64()),
        Some(other) => Err(wrong("messages", format!("the fps of a video is {other}, expected a number"))),
    };
    let mut fps = rate(&part)?;
    let place = ["video_url", "video", "url"].into_iter().find_map(|key| part.remove(key));
    let source = match place {
        Some(Value::Object(mut object)) => {
            fps = fps.or(rate(&object)?);
            object.remove("url")
        }
        other => other,
    };
    let frame = |url: Value| match url {
        Value::String(url) => Some(url),
        _ => None,
    };
    let source = match source {
        Some(Value::String(url)) => Some(VideoSource::File(url)),
        Some(Value::Array(urls)) => {
            urls.into_iter().map(frame).collect::<Option<_>>().map(VideoSource::Frames)
        }
        _ => None,
    };
    match source {
        Some(source) => Ok(VideoInput { source, fps }),
        None => Err(wrong(
            "messages",
            "a video has no URL; expected {\"type\": \"video_url\", \"video_url\": {\"url\": \"data:video/mp4;base64,...\"}} \
             or {\"type\": \"video\", \"video\": [\"data:image/png;base64,...\", ...], \"fps\": 2}",
        )),
    }
}

fn text(part: &Map<String, Value>) -> Result<String> {
    let kind = kind_of(part);
    match (kind, part.get("text").or(part.get("refusal")).and_then(Value::as_str)) {
        ("text" | "input_text" | "output_text" | "refusal", Some(text)) => Ok(text.to_string()),
        ("text" | "input_text" | "output_text" | "refusal", None) => {
            Err(wrong("messages", format!("a part of type {kind:?} has no text")))
        }
        _ => Err(wrong(
            "messages",
            format!("a part of type {kind:?}: text, image_url and video_url can be read"),
        )),
    }
}

fn call(call: Value) -> Result<Value> {
    let function = &call["function"];
    let Some(name) = function["name"].as_str() else {
        return Err(wrong("messages", "a tool call has no function name"));
    };
    let arguments = match &function["arguments"] {
        Value::String(text) if text.trim().is_empty() => Value::Null,
        Value::String(text) => serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.clone())),
        other => other.clone(),
    };
    let arguments = if arguments.is_null() { json!({}) } else { arguments };
    Ok(json!({"type": "function", "id": call["id"], "function": {"name": name, "arguments": arguments}}))
}

#[cfg(test)]
mod tests {
    use keel_text::{ChatRequest, ChatTemplate, SpecialTokens};

    use super::*;

    fn template(json: Value) -> Result<Vec<Message>> {
        Ok(conversation(json)?.messages)
    }

    fn conversation(json: Value) -> Result<Conversation> {
        to_template(serde_json::from_value(json).expect("the types are right"))
    }

    #[test]
    fn pictures_are_taken_out_in_order() {
        let conversation = conversation(json!([
            {"role": "user", "content": [
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {"url": "u1", "detail": "low"}},
                {"type": "input_image", "image_url": "u2"},
                {"type": "input_text", "text": "b"}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": "u3"}]},
        ]))
        .expect("right");
        assert_eq!(conversation.pictures, ["u1", "u2", "u3"].map(|url| MediaSource::Picture(url.into())));
        let kinds = json!([{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}, {"type": "text", "text": "b"}]);
        assert_eq!(conversation.messages[0].content, kinds);
        assert_eq!(conversation.messages[1].content, json!([{"type": "image"}]));
    }

    #[test]
    fn videos_come_in_the_forms_of_their_clients() {
        let conversation = conversation(json!([{"role": "user", "content": [
            {"type": "video_url", "video_url": {"url": "v1", "fps": 2}},
            {"type": "image_url", "image_url": "u1"},
            {"type": "video_url", "video_url": "v2", "fps": 0.5},
            {"type": "video", "video": ["f1", "f2"], "fps": 4},
            {"type": "video", "video": "v3"}]}]))
        .expect("right");
        let file =
            |url: &str, fps| MediaSource::Video(VideoInput { source: VideoSource::File(url.into()), fps });
        let frames = VideoSource::Frames(vec!["f1".into(), "f2".into()]);
        let expected = [
            file("v1", Some(2.0)),
            MediaSource::Picture("u1".into()),
            file("v2", Some(0.5)),
            MediaSource::Video(VideoInput { source: frames, fps: Some(4.0) }),
            file("v3", None),
        ];
        assert_eq!(conversation.pictures, expected);
        let kinds = ["video", "image", "video", "video", "video"].map(|kind| json!({"type": kind}));
        assert_eq!(conversation.messages[0].content, json!(kinds));
    }

    #[test]
    fn parts_are_joined_and_arguments_opened() {
        let messages = template(json!([
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ]))
        .expect("right");
        assert_eq!((messages[0].role.as_str(), &messages[0].content), ("system", &json!("ab")));
        assert_eq!(messages[1].content, "");
        assert_eq!(messages[1].extra["tool_calls"][0]["function"]["arguments"]["x"], 1);
        assert_eq!(messages[2].extra["tool_call_id"], "1");
    }

    /// Qwen's templates take one system message, and iterate over the arguments of calls.
    fn rendered(json: Value) -> String {
        let source = include_str!("../../../../keel-text/tests/assets/templates/qwen_like.jinja");
        let compiled = ChatTemplate::from_source(source, SpecialTokens::default()).expect("it compiles");
        let messages = template(json).expect("right");
        let request = ChatRequest { add_generation_prompt: false, ..ChatRequest::new(&messages) };
        compiled.render(&request).expect("it is rendered")
    }

    #[test]
    fn system_messages_at_the_start_become_one() {
        let user = json!({"role": "user", "content": "Hi"});
        let text = rendered(
            json!([{"role": "system", "content": "a"}, {"role": "developer", "content": "b"},
            {"role": "system", "content": ""}, {"role": "system", "content": [{"type": "text", "text": "c"}]}, user]),
        );
        assert_eq!(text, "<|im_start|>system\na\n\nb\n\nc<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n");
        let picture = json!({"role": "system", "content": [{"type": "image_url", "image_url": "u"}]});
        for (messages, shown) in [
            (json!([{"role": "system", "content": "a"}, picture, user]), "a\n\n<|image|>"),
            (json!([picture, {"role": "developer", "content": "b"}, user]), "<|image|>\n\nb"),
        ] {
            let text = rendered(messages);
            assert!(text.starts_with(&format!("<|im_start|>system\n{shown}<|im_end|>")), "{text}");
        }
        let late =
            template(json!([user, {"role": "system", "content": "a"}, {"role": "system", "content": "b"}]));
        assert_eq!(late.expect("right").len(), 3, "those after the start stay, and the template decides");
    }

    #[test]
    fn calls_without_arguments_are_rendered() {
        for arguments in [json!(""), json!(" "), json!("null"), json!("{}"), json!({}), Value::Null] {
            let call =
                json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}});
            let text = rendered(json!([{"role": "user", "content": "Hi"},
                {"role": "assistant", "content": null, "tool_calls": [call]}]));
            assert!(
                text.contains("<tool_call>\n<function=f>\n</function>\n</tool_call>"),
                "{arguments}: {text}"
            );
        }
    }

    #[test]
    fn what_the_model_cannot_read_is_refused() {
        for message in [
            json!({"role": "user", "content": [{"type": "image_url", "image_url": {"uri": "x"}}]}),
            json!({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}),
            json!({"role": "user", "content": [{"type": "video_url", "video_url": {}}]}),
            json!({"role": "user", "content": [{"type": "video", "video": ["a", 3]}]}),
            json!({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}),
            json!({"role": "robot", "content": "x"}),
            json!({"role": "assistant", "tool_calls": [{"function": {}}]}),
        ] {
            assert_eq!(template(json!([message])).expect_err("wrong").field(), Some("messages"));
        }
    }
}
