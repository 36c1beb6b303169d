//! Memory of the CPU backend.
//!
//! The bytes have no Rust owner that could lend them as slices for long. Kernels, the host's reads and writes and the
//! packing of weights all reach them by pointer. These uses never overlap: the runtime's stream calls the backend one
//! call at a time, and within a call the workers take disjoint ranges or meet at a barrier between kernels.

use keel_array::{ALIGNMENT, DeviceMemory};
use memmap2::{Advice, MmapMut, MmapRaw};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::ops::Range;

use super::slab::SlabRange;
use crate::pool::ThreadPool;

/// Smallest allocation that is mapped. Mapped pages come when they are touched and go when they are freed. The heap
/// zeroes memory that it takes from free blocks, and keeps it when it is freed.
const MAPPED_BYTES_MIN: usize = 128 << 10;

/// Smallest page of any system, in bytes.
const PAGE: usize = 4096;

/// Smallest mapping in large pages, where the system has them. It starts at a large page, so that every whole one is
/// used.
pub(super) const LARGE_PAGE: usize = 2 << 20;

/// The end of a mapping becomes a large page, too, if that wastes at most 1/32 of its bytes.
const WASTE_PARTS_MIN: usize = 32;

/// The byte that fills freed memory on request: a NaN in every float type, an index out of every range.
pub(super) const POISON: u8 = 0xff;

/// Zeroed bytes, aligned to [`ALIGNMENT`]; or only their number.
pub(crate) struct HostMemory {
    region: Region,
    start: *mut u8,
    bytes: usize,
    poison: bool,
}

enum Region {
    /// Planned; no memory exists.
    Counted,
    Heap {
        allocation: *mut u8,
        layout: Layout,
    },
    Mapped {
        map: MmapRaw,
    },
    /// A range of a slab, whose other ranges stay.
    Slab(SlabRange),
}

