//! Sizes such as `800M` and `1.5Gi`.

/// Parses a number of bytes: a plain number, or one with K, M, G or T (powers of 1000), or Ki, Mi, Gi or Ti (powers of
/// 1024). A `B` may follow.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a size; expected for example 800M, 1.5Gi or 1000000");
    let trimmed = text.trim().trim_end_matches(['B', 'b']);
    let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits);
    let scale: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" => 1,
        "k" => 1000,
        "m" => 1_000_000,
        "g" => 1_000_000_000,
        "t" => 1_000_000_000_000,
        "ki" => 1 << 10,
        "mi" => 1 << 20,
        "gi" => 1 << 30,
        "ti" => 1 << 40,
        _ => return Err(wrong()),
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(scale).ok_or_else(|| format!("{text:?} is more than 2^64 bytes"));
    }
    let value: f64 = number.parse().map_err(|_| wrong())?;
    let bytes = value * scale as f64;
    if !bytes.is_finite() || bytes >= u64::MAX as f64 {
        return Err(format!("{text:?} is more than 2^64 bytes"));
    }
    Ok(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::parse_bytes;

    #[test]
    fn units_are_powers_of_1000_and_of_1024() {
        let cases = [
            ("0", 0),
            ("123", 123),
            ("5K", 5000),
            ("5k", 5000),
            ("5KB", 5000),
            ("2Ki", 2048),
            ("2 MiB", 2 << 20),
            ("1.5Gi", 3 << 29),
            ("3G", 3_000_000_000),
        ];
        for (text, bytes) in cases {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in ["", "G", "-1", "1X", "1.2.3", "nan", "99999999999999999999", "20000000T", "1e9"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }
}
