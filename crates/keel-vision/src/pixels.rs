//! Converts 8-bit values to the numbers that a tower reads.

use crate::Result;
use crate::fields::Fields;

/// Computes `(value - offset) / divisor` for each channel in f32. Without normalisation it is the value times a factor.
///
/// The reference fuses rescaling and normalising: `offset = mean / rescale`, `divisor = std / rescale`.
#[derive(Clone, Debug, PartialEq)]
pub struct PixelScale {
    tables: [Vec<f32>; 3],
}

/// Means and standard deviations, used if a file has none.
pub(crate) struct ScaleDefaults {
    pub mean: [f64; 3],
    pub std: [f64; 3],
}

impl ScaleDefaults {
    pub const HALF: ScaleDefaults = ScaleDefaults { mean: [0.5; 3], std: [0.5; 3] };
    pub const CLIP: ScaleDefaults = ScaleDefaults {
        mean: [0.481_454_66, 0.457_827_5, 0.408_210_73],
        std: [0.268_629_54, 0.261_302_58, 0.275_777_11],
    };
}

impl PixelScale {
    pub(crate) fn from_fields(fields: &Fields<'_>, defaults: &ScaleDefaults) -> Result<PixelScale> {
        let rescales = fields.flag_or("do_rescale", true)?;
        let normalises = fields.flag_or("do_normalize", true)?;
        let factor = fields.number("rescale_factor")?.unwrap_or(1.0 / 255.0);
        let mean = fields.triple_or("image_mean", defaults.mean)?;
        let std = fields.triple_or("image_std", defaults.std)?;
        if std.contains(&0.0) {
            return Err(fields.error("image_std has a 0, and values are divided by it"));
        }
        let widened = if rescales { (1.0 / factor) as f32 } else { 1.0 };
        let table = |channel: usize| -> Vec<f32> {
            let (offset, divisor) = (mean[channel] as f32 * widened, std[channel] as f32 * widened);
            let number = |value: u8| match (rescales, normalises) {
                (_, true) => (f32::from(value) - offset) / divisor,
                (true, false) => f32::from(value) * factor as f32,
                (false, false) => f32::from(value),
            };
            (0..=u8::MAX).map(number).collect()
        };
        Ok(PixelScale { tables: [table(0), table(1), table(2)] })
    }

    /// The number for a value of a channel.
    #[inline]
    pub fn number(&self, channel: usize, value: u8) -> f32 {
        self.tables[channel][usize::from(value)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_switches_are_followed() {
        let scale = |json| {
            let fields = Fields { file: "preprocessor_config.json", json: &json };
            PixelScale::from_fields(&fields, &ScaleDefaults::HALF).expect("sound")
        };
        assert_eq!(scale(json!({})).number(0, 255), 1.0);
        assert_eq!(scale(json!({})).number(2, 0), -1.0);
        assert_eq!(scale(json!({"do_normalize": false})).number(0, 255), 1.0);
        assert_eq!(scale(json!({"do_normalize": false, "do_rescale": false})).number(0, 7), 7.0);
        let own = scale(json!({"image_mean": [0.0, 0.1, 0.2], "image_std": [1.0, 2.0, 4.0]}));
        assert_eq!(own.number(2, 102), (102.0 - 0.2f32 * 255.0) / (4.0f32 * 255.0));
    }
}