// SAFETY: the memory belongs only to this value; the module's first comment says who touches the bytes and when.
unsafe impl Send for HostMemory {}
// SAFETY: as above. Where several workers of one call write through `&self`, `each_large_page` gives each its own
// bytes.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// A number of bytes without memory.
    pub fn counted(bytes: usize) -> HostMemory {
        HostMemory { region: Region::Counted, start: std::ptr::null_mut(), bytes, poison: false }
    }

    /// Zeroed memory.
    pub fn zeroed(bytes: usize) -> Result<HostMemory, String> {
        if bytes >= MAPPED_BYTES_MIN {
            return HostMemory::mapped(bytes);
        }
        // Aligned by hand: an aligned allocation would be zeroed by touching all of it.
        let layout = Layout::from_size_align(bytes + ALIGNMENT, 1).map_err(|e| e.to_string())?;
        // SAFETY: the size is not zero.
        let allocation = unsafe { alloc_zeroed(layout) };
        if allocation.is_null() {
            return Err("no memory left".into());
        }
        // SAFETY: the offset is below ALIGNMENT, so the pointer stays within the allocation.
        let start = unsafe { allocation.add(allocation.align_offset(ALIGNMENT)) };
        Ok(HostMemory { start, region: Region::Heap { allocation, layout }, bytes, poison: false })
    }

    /// Zeroed memory in its own pages. It starts at a large page if it has room for one.
    fn mapped(bytes: usize) -> Result<HostMemory, String> {
        if bytes < LARGE_PAGE {
            let map: MmapRaw = MmapMut::map_anon(bytes).map_err(|e| e.to_string())?.into();
            let start = map.as_mut_ptr();
            return Ok(HostMemory { start, region: Region::Mapped { map }, bytes, poison: false });
        }
        let waste = bytes.checked_next_multiple_of(LARGE_PAGE).map_or(0, |padded| padded - bytes);
        let whole = waste <= bytes / WASTE_PARTS_MIN;
        let large = if whole { bytes + waste } else { bytes / LARGE_PAGE * LARGE_PAGE };
        let (map, first) = map_large_pages(bytes, large)?;
        // SAFETY: the offset is less than a large page, so the pointer stays within the mapping.
        let start = unsafe { map.as_mut_ptr().add(first) };
        Ok(HostMemory { start, region: Region::Mapped { map }, bytes, poison: false })
    }

    /// A range of a slab, which is zeroed.
    pub(super) fn of_slab(range: SlabRange) -> HostMemory {
        HostMemory { start: range.start(), bytes: range.bytes(), region: Region::Slab(range), poison: false }
    }

    /// The memory, overwritten with [`POISON`] when it is freed if `poison`.
    pub fn poisoned_when_freed(mut self, poison: bool) -> HostMemory {
        self.poison = poison;
        self
    }

    /// Passes `bytes` to `work` in pieces, on all threads of the pool. No two pieces share a large page. For work that
    /// makes the system back pages: threads that write to the same new page at the same time each clear a page, and the
    /// system keeps one.
    pub fn each_large_page(
        &self,
        pool: &ThreadPool,
        bytes: Range<usize>,
        work: impl Fn(Range<usize>) + Sync,
    ) {
        // Bytes before the first one in its large page.
        let before = self.start.wrapping_add(bytes.start).addr() % LARGE_PAGE;
        let pages = (before + bytes.len()).div_ceil(LARGE_PAGE);
        if pages <= 1 {
            return work(bytes);
        }
        pool.run(|worker| {
            for page in worker.claim(pages, 1) {
                let edge = |page: usize| bytes.start + (page * LARGE_PAGE).saturating_sub(before);
                work(edge(page.start)..edge(page.end).min(bytes.end));
            }
        });
    }

    /// Makes the system back all of it now, instead of each page at its first write.
    pub fn touch(&self, pool: &ThreadPool) {
        self.each_large_page(pool, 0..self.bytes, |bytes| {
            let last = bytes.clone().next_back();
            for offset in bytes.step_by(PAGE).chain(last) {
                // SAFETY: within the memory, which is zeroed and which nothing else uses yet. One worker has each byte.
                unsafe { self.start().add(offset).write_volatile(0) };
            }
        });
    }

    /// Asks the system to back these bytes now. The contents stay. Without an effect where the system knows no such
    /// request, or where the bytes share pages with the heap.
    pub fn populate(&self, range: Range<usize>) {
        #[cfg(target_os = "linux")]
        match &self.region {
            Region::Mapped { map } => {
                let first = self.start.addr() - map.as_ptr().addr();
                let _ = map.advise_range(Advice::PopulateWrite, first + range.start, range.len());
            }
            Region::Slab(slab) => slab.populate(range),
            Region::Counted | Region::Heap { .. } => {}
        }
        #[cfg(not(target_os = "linux"))]
        let _ = range;
    }

    /// Returns its whole pages to the system until they are used again; the contents are lost. The pages come back
    /// small, because the next use may need only a part of a large page.
    pub fn discard(&self) {
        if self.poison && !self.start.is_null() {
            // SAFETY: within the memory; the stream lets nothing else touch it meanwhile.
            return unsafe { self.start.write_bytes(POISON, self.bytes) };
        }
        #[cfg(unix)]
        if let Region::Mapped { map } = &self.region {
            #[cfg(target_os = "linux")]
            let _ = map.advise_range(Advice::NoHugePage, 0, map.len());
            let advice = memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: these bytes belong only to this value, and their contents are no longer needed.
            let _ = unsafe { map.unchecked_advise_range(advice, 0, map.len()) };
        }
    }

    /// The memory object of this backend.
    pub fn of(memory: &dyn DeviceMemory) -> &HostMemory {
        memory.as_any().downcast_ref().expect("the CPU backend works on memory that it allocated")
    }

    /// First byte; null if there is no memory.
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn check(&self, offset: usize, len: usize) {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.bytes),
            "{len} bytes at {offset} of memory of {}",
            self.bytes
        );
    }

    /// Copies bytes in. Workers that write at the same time must write disjoint ranges.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        self.check(offset, bytes.len());
        if !self.start.is_null() {
            // SAFETY: within the memory. Nothing else touches these bytes meanwhile: the stream calls one method at a
            // time, and the workers of one call write disjoint ranges.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.add(offset), bytes.len()) };
        }
    }

    /// Copies bytes out; zeros if there is no memory.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        self.check(offset, bytes.len());
        if self.start.is_null() {
            bytes.fill(0);
        } else {
            // SAFETY: within the memory; the stream lets nothing else touch it meanwhile.
            unsafe { std::ptr::copy_nonoverlapping(self.start.add(offset), bytes.as_mut_ptr(), bytes.len()) };
        }
    }
}

/// A mapping with room for `bytes` from the start of a large page, and the offset of that start. The system is asked to
/// put the first `large` bytes into large pages.
pub(super) fn map_large_pages(bytes: usize, large: usize) -> Result<(MmapRaw, usize), String> {
    let padded = bytes.checked_next_multiple_of(LARGE_PAGE).and_then(|padded| padded.checked_add(LARGE_PAGE));
    let reserved = padded.ok_or_else(|| format!("{bytes} bytes are more than can be mapped"))?;
    let map = MmapMut::map_anon(reserved).map_err(|e| e.to_string())?;
    let first = map.as_ptr().align_offset(LARGE_PAGE);
    // Large pages are optional: without them the memory is only slower.
    #[cfg(target_os = "linux")]
    let _ = map.advise_range(Advice::HugePage, first, large);
    #[cfg(not(target_os = "linux"))]
    let _ = large;
    Ok((map.into(), first))
}

