//! Rows of a gathered layer sorted by expert.
//!
//! The table, in u32 words: number of segments, then `order` `[R]`, then segments `[min(E, R)]` of three
//! words, then `[E]` counters that only the sort uses.

use super::rows::Segment;
use crate::shared_slice::SharedMut;

const SEGMENT_WORDS: usize = 3;
const _: () = assert!(size_of::<Segment>() == SEGMENT_WORDS * 4 && align_of::<Segment>() == 4);

/// Bytes of the table; a multiple of 64.
pub(super) fn bytes(rows: usize, experts: usize) -> usize {
    ((1 + rows + SEGMENT_WORDS * rows.min(experts) + experts) * 4).next_multiple_of(64)
}

/// The table's words, to write.
///
/// # Safety
/// No other thread may use them meanwhile.
pub(super) unsafe fn words_mut(table: SharedMut<'_, u8>) -> &mut [u32] {
    let start = table.as_ptr().cast::<u32>();
    assert!(start.is_aligned(), "the scratch must start at a multiple of 8 bytes");
    // SAFETY: aligned, within the table, any bits are a u32; the caller promises the rest.
    unsafe { std::slice::from_raw_parts_mut(start, table.len() / 4) }
}

/// The table's words, to read.
///
/// # Safety
/// No thread may write them meanwhile.
pub(super) unsafe fn words(table: SharedMut<'_, u8>) -> &[u32] {
    // SAFETY: `words_mut` has checked the alignment; the caller promises the rest.
    unsafe { std::slice::from_raw_parts(table.as_ptr().cast(), table.len() / 4) }
}

/// Fills the table: positions sorted by expert, rows of one expert in their order (a counting sort).
///
/// # Panics
/// If an expert is `matrices` or more.
pub(super) fn sort(experts: &[u32], matrices: usize, words: &mut [u32]) {
    let rows = experts.len();
    let (count, words) = words.split_first_mut().expect("the table is not empty");
    let (order, words) = words.split_at_mut(rows);
    let (segments, words) = words.split_at_mut(SEGMENT_WORDS * rows.min(matrices));
    let next = &mut words[..matrices];
    next.fill(0);
    for expert in experts {
        next[*expert as usize] += 1;
    }
    let (mut start, mut used) = (0, 0);
    for (matrix, next) in next.iter_mut().enumerate() {
        let end = start + *next;
        if end > start {
            segments[used..used + SEGMENT_WORDS].copy_from_slice(&[matrix as u32, start, end]);
            used += SEGMENT_WORDS;
        }
        *next = start;
        start = end;
    }
    *count = (used / SEGMENT_WORDS) as u32;
    for (row, expert) in experts.iter().enumerate() {
        let position = &mut next[*expert as usize];
        order[*position as usize] = row as u32;
        *position += 1;
    }
}

/// Order and segments of a filled table of `rows` rows.
pub(super) fn read(words: &[u32], rows: usize) -> (&[u32], &[Segment]) {
    let (order, rest) = words[1..].split_at(rows);
    let segments = &rest[..words[0] as usize * SEGMENT_WORDS];
    // SAFETY: a segment is three words and has their alignment.
    let segments = unsafe { std::slice::from_raw_parts(segments.as_ptr().cast(), words[0] as usize) };
    (order, segments)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_sorted_by_expert_and_keep_their_order_within_one() {
        let experts = [3, 0, 3, 5, 0, 3, 2];
        let mut words = vec![9; bytes(experts.len(), 6) / 4];
        sort(&experts, 6, &mut words);
        let (order, segments) = read(&words, experts.len());
        assert_eq!(order, [1, 4, 6, 0, 2, 5, 3]);
        let flat: Vec<_> = segments.iter().map(|s| (s.matrix, s.start, s.end)).collect();
        assert_eq!(flat, [(0, 0, 2), (2, 2, 3), (3, 3, 6), (5, 6, 7)]);
    }
}
