//! Reads the processor files of a checkpoint, and prepares pictures accordingly.
//!
//! `processor_config.json` contains both the image and the video processor. As in the reference, it takes precedence.
//! Older checkpoints have `preprocessor_config.json` and `video_preprocessor_config.json`.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::crops::{PanAndScan, crop_sizes, crops};
use crate::fields::Fields;
use crate::patches::{PatchShape, patches, planes};
use crate::pixels::ScaleDefaults;
use crate::resample::resize_bytes;
use crate::size::{image_size, size_at_most};
use crate::{
    Filter, Grid, Picture, PixelBounds, PixelScale, Result, Size, VideoProcessor, VisionError, resize,
    work_limit,
};

const PROCESSOR: &str = "processor_config.json";
const IMAGE: &str = "preprocessor_config.json";
const VIDEO: &str = "video_preprocessor_config.json";

/// Bytes of lists and handles while something is prepared.
pub(crate) const SMALL_BYTES: u64 = 64 << 10;

/// Limit on a processor file. Real ones have a few hundred bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The longest side of pictures that a tower reads at one size. Gemma's towers have 896 pixels.
const SIDE_MAX: usize = 8192;

/// The largest lower bound on the pixels of a picture. A picture with fewer pixels is enlarged.
const LEAST_PIXELS_MAX: usize = SIDE_MAX * SIDE_MAX;

/// The processor files of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProcessorFiles {
    processor: Option<Value>,
    image: Option<Value>,
    video: Option<Value>,
}

impl ProcessorFiles {
    /// Reads the processor files that exist in a folder.
    ///
    /// # Errors
    /// A file that cannot be read or is not JSON.
    pub fn read(folder: &Path) -> Result<ProcessorFiles> {
        let read = |name: &str| -> Result<Option<Value>> {
            let path = folder.join(name);
            let wrong = |reason: String| VisionError::Processor { file: path.display().to_string(), reason };
            let Ok(metadata) = path.metadata() else { return Ok(None) };
            // Opening a pipe would wait for somebody to write.
            if !metadata.is_file() {
                return Err(wrong("it is not a regular file".into()));
            }
            let mut bytes = Vec::new();
            let read =
                File::open(&path).and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes));
            read.map_err(|error| wrong(error.to_string()))?;
            if bytes.len() as u64 > FILE_BYTES_MAX {
                return Err(wrong(format!("more than {FILE_BYTES_MAX} bytes, at most these are read")));
            }
            serde_json::from_slice(&bytes).map(Some).map_err(|error| wrong(error.to_string()))
        };
        Ok(ProcessorFiles { processor: read(PROCESSOR)?, image: read(IMAGE)?, video: read(VIDEO)? })
    }

    /// Creates it from files in memory.
    pub fn new(processor: Option<Value>, image: Option<Value>, video: Option<Value>) -> ProcessorFiles {
        ProcessorFiles { processor, image, video }
    }

    fn nested(&self, key: &str) -> Option<&Value> {
        self.processor.as_ref()?.get(key).filter(|value| value.is_object())
    }

    /// The image processor. Settings in `instead` override those of the file.
    ///
    /// # Errors
    /// No file defines it, or a value is not supported.
    pub fn image(&self, instead: &Map<String, Value>) -> Result<ImageProcessor> {
        let (file, json) = match (self.nested("image_processor"), &self.image) {
            (Some(nested), _) => (PROCESSOR, nested),
            (None, Some(own)) => (IMAGE, own),
            (None, None) => return Err(missing(IMAGE)),
        };
        // As in the reference, pictures are cut only if the caller asks for it, whatever the file says.
        let mut json = merged(json, instead);
        if !instead.contains_key("do_pan_and_scan")
            && let Some(settings) = json.as_object_mut()
        {
            settings.remove("do_pan_and_scan");
        }
        ImageProcessor::from_json(file, &json)
    }

    /// The video processor. Settings in `instead` override those of the file.
    ///
    /// # Errors
    /// As [`ProcessorFiles::image`].
    pub fn video(&self, instead: &Map<String, Value>) -> Result<VideoProcessor> {
        let (file, json) = match (self.nested("video_processor"), &self.video, &self.image) {
            (Some(nested), ..) => (PROCESSOR, nested),
            (None, Some(own), _) => (VIDEO, own),
            (None, None, Some(image)) => (IMAGE, image),
            (None, None, None) => return Err(missing(VIDEO)),
        };
        VideoProcessor::from_json(file, &merged(json, instead))
    }
}

fn missing(file: &str) -> VisionError {
    VisionError::Processor {
        file: file.into(),
        reason: format!("the checkpoint has neither it nor {PROCESSOR}, so pictures cannot be prepared"),
    }
}

fn merged(json: &Value, instead: &Map<String, Value>) -> Value {
    let mut all = json.as_object().cloned().unwrap_or_default();
    all.extend(instead.iter().map(|(key, value)| (key.clone(), value.clone())));
    Value::Object(all)
}

