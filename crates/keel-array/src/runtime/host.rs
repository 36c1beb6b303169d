//! Bytes between the host and arrays.

use bytemuck::NoUninit;

use crate::array::{Array, Storage};
use crate::error::{expect_dtype, expect_shape};
use crate::ledger::Category;
use crate::program::Binding;
use crate::{ArrayError, DType, Layout, Result, Runtime, Shape};

// Arrays hold little-endian elements, and the host's values are copied as they are.
const _: () = assert!(cfg!(target_endian = "little"));

/// A host type that stands for a dtype.
pub trait Element: NoUninit + Default {
    /// The dtype.
    const DTYPE: DType;
    /// From little-endian bytes of the dtype's size.
    fn get(bytes: &[u8]) -> Self;
}

macro_rules! element {
    ($($t:ty => $dtype:ident),*) => { $(impl Element for $t {
        const DTYPE: DType = DType::$dtype;
        fn get(bytes: &[u8]) -> Self {
            bytes.try_into().map(<$t>::from_le_bytes).unwrap_or_default()
        }
    })* };
}

element!(u8 => U8, u32 => U32, i32 => I32, i64 => I64, half::f16 => F16, half::bf16 => BF16, f32 => F32);

impl Element for bool {
    const DTYPE: DType = DType::Bool;
    fn get(bytes: &[u8]) -> bool {
        bytes.first().is_some_and(|&b| b != 0)
    }
}

impl Array {
    /// An array of these values, row-major.
    ///
    /// # Errors
    /// If their number is not that of the shape, or the memory limit would be exceeded.
    pub fn from_slice<T: Element>(runtime: &Runtime, values: &[T], shape: impl Into<Shape>) -> Result<Array> {
        let shape = shape.into();
        expect_shape("from_slice", "values", &[shape.elements()], &Shape::from([values.len()]))?;
        let array = Array::persistent(runtime, Category::User, shape, T::DTYPE)?;
        array.write(values)?;
        Ok(array)
    }

    /// Zeroed storage with a fixed address: staging, state, or other data that the host fills.
    ///
    /// # Errors
    /// If the memory limit would be exceeded.
    pub fn persistent(
        runtime: &Runtime,
        category: Category,
        shape: impl Into<Shape>,
        dtype: DType,
    ) -> Result<Array> {
        let shape = shape.into();
        let bytes = shape.elements().saturating_mul(dtype.size());
        if bytes > isize::MAX as usize {
            let reason = format!("{shape} of {dtype} cannot be addressed");
            return Err(ArrayError::Argument { op: "allocate", reason });
        }
        let buffer = runtime.allocate(category, bytes)?;
        Ok(Array::ready(runtime, dtype, Storage { buffer, layout: Layout::contiguous(shape), fence: None }))
    }

    /// The first `count` entries along the first axis of persistent storage, as a second handle to the same memory.
    ///
    /// # Memory
    /// This handle keeps the whole storage alive. Law 4 does not apply, because this is no result of an evaluation: it
    /// is a handle to memory that its owner keeps and the host overwrites, as a clone of the array would be. To get a
    /// copy, evaluate [`contiguous`](Array::contiguous).
    ///
    /// # Errors
    /// If this array is not in memory or has fewer entries.
    pub fn prefix(&self, count: usize) -> Result<Array> {
        self.entries(0, count)
    }

    /// As [`Array::prefix`], for `count` entries from entry `start` on.
    ///
    /// # Errors
    /// As [`Array::prefix`].
    pub fn entries(&self, start: usize, count: usize) -> Result<Array> {
        let wrong = |reason| ArrayError::Argument { op: "entries", reason };
        let storage = self.0.storage().ok_or_else(|| wrong("the array is not in memory".into()))?;
        let extent = self.shape().first().copied();
        if extent.is_none_or(|extent| start.checked_add(count).is_none_or(|end| end > extent)) {
            let reason = format!("from entry {start} on there are no {count} entries in {}", self.shape());
            return Err(wrong(reason));
        }
        let shape: Shape = [count].iter().chain(&self.shape()[1..]).copied().collect();
        let layout = storage.layout.slice(&[start], &shape);
        Ok(Array::ready(self.runtime(), self.dtype(), Storage { layout, ..storage }))
    }

