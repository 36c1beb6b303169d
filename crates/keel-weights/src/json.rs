//! Reading small JSON files with a bound on their size.

use std::path::Path;

use serde::de::DeserializeOwned;

use crate::{Result, WeightsError};

/// Parses the JSON file at `path`, refusing more than `bytes_max` before reading it.
pub(crate) fn read<T: DeserializeOwned>(path: &Path, bytes_max: u64) -> Result<T> {
    let problem = |problem: String| WeightsError::Json { path: path.into(), problem };
    let bytes = std::fs::metadata(path).map_err(WeightsError::io("open", path))?.len();
    if bytes > bytes_max {
        return Err(problem(format!("it has {bytes} bytes, at most {bytes_max} are accepted")));
    }
    let bytes = std::fs::read(path).map_err(WeightsError::io("read", path))?;
    serde_json::from_slice(&bytes).map_err(|error| problem(error.to_string()))
}