/// The form in which the tower reads a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Any size: patches in blocks (Qwen).
    Patches {
        /// Pixels along a side of a patch.
        side: usize,
        /// Patches along a side of a block, which becomes one token.
        merge: usize,
        /// Frames per patch. A picture counts as this many equal frames.
        frames: usize,
        /// Bounds on the number of pixels of a picture.
        pixels: PixelBounds,
    },
    /// One fixed size (Gemma 3): `[channel, height, width]`.
    Whole {
        /// Rows.
        height: usize,
        /// Pixels per row.
        width: usize,
    },
}

/// Prepares pictures.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageProcessor {
    /// The form in which the tower reads a picture.
    pub layout: Layout,
    filter: Filter,
    resizes: bool,
    scale: PixelScale,
    pan_and_scan: Option<PanAndScan>,
    /// Whether no picture may have more pixels than the layout's most, also where the reference rounds up.
    is_limited: bool,
    /// All settings in one line.
    settings: String,
}

/// A picture as a tower reads it.
#[derive(Clone, Debug, PartialEq)]
pub struct ProcessedImage {
    /// Rows of patches, or planes: see [`Layout`].
    pub values: Vec<f32>,
    /// The number of patches. It is 1 x 1 x 1 for [`Layout::Whole`].
    pub grid: Grid,
    /// The resized picture.
    pub resized: Picture,
}

impl ProcessedImage {
    /// Tells the picture from all others: a SHA-256 of its pixels, its size and the settings that it was prepared with.
    pub fn key(&self, processor: &ImageProcessor) -> [u8; 32] {
        let Picture { width, height, rgb } = &self.resized;
        let mut hasher = Sha256::new();
        hasher.update(b"keel picture 1");
        for number in [processor.settings.len(), *width, *height] {
            hasher.update((number as u64).to_le_bytes());
        }
        hasher.update(&processor.settings);
        hasher.update(rgb);
        hasher.finalize().into()
    }
}

impl ImageProcessor {
    /// Reads a processor from a file's JSON.
    ///
    /// # Errors
    /// A value is not supported.
    pub fn from_json(file: &str, json: &Value) -> Result<ImageProcessor> {
        let fields = Fields { file, json };
        let class = json["image_processor_type"].as_str().unwrap_or_default();
        let whole =
            class.starts_with("Gemma3") || fields.get("size").is_some_and(|s| s["height"].is_number());
        let (layout, filter, defaults) = if whole {
            let side = |key: &str| match fields.get("size").and_then(|size| size.get(key)) {
                Some(value) => fields.whole_to(key, value, SIDE_MAX),
                None => Ok(224),
            };
            let layout = Layout::Whole { height: side("height")?, width: side("width")? };
            (layout, Filter::Bilinear, ScaleDefaults::HALF)
        } else {
            let shape = patch_shape(&fields, 14)?;
            let pixels = pixel_bounds(&fields, PixelBounds { least: 56 * 56, most: 28 * 28 * 1280 })?;
            let PatchShape { side, merge, frames } = shape;
            (Layout::Patches { side, merge, frames, pixels }, Filter::Bicubic, ScaleDefaults::CLIP)
        };
        let pan_and_scan = match fields.flag_or("do_pan_and_scan", false)? {
            false => None,
            true => Some(PanAndScan {
                min_crop: fields.size_or("pan_and_scan_min_crop_size", 256)?,
                max_crops: fields.size_or("pan_and_scan_max_num_crops", 4)?,
                min_ratio: fields.number("pan_and_scan_min_ratio_to_activate")?.unwrap_or(1.2),
            }),
        };
        Ok(ImageProcessor {
            layout,
            filter: filter_of(&fields, filter)?,
            resizes: fields.flag_or("do_resize", true)?,
            scale: PixelScale::from_fields(&fields, &defaults)?,
            pan_and_scan,
            is_limited: false,
            settings: json.to_string(),
        })
    }

    /// The same processor with pictures of at most `pixels`: larger ones are read at that size.
    ///
    /// # Errors
    /// If the smallest size of the processor has more.
    pub fn limited_to(mut self, pixels: usize) -> Result<ImageProcessor> {
        if let Layout::Patches { pixels: PixelBounds { least, most }, .. } = &mut self.layout
            && *most > pixels
        {
            if *least > pixels {
                let reason =
                    format!("its smallest picture has {least} pixels, and at most {pixels} are planned for");
                return Err(VisionError::Processor { file: IMAGE.into(), reason });
            }
            *most = pixels;
            self.is_limited = true;
            self.settings.push_str(&format!(" at most {pixels}"));
        }
        Ok(self)
    }

    /// The most bytes of heap while a picture of `width` by `height` is prepared, in addition to its own. The prepared
    /// picture and its crops are included.
    ///
    /// # Errors
    /// As [`ImageProcessor::process`].
    pub fn work_bytes(&self, width: usize, height: usize) -> Result<u64> {
        let own = Size { height, width };
        let sizes = self.pan_and_scan.map_or(Vec::new(), |how| crop_sizes(own, how));
        let (mut kept, mut most) = (0, 0);
        for &own in std::iter::once(&own).chain(&sizes) {
            let size = self.target(own)?;
            let pixels = size.pixels() as u64;
            let frames = match self.layout {
                Layout::Whole { .. } => 1,
                Layout::Patches { frames, .. } => frames as u64,
            };
            let one = pixels * 3 * (1 + frames * size_of::<f32>() as u64);
            most = most.max(kept + one.max(3 * pixels + resize_bytes(own, size)));
            kept += one;
        }
        let crops: u64 = sizes.iter().map(|size| 3 * size.pixels() as u64).sum();
        Ok(crops + most + SMALL_BYTES)
    }

