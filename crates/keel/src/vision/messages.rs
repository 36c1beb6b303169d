//! Parses a conversation in OpenAI's form, and extracts its pictures.
//!
//! Parts of a message: `{"type": "text", "text"}`, `{"type": "image_url", "image_url": {"url"}}` (or the URL itself),
//! `{"type": "input_image", "image_url"}`, `{"type": "image", "image"}`, and
//! `{"type": "video", "video": [frames], "fps", "do_sample_frames"}`, where `video` may also be one file, as in
//! `{"type": "video_url", "video_url": {"url"}}`. A URL is a data URI or a path.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use keel_text::Message;
use serde_json::{Map, Value, json};

use super::load::{Origin, origin};
use crate::input;

/// A video of a conversation.
pub struct VideoPart {
    /// The locations of its frames.
    pub frames: VideoFrames,
    /// Settings that override the processor file.
    pub settings: Map<String, Value>,
}

/// Where the frames of a video are.
pub enum VideoFrames {
    /// Pictures, and how many of them make a second.
    Listed(Vec<Origin>, f64),
    /// One file: a GIF, or a video that `ffmpeg` reads.
    File(Origin),
}

/// A conversation, and the locations of its pictures.
#[derive(Default)]
pub struct Conversation {
    /// The messages in the form for templates.
    pub messages: Vec<Message>,
    /// The pictures, in order.
    pub images: Vec<Origin>,
    /// The videos, in order.
    pub videos: Vec<VideoPart>,
    /// Settings that override the processor files.
    pub settings: Map<String, Value>,
    /// Variables of the template.
    pub variables: Map<String, Value>,
}

impl Conversation {
    /// Reads a file. Paths in it are relative to its folder.
    ///
    /// # Errors
    /// The file cannot be read, is not JSON, or has no messages in this form.
    pub fn read(path: &Path) -> Result<Conversation> {
        let shown = path.display();
        let text = input::text_of(path, input::TEXTS_BYTES_MAX)?;
        let json: Value = serde_json::from_str(&text).with_context(|| format!("{shown} is no JSON"))?;
        let folder = path.parent().map_or(PathBuf::new(), Path::to_path_buf);
        Conversation::from_json(&json, &folder).with_context(|| shown.to_string())
    }

    /// Reads `{"messages": [..]}`, or the list alone.
    ///
    /// # Errors
    /// The JSON does not have this form.
    pub fn from_json(json: &Value, folder: &Path) -> Result<Conversation> {
        let Some(messages) = json.get("messages").unwrap_or(json).as_array() else {
            bail!("there is no list of messages");
        };
        let object = |keys: [&str; 2]| {
            keys.iter().find_map(|key| json.get(*key)?.as_object().cloned()).unwrap_or_default()
        };
        let mut conversation = Conversation {
            settings: object(["processor_kwargs", "mm_processor_kwargs"]),
            variables: object(["chat_template_kwargs", "template_kwargs"]),
            ..Conversation::default()
        };
        for (i, message) in messages.iter().enumerate() {
            conversation.add(message, folder).with_context(|| format!("message {i}"))?;
        }
        Ok(conversation)
    }

    /// Whether there are pictures or videos.
    pub fn has_pictures(&self) -> bool {
        !self.images.is_empty() || !self.videos.is_empty()
    }

    fn add(&mut self, message: &Value, folder: &Path) -> Result<()> {
        let Some(fields) = message.as_object() else { bail!("it is no object") };
        let Some(role) = message["role"].as_str() else { bail!("it has no role") };
        let content = match &message["content"] {
            Value::Array(parts) => {
                let parts = parts.iter().enumerate();
                let parts =
                    parts.map(|(i, part)| self.part(part, folder).with_context(|| format!("part {i}")));
                Value::Array(parts.collect::<Result<_>>()?)
            }
            text @ (Value::String(_) | Value::Null) => text.clone(),
            _ => bail!("its content is neither text nor a list of parts"),
        };
        let mut extra = fields.clone();
        extra.retain(|key, _| key != "role" && key != "content");
        self.messages.push(Message { role: role.into(), content, extra });
        Ok(())
    }

