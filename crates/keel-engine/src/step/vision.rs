//! Buffers for the rows of pictures in a step.

use std::ops::Range;

use keel_array::{Array, Category, DType, Regime, Runtime};
use keel_models::blocks::{NextVisionRows, VisionRows};
use keel_models::vision::VisionConfig;

use super::staging::Rows;
use super::{Buckets, Outcome, StepShape};
use crate::options::EngineOptions;
use crate::{EngineError, Result};

/// The buffers, for the largest step of a prompt.
pub(super) struct VisionStaging {
    is_picture: Array,
    /// Level by level, f32 `[rows, hidden]`.
    features: Vec<Array>,
    /// i32 `[3 rows]`
    positions: Array,
    /// u32 `[rows]`, where the rows of a picture see each other.
    until: Option<Array>,
    /// `is_picture` and the first level of `features` for the tokens after the rows, where sequences draft.
    next: Option<NextVisionRows>,
}

impl Rows<'_> {
    /// Whether a row, or the token after one, belongs to a picture.
    pub fn has_pictures(&self) -> bool {
        self.has_picture_in(self.first..self.first + self.tokens.len() + 1)
    }

    /// Whether a step with this outcome needs pictures.
    ///
    /// A pass of the MTP head over staged hidden states reads the tokens after its rows, and not those of its rows. The
    /// features of these may be gone, because the prompt has been run. If a prompt ends with a picture's token, the
    /// pass rotates its row by the first of its three positions. Drafts may then be worse.
    pub fn needs_pictures(&self, outcome: Outcome) -> bool {
        match outcome.reads_hidden() {
            true => self.has_picture_in(self.first + 1..self.first + self.tokens.len() + 1),
            false => self.has_pictures(),
        }
    }

    fn has_picture_in(&self, tokens: Range<usize>) -> bool {
        self.sequence.vision_inputs().is_some_and(|vision| vision.has_picture_in(tokens))
    }
}

impl VisionStaging {
    pub fn allocate(
        runtime: &Runtime,
        config: &VisionConfig,
        options: &EngineOptions,
        buckets: &Buckets,
    ) -> Result<VisionStaging> {
        let (rows, hidden) = (buckets.prefill_rows_max(), config.text_hidden);
        let array = |shape: &[usize], dtype| Array::persistent(runtime, Category::Vision, shape, dtype);
        let is_picture = || array(&[rows, 1], DType::Bool);
        let features = || array(&[rows, hidden], DType::F32);
        Ok(VisionStaging {
            is_picture: is_picture()?,
            features: (0..config.levels()).map(|_| features()).collect::<std::result::Result<_, _>>()?,
            positions: array(&[3 * rows], DType::I32)?,
            until: config.is_bidirectional().then(|| array(&[rows], DType::U32)).transpose()?,
            next: match options.drafts {
                0 => None,
                _ => Some(NextVisionRows { is_picture: is_picture()?, features: features()? }),
            },
        })
    }

    /// The arrays of a step.
    pub fn rows(&self, shape: StepShape) -> Result<VisionRows> {
        let rows = shape.rows;
        let first = |array: &Array| array.prefix(rows);
        let features = self.features.iter().map(first).collect::<std::result::Result<Vec<_>, _>>()?;
        let is_picture = first(&self.is_picture)?;
        let next = match (&self.next, shape.outcome) {
            // The rows' own tokens are those after the hidden states.
            (_, Outcome::MtpHidden) => {
                Some(NextVisionRows { is_picture: is_picture.clone(), features: features[0].clone() })
            }
            (Some(NextVisionRows { is_picture, features }), _) => {
                Some(NextVisionRows { is_picture: first(is_picture)?, features: first(features)? })
            }
            (None, _) => None,
        };
        Ok(VisionRows {
            is_picture,
            features,
            positions: self.positions.prefix(3 * rows)?.reshape([3, rows])?,
            // Where rows of a picture see each other, decode rows belong to no picture; only the token after one may.
            until: match shape.regime {
                Regime::Prefill => self.until.as_ref().map(first).transpose()?,
                Regime::Decode => None,
            },
            next,
        })
    }

    /// Fills the buffers for the rows of a step of this shape. Padding rows see nothing.
    pub fn fill(&self, rows: &[Rows<'_>], shape: StepShape) -> Result<()> {
        // The MTP head reads the tokens after its rows.
        let shift = usize::from(shape.outcome == Outcome::MtpHidden || shape.reads_hidden());
        fill_features(rows, shape.rows, shift, &self.is_picture, &self.features)?;
        if let Some(NextVisionRows { is_picture, features }) = &self.next {
            fill_features(rows, shape.rows, 1, is_picture, std::slice::from_ref(features))?;
        }
        let tokens = || rows.iter().flat_map(|row| row.positions().map(move |token| (row, token)));
        let mut places: Vec<[i32; 3]> =
            tokens().map(|(row, token)| row.sequence.position_of(token)).collect();
        places.resize(shape.rows, [0; 3]);
        let axes: Vec<i32> = (0..3).flat_map(|axis| places.iter().map(move |place| place[axis])).collect();
        self.positions.write(&axes)?;
        if let Some(until) = &self.until {
            let end = |(row, token): (&Rows<'_>, usize)| {
                row.sequence.vision_inputs().map_or(token, |vision| vision.end(token)) as u32
            };
            let mut ends: Vec<u32> = tokens().map(end).collect();
            ends.resize(shape.rows, 0);
            until.write(&ends)?;
        }
        Ok(())
    }
}

/// Fills the features of the tokens that come `shift` after the rows' own, for a step of `count` rows.
fn fill_features(
    rows: &[Rows<'_>],
    count: usize,
    shift: usize,
    is_picture: &Array,
    levels: &[Array],
) -> Result<()> {
    let width = levels.first().map_or(0, |level| level.shape()[1]);
    let mut flags = vec![false; count];
    for (level, array) in levels.iter().enumerate() {
        let mut values = vec![0.0f32; count * width];
        let tokens = rows.iter().flat_map(|row| row.positions().map(move |at| (row, at + shift)));
        for (i, (row, token)) in tokens.enumerate() {
            let Some(vision) = row.sequence.vision_inputs().filter(|vision| vision.is_picture(token)) else {
                continue;
            };
            let feature = vision.feature(level, token).ok_or(EngineError::Unseen { token })?;
            values[i * width..(i + 1) * width].copy_from_slice(feature);
            flags[i] = true;
        }
        array.write(&values)?;
    }
    Ok(is_picture.write(&flags)?)
}
