//! Reads small JSON files, with a bound on their size.

use std::{io::ErrorKind, path::Path};

use serde::de::DeserializeOwned;

use crate::{Result, WeightsError, read_regular, write_whole};

/// Parses the JSON file at `path`, if it has at most `bytes_max` bytes.
pub(crate) fn read<T: DeserializeOwned>(path: &Path, bytes_max: u64) -> Result<T> {
    let bytes = read_regular(path, bytes_max).map_err(|error| match error.kind() {
        ErrorKind::FileTooLarge => {
            let problem = format!("it has more than the {bytes_max} bytes that are accepted");
            WeightsError::Json { path: path.into(), problem }
        }
        _ => WeightsError::io("read", path)(error),
    })?;
    parse(path, &bytes)
}

/// Parses the bytes of a JSON file. Errors name it `path`.
pub(crate) fn parse<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T> {
    let problem = |problem| WeightsError::Json { path: path.into(), problem };
    serde_json::from_slice(bytes).map_err(|error| problem(error.to_string()))
}

/// Writes `value` to `path`, indented, completely or not at all.
pub(crate) fn write(path: &Path, value: &serde_json::Value) -> Result<()> {
    write_whole(path, format!("{value:#}\n").as_bytes())
}
