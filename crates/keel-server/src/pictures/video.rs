//! Videos of requests: a file, or a list of pictures that are its frames.

use std::sync::Arc;
use std::time::Duration;

use keel_engine::PatchGrid;
use keel_engine::batch::PictureInput;
use keel_vision::{
    DecodeLimits, FPS_DEFAULT, Measured, ProcessedVideo, ProcessorFiles, VideoBounds, VideoBuilder,
    VideoFile, VideoFileLimits, VideoProcessor, VideoSpan, decode, measure, timestamps,
};
use serde_json::{Map, json};

use super::source::{self, FILE_BYTES_MAX, PIXELS_MAX};
use super::{ImagePreprocessor, MediaError};
use crate::memory::charge::Hold;
use crate::text::Bounds;

/// Bounds on a video's file.
const LIMITS: VideoFileLimits = VideoFileLimits {
    file_bytes: FILE_BYTES_MAX,
    pixels: PIXELS_MAX,
    frames: 1 << 17,
    drawn_pixels: 1 << 30,
    time: Duration::from_secs(30),
};

/// Frames of a video that a request lists one by one, at most.
const LISTED_MAX: usize = 2048;

/// The prefix of frames in one data URI, as vLLM's clients send them.
const JPEG_FRAMES: &str = "data:video/jpeg;base64,";

/// A video of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct VideoInput {
    pub source: VideoSource,
    /// Of a file: how many frames of a second are read. Of a list: how many there are in a second.
    pub fps: Option<f64>,
}

/// Where a video's frames come from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum VideoSource {
    /// The URL of a file.
    File(String),
    /// The URLs of its frames.
    Frames(Vec<String>),
}

/// A prepared video, and its place in the prompt.
pub(super) struct PreparedVideo {
    pub input: PictureInput,
    pub span: VideoSpan,
}

/// Prepares the videos of requests.
pub(super) struct VideoPreprocessor {
    files: ProcessorFiles,
    bounds: VideoBounds,
}

impl VideoPreprocessor {
    /// `None` if no file says how videos are prepared.
    pub fn new(files: &ProcessorFiles, bounds: VideoBounds) -> Option<VideoPreprocessor> {
        files.video(&Map::new()).ok()?;
        Some(VideoPreprocessor { files: files.clone(), bounds })
    }

    /// The processor; `fps` is how many frames of a second it takes.
    fn processor(&self, fps: Option<f64>) -> Result<VideoProcessor, MediaError> {
        let mut instead = Map::new();
        if let Some(fps) = fps {
            instead.insert("fps".into(), json!(fps));
        }
        Ok(self.files.video(&instead)?.limited_to(self.bounds))
    }
}

impl ImagePreprocessor {
    /// Reads, decodes and prepares a video.
    pub(super) fn prepare_video(
        &self,
        video: &VideoInput,
        bounds: &Bounds<'_>,
    ) -> Result<PreparedVideo, MediaError> {
        let Some(videos) = &self.videos else {
            return Err(MediaError::Picture("this model is not shown videos".into()));
        };
        if video.fps.is_some_and(|fps| !(fps.is_finite() && fps > 0.0 && fps <= 1000.0)) {
            let problem =
                format!("its fps is {}, expected a number above 0, at most 1000", video.fps.unwrap_or(0.0));
            return Err(MediaError::Picture(problem));
        }
        match &video.source {
            VideoSource::File(url) => match url.strip_prefix(JPEG_FRAMES) {
                Some(frames) => {
                    // One more than is allowed is refused there; the rest is not copied.
                    let urls = frames.split(',').take(LISTED_MAX + 1);
                    let urls = urls.map(|frame| format!("data:image/jpeg;base64,{frame}")).collect();
                    self.prepare_frames(videos, urls, video.fps, bounds)
                }
                None => self.prepare_file(videos, url, video.fps, bounds),
            },
            VideoSource::Frames(urls) => self.prepare_frames(videos, urls.clone(), video.fps, bounds),
        }
    }

    fn prepare_file(
        &self,
        videos: &VideoPreprocessor,
        url: &str,
        fps: Option<f64>,
        bounds: &Bounds<'_>,
    ) -> Result<PreparedVideo, MediaError> {
        let processor = videos.processor(fps)?;
        let file = source::read(url, bounds)?;
        let video = VideoFile::open(&file.bytes, LIMITS)?;
        let chosen = processor.sample(video.frames(), video.fps())?;
        let (width, height) = video.size();
        let work = bounds.hold(video.frame_bytes() + processor.work_bytes(chosen.len(), width, height)?)?;
        let mut builder = VideoBuilder::new(&processor, chosen.len());
        video.take(&chosen, &mut |frame| builder.add(&frame))?;
        self.finish(builder.finish()?, &processor, &chosen, video.fps(), work)
    }

    fn prepare_frames(
        &self,
        videos: &VideoPreprocessor,
        urls: Vec<String>,
        fps: Option<f64>,
        bounds: &Bounds<'_>,
    ) -> Result<PreparedVideo, MediaError> {
        if urls.len() > LISTED_MAX {
            let problem =
                format!("a video of {} or more frames, at most {LISTED_MAX} are listed", urls.len());
            return Err(MediaError::Picture(problem));
        }
        let (processor, fps) = (videos.processor(None)?, fps.unwrap_or(FPS_DEFAULT));
        let chosen = processor.sample(urls.len(), fps)?;
        let mut builder = VideoBuilder::new(&processor, chosen.len());
        let limits = DecodeLimits { file_bytes: FILE_BYTES_MAX, pixels: PIXELS_MAX };
        let mut of_all = None;
        for &i in &chosen {
            let file = source::read(&urls[i], bounds)?;
            let Measured { width, height, decode_bytes } = measure(&file.bytes, limits)?;
            if of_all.is_none() {
                of_all = bounds.hold(processor.work_bytes(chosen.len(), width, height)?)?;
            }
            let _frame = bounds.hold(decode_bytes)?;
            builder.add(&decode(&file.bytes, limits)?)?;
        }
        self.finish(builder.finish()?, &processor, &chosen, fps, of_all)
    }

    fn finish(
        &self,
        video: ProcessedVideo,
        processor: &VideoProcessor,
        chosen: &[usize],
        fps: f64,
        work: Option<Hold<'_>>,
    ) -> Result<PreparedVideo, MediaError> {
        let key = video.key(processor);
        if let Some(work) = work {
            work.keep(size_of_val(&video.values[..]) as u64);
        }
        let grid = PatchGrid { t: video.grid.t, h: video.grid.h, w: video.grid.w };
        let span = VideoSpan {
            tokens: self.config.rows_of(grid.h, grid.w),
            seconds: timestamps(chosen, fps, processor.frames_per_patch()),
        };
        let input = PictureInput { key, values: Arc::new(video.values), grid, is_video: true };
        Ok(PreparedVideo { input, span })
    }
}
