//! A GPU that stands in for a smaller one: kernels are chosen and cut as for the smaller one, and compiled without the
//! instructions that only its own generation has. So tests on one GPU cover the kernels that others run.

use crate::CudaError;
use crate::error::Result;

/// The environment variable that names the compute capability of the smaller GPU, such as `8.6`.
const VARIABLE: &str = "KEEL_CUDA_AS";

/// The properties of a GPU on which the choice of kernels depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StandIn {
    /// Compute capability: major, minor.
    pub capability: (u32, u32),
    /// Bytes of shared memory that a block may have.
    pub shared_bytes_max: usize,
}

impl StandIn {
    /// The GPU to stand in for, if one is named.
    ///
    /// # Errors
    /// The name is no compute capability of 8.0 or newer.
    pub fn named() -> Result<Option<StandIn>> {
        let Ok(name) = std::env::var(VARIABLE) else { return Ok(None) };
        let wrong = || CudaError::StandIn { variable: VARIABLE, name: name.clone() };
        StandIn::of(&name).ok_or_else(wrong).map(Some)
    }

    fn of(name: &str) -> Option<StandIn> {
        let (major, minor) = name.split_once('.')?;
        let capability = (major.parse().ok()?, minor.parse().ok()?);
        // CUDA's table of technical specifications, without the 1 KiB that each block reserves.
        let kilobytes = match capability {
            (..8, _) => return None,
            (8, 0 | 7) => 163,
            (8 | 12, _) => 99,
            _ => 227,
        };
        Some(StandIn { capability, shared_bytes_max: kilobytes << 10 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_capabilities() {
        let of = |name| StandIn::of(name).map(|gpu| (gpu.capability, gpu.shared_bytes_max >> 10));
        assert_eq!(of("8.0"), Some(((8, 0), 163)));
        assert_eq!(of("8.9"), Some(((8, 9), 99)));
        assert_eq!(of("12.0"), Some(((12, 0), 99)));
        assert_eq!([of("7.5"), of("8"), of("sm_86"), of("")], [None; 4]);
    }
}
