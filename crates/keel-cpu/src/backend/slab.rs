//! Memory for allocations that last: one after another, on large pages.
//!
//! Weights share a mapping. In mappings of their own, weights smaller than a large page would lie in small pages, and
//! so would the end of each larger weight: a fifth of a small model. Small pages take more page walks, and the hardware
//! prefetches only up to the end of a page.

use keel_array::ALIGNMENT;
use memmap2::MmapRaw;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::memory::{HostMemory, map_large_pages};

/// Address space of a slab. Its pages come when they are touched, so the unused rest costs nothing.
const SLAB_BYTES: usize = 256 << 20;

/// Larger allocations have a mapping of their own.
const RANGE_MAX: usize = SLAB_BYTES / 4;

/// Unit of memory that is returned to the system: a multiple of every system's page.
const PAGE: usize = 64 << 10;

/// Hands out ranges of slabs. A slab is unmapped when the last of its ranges is gone; no range is handed out twice.
#[derive(Default)]
pub(super) struct Slabs {
    open: Mutex<Option<Open>>,
}

/// The slab that new ranges come from.
struct Open {
    slab: Arc<Slab>,
    /// Bytes handed out, a multiple of [`ALIGNMENT`].
    used: usize,
}

/// A mapping of one slab.
struct Slab {
    map: MmapRaw,
    /// Offset of the first large page, where the slab's bytes begin.
    first: usize,
}

/// Bytes of a slab that belong to one allocation.
pub(super) struct SlabRange {
    slab: Arc<Slab>,
    range: Range<usize>,
}

impl Slabs {
    /// Zeroed memory.
    pub fn allocate(&self, bytes: usize) -> Result<HostMemory, String> {
        if bytes > RANGE_MAX {
            return HostMemory::zeroed(bytes);
        }
        let mut open = self.open.lock().unwrap_or_else(|e| e.into_inner());
        let slab = match open.take() {
            Some(slab) if slab.used + bytes <= SLAB_BYTES => slab,
            _ => Open { slab: Arc::new(Slab::new()?), used: 0 },
        };
        let range = slab.used..slab.used + bytes;
        let used = range.end.next_multiple_of(ALIGNMENT);
        *open = Some(Open { slab: Arc::clone(&slab.slab), used });
        Ok(HostMemory::of_slab(SlabRange { slab: slab.slab, range }))
    }

    /// Returns the unused rest of the open slab to the system, until it is handed out.
    pub fn give_back_unused(&self) {
        let open = self.open.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(Open { slab, used }) = &*open {
            slab.give_back(*used..SLAB_BYTES);
        }
    }
}

impl Slab {
    fn new() -> Result<Slab, String> {
        let (map, first) = map_large_pages(SLAB_BYTES, SLAB_BYTES)?;
        Ok(Slab { map, first })
    }

    /// Returns the whole pages within a range of unused bytes.
    fn give_back(&self, range: Range<usize>) {
        let start = (self.first + range.start).next_multiple_of(PAGE);
        let end = (self.first + range.end) / PAGE * PAGE;
        #[cfg(unix)]
        if start < end {
            // SAFETY: the contents of these bytes are no longer needed, or they were never written.
            let _ = unsafe {
                let advice = memmap2::UncheckedAdvice::DontNeed;
                self.map.unchecked_advise_range(advice, start, end - start)
            };
        }
        #[cfg(not(unix))]
        let _ = start..end;
    }
}

impl SlabRange {
    /// First byte.
    pub fn start(&self) -> *mut u8 {
        self.slab.map.as_mut_ptr().wrapping_add(self.slab.first + self.range.start)
    }

    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        self.range.len()
    }

    /// Asks the system to back some bytes of this range now.
    #[cfg(target_os = "linux")]
    pub fn populate(&self, range: Range<usize>) {
        let first = self.slab.first + self.range.start;
        let _ = self.slab.map.advise_range(memmap2::Advice::PopulateWrite, first + range.start, range.len());
    }

    /// Returns the pages that hold only this range; other ranges may stay. This range is no longer used.
    pub fn give_back(&self) {
        self.slab.give_back(self.range.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_zeroed_aligned_and_apart() {
        let slabs = Slabs::default();
        let sizes = [1, 63, 64, 65, 300_000, RANGE_MAX, RANGE_MAX, RANGE_MAX, RANGE_MAX + 1, 7];
        let ranges: Vec<HostMemory> =
            sizes.iter().map(|bytes| slabs.allocate(*bytes).expect("there is memory")).collect();
        for (i, (range, bytes)) in ranges.iter().zip(sizes).enumerate() {
            assert!(range.start().addr().is_multiple_of(ALIGNMENT), "{bytes}");
            let mut ends = [1; 2];
            range.read(0, &mut ends[..1]);
            range.read(bytes - 1, &mut ends[1..]);
            assert_eq!(ends, [0, 0], "{bytes} bytes");
            range.write(0, &[i as u8 + 1]);
            range.write(bytes - 1, &[i as u8 + 1]);
        }
        for (i, range) in ranges.iter().enumerate() {
            let mut first = [0];
            range.read(0, &mut first);
            assert_eq!(first, [i as u8 + 1]);
        }
    }

    #[test]
    fn what_is_gone_leaves_its_neighbours_alone() {
        let slabs = Slabs::default();
        let [before, gone, after] = [3 * PAGE + 5; 3].map(|bytes| {
            let range = slabs.allocate(bytes).expect("there is memory");
            range.write(0, &vec![7; bytes]);
            range
        });
        drop(gone);
        for range in [&before, &after] {
            let mut read = vec![0; range.bytes()];
            range.read(0, &mut read);
            assert!(read.iter().all(|byte| *byte == 7));
        }
        slabs.give_back_unused();
        let mut last = [0];
        after.read(after.bytes() - 1, &mut last);
        assert_eq!(last, [7]);
        let next = slabs.allocate(9).expect("there is memory");
        let end = after.start().addr() + after.bytes();
        assert!(next.start().addr() >= end, "nothing is handed out twice");
    }
}
