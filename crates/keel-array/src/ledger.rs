//! The ledger: every byte of tensor memory has an owner, by category.
//!
//! All memory goes through [`Ledger::charge`]. It fails before anything is allocated if a limit would be exceeded.
//! The returned [`Charge`] gives the bytes back on drop, so the ledger counts exactly the live memory: the categories
//! add up to the active bytes at any time.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::{ArrayError, Result};

/// The purpose of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(usize)]
pub enum Category {
    /// Model parameters.
    Weights,
    /// Keys and values of attention layers.
    Kv,
    /// Gated-delta states and convolution windows.
    Recurrent,
    /// Records of tokens that are not verified yet.
    DeltaLog,
    /// Saved recurrent slots.
    Checkpoints,
    /// Intermediate results: the arena of a stream, and persistent outputs such as logits.
    Activations,
    /// Scratch of kernels that lives outside the arena.
    Workspace,
    /// Small buffers that the host fills for each step.
    Staging,
    /// Host memory for sequences that are parked.
    Swap,
    /// Buffers of a vision tower, and rows of pictures for each step.
    Vision,
    /// Host memory for the features of pictures that are kept.
    Features,
    /// Host memory in which tokens are drawn, and for hidden states that wait on the host.
    Host,
    /// Arrays that the user of the library made.
    User,
}

impl Category {
    /// All categories, in the order of reports.
    pub const ALL: [Category; 13] = [
        Category::Weights,
        Category::Kv,
        Category::Recurrent,
        Category::DeltaLog,
        Category::Checkpoints,
        Category::Activations,
        Category::Workspace,
        Category::Staging,
        Category::Swap,
        Category::Vision,
        Category::Features,
        Category::Host,
        Category::User,
    ];

    /// Whether the memory is the host's, whatever the device is.
    const fn is_on_host(self) -> bool {
        matches!(self, Category::Swap | Category::Features | Category::Host)
    }

    /// The name in reports and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Category::Weights => "weights",
            Category::Kv => "kv",
            Category::Recurrent => "recurrent",
            Category::DeltaLog => "delta_log",
            Category::Checkpoints => "checkpoints",
            Category::Activations => "activations",
            Category::Workspace => "workspace",
            Category::Staging => "staging",
            Category::Swap => "swap",
            Category::Vision => "vision",
            Category::Features => "features",
            Category::Host => "host",
            Category::User => "user",
        }
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Bytes per category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryReport([u64; Category::ALL.len()]);

impl MemoryReport {
    /// Bytes of one category.
    pub fn get(&self, category: Category) -> u64 {
        self.0[category as usize]
    }

    /// Sum over the categories.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Sum over the categories that are the host's, whatever the device is.
    pub fn on_host(&self) -> u64 {
        self.iter().filter(|(category, _)| category.is_on_host()).map(|(_, bytes)| bytes).sum()
    }

    /// Categories with their bytes, in the order of reports.
    pub fn iter(&self) -> impl Iterator<Item = (Category, u64)> + '_ {
        Category::ALL.into_iter().map(|c| (c, self.get(c)))
    }
}

impl std::iter::Sum for MemoryReport {
    fn sum<I: Iterator<Item = MemoryReport>>(reports: I) -> MemoryReport {
        reports.fold(MemoryReport::default(), |mut sum, report| {
            sum.0.iter_mut().zip(report.0).for_each(|(sum, bytes)| *sum += bytes);
            sum
        })
    }
}

#[derive(Default)]
struct Books {
    active: MemoryReport,
    peak: MemoryReport,
    active_total: u64,
    peak_total: u64,
    limit: Option<u64>,
    frozen: bool,
    charges: u64,
}

/// The account of one runtime's memory. Clones are handles to the same account.
#[derive(Clone, Default)]
pub struct Ledger {
    books: Arc<Mutex<Books>>,
}

