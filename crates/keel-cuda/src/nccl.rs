//! Facts about NCCL that hold before it is loaded: its names, and the versions that will do. So a program can report on
//! the library without opening it.

use crate::{CudaError, Version};

/// The names under which the library is opened, in this order. Every package installs the first.
pub const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The oldest version that is used. It frees the communicators of one process in any order.
pub const VERSION_MIN: Version = (2, 18);

/// The error of a machine without the library. It names the packages to install.
///
/// ```
/// assert!(keel_cuda::nccl::missing().to_string().starts_with("libnccl.so.2 was not found: "));
/// ```
pub fn missing() -> CudaError {
    let advice = "a model on several GPUs needs it; it comes with the packages libnccl2 and nvidia-nccl-cu13; install \
                  either, and name its folder in LD_LIBRARY_PATH";
    CudaError::Missing { library: NAMES[0], advice }
}

/// Why a version is refused, and what to do; `None` if it will do.
///
/// ```
/// assert!(keel_cuda::nccl::refusal((2, 17)).is_some());
/// assert_eq!(keel_cuda::nccl::refusal((2, 18)), None);
/// ```
pub fn refusal(version: Version) -> Option<String> {
    if version >= VERSION_MIN {
        return None;
    }
    let ((major, minor), (least_major, least_minor)) = (version, VERSION_MIN);
    let needed = format!("{least_major}.{least_minor} or newer is needed: update it");
    Some(format!("{} is version {major}.{minor}, and {needed}", NAMES[0]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_before_the_oldest_are_refused_in_a_sentence() {
        let text = "libnccl.so.2 is version 1.99, and 2.18 or newer is needed: update it";
        assert_eq!(refusal((1, 99)).as_deref(), Some(text));
        assert!(refusal((2, 17)).is_some());
        for version in [VERSION_MIN, (2, 30), (3, 0)] {
            assert_eq!(refusal(version), None, "{version:?}");
        }
    }
}
