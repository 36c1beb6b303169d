//! Bytes as text.

/// Formats bytes with a unit and three to four digits.
///
/// ```
/// assert_eq!(evenkeel::human_bytes(107_374_182), "102 MiB");
/// ```
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if unit == 0 || value >= 100.0 { 0 } else { 1 };
    format!("{value:.digits$} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_get_a_unit() {
        let cases = [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (107_374_182, "102 MiB")];
        for (bytes, text) in cases {
            assert_eq!(human_bytes(bytes), text);
        }
        assert_eq!(human_bytes(u64::MAX), "16384 PiB");
    }
}