impl Ledger {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Reserves `bytes` under `category`.
    ///
    /// # Errors
    /// [`ArrayError::Limit`] if the limit would be exceeded, [`ArrayError::Frozen`] after [`Ledger::freeze`].
    pub fn charge(&self, category: Category, bytes: u64) -> Result<Charge> {
        let mut books = self.books();
        if books.frozen && category != Category::User {
            return Err(ArrayError::Frozen { category, requested: bytes });
        }
        let used = books.active_total;
        // No allocation is larger than the range of a pointer. Backends that only count would grant it.
        let limit = books.limit.unwrap_or(u64::MAX).min(isize::MAX as u64);
        if used.checked_add(bytes).is_none_or(|sum| sum > limit) {
            return Err(ArrayError::Limit { category, requested: bytes, used, limit });
        }
        books.charges += 1;
        books.active_total += bytes;
        books.active.0[category as usize] += bytes;
        books.peak_total = books.peak_total.max(books.active_total);
        let i = category as usize;
        books.peak.0[i] = books.peak.0[i].max(books.active.0[i]);
        Ok(Charge { ledger: self.clone(), category, bytes: AtomicU64::new(bytes) })
    }

    /// Bytes in use, by category.
    pub fn active(&self) -> MemoryReport {
        self.books().active
    }

    /// Highest bytes in use so far, for each category separately.
    pub fn peak(&self) -> MemoryReport {
        self.books().peak
    }

    /// Highest sum over all categories.
    pub fn peak_total(&self) -> u64 {
        self.books().peak_total
    }

    /// Sets or lifts the hard limit on the sum of all categories. If the limit is below the bytes in use, every further
    /// charge fails, but no memory is taken back.
    pub fn set_limit(&self, limit: Option<u64>) {
        self.books().limit = limit;
    }

    /// The hard limit.
    pub fn limit(&self) -> Option<u64> {
        self.books().limit
    }

    /// The plan is complete: from now on only the category `user` may grow.
    pub fn freeze(&self) {
        self.books().frozen = true;
    }

    /// Leaves the frozen phase, to load or plan something else.
    pub fn thaw(&self) {
        self.books().frozen = false;
    }

    /// Number of charges since the start; constant while a frozen plan runs.
    pub fn charges(&self) -> u64 {
        self.books().charges
    }
}

/// Reserved bytes; given back on drop.
pub struct Charge {
    ledger: Ledger,
    category: Category,
    bytes: AtomicU64,
}

impl Charge {
    /// The category charged.
    pub fn category(&self) -> Category {
        self.category
    }

    /// The bytes charged.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Takes over the bytes of another charge, which has the same category and ledger.
    pub(crate) fn absorb(&self, other: Charge) {
        assert!(self.category == other.category && Arc::ptr_eq(&self.ledger.books, &other.ledger.books));
        self.bytes.fetch_add(other.bytes.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let bytes = *self.bytes.get_mut();
        let mut books = self.ledger.books();
        books.active_total -= bytes;
        books.active.0[self.category as usize] -= bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_names_requested_used_and_limit_and_changes_nothing() {
        let ledger = Ledger::default();
        ledger.set_limit(Some(100));
        let held = ledger.charge(Category::Weights, 70).expect("fits");
        let error = ledger.charge(Category::Kv, 31).err().expect("one byte too many").to_string();
        assert!(
            error.contains("requested 31") && error.contains("70 in use") && error.contains("limit of 100")
        );
        assert_eq!(ledger.active().total(), 70);
        drop(held);
        assert_eq!((ledger.active().total(), ledger.peak_total()), (0, 70));
        assert!(ledger.charge(Category::Kv, 100).is_ok());
    }

    #[test]
    fn bytes_that_cannot_be_addressed_are_refused_without_a_limit() {
        let ledger = Ledger::default();
        let _held = ledger.charge(Category::Kv, 1).expect("fits");
        for bytes in [isize::MAX as u64, u64::MAX] {
            assert!(
                matches!(ledger.charge(Category::Weights, bytes), Err(ArrayError::Limit { .. })),
                "{bytes}"
            );
        }
        assert_eq!((ledger.active().total(), ledger.peak_total()), (1, 1));
    }

    #[test]
    fn a_frozen_ledger_refuses_what_is_not_planned() {
        let ledger = Ledger::default();
        ledger.freeze();
        assert!(matches!(ledger.charge(Category::Activations, 1), Err(ArrayError::Frozen { .. })));
        assert!(ledger.charge(Category::User, 1).is_ok());
    }
}