impl DeviceMemory for HostMemory {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if self.poison && !self.start.is_null() {
            // SAFETY: this value owns the bytes, and no reference to them remains.
            unsafe { self.start.write_bytes(POISON, self.bytes) };
        }
        match &self.region {
            // SAFETY: allocated with this layout, freed once.
            Region::Heap { allocation, layout } => unsafe { dealloc(*allocation, *layout) },
            Region::Slab(slab) if !self.poison => slab.give_back(),
            _ => {}
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
impl HostMemory {
    /// Whether every page is in memory or swapped. `None` where the system does not say.
    pub fn is_backed(&self) -> Option<bool> {
        use std::io::{Read, Seek, SeekFrom};
        // One word for each page of the address space.
        let mut pages = std::fs::File::open("/proc/self/pagemap").ok()?;
        for page in self.start.addr() / PAGE..(self.start.addr() + self.bytes).div_ceil(PAGE) {
            let mut word = [0; 8];
            pages.seek(SeekFrom::Start(page as u64 * 8)).ok()?;
            pages.read_exact(&mut word).ok()?;
            if u64::from_ne_bytes(word) >> 62 == 0 {
                return Some(false);
            }
        }
        Some(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_and_aligned_whatever_its_size() {
        let edges = [MAPPED_BYTES_MIN, LARGE_PAGE].map(|edge| [edge - 1, edge, edge + 5]);
        for bytes in edges.into_iter().flatten().chain([0, 1, 63, 64, 65]) {
            let memory = HostMemory::zeroed(bytes).expect("there is memory").poisoned_when_freed(true);
            assert!(memory.start().addr().is_multiple_of(ALIGNMENT), "{bytes}");
            let mut read = vec![1; bytes];
            memory.read(0, &mut read);
            assert!(read.iter().all(|&b| b == 0), "{bytes}");
        }
    }

    #[test]
    fn mapped_memory_starts_at_a_large_page() {
        for bytes in [LARGE_PAGE, LARGE_PAGE + 1, 5 * LARGE_PAGE - 1] {
            let memory = HostMemory::zeroed(bytes).expect("there is memory");
            assert!(memory.start().addr().is_multiple_of(LARGE_PAGE), "{bytes}");
            memory.write(bytes - 1, &[7]);
        }
        assert!(HostMemory::zeroed(usize::MAX - LARGE_PAGE).is_err());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn touched_memory_is_backed_by_pages() {
        for bytes in [5 * PAGE, 3 * LARGE_PAGE + 1] {
            let memory = HostMemory::zeroed(bytes).expect("there is memory");
            memory.touch(&ThreadPool::new(2));
            assert_ne!(memory.is_backed(), Some(false), "{bytes} bytes");
        }
    }

    #[test]
    fn populated_memory_keeps_its_contents() {
        for bytes in [100, MAPPED_BYTES_MIN, 3 * LARGE_PAGE + 5] {
            let memory = HostMemory::zeroed(bytes).expect("there is memory");
            memory.write(bytes - 1, &[7]);
            memory.populate(1..bytes);
            let mut read = vec![0; bytes];
            memory.read(0, &mut read);
            assert_eq!(read.pop(), Some(7), "{bytes} bytes");
            assert!(read.iter().all(|byte| *byte == 0), "{bytes} bytes");
        }
    }

    #[cfg(unix)]
    #[test]
    fn discarded_memory_can_be_written_again() {
        for bytes in [100, MAPPED_BYTES_MIN, LARGE_PAGE, 2 * LARGE_PAGE + 5] {
            for poison in [false, true] {
                let memory = HostMemory::zeroed(bytes).expect("there is memory").poisoned_when_freed(poison);
                memory.write(0, &vec![7; bytes]);
                memory.discard();
                let mut read = vec![0; bytes];
                memory.read(0, &mut read);
                // Heap memory keeps its contents.
                let expected = match (poison, bytes < MAPPED_BYTES_MIN) {
                    (true, _) => POISON,
                    (false, true) => 7,
                    (false, false) => 0,
                };
                assert!(read.iter().all(|byte| *byte == expected), "{bytes} bytes, poison: {poison}");
                memory.write(bytes - 1, &[9]);
                memory.read(bytes - 1, &mut read[..1]);
                assert_eq!(read[0], 9);
            }
        }
    }

    #[test]
    fn bytes_come_back_as_they_were_written() {
        let memory = HostMemory::zeroed(100).expect("there is memory");
        memory.write(90, &[1, 2, 3]);
        let mut read = [9; 5];
        memory.read(89, &mut read);
        assert_eq!(read, [0, 1, 2, 3, 0]);
    }

    #[test]
    #[should_panic(expected = "11 bytes at 90 of memory of 100")]
    fn a_write_past_the_end_is_stopped() {
        HostMemory::zeroed(100).expect("there is memory").write(90, &[0; 11]);
    }
}
