//! Whole numbers in requests: counts and ids. As in JSON Schema, `5.0` is one, too, because some clients have only such
//! numbers.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Number;

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
            None => Err(D::Error::custom(format!("{number} is no whole number, or out of range"))),
        }
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
    fn a_float_without_a_fraction_is_a_whole_number() {
        assert_eq!(read(json!({"count": 16.0, "seed": -1.0})), Some((Some(16), Some(-1))));
        assert_eq!(read(json!({"count": 16, "seed": i64::MIN})), Some((Some(16), Some(i64::MIN))));
        assert_eq!(read(json!({"count": null})), Some((None, None)));
        for wrong in [json!(16.5), json!(-1), json!(1e300), json!("16"), json!(true), json!([16])] {
            assert_eq!(read(json!({"count": wrong})), None, "{wrong}");
        }
    }
}