    /// Converts a part to the form for templates, and records its pictures.
    fn part(&mut self, part: &Value, folder: &Path) -> Result<Value> {
        let kind = part["type"].as_str().unwrap_or_default();
        match kind {
            "text" | "input_text" => match part["text"].as_str() {
                Some(text) => Ok(json!({"type": "text", "text": text})),
                None => bail!("it has no text"),
            },
            "image_url" | "input_image" | "image" => {
                let place = [&part["image_url"]["url"], &part["image_url"], &part["image"], &part["url"]];
                let Some(url) = place.into_iter().find_map(Value::as_str) else {
                    bail!("it has no image_url");
                };
                self.images.push(origin(url, folder)?);
                Ok(json!({"type": "image"}))
            }
            "video" | "video_url" => {
                self.videos.push(video(part, folder)?);
                Ok(json!({"type": "video"}))
            }
            other => bail!(
                "its type {other:?} is not known; there are text, image_url, input_image, image, video and \
                 video_url"
            ),
        }
    }
}

fn video(part: &Value, folder: &Path) -> Result<VideoPart> {
    let mut settings = Map::new();
    if let Some(samples) = part.get("do_sample_frames") {
        settings.insert("do_sample_frames".into(), samples.clone());
    }
    let fps = match &part["fps"] {
        Value::Null => None,
        value => Some(value.as_f64().with_context(|| format!("its fps is {value}, expected a number"))?),
    };
    let places = [&part["video_url"]["url"], &part["video_url"], &part["video"]];
    if let Some(url) = places.into_iter().find_map(Value::as_str) {
        // As in the APIs: how many frames of a second are read.
        if let Some(fps) = fps {
            settings.insert("fps".into(), json!(fps));
        }
        return Ok(VideoPart { frames: VideoFrames::File(origin(url, folder)?), settings });
    }
    let Some(frames) = part["video"].as_array() else {
        bail!("its video is neither a file nor a list of frames");
    };
    let frames = frames.iter().map(|frame| match frame.as_str() {
        Some(url) => origin(url, folder),
        None => bail!("a frame of its video is no path or data URI"),
    });
    let fps = fps.unwrap_or(keel_vision::FPS_DEFAULT);
    Ok(VideoPart { frames: VideoFrames::Listed(frames.collect::<Result<_>>()?, fps), settings })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: Value) -> Result<Conversation> {
        Conversation::from_json(&json, Path::new("folder"))
    }

    #[test]
    fn pictures_are_taken_out_in_order() {
        let conversation = read(json!({"messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "name": "a", "content": [
                {"type": "image_url", "image_url": {"url": "a.png"}},
                {"type": "input_image", "image_url": "data:image/png;base64,AAEC"},
                {"type": "video", "video": ["0.png", "1.png"], "fps": 10, "do_sample_frames": false},
                {"type": "text", "text": "What?"}]}],
            "processor_kwargs": {"do_pan_and_scan": true}}))
        .expect("sound");
        assert!(
            matches!(&conversation.images[0], Origin::File(path) if *path == Path::new("folder").join("a.png"))
        );
        assert!(matches!(&conversation.images[1], Origin::Bytes(bytes) if *bytes == [0, 1, 2]));
        assert!(
            matches!(&conversation.videos[0].frames, VideoFrames::Listed(frames, 10.0) if frames.len() == 2)
        );
        assert_eq!(conversation.videos[0].settings["do_sample_frames"], false);
        let kinds: Vec<_> = conversation.messages[1].content.as_array().expect("parts").iter().collect();
        assert_eq!(kinds[0]["type"], "image");
        assert_eq!(conversation.messages[1].extra["name"], "a");
        assert_eq!(conversation.settings["do_pan_and_scan"], true);
    }

    #[test]
    fn what_is_not_in_this_form_is_said() {
        let user = |part: Value| json!({"messages": [{"role": "user", "content": [part]}]});
        for (json, expected) in [
            (json!({"messages": 3}), "no list of messages"),
            (json!([{"content": "x"}]), "no role"),
            (user(json!({"type": "sound"})), "\"sound\" is not known"),
            (user(json!({"type": "image_url"})), "no image_url"),
            (user(json!({"type": "image_url", "image_url": "data:image/png;base64,???"})), "base64"),
            (user(json!({"type": "image_url", "image_url": "https://x.org/a.png"})), "is not fetched"),
            (user(json!({"type": "video", "video": 7})), "neither a file nor"),
            (
                user(json!({"type": "video_url", "video_url": {"url": "https://x.org/a.mp4"}})),
                "is not fetched",
            ),
            (user(json!({"type": "video", "video": [1]})), "no path"),
            (user(json!({"type": "video", "video": ["a"], "fps": "fast"})), "fps"),
        ] {
            let message = format!("{:#}", read(json).err().expect("refused"));
            assert!(message.contains(expected), "{message}");
        }
    }
}
