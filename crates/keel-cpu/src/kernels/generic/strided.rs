//! Reading the elements of any layout in row-major order, a block at a time.

use super::scalar::Plain;
use keel_array::Layout;
use std::marker::PhantomData;

/// Most axes that remain after neighbouring axes without a gap are joined.
const AXES_MAX: usize = Layout::RANK_MAX;

/// The elements of a layout. Unlike a slice, it may cover memory that a kernel also writes, element by element.
#[derive(Clone, Copy)]
pub struct Strided<'a, T> {
    first: *const T,
    axes: usize,
    shape: [usize; AXES_MAX],
    strides: [usize; AXES_MAX],
    elements: usize,
    _memory: PhantomData<&'a T>,
}

impl<'a, T: Plain> Strided<'a, T> {
    /// The elements of `layout`, whose element of index zero is at `first` (the layout's offset is not added).
    ///
    /// # Safety
    /// During `'a` every element must be readable, and no thread may write one while it is read. A kernel that writes
    /// the same memory writes only elements that the same worker has read before.
    pub unsafe fn new(first: *const T, layout: &Layout) -> Strided<'a, T> {
        let (mut shape, mut strides, mut axes) = ([1; AXES_MAX], [0; AXES_MAX], 0);
        for (&extent, &stride) in layout.shape.iter().zip(&layout.strides) {
            if extent == 1 {
                continue;
            }
            if axes > 0 && strides[axes - 1] == stride * extent {
                shape[axes - 1] *= extent;
                strides[axes - 1] = stride;
            } else {
                (shape[axes], strides[axes]) = (extent, stride);
                axes += 1;
            }
        }
        Strided { first, axes, shape, strides, elements: layout.shape.elements(), _memory: PhantomData }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.elements
    }

    /// Copies elements `start..start + to.len()`, counted row-major.
    ///
    /// # Panics
    /// If there are fewer elements.
    #[inline(always)]
    pub fn read(&self, start: usize, to: &mut [T]) {
        assert!(start.checked_add(to.len()).is_some_and(|end| end <= self.elements), "elements past the end");
        if to.is_empty() {
            return;
        }
        let Some(inner) = self.axes.checked_sub(1) else {
            // SAFETY: one element, readable.
            to[0] = unsafe { *self.first };
            return;
        };
        let mut index = self.index_of(start);
        let mut rest = to;
        loop {
            let run = (self.shape[inner] - index[inner]).min(rest.len());
            let (run_to, later) = rest.split_at_mut(run);
            let offset: usize = (0..self.axes).map(|a| index[a] * self.strides[a]).sum();
            // SAFETY: the run lies within the innermost axis at a valid index.
            unsafe { copy_run(self.first.add(offset), self.strides[inner], run_to) };
            if later.is_empty() {
                return;
            }
            rest = later;
            index[inner] += run;
            for axis in (1..self.axes).rev() {
                if index[axis] < self.shape[axis] {
                    break;
                }
                index[axis] = 0;
                index[axis - 1] += 1;
            }
        }
    }

    fn index_of(&self, mut at: usize) -> [usize; AXES_MAX] {
        let mut index = [0; AXES_MAX];
        for axis in (0..self.axes).rev() {
            index[axis] = at % self.shape[axis];
            at /= self.shape[axis];
        }
        index
    }
}

/// Copies elements that are `stride` apart.
///
/// # Safety
/// All of them must be readable.
#[inline(always)]
unsafe fn copy_run<T: Plain>(from: *const T, stride: usize, to: &mut [T]) {
    // SAFETY: the caller's promise.
    unsafe {
        match stride {
            1 => std::ptr::copy(from, to.as_mut_ptr(), to.len()),
            0 => to.fill(*from),
            _ => to.iter_mut().enumerate().for_each(|(i, to)| *to = *from.add(i * stride)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_block_of_any_layout_reads_as_element_by_element() {
        let memory: Vec<u32> = (0..2 * 3 * 4 * 5).collect();
        let base = Layout::contiguous([2, 3, 4, 5].into());
        let layouts = [
            base.clone(),
            base.permute(&[3, 1, 0, 2]),
            base.slice(&[1, 0, 1, 2], &[1, 3, 2, 3].into()),
            base.slice(&[0, 1, 0, 0], &[2, 1, 4, 5].into()).broadcast(&[2, 7, 4, 5].into()),
            base.slice(&[1, 2, 3, 4], &[1, 1, 1, 1].into()),
        ];
        for layout in layouts {
            let at = |mut i: usize| {
                let mut offset = layout.offset;
                for axis in (0..4).rev() {
                    offset += i % layout.shape[axis] * layout.strides[axis];
                    i /= layout.shape[axis];
                }
                memory[offset]
            };
            // SAFETY: the layout lies within the memory.
            let strided = unsafe { Strided::new(memory.as_ptr().add(layout.offset), &layout) };
            for start in 0..strided.len() {
                for len in [0, 1, 2, 7, strided.len()] {
                    let mut block = vec![u32::MAX; len.min(strided.len() - start)];
                    strided.read(start, &mut block);
                    let expected: Vec<u32> = (start..start + block.len()).map(at).collect();
                    assert_eq!(block, expected, "{layout:?} from {start}");
                }
            }
        }
    }
}
