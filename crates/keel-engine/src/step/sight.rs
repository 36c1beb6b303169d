//! Buffers for the rows of pictures in a step.

use keel_array::{Array, Category, DType, Regime, Runtime};
use keel_models::blocks::{NextSight, SightRows};
use keel_models::vision::VisionConfig;

use super::staging::Rows;
use super::{Buckets, Outcome, StepShape};
use crate::options::EngineOptions;
use crate::{EngineError, Result};

/// The buffers, for the largest step of a prompt.
pub(super) struct SightStaging {
    sees: Array,
    /// Level by level, f32 `[rows, hidden]`.
    features: Vec<Array>,
    /// i32 `[3 rows]`
    positions: Array,
    /// u32 `[rows]`, where the rows of a picture see each other.
    until: Option<Array>,
    /// `sees` and the first level of `features` for the tokens after the rows, where sequences draft.
    next: Option<NextSight>,
}

impl Rows<'_> {
    /// Whether a row, or the token after one, belongs to a picture.
    pub fn sees(&self) -> bool {
        let tokens = self.first..self.first + self.tokens.len() + 1;
        self.sequence.sight().is_some_and(|sight| sight.sees_any(tokens))
    }
}

impl SightStaging {
    pub fn allocate(
        runtime: &Runtime,
        config: &VisionConfig,
        options: &EngineOptions,
        buckets: &Buckets,
    ) -> Result<SightStaging> {
        let (rows, hidden) = (buckets.prefill_rows_max(), config.text_hidden);
        let array = |shape: &[usize], dtype| Array::persistent(runtime, Category::Vision, shape, dtype);
        let sees = || array(&[rows, 1], DType::Bool);
        let features = || array(&[rows, hidden], DType::F32);
        Ok(SightStaging {
            sees: sees()?,
            features: (0..config.levels()).map(|_| features()).collect::<std::result::Result<_, _>>()?,
            positions: array(&[3 * rows], DType::I32)?,
            until: config.is_bidirectional().then(|| array(&[rows], DType::U32)).transpose()?,
            next: match options.drafts {
                0 => None,
                _ => Some(NextSight { sees: sees()?, features: features()? }),
            },
        })
    }

    /// The arrays of a step.
    pub fn rows(&self, shape: StepShape) -> Result<SightRows> {
        let rows = shape.rows;
        let first = |array: &Array| array.prefix(rows);
        let features = self.features.iter().map(first).collect::<std::result::Result<Vec<_>, _>>()?;
        let sees = first(&self.sees)?;
        let next = match (&self.next, shape.outcome) {
            // The rows' own tokens are those after the hidden states.
            (_, Outcome::MtpHidden) => Some(NextSight { sees: sees.clone(), features: features[0].clone() }),
            (Some(NextSight { sees, features }), _) => {
                Some(NextSight { sees: first(sees)?, features: first(features)? })
            }
            (None, _) => None,
        };
        Ok(SightRows {
            sees,
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
        let shift = usize::from(shape.outcome == Outcome::MtpHidden);
        fill_features(rows, shape.rows, shift, &self.sees, &self.features)?;
        if let Some(NextSight { sees, features }) = &self.next {
            fill_features(rows, shape.rows, 1, sees, std::slice::from_ref(features))?;
        }
        let tokens = || rows.iter().flat_map(|row| row.positions().map(move |token| (row, token)));
        let mut places: Vec<[i32; 3]> =
            tokens().map(|(row, token)| row.sequence.position_of(token)).collect();
        places.resize(shape.rows, [0; 3]);
        let axes: Vec<i32> = (0..3).flat_map(|axis| places.iter().map(move |place| place[axis])).collect();
        self.positions.write(&axes)?;
        if let Some(until) = &self.until {
            let end = |(row, token): (&Rows<'_>, usize)| {
                row.sequence.sight().map_or(token, |sight| sight.end(token)) as u32
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
    sees: &Array,
    levels: &[Array],
) -> Result<()> {
    let width = levels.first().map_or(0, |level| level.shape()[1]);
    let mut flags = vec![false; count];
    for (level, array) in levels.iter().enumerate() {
        let mut values = vec![0.0f32; count * width];
        let tokens = rows.iter().flat_map(|row| row.positions().map(move |at| (row, at + shift)));
        for (i, (row, token)) in tokens.enumerate() {
            let Some(sight) = row.sequence.sight().filter(|sight| sight.is_picture(token)) else { continue };
            let feature = sight.feature(level, token).ok_or(EngineError::Unseen { token })?;
            values[i * width..(i + 1) * width].copy_from_slice(feature);
            flags[i] = true;
        }
        array.write(&values)?;
    }
    Ok(sees.write(&flags)?)
}
