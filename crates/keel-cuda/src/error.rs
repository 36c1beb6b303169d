//! Errors between this crate and a GPU.

use crate::driver::MemoryInfo;
use keel_array::ArrayError;

/// Errors of the CUDA backend.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// A library that is loaded at run time is not there.
    #[error("{library} was not found: {advice}")]
    Missing {
        /// The library.
        library: &'static str,
        /// Where it comes from.
        advice: &'static str,
    },
    /// The driver is older than the version that the kernels need.
    #[error(
        "the NVIDIA driver supports CUDA {}.{}, but {}.{} or newer is needed: update the driver",
        found / 1000, found % 1000 / 10, needed / 1000, needed % 1000 / 10
    )]
    DriverTooOld {
        /// 1000 * major + 10 * minor.
        found: i32,
        /// As `found`.
        needed: i32,
    },
    /// There is no such device.
    #[error("cuda:{ordinal} does not exist: {count} devices were found")]
    NoDevice {
        /// The number asked for.
        ordinal: usize,
        /// Devices that exist.
        count: usize,
    },
    /// The device is too old.
    #[error("{name} has compute capability {}.{}; 8.0 or newer is needed", capability.0, capability.1)]
    Capability {
        /// Name of the device.
        name: String,
        /// Major and minor.
        capability: (u32, u32),
    },
    /// An environment variable names no GPU to stand in for.
    #[error("{variable}={name} is no compute capability; use one of 8.0 or newer, such as 8.6, or unset it")]
    StandIn {
        /// The variable.
        variable: &'static str,
        /// Its value.
        name: String,
    },
    /// The driver refused a call.
    #[error("{call}: {reason}")]
    Driver {
        /// The function of the driver.
        call: &'static str,
        /// Its name for the error, and its explanation.
        reason: String,
    },
    /// A library has no kernel for a product.
    #[error("{call}: no kernel for this product ({reason})")]
    NoProduct {
        /// The function of the library.
        call: &'static str,
        /// Its name for the refusal.
        reason: String,
    },
    /// The driver refused a call, and will refuse all that follow: a kernel or the hardware has broken the context.
    #[error("{call}: {reason}")]
    ContextLost {
        /// The function of the driver.
        call: &'static str,
        /// Its name for the error, and its explanation.
        reason: String,
    },
    /// There is no memory for a call.
    #[error("{call}: out of memory")]
    OutOfMemory {
        /// The function of the driver or of a library.
        call: &'static str,
    },
    /// A device has too little free memory for an allocation outside of plans.
    #[error(
        "cuda:{ordinal} has too little free memory for {purpose}{}; nvidia-smi shows which programs hold its memory: \
         end one of them, or choose another device ({call}: out of memory)",
        free_of_total(*memory)
    )]
    DeviceFull {
        /// The device's number.
        ordinal: usize,
        /// The purpose of the memory.
        purpose: &'static str,
        /// The device's memory; `None` if nothing tells.
        memory: Option<MemoryInfo>,
        /// The function of the driver or of a library.
        call: &'static str,
    },
    /// Another device of the group has failed, or the connection to it.
    #[error("{reason}")]
    Peer {
        /// One sentence.
        reason: String,
    },
    /// A kernel does not compile.
    #[error("kernel {kernel} does not compile for {architecture}:\n{log}")]
    Compile {
        /// File and constants, and the entry point if only one is compiled; or the name of a user's kernel.
        kernel: String,
        /// The target architecture.
        architecture: String,
        /// The compiler's log.
        log: String,
    },
}

/// Result of this crate.
pub type Result<T, E = CudaError> = std::result::Result<T, E>;

/// In MiB, as nvidia-smi has them.
fn free_of_total(memory: Option<MemoryInfo>) -> String {
    let text = |MemoryInfo { free, total }| format!(": {} of {} MiB are free", free >> 20, total >> 20);
    memory.map_or_else(String::new, text)
}

impl CudaError {
    /// The error as the array runtime reports it for an operation. One that follows from the failure of a peer names no
    /// other operation than `exchange`, wherever the host has met it.
    pub(crate) fn in_op(self, op: &str) -> ArrayError {
        let reason = self.to_string();
        match self {
            CudaError::Peer { .. } => ArrayError::Kernel { op: "exchange".into(), reason },
            CudaError::ContextLost { .. } => ArrayError::DeviceLost { op: op.into(), reason },
            _ => ArrayError::Kernel { op: op.into(), reason },
        }
    }
}
