//! Options for pictures and videos in the prompt.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use keel_text::Message;
use serde_json::json;

use crate::sight::{Conversation, Origin, VideoPart};

/// Largest number of frames in a folder. Only hundreds of them are sampled.
const FRAMES_MAX: usize = 65_536;

/// Pictures and videos.
#[derive(Clone, Debug, Args)]
pub struct PictureArgs {
    /// Show the model a picture (PNG, JPEG, WebP, the first frame of a GIF); may be given several times.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["raw", "ids", "ids_file"])]
    image: Vec<PathBuf>,
    /// Show the model a video: a folder of pictures, which are its frames in the order of their names.
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["raw", "ids", "ids_file"])]
    video: Vec<PathBuf>,
    /// Frames a second of the videos.
    #[arg(long, value_name = "N", default_value_t = keel_vision::FPS_DEFAULT, requires = "video")]
    video_fps: f64,
}

impl PictureArgs {
    /// Whether a picture or video is given.
    pub fn are_any(&self) -> bool {
        !self.image.is_empty() || !self.video.is_empty()
    }

    /// Builds a conversation: the system text, then a user's turn with the pictures, the videos and the text.
    ///
    /// # Errors
    /// A video is not a folder of pictures.
    pub fn conversation(&self, system: Option<&str>, text: &str) -> Result<Conversation> {
        let mut parts: Vec<_> = self.image.iter().map(|_| json!({"type": "image"})).collect();
        parts.extend(self.video.iter().map(|_| json!({"type": "video"})));
        parts.push(json!({"type": "text", "text": text}));
        let mut user = Message::new("user", "");
        user.content = parts.into();
        let system = system.map(|system| Message::new("system", system));
        let videos = self.video.iter().map(|folder| {
            let frames = frames(folder).with_context(|| format!("--video {}", folder.display()))?;
            Ok(VideoPart { frames, fps: self.video_fps, settings: serde_json::Map::new() })
        });
        Ok(Conversation {
            messages: system.into_iter().chain([user]).collect(),
            images: self.image.iter().cloned().map(Origin::File).collect(),
            videos: videos.collect::<Result<_>>()?,
            ..Conversation::default()
        })
    }
}

/// The files of a folder, sorted by name.
fn frames(folder: &Path) -> Result<Vec<Origin>> {
    if !folder.is_dir() {
        bail!("this is no folder; a video is given as a folder of its frames");
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_file() {
            files.push(path);
        }
        if files.len() > FRAMES_MAX {
            bail!("the folder has more than {FRAMES_MAX} files");
        }
    }
    if files.is_empty() {
        bail!("the folder has no files");
    }
    files.sort();
    Ok(files.into_iter().map(Origin::File).collect())
}
