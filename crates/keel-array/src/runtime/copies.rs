//! Copies between arrays, and entries that are zeroed: several of a device in one call of its backend.

use crate::array::Array;
use crate::backend::{MemoryAt, MemoryCopy, MemoryRange};
use crate::program::Binding;
use crate::{ArrayError, Result};

/// A copy of elements, counted row-major, between persistent arrays of one type and runtime.
#[derive(Clone, Copy, Debug)]
pub struct ElementCopy<'a> {
    /// Where the elements are.
    pub source: &'a Array,
    /// The first of them.
    pub from: usize,
    /// Where they go.
    pub target: &'a Array,
    /// The first of those that are overwritten.
    pub to: usize,
    /// How many.
    pub count: usize,
}

impl<'a> ElementCopy<'a> {
    const OP: &'static str = "copy";

    /// The copy in the other direction.
    #[must_use]
    pub fn reversed(self) -> ElementCopy<'a> {
        ElementCopy { source: self.target, from: self.to, target: self.source, to: self.from, ..self }
    }

    fn check(&self) -> Result<()> {
        let ElementCopy { source, from, target, to, count } = *self;
        let has = |a: &Array, at: usize| at.checked_add(count).is_some_and(|end| end <= a.shape().elements());
        if !source.runtime().is_same(target.runtime()) {
            let reason = "the arrays are of two runtimes; copy through the host".into();
            return Err(ArrayError::Argument { op: Self::OP, reason });
        }
        if source.dtype() == target.dtype() && has(source, from) && has(target, to) {
            return Ok(());
        }
        let [of, on] = [source, target].map(|a| format!("{} {}", a.dtype(), a.shape()));
        let reason = format!("{count} elements at {from} of {of} to those at {to} of {on}");
        Err(ArrayError::Argument { op: Self::OP, reason })
    }

    fn places(&self) -> Result<[Binding; 2]> {
        Ok([self.source.contiguous_storage(Self::OP)?, self.target.contiguous_storage(Self::OP)?])
    }
}

/// Makes copies, in any order or all at once: no element that a copy writes may belong to another one.
///
/// # Errors
/// If the runtimes or types of a copy differ, its elements are not within its arrays, or an array is not contiguous in
/// memory.
pub fn copy_all(copies: &[ElementCopy<'_>]) -> Result<()> {
    copies.iter().try_for_each(ElementCopy::check)?;
    for copies in copies.chunk_by(|a, b| a.source.runtime().is_same(b.source.runtime())) {
        let runtime = copies[0].source.runtime();
        let places: Vec<[Binding; 2]> = copies.iter().map(ElementCopy::places).collect::<Result<_>>()?;
        if runtime.backend().is_planning() {
            continue;
        }
        let all = copies.iter().zip(&places).map(|(copy, [source, target])| {
            let size = copy.source.dtype().size();
            MemoryCopy {
                from: MemoryAt { memory: source.buffer.memory(), offset: source.offset + copy.from * size },
                to: MemoryAt { memory: target.buffer.memory(), offset: target.offset + copy.to * size },
                bytes: copy.count * size,
            }
        });
        let all: Vec<MemoryCopy<'_>> = all.collect();
        runtime.exclusive(|backend| backend.copy(&all));
    }
    Ok(())
}

/// Zeroes entry `index` along the first axis of persistent arrays.
///
/// # Errors
/// If an array has no such entry or is not contiguous in memory.
pub fn clear_entries(arrays: &[&Array], index: usize) -> Result<()> {
    const OP: &str = "clear";
    for arrays in arrays.chunk_by(|a, b| a.runtime().is_same(b.runtime())) {
        let place = |array: &&Array| {
            let count = array.shape().first().copied().unwrap_or(0);
            if index < count {
                return Ok((array.contiguous_storage(OP)?, array.bytes() / count));
            }
            let reason = format!("no entry {index} in {}", array.shape());
            Err(ArrayError::Argument { op: OP, reason })
        };
        let places: Vec<(Binding, usize)> = arrays.iter().map(place).collect::<Result<_>>()?;
        let runtime = arrays[0].runtime();
        if runtime.backend().is_planning() {
            continue;
        }
        let ranges = places.iter().map(|(place, entry)| {
            let start = place.offset + index * entry;
            MemoryRange { memory: place.buffer.memory(), bytes: start..start + entry }
        });
        let ranges: Vec<MemoryRange<'_>> = ranges.collect();
        runtime.exclusive(|backend| backend.clear(&ranges));
    }
    Ok(())
}

impl Array {
    /// The copy of entry `from` along the first axis to entry `to` of `target`, whose entries have the same shape.
    /// `target` may be the same array.
    ///
    /// # Errors
    /// If the entries differ in shape, or there is no such entry.
    pub fn entry_copy<'a>(&'a self, from: usize, target: &'a Array, to: usize) -> Result<ElementCopy<'a>> {
        let count = |a: &Array| a.shape().first().copied().unwrap_or(0);
        if self.shape().get(1..) == target.shape().get(1..) && from < count(self) && to < count(target) {
            let entry = self.shape().elements() / count(self);
            return Ok(ElementCopy {
                source: self,
                from: from * entry,
                target,
                to: to * entry,
                count: entry,
            });
        }
        let reason = format!("entry {from} of {} to entry {to} of {}", self.shape(), target.shape());
        Err(ArrayError::Argument { op: ElementCopy::OP, reason })
    }
}
