//! Positions of the tokens of a prompt with pictures on three axes (time, row, column), and which tokens see each
//! other.
//!
//! Reference: `get_rope_index` of transformers' `modeling_qwen3_vl.py`. A text token has the position `(c, c, c)`; then
//! `c` grows by one. In a picture of `h` by `w` rows that starts at `c`, a row has the position
//! `(c, c + row, c + column)`; then `c` grows by `max(h, w)`. Each group of a video's frames counts as a picture.

use super::config::VisionConfig;
use crate::{ModelError, Result};

/// The rows of one picture, or of one group of a video's frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageRun {
    /// Number of rows from top to bottom.
    pub height: usize,
    /// Number of rows from left to right.
    pub width: usize,
    /// Index of its first feature among all features.
    pub first: usize,
}

/// The layout of a prompt with pictures: the positions and features of its tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptLayout {
    /// Time, row and column of each token.
    pub positions: Vec<[i32; 3]>,
    /// Position of a later token minus its number.
    pub delta: i32,
    /// For each token of a picture, the feature that replaces its embedding.
    pub features: Vec<Option<u32>>,
}

/// Finds the pictures' tokens in a prompt, and the positions of all tokens. `images` and `videos` are the runs of
/// pictures, in order.
///
/// # Errors
/// If the numbers of picture or video tokens in the prompt differ from these runs.
pub fn prompt_layout(
    config: &VisionConfig,
    tokens: &[u32],
    images: &[ImageRun],
    videos: &[ImageRun],
) -> Result<PromptLayout> {
    let (mut images, mut videos) = (images.iter(), videos.iter());
    let mut layout = PromptLayout::default();
    let (mut at, mut next) = (0, 0i32);
    while let Some(&token) = tokens.get(at) {
        let run = if token == config.tokens.image {
            images.next()
        } else if Some(token) == config.tokens.video {
            videos.next()
        } else {
            layout.positions.push([next; 3]);
            layout.features.push(None);
            (at, next) = (at + 1, next + 1);
            continue;
        };
        let run = run.ok_or_else(|| miscounted("more"))?;
        let count = run.height * run.width;
        if count == 0 || tokens[at..].iter().take(count).any(|&t| t != token) || tokens.len() - at < count {
            return Err(miscounted("fewer"));
        }
        for i in 0..count {
            let place = [0, i / run.width, i % run.width].map(|offset| next + offset as i32);
            // If positions have one axis, each token of the picture counts.
            layout.positions.push(if config.is_bidirectional() { [next + i as i32; 3] } else { place });
            layout.features.push(Some((run.first + i) as u32));
        }
        next += if config.is_bidirectional() { count } else { run.height.max(run.width) } as i32;
        at += count;
    }
    if images.next().is_some() || videos.next().is_some() {
        return Err(miscounted("fewer"));
    }
    layout.delta = next - tokens.len() as i32;
    Ok(layout)
}

fn miscounted(what: &str) -> ModelError {
    ModelError::Config(format!(
        "the prompt has {what} tokens of pictures than its pictures give; their tokens may not be written as text"
    ))
}

/// The last token that each token sees: the end of its run if the rows of a picture see each other, otherwise itself.
pub fn run_ends(config: &VisionConfig, layout: &PromptLayout) -> Vec<u32> {
    let count = layout.features.len();
    let mut ends: Vec<u32> = (0..count as u32).collect();
    if config.is_bidirectional() {
        for i in (0..count.saturating_sub(1)).rev() {
            if layout.features[i].is_some() && layout.features[i + 1].is_some() {
                ends[i] = ends[i + 1];
            }
        }
    }
    ends
}
