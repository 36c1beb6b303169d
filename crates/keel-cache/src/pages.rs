//! Free pages, and the number of holders of the others.

use crate::{CacheError, PageId, Result};

/// Page numbers with reference counts. A page number stands for the same page in every attention layer.
#[derive(Debug)]
pub struct PageAllocator {
    /// Free pages. The last is handed out next.
    free: Vec<PageId>,
    /// Holders of each page.
    holders: Vec<u32>,
    /// Pages that a prefix tree holds.
    is_remembered: Vec<bool>,
    /// Number of pages that only a prefix tree holds.
    only_remembered: usize,
}

impl PageAllocator {
    /// `total` free pages.
    pub fn new(total: usize) -> PageAllocator {
        PageAllocator {
            free: PageId::all(total),
            holders: vec![0; total],
            is_remembered: vec![false; total],
            only_remembered: 0,
        }
    }

    /// Free pages.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// All pages.
    pub fn total(&self) -> usize {
        self.holders.len()
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
        let holders = &mut self.holders;
        Ok(self.free.drain(free - count..).rev().inspect(move |&page| holders[page.index()] = 1))
    }

    /// Takes one page.
    ///
    /// # Errors
    /// [`CacheError::NoPages`] if none is free.
    pub fn take_one(&mut self) -> Result<PageId> {
        let total = self.total();
        let page = self.free.pop().ok_or(CacheError::NoPages { needed: 1, free: 0, total })?;
        self.holders[page.index()] = 1;
        Ok(page)
    }

    /// Holders of a page.
    pub fn holders(&self, page: PageId) -> u32 {
        self.holders[page.index()]
    }

    /// True if a page has more than one holder.
    pub fn is_shared(&self, page: PageId) -> bool {
        self.holders(page) > 1
    }

    /// Number of pages that only a prefix tree holds. Forgetting would free them. O(1).
    pub fn only_remembered(&self) -> usize {
        self.only_remembered
    }

    /// How many sequences hold a page.
    pub fn sequences(&self, page: PageId) -> u32 {
        self.holders(page) - u32::from(self.is_remembered[page.index()])
    }

    fn is_only_remembered(&self, page: PageId) -> bool {
        self.is_remembered[page.index()] && self.holders[page.index()] == 1
    }

    /// Changes the holders of a page, and the count of pages that only a tree holds with them.
    fn change(&mut self, page: PageId, change: impl FnOnce(&mut u32, &mut bool)) {
        let was = self.is_only_remembered(page);
        change(&mut self.holders[page.index()], &mut self.is_remembered[page.index()]);
        let is = self.is_only_remembered(page);
        self.only_remembered = self.only_remembered + usize::from(is) - usize::from(was);
    }

    /// Adds a holder.
    pub fn share(&mut self, page: PageId) {
        assert!(self.holders(page) > 0, "page {} is shared while it is free", page.0);
        self.change(page, |holders, _| *holders += 1);
    }

    /// Removes a holder; the last one frees the page.
    pub fn release(&mut self, page: PageId) {
        assert!(self.holders(page) > 0, "page {} is released twice", page.0);
        self.change(page, |holders, _| *holders -= 1);
        if self.holders(page) == 0 {
            assert!(!self.is_remembered[page.index()], "page {} is remembered and has no holder", page.0);
            self.free.push(page);
        }
    }

    /// Adds a prefix tree as holder. There is one tree.
    pub fn remember(&mut self, page: PageId) {
        assert!(!self.is_remembered[page.index()], "page {} is remembered twice", page.0);
        self.share(page);
        self.change(page, |_, is_remembered| *is_remembered = true);
    }

    /// Removes the prefix tree as holder.
    pub fn forget(&mut self, page: PageId) {
        assert!(self.is_remembered[page.index()], "page {} is forgotten twice", page.0);
        self.change(page, |_, is_remembered| *is_remembered = false);
        self.release(page);
    }

    /// Every page is either free or held: `free + held == total`. The counts are those that a scan finds.
    pub fn is_conserved(&self) -> bool {
        let held = self.holders.iter().filter(|&&h| h > 0).count();
        let mut free = self.free.clone();
        free.sort_unstable();
        free.dedup();
        let only_remembered =
            (0..self.total() as u32).filter(|&page| self.is_only_remembered(PageId(page))).count();
        held + free.len() == self.total()
            && free.iter().all(|&p| self.holders[p.index()] == 0)
            && only_remembered == self.only_remembered
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
        let mut expect = |change: &mut dyn FnMut(&mut PageAllocator), only_remembered| {
            change(&mut pages);
            assert_eq!(pages.only_remembered(), only_remembered);
            assert!(pages.is_conserved());
        };
        expect(&mut |pages| pages.remember(taken[0]), 0);
        expect(&mut |pages| pages.release(taken[0]), 1);
        expect(&mut |pages| pages.share(taken[0]), 0);
        expect(&mut |pages| pages.release(taken[1]), 0);
        expect(&mut |pages| pages.release(taken[0]), 1);
        expect(&mut |pages| pages.forget(taken[0]), 0);
        assert_eq!(pages.free(), 3);
    }
}
