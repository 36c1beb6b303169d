//! Memory of the process that is not tensors.

/// Gives back to the system what was freed on the heap but is kept for later, as far as the allocator can: GNU's keeps whole
/// pages between blocks that are in use.
pub fn give_back_free() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            fn malloc_trim(pad: usize) -> i32;
        }
        // SAFETY: the function of the C library with this signature, which every program for this target links. It
        // takes the allocator's locks and touches free blocks alone.
        unsafe { malloc_trim(0) };
    }
}
