//! The heap of the process.

/// Blocks of at least this size are mapped one by one.
const MAPPED_BYTES: i32 = 256 << 10;
/// Free bytes at the end of the heap that stay.
const TOP_BYTES: i32 = 1 << 20;

/// Sets the allocator up for a long-running process that must stay small. Call this first: threads that have an arena
/// keep it. The allocators of systems without glibc are left as they are.
///
/// - All threads share one arena. By default each thread gets its own, up to 8 per core. An arena keeps the most that
///   its thread ever needed, and other threads do not get its free memory.
/// - A large block is a mapping of its own, which grows without a copy and returns to the system when it is freed. By
///   default the first such block that is freed makes glibc put blocks of its size, up to 32 MiB, into the heap, where
///   they leave holes.
pub fn stay_small() {
    // SAFETY: sets numbers that the allocator reads under its own lock.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, TOP_BYTES);
    }
}

/// Returns freed memory that the allocator keeps for later to the system, as far as it can: glibc returns whole pages
/// between blocks that are in use.
pub fn give_back_free() {
    // SAFETY: takes the allocator's locks, and touches only free blocks.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::malloc_trim(0);
    }
}
