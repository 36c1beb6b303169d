//! How the pages of a long context are cut into units of work.
//!
//! There are 16 segments of one page, then 16 of two pages, 16 of four, and so on. So short contexts spread over many
//! workers, and a context of a million tokens still has few partial results. The cut depends on nothing else, so a row
//! always sums its pages in the same order.

use std::ops::Range;

/// Segments of each size.
const PER_SIZE: usize = 16;

/// The segment that holds `page`.
pub(super) fn segment_of(page: usize) -> usize {
    let log_size = (page / PER_SIZE + 1).ilog2() as usize;
    PER_SIZE * log_size + ((page - first_page(log_size)) >> log_size)
}

/// The pages of `segment`.
pub(super) fn pages_of(segment: usize) -> Range<usize> {
    let log_size = segment / PER_SIZE;
    let start = first_page(log_size) + ((segment % PER_SIZE) << log_size);
    start..start + (1 << log_size)
}

/// The first page of the segments with `2^log_size` pages.
fn first_page(log_size: usize) -> usize {
    PER_SIZE * ((1 << log_size) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_follow_each_other_and_hold_what_they_say() {
        let mut next = 0;
        for segment in 0..120 {
            let pages = pages_of(segment);
            assert_eq!(pages.start, next);
            assert!(pages.clone().all(|page| segment_of(page) == segment));
            next = pages.end;
        }
        assert_eq!(segment_of(31), 23, "8192 tokens in 24 segments");
        assert_eq!(segment_of(4095), 128, "a million tokens in 129");
    }
}
