//! The counters of a budget that requests share.
//!
//! They are changed by many threads without a lock. `tests/interleavings.rs` compiles this file with loom's atomics and
//! checks each order of the operations.

use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering};

/// A request that holds at most this may use the whole budget. A larger request may use [`LARGE_SHARE`] of it. So large
/// bodies do not keep small requests out.
const SMALL_BYTES: u64 = 256 << 10;
const LARGE_SHARE: (u64, u64) = (7, 8);

/// A budget, and its bytes in use.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: u64,
    /// The part of the limit that is kept for connections.
    reserve: u64,
    used: AtomicU64,
    peak: AtomicU64,
    /// Sum of all bytes that were ever charged.
    total: AtomicU64,
}

/// Why bytes are not charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The request exceeds even an unused budget.
    Always { needed: u64, limit: u64 },
    /// Others use too much now.
    Now { needed: u64, used: u64, limit: u64 },
}

impl Budget {
    /// A budget of `limit` bytes. `reserve` of them are kept for connections.
    pub fn new(limit: u64, reserve: u64) -> Budget {
        let zero = || AtomicU64::new(0);
        Budget { limit, reserve, used: zero(), peak: zero(), total: zero() }
    }

    /// The budget in bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes in use now.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }

    /// The peak of the bytes in use.
    pub fn peak(&self) -> u64 {
        self.peak.load(Ordering::Acquire)
    }

    /// Sum of all bytes that were ever charged.
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Acquire)
    }

    /// Bytes that a request of `bytes` may use, together with all others.
    fn share(&self, bytes: u64) -> u64 {
        let limit = self.limit.saturating_sub(self.reserve);
        if bytes <= SMALL_BYTES { limit } else { limit / LARGE_SHARE.1 * LARGE_SHARE.0 }
    }
}

/// Bytes of a budget that one owner holds. Owners of one request share `request`. Dropping it returns its bytes.
#[derive(Debug)]
pub(crate) struct Meter {
    budget: Arc<Budget>,
    /// Bytes that all owners of the request hold.
    request: Arc<AtomicU64>,
    held: AtomicU64,
}

impl Meter {
    /// The charge of a new request.
    pub fn new(budget: &Arc<Budget>) -> Meter {
        Meter { budget: Arc::clone(budget), request: Arc::new(AtomicU64::new(0)), held: AtomicU64::new(0) }
    }

    /// Another owner's charge of the same request.
    pub fn part(&self) -> Meter {
        Meter {
            budget: Arc::clone(&self.budget),
            request: Arc::clone(&self.request),
            held: AtomicU64::new(0),
        }
    }

    /// Charges bytes.
    ///
    /// # Errors
    /// [`Refused`]; nothing has been charged then.
    pub fn take(&self, bytes: u64) -> Result<(), Refused> {
        // An owner that holds little, such as waiting tokens, may use the whole budget, even if its request is large.
        // So a running answer is not cut off while small requests have room.
        self.take_of(self.budget.share(self.held().saturating_add(bytes)), bytes)
    }

    /// Charges bytes by which a running answer has grown. As for waiting tokens, large requests leave room for them,
    /// however much the answer holds.
    ///
    /// # Errors
    /// [`Refused`]; nothing has been charged then.
    pub fn grow(&self, bytes: u64) -> Result<(), Refused> {
        self.take_of(self.budget.share(bytes), bytes)
    }

    /// Charges bytes if no more than `share` are then used.
    fn take_of(&self, share: u64, bytes: u64) -> Result<(), Refused> {
        if bytes == 0 {
            // Bytes that are charged already stay, whatever others use.
            return Ok(());
        }
        let wanted = self.request.load(Ordering::Acquire).saturating_add(bytes);
        let more = |used: u64| used.checked_add(bytes).filter(|&used| used <= share);
        match self.budget.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, more) {
            Ok(before) => {
                self.budget.peak.fetch_max(before + bytes, Ordering::AcqRel);
                self.budget.total.fetch_add(bytes, Ordering::AcqRel);
                self.request.fetch_add(bytes, Ordering::AcqRel);
                self.held.fetch_add(bytes, Ordering::AcqRel);
                Ok(())
            }
            // More than this owner would get if nothing else were in use.
            Err(_) if wanted > share.max(self.budget.share(wanted)) => {
                Err(Refused::Always { needed: wanted, limit: share.max(self.budget.share(wanted)) })
            }
            Err(used) => Err(Refused::Now { needed: bytes, used, limit: share }),
        }
    }

    /// Returns charged bytes.
    pub fn give_back(&self, bytes: u64) {
        self.request.fetch_sub(bytes, Ordering::AcqRel);
        self.budget.used.fetch_sub(bytes, Ordering::AcqRel);
        // Last: a thread that sees this owner's smaller count also sees the request's.
        self.held.fetch_sub(bytes, Ordering::AcqRel);
    }

    /// Charges bytes until the returned [`Hold`] is dropped.
    ///
    /// # Errors
    /// As [`Meter::take`].
    pub fn hold(&self, bytes: u64) -> Result<Hold<'_>, Refused> {
        self.take(bytes)?;
        Ok(Hold { meter: self, bytes })
    }

    /// Reduces the charge to `bytes`, if it is larger.
    pub fn settle(&self, bytes: u64) {
        self.give_back(self.held().saturating_sub(bytes));
    }

    /// Raises or reduces the charge to `bytes`.
    ///
    /// # Errors
    /// As [`Meter::take`].
    pub fn set(&self, bytes: u64) -> Result<(), Refused> {
        self.settle(bytes);
        self.take(bytes - self.held())
    }

    /// Bytes that this owner holds now.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Acquire)
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.settle(0);
    }
}

/// Bytes of a [`Meter`] that are charged for a while.
#[derive(Debug)]
pub(crate) struct Hold<'a> {
    meter: &'a Meter,
    bytes: u64,
}

impl Hold<'_> {
    /// Reduces it to `bytes`, if it is larger.
    pub fn reduce(&mut self, bytes: u64) {
        let rest = self.bytes.saturating_sub(bytes);
        self.meter.give_back(rest);
        self.bytes -= rest;
    }

    /// Keeps `bytes` of it charged to the request, and gives the rest back.
    pub fn keep(mut self, bytes: u64) {
        debug_assert!(bytes <= self.bytes, "what is kept was charged");
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.meter.give_back(self.bytes);
    }
}