    /// Prepares a picture. Its crops, if any, follow it.
    ///
    /// # Errors
    /// The picture cannot be resized to a size that the tower supports.
    pub fn process(&self, picture: &Picture) -> Result<Vec<ProcessedImage>> {
        let pieces = self.pan_and_scan.map_or(Vec::new(), |how| crops(picture, how));
        std::iter::once(picture).chain(&pieces).map(|piece| self.process_one(piece)).collect()
    }

    fn process_one(&self, picture: &Picture) -> Result<ProcessedImage> {
        work_limit::check()?;
        let Size { height, width } = self.target(picture.size())?;
        let resized = resize(picture, width, height, self.filter);
        let (values, grid) = match self.layout {
            Layout::Whole { .. } => (planes(&resized, &self.scale), Grid { t: 1, h: 1, w: 1 }),
            Layout::Patches { side, merge, frames, .. } => {
                patches(&[&resized], PatchShape { side, merge, frames }, &self.scale)
            }
        };
        Ok(ProcessedImage { values, grid, resized })
    }

    /// The size after resizing.
    fn target(&self, own: Size) -> Result<Size> {
        match self.layout {
            Layout::Whole { height, width } if self.resizes || own == (Size { height, width }) => {
                Ok(Size { height, width })
            }
            Layout::Patches { side, merge, pixels, .. } if self.resizes => match self.is_limited {
                true => size_at_most(own, side * merge, pixels),
                false => image_size(own, side * merge, pixels),
            },
            Layout::Patches { side, merge, .. } => unresized(own, side * merge),
            Layout::Whole { height, width } => Err(VisionError::Prompt(format!(
                "the picture is {own}, the tower reads {width} x {height}, and do_resize is false"
            ))),
        }
    }
}

/// Checks the size of a picture that is not resized: sides must be multiples of `factor`.
pub(crate) fn unresized(own: Size, factor: usize) -> Result<Size> {
    if own.height.is_multiple_of(factor) && own.width.is_multiple_of(factor) && own.pixels() > 0 {
        return Ok(own);
    }
    Err(VisionError::Prompt(format!(
        "the picture is {own}, sides must be multiples of {factor}, and do_resize is false"
    )))
}

pub(crate) fn patch_shape(fields: &Fields<'_>, side: usize) -> Result<PatchShape> {
    let shape = PatchShape {
        side: fields.size_or("patch_size", side)?,
        merge: fields.size_or("merge_size", 2)?,
        frames: fields.size_or("temporal_patch_size", 2)?,
    };
    if shape.side > 1024 || shape.merge > 64 || shape.frames > 64 {
        let PatchShape { side, merge, frames } = shape;
        return Err(fields.error(format!(
            "patch_size, merge_size and temporal_patch_size are {side}, {merge} and {frames}; expected at most 1024, 64 \
             and 64"
        )));
    }
    Ok(shape)
}

/// Smallest and largest number of pixels. The keys are `min_pixels` and `max_pixels`, or `size.shortest_edge` and
/// `longest_edge`, which are counts of pixels in spite of their names.
pub(crate) fn pixel_bounds(fields: &Fields<'_>, default: PixelBounds) -> Result<PixelBounds> {
    let bound = |older: &str, edge: &str, default: usize, limit: usize| {
        let nested = fields.get("size").and_then(|size| {
            [edge, older].into_iter().find_map(|key| size.get(key).filter(|value| !value.is_null()))
        });
        match (fields.get(older), nested) {
            (Some(value), _) => fields.whole_to(older, value, limit),
            (None, Some(value)) => fields.whole_to(edge, value, limit),
            (None, None) => Ok(default),
        }
    };
    let least = bound("min_pixels", "shortest_edge", default.least, LEAST_PIXELS_MAX)?;
    // The decoder bounds the pixels of a picture, so a large bound here means none.
    let most = bound("max_pixels", "longest_edge", default.most, usize::MAX)?;
    if least > most {
        return Err(fields.error(format!("at least {least} and at most {most} pixels cannot be")));
    }
    Ok(PixelBounds { least, most })
}

/// The filter with Pillow's number.
pub(crate) fn filter_of(fields: &Fields<'_>, default: Filter) -> Result<Filter> {
    match fields.get("resample") {
        None => Ok(default),
        Some(value) => match value.as_u64() {
            Some(2) => Ok(Filter::Bilinear),
            Some(3) => Ok(Filter::Bicubic),
            _ => {
                Err(fields.error(format!("resample is {value}; 2 (bilinear) and 3 (bicubic) are supported")))
            }
        },
    }
}

#[cfg(test)]
mod tests;
