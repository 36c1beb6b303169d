//! The heap of the process.

/// Has all threads of this process share one arena of the heap, for a process that is to stay as large as it is. By default
/// glibc gives each thread its own, up to eight for each core. Each keeps what its thread once needed, and what one thread has
/// freed another does not get, so a server grows for long. Threads that have an arena already keep it: call this first. Other
/// systems' allocators are left as they are.
pub fn share_arena() {
    // SAFETY: sets a number that the allocator reads under its own lock.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Gives back to the system what was freed but is kept for later, as far as the allocator can: GNU's keeps whole pages
/// between blocks that are in use.
pub fn give_back_free() {
    // SAFETY: takes the allocator's locks, and touches free blocks alone.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::malloc_trim(0);
    }
}
