//! The failure of a copy to the device or within it, which only launches and reads after it can report.

use crate::error::{CudaError, Result};
use keel_array::ArrayError;

/// The first transfer that failed. The values of its bytes are not known, so nothing runs or is read after it. One that
/// failed because of a peer is reported by one launch: the stream has passed, and the step after it writes its inputs
/// again.
#[derive(Default)]
pub(super) struct FailedTransfer(Option<CudaError>);

impl FailedTransfer {
    /// Notes the outcome of a transfer. After a failure that is not of a peer, further ones are its consequences, or it
    /// comes again: a delivery notes its failure, and so does the write that has asked for the delivery.
    pub fn note(&mut self, outcome: Result<()>) {
        let Err(error) = outcome else { return };
        if self.0.as_ref().is_none_or(is_of_peer) {
            tracing::error!("{error}");
            self.0 = Some(error);
        } else {
            tracing::debug!("after another failure: {error}");
        }
    }

    /// An error if a transfer before this launch has failed.
    pub fn report_to_launch(&mut self) -> Result<(), ArrayError> {
        match self.0.take_if(|error| is_of_peer(error)) {
            Some(error) => Err(error.in_op("copy")),
            None => self.report_to_read().map_err(|error| error.in_op("copy")),
        }
    }

    /// An error if a transfer before this read has failed.
    pub fn report_to_read(&self) -> Result<()> {
        match &self.0 {
            None => Ok(()),
            Some(error @ (CudaError::Peer { .. } | CudaError::ContextLost { .. })) => Err(error.clone()),
            Some(error) => Err(CudaError::ContextLost { call: "copy", reason: error.to_string() }),
        }
    }
}

fn is_of_peer(error: &CudaError) -> bool {
    matches!(error, CudaError::Peer { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused() -> CudaError {
        CudaError::Driver { call: "cuMemcpyDtoDAsync_v2", reason: "injected".into() }
    }

    /// A launch that is repeated after such a failure would run without the copy.
    #[test]
    fn nothing_runs_after_a_failed_transfer() {
        let mut failed = FailedTransfer::default();
        failed.note(Ok(()));
        assert!(failed.report_to_launch().is_ok() && failed.report_to_read().is_ok());
        failed.note(Err(refused()));
        failed.note(Err(CudaError::Driver { call: "cuMemsetD8Async", reason: "a consequence".into() }));
        for _ in 0..3 {
            let error = failed.report_to_launch().expect_err("the copy is missing");
            assert!(matches!(error, ArrayError::DeviceLost { .. }), "{error}");
            assert!(error.to_string().contains("cuMemcpyDtoDAsync_v2: injected"), "{error}");
            assert!(failed.report_to_read().is_err());
        }
    }

    #[test]
    fn the_failure_of_a_peer_is_reported_by_one_launch() {
        let mut failed = FailedTransfer::default();
        let peer = || CudaError::Peer { reason: "device 1 has failed".into() };
        failed.note(Err(peer()));
        assert!(matches!(failed.report_to_read(), Err(CudaError::Peer { .. })));
        let error = failed.report_to_launch().expect_err("its inputs are missing");
        assert!(matches!(&error, ArrayError::Kernel { op, .. } if op == "exchange"), "{error}");
        assert!(failed.report_to_launch().is_ok());
        // A failure of its own is not hidden by that of a peer.
        failed.note(Err(peer()));
        failed.note(Err(refused()));
        assert!(matches!(failed.report_to_launch(), Err(ArrayError::DeviceLost { .. })));
        assert!(matches!(failed.report_to_launch(), Err(ArrayError::DeviceLost { .. })));
    }
}
