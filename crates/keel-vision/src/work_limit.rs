//! Ends work on pictures and videos early: when no client waits for the result, or when its time is over.
//!
//! A thread carries its limit, as in `keel_text::Cancel`. It is checked between pictures, between frames, between the
//! scans of a JPEG, and while `ffmpeg` runs. The work between two checks is bounded by the limits on pixels.

use std::cell::RefCell;
use std::fmt::{Debug, Formatter};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::{Result, VisionError};

thread_local! {
    static CURRENT: RefCell<WorkLimit> = RefCell::default();
}

/// How long work may take, and whether its result is still wanted. Clones share both. The default is endless.
#[derive(Clone, Default)]
pub struct WorkLimit(Option<Arc<Bounds>>);

struct Bounds {
    start: Instant,
    time: Duration,
    is_wanted: Box<dyn Fn() -> bool + Send + Sync>,
}

impl WorkLimit {
    /// For `time` from now on, as long as `is_wanted` says so.
    pub fn new(time: Duration, is_wanted: impl Fn() -> bool + Send + Sync + 'static) -> WorkLimit {
        WorkLimit(Some(Arc::new(Bounds { start: Instant::now(), time, is_wanted: Box::new(is_wanted) })))
    }

    /// Runs `work` so that the functions of this crate that it calls on this thread have this limit.
    pub fn scope<T>(&self, work: impl FnOnce() -> T) -> T {
        let _before = Before(CURRENT.with(|current| current.replace(self.clone())));
        work()
    }

    /// The limit of the caller's scope.
    pub fn current() -> WorkLimit {
        CURRENT.with(|current| current.borrow().clone())
    }

    /// Fails if the work must end.
    ///
    /// # Errors
    /// [`VisionError::Unwanted`] or [`VisionError::Time`].
    pub fn check(&self) -> Result<()> {
        match &self.0 {
            Some(bounds) if !(bounds.is_wanted)() => Err(VisionError::Unwanted),
            Some(bounds) if bounds.start.elapsed() >= bounds.time => {
                Err(VisionError::Time { seconds: bounds.time.as_secs_f64() })
            }
            _ => Ok(()),
        }
    }

    /// The time that is left of `time`, or of this if that is less.
    #[must_use]
    pub fn left_of(&self, time: Duration) -> Duration {
        self.0.as_ref().map_or(time, |bounds| time.min(bounds.time.saturating_sub(bounds.start.elapsed())))
    }
}

impl Debug for WorkLimit {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let time = self.0.as_ref().map(|bounds| bounds.time);
        f.debug_struct("WorkLimit").field("time", &time).finish_non_exhaustive()
    }
}

/// Fails if the work of this thread must end.
pub(crate) fn check() -> Result<()> {
    CURRENT.with(|current| current.borrow().check())
}

/// Restores the limit of the surrounding scope, also after a panic.
struct Before(WorkLimit);

impl Drop for Before {
    fn drop(&mut self) {
        CURRENT.with(|current| current.swap(&RefCell::new(std::mem::take(&mut self.0))));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::{DecodeLimits, ImageProcessor, Picture, VideoProcessor, decode};
    use serde_json::json;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn it_holds_within_its_scope_alone() {
        let wanted = Arc::new(AtomicBool::new(true));
        let asked = Arc::clone(&wanted);
        let patience = WorkLimit::new(HOUR, move || asked.load(Ordering::Relaxed));
        patience.scope(|| {
            check().expect("wanted");
            wanted.store(false, Ordering::Relaxed);
            assert!(matches!(check(), Err(VisionError::Unwanted)));
            WorkLimit::default().scope(|| check().expect("endless"));
            assert!(check().is_err());
        });
        check().expect("endless");
        assert!(patience.left_of(Duration::from_secs(5)) == Duration::from_secs(5));
        assert!(WorkLimit::new(Duration::ZERO, || true).left_of(HOUR) == Duration::ZERO);
    }

    #[test]
    fn every_kind_of_work_ends_when_its_time_is_over() {
        let over = WorkLimit::new(Duration::ZERO, || true);
        let picture = Picture { width: 64, height: 64, rgb: vec![0; 64 * 64 * 3] };
        let mut png = std::io::Cursor::new(Vec::new());
        image::RgbImage::new(8, 8).write_to(&mut png, image::ImageFormat::Png).expect("coded");
        let processor = ImageProcessor::from_json("p.json", &json!({"patch_size": 16})).expect("sound");
        let video = VideoProcessor::from_json("v.json", &json!({"patch_size": 16})).expect("sound");
        let outcomes = over.scope(|| {
            [
                decode(png.get_ref(), DecodeLimits::default()).map(|_| ()),
                processor.process(&picture).map(|_| ()),
                video.process(std::slice::from_ref(&picture)).map(|_| ()),
            ]
        });
        for outcome in outcomes {
            let error = outcome.expect_err("its time is over").to_string();
            assert!(error.contains("longer than 0 s"), "{error}");
        }
    }
}
