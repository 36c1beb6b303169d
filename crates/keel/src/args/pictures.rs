//! Options for pictures and videos in the prompt.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use keel_text::Message;
use serde_json::json;

use crate::vision::{Conversation, Origin, VideoFrames, VideoPart};

/// Largest number of frames in a folder. Only hundreds of them are sampled.
const FRAMES_MAX: usize = 65_536;

/// Pictures and videos.
#[derive(Clone, Debug, Args)]
pub struct PictureArgs {
    /// Picture to show the model: PNG, JPEG, WebP, or the first frame of a GIF. May be repeated.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["raw", "ids", "ids_file"])]
    image: Vec<PathBuf>,
    /// Show the model a video: a GIF, with ffmpeg also an MP4, WebM, Matroska or AVI file, or a folder of pictures,
    /// which are its frames in the order of their names.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["raw", "ids", "ids_file"])]
    video: Vec<PathBuf>,
    /// Frames per second of a video that is a folder. By default 24.
    #[arg(long, value_name = "N", requires = "video")]
    video_fps: Option<f64>,
}

impl PictureArgs {
    /// Whether a picture or video is given.
    pub fn are_any(&self) -> bool {
        !self.image.is_empty() || !self.video.is_empty()
    }

    /// Builds a conversation: the system text, then a user's turn with the pictures, the videos and the text.
    ///
    /// # Errors
    /// A video is neither a file nor a folder of pictures.
    pub fn conversation(&self, system: Option<&str>, text: &str) -> Result<Conversation> {
        let mut parts: Vec<_> = self.image.iter().map(|_| json!({"type": "image"})).collect();
        parts.extend(self.video.iter().map(|_| json!({"type": "video"})));
        parts.push(json!({"type": "text", "text": text}));
        let mut user = Message::new("user", "");
        user.content = parts.into();
        let system = system.map(|system| Message::new("system", system));
        let videos = self.video.iter().map(|path| {
            let frames = self.frames(path).with_context(|| format!("--video {}", path.display()))?;
            Ok(VideoPart { frames, settings: serde_json::Map::new() })
        });
        Ok(Conversation {
            messages: system.into_iter().chain([user]).collect(),
            images: self.image.iter().cloned().map(Origin::File).collect(),
            videos: videos.collect::<Result<_>>()?,
            ..Conversation::default()
        })
    }
}

impl PictureArgs {
    fn frames(&self, path: &Path) -> Result<VideoFrames> {
        if path.is_dir() {
            return Ok(VideoFrames::Listed(files(path)?, self.video_fps.unwrap_or(keel_vision::FPS_DEFAULT)));
        }
        if !path.is_file() {
            bail!("this is neither a file nor a folder of frames");
        }
        if self.video_fps.is_some() {
            bail!("--video-fps is for folders of frames: a video file has its own frame rate");
        }
        Ok(VideoFrames::File(Origin::File(path.to_path_buf())))
    }
}

/// The files of a folder, sorted by name.
fn files(folder: &Path) -> Result<Vec<Origin>> {
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
