//! Operands of a kernel as device addresses, and their strides as kernels take them.

use crate::driver::{CudaMemory, overlap};
use keel_array::{DType, Kernel, Launch, Layout, Operand, OperandMemory, Place};

/// An operand with its place in device memory.
#[derive(Clone, Copy)]
pub(super) struct Bound<'a> {
    /// Address of the layout's first element; 0 for an absorbed value, which the kernel computes itself.
    pub address: u64,
    pub layout: &'a Layout,
    pub dtype: DType,
    /// True if the memory existed before the launch and keeps its value throughout, unless it is state.
    pub lasting: bool,
}

/// A kernel with its operands, and with those of the kernels that it has absorbed.
#[derive(Clone)]
pub(super) struct BoundKernel<'a> {
    pub kernel: &'a Kernel,
    pub inputs: Vec<Bound<'a>>,
    absorbed: Vec<BoundKernel<'a>>,
}

impl<'a> BoundKernel<'a> {
    pub fn new(launch: &Launch<'a>, kernel: &'a Kernel) -> BoundKernel<'a> {
        BoundKernel {
            kernel,
            inputs: kernel.inputs.iter().map(|o| Bound::new(launch, o)).collect(),
            absorbed: kernel.absorbed.iter().map(|k| BoundKernel::new(launch, k)).collect(),
        }
    }

    /// The absorbed kernel that computes input number `input`, if there is one.
    pub fn producer(&self, input: usize) -> Option<&BoundKernel<'a>> {
        match self.kernel.inputs[input].memory {
            OperandMemory::Absorbed(i) => Some(&self.absorbed[i]),
            _ => None,
        }
    }

    /// Input number `input`, or the source if the input is an absorbed copy of strided data.
    pub fn strided(&self, input: usize) -> Bound<'a> {
        self.producer(input).map_or(self.inputs[input], |copy| copy.inputs[0])
    }
}

impl<'a> Bound<'a> {
    /// Binds an operand.
    ///
    /// # Panics
    /// If it does not lie within its memory.
    pub fn new(launch: &Launch<'a>, operand: &'a Operand) -> Bound<'a> {
        if let OperandMemory::Absorbed(_) = operand.memory {
            return Bound { address: 0, layout: &operand.layout, dtype: operand.dtype, lasting: false };
        }
        let Place { buffer, offset: start } = launch.resolve(operand.memory);
        let size = operand.dtype.size();
        let first = start + operand.layout.offset * size;
        let address = CudaMemory::of(buffer.memory())
            .range(first, (operand.layout.end() - operand.layout.offset) * size);
        let lasting = matches!(operand.memory, OperandMemory::External(_));
        Bound { address, layout: &operand.layout, dtype: operand.dtype, lasting }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.layout.shape.elements()
    }

    /// Last extent; 1 for a scalar.
    pub fn width(&self) -> usize {
        self.layout.shape.last().copied().unwrap_or(1)
    }

    /// Number of rows along the last axis.
    pub fn rows(&self) -> usize {
        self.len() / self.width().max(1)
    }

    /// Distance between rows whose values are the last `inner` axes, in elements.
    pub fn row_stride(&self, inner: usize) -> usize {
        let inner = inner.min(self.layout.shape.rank());
        self.layout.row_stride(inner).expect("the program copies uneven rows")
    }

    /// The strides of values [T, heads, D].
    pub fn head_strides(&self) -> HeadStrides {
        head_strides(self.layout).expect("a copy is absorbed only if its source is made of heads")
    }

    /// Bytes from the first element to the end of the last.
    pub fn span(&self) -> std::ops::Range<u64> {
        let bytes = (self.layout.end() - self.layout.offset) * self.dtype.size();
        self.address..self.address + bytes as u64
    }

    /// True if they have memory in common.
    pub fn overlaps(&self, other: &Bound<'_>) -> bool {
        overlap(&self.span(), &other.span())
    }

    /// The structure `Strides` of `common.cuh`.
    pub fn strides(&self) -> [u64; STRIDES_WORDS] {
        strides(self.layout)
    }
}

/// Distances between rows and between heads, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeadStrides {
    pub row: usize,
    pub head: usize,
}

/// The strides of a layout [T, heads, D] whose heads are gap-free.
pub(super) fn head_strides(layout: &Layout) -> Option<HeadStrides> {
    match (&layout.shape[..], &layout.strides[..]) {
        ([_, _, width], &[row, head, step]) if step == 1 || *width == 1 => Some(HeadStrides { row, head }),
        _ => None,
    }
}

/// Words of the structure `Strides`: a rank, extents and strides.
const STRIDES_WORDS: usize = 1 + 2 * Layout::RANK_MAX;

/// `Strides` of a layout: axes of one element are dropped, axes that are contiguous with each other merged. Rank 0 if
/// the elements are gap-free.
pub(super) fn strides(layout: &Layout) -> [u64; STRIDES_WORDS] {
    let mut axes: Vec<(u64, u64)> = Vec::new();
    if !layout.is_contiguous() {
        for (&extent, &stride) in layout.shape.iter().zip(&layout.strides).filter(|(extent, _)| **extent != 1)
        {
            let (extent, stride) = (extent as u64, stride as u64);
            match axes.last_mut() {
                Some(last) if last.1 == stride * extent => *last = (last.0 * extent, stride),
                _ => axes.push((extent, stride)),
            }
        }
    }
    let mut words = [0; STRIDES_WORDS];
    words[0] = axes.len() as u64;
    for (axis, (extent, stride)) in axes.into_iter().enumerate() {
        words[1 + axis] = extent;
        words[1 + Layout::RANK_MAX + axis] = stride;
    }
    words
}

/// The type of an element in the kernels' sources.
pub(super) fn c_type(dtype: DType) -> &'static str {
    match dtype {
        DType::Bool => "flag",
        DType::U8 => "u8",
        DType::U32 => "u32",
        DType::I32 => "i32",
        DType::I64 => "i64",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::F32 => "float",
    }
}

/// An unsigned type of the element's size, for kernels that only move bytes.
pub(super) fn bits_type(dtype: DType) -> &'static str {
    match dtype.size() {
        1 => "u8",
        2 => "u16",
        4 => "u32",
        _ => "u64",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keel_array::Shape;

    #[test]
    fn heads_within_wider_rows_have_strides() {
        let wide = Layout::contiguous(Shape::from([5, 12]));
        let heads =
            wide.slice(&[0, 4], &Shape::from([5, 8])).reshape(&Shape::from([5, 2, 4])).expect("whole rows");
        let halves = heads.slice(&[0, 0, 2], &Shape::from([5, 2, 2]));
        assert_eq!(head_strides(&halves), Some(HeadStrides { row: 12, head: 4 }));
        assert_eq!(head_strides(&wide), None);
    }

    #[test]
    fn seamless_axes_are_walked_as_one() {
        let wide = Layout::contiguous(Shape::from([5, 12]));
        assert_eq!(strides(&wide)[0], 0);
        let heads =
            wide.slice(&[0, 4], &Shape::from([5, 6])).reshape(&Shape::from([5, 2, 3])).expect("whole rows");
        assert_eq!((strides(&heads)[0], strides(&heads)[1], strides(&heads)[2]), (2, 5, 6));
        assert_eq!((strides(&heads)[9], strides(&heads)[10]), (12, 1));
        let repeated = Layout::contiguous(Shape::from([3])).broadcast(&Shape::from([4, 3]));
        assert_eq!((strides(&repeated)[0], strides(&repeated)[9], strides(&repeated)[10]), (2, 0, 1));
    }
}
