//! Kernels that are listed instead of launched, so that they can be compiled before the first launch.

use crate::driver::SizedKernel;
use crate::kernels::KernelKey;
use std::sync::{Mutex, MutexGuard};

/// Takes the place of the stream while the kernels of launches are listed.
#[derive(Default)]
pub(super) struct Listing(Mutex<Option<Vec<SizedKernel>>>);

/// Ends a listing when it is dropped, also in a panic. All later launches would only be listed otherwise.
struct UnderWay<'a>(&'a Listing);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        *self.0.listed() = None;
    }
}

impl Listing {
    fn listed(&self) -> MutexGuard<'_, Option<Vec<SizedKernel>>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Whether kernels are only listed, not put on the stream.
    pub fn is_under_way(&self) -> bool {
        self.listed().is_some()
    }

    /// Lists a kernel. False if kernels are to be launched.
    pub fn takes(&self, key: &KernelKey, shared_bytes: usize) -> bool {
        match self.listed().as_mut() {
            Some(listed) => {
                listed.push(SizedKernel { key: key.clone(), shared_bytes });
                true
            }
            None => false,
        }
    }

    /// The kernels that `record` would launch.
    pub fn of<E>(&self, record: impl FnOnce() -> Result<(), E>) -> Result<Vec<SizedKernel>, E> {
        *self.listed() = Some(Vec::new());
        let _under_way = UnderWay(self);
        record()?;
        let listed = self.listed().take();
        Ok(listed.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::BATCH;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn a_listing_ends_however_it_ends() {
        let (listing, key) = (Listing::default(), KernelKey::new(BATCH, "check_batch"));
        assert!(!listing.takes(&key, 8));
        let list = || {
            assert!(listing.is_under_way() && listing.takes(&key, 8) && listing.takes(&key, 16));
        };
        let listed = listing.of(|| {
            list();
            Ok::<(), ()>(())
        });
        let bytes =
            listed.map(|listed| listed.into_iter().map(|kernel| kernel.shared_bytes).collect::<Vec<_>>());
        assert_eq!(bytes, Ok(vec![8, 16]));
        assert!(!listing.is_under_way() && !listing.takes(&key, 8));
        let refused = listing.of(|| {
            list();
            Err("refused")
        });
        assert_eq!(refused.err(), Some("refused"));
        assert!(!listing.is_under_way());
        let panicked = catch_unwind(AssertUnwindSafe(|| listing.of::<()>(|| panic!("in a kernel's launch"))));
        assert!(panicked.is_err());
        assert!(!listing.is_under_way() && !listing.takes(&key, 8), "later launches are launches");
    }
}
