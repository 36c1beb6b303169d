//! Free pages, and the number of holders of the others.

use crate::{CacheError, PageId, Result};

/// Page numbers with reference counts. A page number stands for the same page in every attention layer. A page is held
/// by sequences and by blocks of a prefix tree; all blocks together count as one holder.
#[derive(Debug)]
pub struct PageAllocator {
    /// Free pages. The last is handed out next.
    free: Vec<PageId>,
    /// Sequences that hold each page.
    sequences: Vec<u32>,
    /// Blocks of a prefix tree that hold each page.
    blocks: Vec<u32>,
    /// Number of pages that blocks hold.
    remembered: usize,
    /// Number of pages that only blocks hold.
    only_remembered: usize,
}

impl PageAllocator {
    /// `total` free pages.
    pub fn new(total: usize) -> PageAllocator {
        PageAllocator {
            free: PageId::all(total),
            sequences: vec![0; total],
            blocks: vec![0; total],
            remembered: 0,
            only_remembered: 0,
        }
    }

    /// Free pages.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// All pages.
    pub fn total(&self) -> usize {
        self.sequences.len()
    }

    /// Takes `count` pages, or none.
    ///
    /// # Errors
    /// [`CacheError::NoPages`] if fewer are free.
    pub fn take(&mut self, count: usize) -> Result<impl Iterator<Item = PageId> + '_> {
        let (free, total) = (self.free(), self.total());
        if count > free {
            return Err(CacheError::NoPages { needed: count, free, total });
        }
        let sequences = &mut self.sequences;
        Ok(self.free.drain(free - count..).rev().inspect(move |&page| sequences[page.index()] = 1))
    }

    /// Takes one page.
    ///
    /// # Errors
    /// [`CacheError::NoPages`] if none is free.
    pub fn take_one(&mut self) -> Result<PageId> {
        let total = self.total();
        let page = self.free.pop().ok_or(CacheError::NoPages { needed: 1, free: 0, total })?;
        self.sequences[page.index()] = 1;
        Ok(page)
    }

    /// Holders of a page.
    pub fn holders(&self, page: PageId) -> u32 {
        self.sequences(page) + u32::from(self.is_remembered(page))
    }

    /// True if a page has more than one holder.
    pub fn is_shared(&self, page: PageId) -> bool {
        self.holders(page) > 1
    }

    /// How many sequences hold a page.
    pub fn sequences(&self, page: PageId) -> u32 {
        self.sequences[page.index()]
    }

    /// Number of pages that a prefix tree holds. O(1).
    pub fn remembered(&self) -> usize {
        self.remembered
    }

    /// Number of pages that only a prefix tree holds. Forgetting would free them. O(1).
    pub fn only_remembered(&self) -> usize {
        self.only_remembered
    }

    fn is_remembered(&self, page: PageId) -> bool {
        self.blocks[page.index()] > 0
    }

    fn is_only_remembered(&self, page: PageId) -> bool {
        self.is_remembered(page) && self.sequences(page) == 0
    }

    /// Changes the holders of a page, and the counts of remembered pages with them. The last holder frees the page.
    fn change(&mut self, page: PageId, change: impl FnOnce(&mut u32, &mut u32)) {
        assert!(self.holders(page) > 0, "page {} has no holder", page.0);
        self.remembered -= usize::from(self.is_remembered(page));
        self.only_remembered -= usize::from(self.is_only_remembered(page));
        change(&mut self.sequences[page.index()], &mut self.blocks[page.index()]);
        self.remembered += usize::from(self.is_remembered(page));
        self.only_remembered += usize::from(self.is_only_remembered(page));
        if self.holders(page) == 0 {
            self.free.push(page);
        }
    }

    /// Adds a sequence as holder of a page that has one.
    pub fn share(&mut self, page: PageId) {
        self.change(page, |sequences, _| *sequences += 1);
    }

    /// Removes a sequence as holder.
    pub fn release(&mut self, page: PageId) {
        assert!(self.sequences(page) > 0, "page {} is released twice", page.0);
        self.change(page, |sequences, _| *sequences -= 1);
    }

    /// Adds a block of a prefix tree as holder of a page that has one.
    pub fn remember(&mut self, page: PageId) {
        self.change(page, |_, blocks| *blocks += 1);
    }

    /// Removes a block of a prefix tree as holder.
    pub fn forget(&mut self, page: PageId) {
        assert!(self.is_remembered(page), "page {} is forgotten twice", page.0);
        self.change(page, |_, blocks| *blocks -= 1);
    }

    /// Every page is either free or held: `free + held == total`. The counts are those that a scan finds.
    pub fn is_conserved(&self) -> bool {
        let count =
            |is: &dyn Fn(PageId) -> bool| (0..self.total() as u32).filter(|&page| is(PageId(page))).count();
        let mut free = self.free.clone();
        free.sort_unstable();
        free.dedup();
        count(&|page| self.holders(page) > 0) + free.len() == self.total()
            && free.iter().all(|&page| self.holders(page) == 0)
            && count(&|page| self.is_remembered(page)) == self.remembered
            && count(&|page| self.is_only_remembered(page)) == self.only_remembered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_conserved_through_take_share_and_release() {
        let mut pages = PageAllocator::new(5);
        let taken: Vec<PageId> = pages.take(3).expect("five are free").collect();
        assert_eq!(taken, [0, 1, 2].map(PageId));
        pages.share(PageId(1));
        taken.iter().for_each(|&p| pages.release(p));
        assert_eq!(pages.free(), 4);
        assert!(pages.is_conserved());
        assert!(matches!(pages.take(5).err(), Some(CacheError::NoPages { needed: 5, free: 4, total: 5 })));
        pages.release(PageId(1));
        assert_eq!(pages.free(), 5);
        assert!(pages.is_conserved());
    }

    #[test]
    fn pages_that_only_the_tree_holds_are_counted() {
        let mut pages = PageAllocator::new(3);
        let taken: Vec<PageId> = pages.take(2).expect("three are free").collect();
        let mut expect = |change: &mut dyn FnMut(&mut PageAllocator), remembered, only_remembered| {
            change(&mut pages);
            assert_eq!((pages.remembered(), pages.only_remembered()), (remembered, only_remembered));
            assert!(pages.is_conserved());
        };
        expect(&mut |pages| pages.remember(taken[0]), 1, 0);
        expect(&mut |pages| pages.remember(taken[0]), 1, 0);
        expect(&mut |pages| pages.release(taken[0]), 1, 1);
        expect(&mut |pages| pages.share(taken[0]), 1, 0);
        expect(&mut |pages| pages.release(taken[1]), 1, 0);
        expect(&mut |pages| pages.release(taken[0]), 1, 1);
        expect(&mut |pages| pages.forget(taken[0]), 1, 1);
        expect(&mut |pages| pages.forget(taken[0]), 0, 0);
        assert_eq!(pages.free(), 3);
    }
}