    /// Overwrites the first elements of evaluated, contiguous storage.
    ///
    /// # Errors
    /// If there are more values than elements, the type differs, or the array is not in memory.
    pub fn write<T: Element>(&self, values: &[T]) -> Result<()> {
        expect_dtype("write", "array", T::DTYPE == self.dtype(), "the type of the values", self.dtype())?;
        self.write_bytes(0, bytemuck::cast_slice(values))
    }

    /// Overwrites bytes of evaluated, contiguous storage.
    ///
    /// # Errors
    /// If the bytes do not fit, or the array is not in memory or not contiguous.
    pub fn write_bytes(&self, at: usize, bytes: &[u8]) -> Result<()> {
        let Binding { buffer, offset: start } = self.contiguous_storage("write")?;
        if at.checked_add(bytes.len()).is_none_or(|end| end > self.bytes()) {
            let reason = format!(
                "{} bytes at {at} do not fit into {} of {} bytes",
                bytes.len(),
                self.shape(),
                self.bytes()
            );
            return Err(ArrayError::Argument { op: "write", reason });
        }
        if !self.runtime().backend().is_planning() {
            self.runtime().exclusive(|backend| backend.write(buffer.memory(), start + at, bytes));
        }
        Ok(())
    }

    /// Copies bytes of evaluated, contiguous storage to the host.
    ///
    /// # Errors
    /// If the range is not within the array, the array is not in memory or not contiguous, or the copy fails.
    pub fn read_bytes(&self, at: usize, bytes: &mut [u8]) -> Result<()> {
        let Binding { buffer, offset: start } = self.readable(at, bytes.len())?;
        self.runtime().exclusive(|backend| backend.read(buffer.memory(), start, bytes))
    }

    /// As [`Array::read_bytes`], but does not wait for runs under way. None of them may write these bytes,
    /// nor may the host have written them since it last waited for one.
    ///
    /// # Errors
    /// As [`Array::read_bytes`].
    pub fn read_settled_bytes(&self, at: usize, bytes: &mut [u8]) -> Result<()> {
        let place = self.readable(at, bytes.len())?;
        self.runtime().exclusive(|backend| backend.read_settled(place.buffer.memory(), place.offset, bytes))
    }

    /// The memory of the array, and where in it byte `at` of the array is, of `count` that are to be read.
    fn readable(&self, at: usize, count: usize) -> Result<Binding> {
        let Binding { buffer, offset } = self.contiguous_storage("read")?;
        if at.checked_add(count).is_none_or(|end| end > self.bytes()) {
            let reason =
                format!("{count} bytes at {at} are not within {} of {} bytes", self.shape(), self.bytes());
            return Err(ArrayError::Argument { op: "read", reason });
        }
        Ok(Binding { buffer, offset: offset + at })
    }

    /// Evaluates, and copies the elements to the host, row-major.
    ///
    /// # Errors
    /// As [`Array::eval`]; or if the type differs.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        let expected = "the array's own type (cast it first)";
        expect_dtype("to_vec", "array", T::DTYPE == self.dtype(), expected, self.dtype())?;
        self.eval()?;
        let dense = match self.0.storage() {
            Some(storage) if storage.layout.is_contiguous() => self.clone(),
            _ => self.contiguous()?,
        };
        dense.eval()?;
        let mut bytes = vec![0; dense.bytes()];
        dense.read_bytes(0, &mut bytes)?;
        Ok(bytes.chunks_exact(T::DTYPE.size()).map(T::get).collect())
    }

    pub(super) fn contiguous_storage(&self, op: &'static str) -> Result<Binding> {
        let storage = self.0.storage().filter(|s| s.layout.is_contiguous()).ok_or(ArrayError::Argument {
            op,
            reason: format!("{self:?} is not contiguous in memory; evaluate it first"),
        })?;
        if let Some(fence) = &storage.fence {
            fence.wait()?;
        }
        Ok(Binding { offset: storage.layout.offset * self.dtype().size(), buffer: storage.buffer })
    }
}
