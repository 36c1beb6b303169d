//! Numbers in requests. Counts and ids are whole numbers. As in JSON Schema, `5.0` is one, too, because some clients
//! have only such numbers.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Number;

use crate::error::{Result, wrong};

/// A whole number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Whole<T>(pub T);

impl<'de, T: TryFrom<i128>> Deserialize<'de> for Whole<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Whole<T>, D::Error> {
        let number = Number::deserialize(deserializer)?;
        // No type of a field holds numbers as large as 1e30, and i128 does.
        let float = || number.as_f64().filter(|float| float.fract() == 0.0 && float.abs() < 1e30);
        let whole = number.as_i128().or_else(|| float().map(|float| float as i128));
        match whole.and_then(|whole| T::try_from(whole).ok()) {
            Some(whole) => Ok(Whole(whole)),
            None => Err(D::Error::custom(match (whole, T::try_from(-1)) {
                (Some(1..), _) => format!("{number} is too large"),
                (_, Err(_)) => format!("expected a whole number from 0, not {number}"),
                (_, Ok(_)) => format!("expected a whole number, not {number}"),
            })),
        }
    }
}

/// Any number. Its type in this program says nothing to a client, so an error does not name it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Real(pub f32);

impl<'de> Deserialize<'de> for Real {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Real, D::Error> {
        let number = Number::deserialize(deserializer)?;
        let float = number.as_f64().ok_or_else(|| D::Error::custom(format!("{number} is too large")))?;
        Ok(Real(float as f32))
    }
}

/// Refuses a limit of no tokens.
///
/// # Errors
/// The field with the limit.
pub(crate) fn check_limit(field: &'static str, limit: Option<usize>) -> Result<()> {
    match limit {
        Some(0) => Err(wrong(field, "0 tokens, expected at least 1")),
        _ => Ok(()),
    }
}

/// Reads a field that is a whole number or null.
pub(crate) fn whole_number<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: TryFrom<i128>,
{
    Ok(Option::<Whole<T>>::deserialize(deserializer)?.map(|Whole(number)| number))
}

/// Reads a field that is a number or null.
pub(crate) fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f32>, D::Error> {
    Ok(Option::<Real>::deserialize(deserializer)?.map(|Real(number)| number))
}

/// Reads a list of ids.
pub(crate) fn ids<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u32>, D::Error> {
    Ok(Vec::<Whole<u32>>::deserialize(deserializer)?.into_iter().map(|Whole(id)| id).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[derive(Deserialize)]
    struct Fields {
        #[serde(default, deserialize_with = "whole_number")]
        count: Option<usize>,
        #[serde(default, deserialize_with = "whole_number")]
        seed: Option<i64>,
    }

    fn read(json: Value) -> Option<(Option<usize>, Option<i64>)> {
        serde_json::from_value(json).ok().map(|Fields { count, seed }| (count, seed))
    }

    #[test]
    fn errors_say_which_numbers_are_right() {
        for (json, expected) in [
            (json!({"count": -1}), "expected a whole number from 0, not -1"),
            (json!({"count": 2.5}), "expected a whole number from 0, not 2.5"),
            (json!({"count": 1e25}), "is too large"),
            (json!({"seed": 2.5}), "expected a whole number, not 2.5"),
            (json!({"seed": u64::MAX}), "18446744073709551615 is too large"),
        ] {
            let error = serde_json::from_value::<Fields>(json).err().expect("out of range");
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    #[test]
    fn a_float_without_a_fraction_is_a_whole_number() {
        assert_eq!(read(json!({"count": 16.0, "seed": -1.0})), Some((Some(16), Some(-1))));
        assert_eq!(read(json!({"count": 16, "seed": i64::MIN})), Some((Some(16), Some(i64::MIN))));
        assert_eq!(read(json!({"count": null})), Some((None, None)));
        for wrong in [json!(16.5), json!(-1), json!(1e300), json!("16"), json!(true), json!([16])] {
            assert_eq!(read(json!({"count": wrong})), None, "{wrong}");
        }
    }
}
