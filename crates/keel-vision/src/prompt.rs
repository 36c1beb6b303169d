//! Repeats the placeholders of a rendered prompt, once for each row that the tower outputs.
//!
//! Reference: `processing_qwen3_vl.py` and `processing_gemma3.py` of transformers. Where markers enclose a video's
//! placeholder, the markers are replaced too, because each group of frames has its own markers.

use crate::video::seconds;
use crate::{Result, VisionError};

/// The special tokens around pictures, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placeholders {
    /// Qwen: one placeholder per picture and per video, between markers that the template writes.
    Qwen {
        /// Stands for a picture.
        image: String,
        /// Stands for a video.
        video: String,
        /// Marker before the rows of a picture.
        start: String,
        /// Marker after them.
        end: String,
    },
    /// Gemma 3: the template writes only the start marker for a picture.
    Gemma {
        /// Stands for one row of a picture.
        image: String,
        /// Marker before the rows of a picture.
        start: String,
        /// Marker after them.
        end: String,
    },
}

/// The rows of a picture in the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageSpan {
    /// Rows of the picture, and also of each of its crops.
    pub tokens: usize,
    /// Number of crops after it.
    pub crops: usize,
}

/// The rows of a video in the prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct VideoSpan {
    /// Rows per group of frames.
    pub tokens: usize,
    /// Time of each group.
    pub seconds: Vec<f64>,
}

/// Returns the prompt with its placeholders repeated.
///
/// # Errors
/// The number of placeholders differs from the number of pictures or videos.
pub fn expand(
    prompt: &str,
    placeholders: &Placeholders,
    images: &[ImageSpan],
    videos: &[VideoSpan],
) -> Result<String> {
    match placeholders {
        Placeholders::Qwen { image, video, start, end } => {
            expect_count("picture", prompt.matches(image.as_str()).count(), images.len())?;
            expect_count("video", prompt.matches(video.as_str()).count(), videos.len())?;
            let (wrapped, mut rest) = (format!("{start}{video}{end}"), prompt);
            let (mut images, mut videos) = (images.iter(), videos.iter());
            let mut out = String::with_capacity(prompt.len());
            while let Some((at, is_video)) = first_of(rest, image, video) {
                let wrapped_at = at
                    .checked_sub(start.len())
                    .filter(|&at| is_video && rest.get(at..).is_some_and(|text| text.starts_with(&wrapped)));
                let (from, len) = match wrapped_at {
                    Some(at) => (at, wrapped.len()),
                    None => (at, if is_video { video.len() } else { image.len() }),
                };
                out.push_str(&rest[..from]);
                rest = &rest[from + len..];
                if is_video {
                    let span = videos.next().ok_or_else(|| miscounted("video"))?;
                    for time in &span.seconds {
                        out.push_str(&format!("<{} seconds>{start}", seconds(*time)));
                        out.push_str(&video.repeat(span.tokens));
                        out.push_str(end);
                    }
                } else {
                    let span = images.next().ok_or_else(|| miscounted("picture"))?;
                    out.push_str(&image.repeat(span.tokens));
                }
            }
            out.push_str(rest);
            Ok(out)
        }
        Placeholders::Gemma { image, start, end } => {
            expect_count("video", 0, videos.len())?;
            expect_count("picture", prompt.matches(start.as_str()).count(), images.len())?;
            let mut out = String::with_capacity(prompt.len());
            for (i, text) in prompt.split(start.as_str()).enumerate() {
                if let Some(span) = i.checked_sub(1).map(|i| images[i]) {
                    let whole = format!("\n\n{start}{}{end}\n\n", image.repeat(span.tokens));
                    match span.crops {
                        0 => out.push_str(&whole),
                        crops => {
                            out.push_str(&format!(
                                "Here is the original image {whole} and here are some crops to help you see better "
                            ));
                            out.push_str(&vec![whole; crops].join(" "));
                        }
                    }
                }
                out.push_str(text);
            }
            Ok(out)
        }
    }
}

/// Position of the first placeholder, and whether it stands for a video.
fn first_of(text: &str, image: &str, video: &str) -> Option<(usize, bool)> {
    let places = [text.find(image).map(|at| (at, false)), text.find(video).map(|at| (at, true))];
    places.into_iter().flatten().min()
}

fn expect_count(kind: &str, found: usize, given: usize) -> Result<()> {
    if found == given {
        return Ok(());
    }
    Err(VisionError::Prompt(format!(
        "the prompt has {found} {kind} placeholder(s) for {given} {kind}(s): a placeholder may not be written as text, and \
         the chat template must name each {kind} once"
    )))
}

fn miscounted(kind: &str) -> VisionError {
    VisionError::Prompt(format!("the prompt has more {kind} placeholders than {kind}s"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn qwen() -> Placeholders {
        let [image, video, start, end] = ["<i>", "<v>", "<s>", "<e>"].map(String::from);
        Placeholders::Qwen { image, video, start, end }
    }

    #[test]
    fn a_video_replaces_its_markers_and_a_picture_keeps_them() {
        let (image, video) =
            (ImageSpan { tokens: 2, crops: 0 }, VideoSpan { tokens: 1, seconds: vec![0.25, 1.0] });
        let text = expand("a<s><v><e>b<s><i><e>c<v>", &qwen(), &[image], &[video.clone(), video]);
        let frames = "<0.2 seconds><s><v><e><1.0 seconds><s><v><e>";
        assert_eq!(text.expect("counts fit"), format!("a{frames}b<s><i><i><e>c{frames}"));
    }

    #[test]
    fn crops_follow_the_whole_picture() {
        let [image, start, end] = ["<i>", "<s>", "<e>"].map(String::from);
        let placeholders = Placeholders::Gemma { image, start, end };
        let spans = [ImageSpan { tokens: 1, crops: 0 }, ImageSpan { tokens: 1, crops: 2 }];
        let text = expand("a<s>b<s>c", &placeholders, &spans, &[]).expect("counts fit");
        let whole = "\n\n<s><i><e>\n\n";
        assert_eq!(
            text,
            format!(
                "a{whole}bHere is the original image {whole} and here are some crops to help you see better \
                 {whole} {whole}c"
            )
        );
    }

    #[test]
    fn a_placeholder_in_the_text_is_refused() {
        let image = ImageSpan { tokens: 2, crops: 0 };
        let message = expand("<i> and <i>", &qwen(), &[image], &[]).expect_err("two").to_string();
        assert!(message.contains("2 picture placeholder(s) for 1"), "{message}");
    }
}
