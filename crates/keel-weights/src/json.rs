//! Reading small JSON files with a bound on their size.

use std::{io::Write, path::Path};

use serde::de::DeserializeOwned;

use crate::{Result, WeightsError, partial::PartialFile};

/// Parses the JSON file at `path`, refusing more than `bytes_max` before reading it.
pub(crate) fn read<T: DeserializeOwned>(path: &Path, bytes_max: u64) -> Result<T> {
    let problem = |problem: String| WeightsError::Json { path: path.into(), problem };
    let bytes = std::fs::metadata(path).map_err(WeightsError::io("open", path))?.len();
    if bytes > bytes_max {
        return Err(problem(format!("it has {bytes} bytes, at most {bytes_max} are accepted")));
    }
    let bytes = std::fs::read(path).map_err(WeightsError::io("read", path))?;
    parse(path, &bytes)
}

/// Parses the bytes of a JSON file that errors call by `path`.
pub(crate) fn parse<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T> {
    let problem = |problem| WeightsError::Json { path: path.into(), problem };
    serde_json::from_slice(bytes).map_err(|error| problem(error.to_string()))
}

/// Writes `value` to `path`, indented, as a whole or not at all.
pub(crate) fn write(path: &Path, value: &serde_json::Value) -> Result<()> {
    let (partial, mut file) = PartialFile::create(path)?;
    let written = file.write_all(format!("{value:#}\n").as_bytes()).and_then(|()| file.sync_all());
    written.map_err(WeightsError::io("write", path))?;
    partial.commit()
}
