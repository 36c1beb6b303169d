//! The heap of the process.

/// Makes all threads of this process share one arena of the heap, so that a long-running process stays small. By
/// default glibc gives each thread its own arena, up to 8 per core. An arena keeps the most that its thread ever
/// needed, and other threads do not get its free memory. Call this first: threads that have an arena keep it. The
/// allocators of other systems are left as they are.
pub fn share_arena() {
    // SAFETY: sets a number that the allocator reads under its own lock.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
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
