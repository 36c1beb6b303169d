//! How the elements of a state are kept in memory.

use half::f16;

use super::GatedDelta;
use crate::kernels::gated_delta_chunked;
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use crate::simd::{Element, LANES, Simd};

/// An element of a state: f32, or f16 for half of the memory and traffic. Arithmetic is in f32. A state in f16 is
/// rounded after each update, so a row that another row follows in its step has the bits of a row whose state went to
/// memory.
pub trait StateElement: Element + sealed::Rule {}

mod sealed {
    use super::{GatedDelta, SharedMut, Worker};

    /// The kernels over states of one element.
    pub trait Rule: Sized {
        /// [`gated_delta`](crate::kernels::gated_delta::gated_delta)
        fn step(task: &GatedDelta<'_, Self>, workspace: SharedMut<'_, f32>, worker: &Worker<'_>);

        /// [`gated_delta_chunked`](crate::kernels::gated_delta_chunked::gated_delta_chunked)
        fn chunks(task: &GatedDelta<'_, Self>, workspace: SharedMut<'_, f32>, worker: &Worker<'_>);
    }
}

/// Implements the kernels for each element without type parameters. So they are compiled in this crate, and not again
/// in each program that calls them.
macro_rules! state_elements {
    ($($element:ty)+) => { $(
        impl StateElement for $element {}

        impl sealed::Rule for $element {
            #[inline(never)]
            fn step(task: &GatedDelta<'_, $element>, workspace: SharedMut<'_, f32>, worker: &Worker<'_>) {
                super::run(task, workspace, worker);
            }

            #[inline(never)]
            fn chunks(task: &GatedDelta<'_, $element>, workspace: SharedMut<'_, f32>, worker: &Worker<'_>) {
                gated_delta_chunked::run(task, workspace, worker);
            }
        }
    )+ };
}
state_elements!(f32 f16);

/// `N` vectors of a row. With N = 1, `x` may be shorter than a vector.
#[inline(always)]
pub(super) fn load_row<E: StateElement, S: Simd, const N: usize>(s: S, x: &[E]) -> [S::V; N] {
    if N == 1 && x.len() < LANES {
        let mut part = [E::default(); LANES];
        part[..x.len()].copy_from_slice(x);
        // SAFETY: the array has sixteen values.
        return [unsafe { E::load(s, part.as_ptr()) }; N];
    }
    let (chunks, _) = x.as_chunks::<LANES>();
    assert!(chunks.len() >= N);
    let mut row = [s.splat(0.0); N];
    for n in 0..N {
        // SAFETY: a chunk has sixteen values.
        row[n] = unsafe { E::load(s, chunks[n].as_ptr()) };
    }
    row
}

/// Writes the values that [`load_row`] reads. They must be [`Element::kept`].
#[inline(always)]
pub(super) fn store_row<E: StateElement, S: Simd, const N: usize>(s: S, row: [S::V; N], x: &mut [E]) {
    if N == 1 && x.len() < LANES {
        let mut part = [E::default(); LANES];
        // SAFETY: the array has room for sixteen values.
        unsafe { E::store(s, row[0], part.as_mut_ptr()) };
        return x.copy_from_slice(&part[..x.len()]);
    }
    let (chunks, _) = x.as_chunks_mut::<LANES>();
    assert!(chunks.len() >= N);
    for n in 0..N {
        // SAFETY: a chunk has room for sixteen values.
        unsafe { E::store(s, row[n], chunks[n].as_mut_ptr()) };
    }
}

/// Widens `from` to the front of `to`, and fills the rest with zeros.
#[inline(always)]
#[allow(private_bounds)]
pub(crate) fn widen<E: StateElement, S: Simd>(s: S, from: &[E], to: &mut [f32]) {
    let mut to = to.chunks_mut(LANES);
    for (part, to) in from.chunks(LANES).zip(&mut to) {
        s.store_partial(load_row::<E, S, 1>(s, part)[0], to);
    }
    to.for_each(|rest| rest.fill(0.0));
}

/// Writes the front of `from`, which is [`Element::kept`].
#[inline(always)]
#[allow(private_bounds)]
pub(crate) fn narrow<E: StateElement, S: Simd>(s: S, from: &[f32], to: &mut [E]) {
    for (part, to) in from.chunks(LANES).zip(to.chunks_mut(LANES)) {
        store_row::<E, S, 1>(s, [s.load_partial(part)], to);
    }
}

/// Replaces values by those that memory keeps. Whole vectors.
#[inline(always)]
#[allow(private_bounds)]
pub(crate) fn keep<E: StateElement, S: Simd>(s: S, x: &mut [f32]) {
    for part in x.as_chunks_mut::<LANES>().0 {
        s.store(E::kept(s, s.load(part)), part);
    }
}
