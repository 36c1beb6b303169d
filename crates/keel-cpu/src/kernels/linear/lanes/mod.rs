//! Sixteen lanes, one for each output row of a weight tile, the same on every instruction set.
//!
//! Kernels are written once over [`Lanes`] and compiled for each level. The integer dot product is exact and
//! the f32 operations round alike everywhere (multiply-add rounds once), so **`Compute::F32` and
//! `Compute::Int8` give the same bits at every level**; only [`Lanes::dot_bf16`] rounds as its hardware does.
//!
//! Every method is unsafe for one reason: the caller must run on a CPU with the instructions of the methods that it
//! calls, inside a function compiled for them. A dot product may need more instructions than the other methods of its
//! level: the type that implements [`Lanes`] names them. Pointers must be valid for the bytes that the method's name
//! implies; none needs an alignment.

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
pub(super) mod portable;

/// Lanes of a vector: rows of a tile.
pub(super) const LANES: usize = 16;

#[allow(clippy::missing_safety_doc, reason = "the module's documentation states the one condition")]
pub(super) trait Lanes: Copy {
    /// Sixteen f32.
    type F: Copy;
    /// Sixteen 32-bit words: i32, or four u8 or i8 each, or two bf16 each.
    type I: Copy;

    /// All words `x`.
    unsafe fn splat_i(x: i32) -> Self::I;
    /// 64 bytes at `p`.
    unsafe fn load_i(p: *const u8) -> Self::I;
    /// Writes 64 bytes.
    unsafe fn store_i(a: Self::I, p: *mut u8);
    /// Each word shifted right by `S` bits, zeros coming in.
    unsafe fn shr<const S: u32>(a: Self::I) -> Self::I;
    /// Each word shifted left by `S` bits.
    unsafe fn shl<const S: u32>(a: Self::I) -> Self::I;
    /// Bitwise and.
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise or.
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I;
    /// `acc` plus, in each lane, the products of four u8 of `w`, each below `2^BITS`, and four i8 of `x`,
    /// none of which is -128. Exact.
    unsafe fn dot_u8_i8<const BITS: usize>(acc: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// `acc` plus, in each lane, the products of two bf16 of `w` and of `x`.
    unsafe fn dot_bf16(acc: Self::F, w: Self::I, x: Self::I) -> Self::F;
    /// i32 to the nearest f32.
    unsafe fn to_f32(a: Self::I) -> Self::F;
    /// The bits of the words as f32.
    unsafe fn as_f32(a: Self::I) -> Self::F;

    /// The bits of the lanes.
    unsafe fn as_i(a: Self::F) -> Self::I;
    /// `a + b`, wrapping.
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I;
    /// The larger word, as u32.
    unsafe fn max_u(a: Self::I, b: Self::I) -> Self::I;
    /// The largest of all words, as u32.
    unsafe fn reduce_max_u(a: Self::I) -> u32;
    /// The sum of all words, wrapping.
    unsafe fn reduce_add_i(a: Self::I) -> i32;
    /// Sixteen u8 at `p`, widened.
    unsafe fn load_u8(p: *const u8) -> Self::I;
    /// Sixteen i8 at `p`, widened.
    unsafe fn load_i8(p: *const u8) -> Self::I;
    /// Each byte's entry in `table`; all bytes are below 16.
    unsafe fn lookup(a: Self::I, table: &[u8; 16]) -> Self::I;
    /// Writes each word, an i32 that fits i8, as one byte.
    unsafe fn store_i8(a: Self::I, p: *mut u8);

    /// All lanes `x`.
    unsafe fn splat(x: f32) -> Self::F;
    /// Sixteen f32 at `p`.
    unsafe fn load(p: *const f32) -> Self::F;
    /// Sixteen bf16 at `p`, widened.
    unsafe fn load_bf16(p: *const u16) -> Self::F;
    /// Sixteen f16 at `p`, widened.
    unsafe fn load_f16(p: *const u16) -> Self::F;
    /// Writes the first `count <= 16` lanes.
    unsafe fn store(a: Self::F, p: *mut f32, count: usize);
    /// The first `count <= 16` values at `p`, then zeros.
    unsafe fn load_first(p: *const f32, count: usize) -> Self::F;
    /// `a + b`
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Prefetches the cache line at `p`; any address is allowed.
    unsafe fn prefetch(p: *const u8);
}
