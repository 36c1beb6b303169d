//! Free pages, and the number of holders of the others.

use crate::{CacheError, Result};

/// Page numbers with reference counts. A page number stands for the same page in every attention layer.
#[derive(Debug)]
pub struct PageAllocator {
    /// Free pages. The last is handed out next.
    free: Vec<u32>,
    /// Holders of each page.
    holders: Vec<u32>,
}

impl PageAllocator {
    /// `total` free pages.
    pub fn new(total: usize) -> PageAllocator {
        PageAllocator { free: (0..total as u32).rev().collect(), holders: vec![0; total] }
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
    pub fn take(&mut self, count: usize) -> Result<impl Iterator<Item = u32> + '_> {
        let (free, total) = (self.free(), self.total());
        if count > free {
            return Err(CacheError::NoPages { needed: count, free, total });
        }
        let holders = &mut self.holders;
        Ok(self.free.drain(free - count..).rev().inspect(move |&page| holders[page as usize] = 1))
    }

    /// Takes one page.
    ///
    /// # Errors
    /// [`CacheError::NoPages`] if none is free.
    pub fn take_one(&mut self) -> Result<u32> {
        let total = self.total();
        let page = self.free.pop().ok_or(CacheError::NoPages { needed: 1, free: 0, total })?;
        self.holders[page as usize] = 1;
        Ok(page)
    }

    /// Holders of a page.
    pub fn holders(&self, page: u32) -> u32 {
        self.holders[page as usize]
    }

    /// True if a page has more than one holder.
    pub fn is_shared(&self, page: u32) -> bool {
        self.holders(page) > 1
    }

    /// Adds a holder.
    pub fn share(&mut self, page: u32) {
        let holders = &mut self.holders[page as usize];
        assert!(*holders > 0, "page {page} is shared while it is free");
        *holders += 1;
    }

    /// Removes a holder; the last one frees the page.
    pub fn release(&mut self, page: u32) {
        let holders = &mut self.holders[page as usize];
        assert!(*holders > 0, "page {page} is released twice");
        *holders -= 1;
        if *holders == 0 {
            self.free.push(page);
        }
    }

    /// Every page is either free or held: `free + held == total`.
    pub fn is_conserved(&self) -> bool {
        let held = self.holders.iter().filter(|&&h| h > 0).count();
        let mut free: Vec<u32> = self.free.clone();
        free.sort_unstable();
        free.dedup();
        held + free.len() == self.total() && free.iter().all(|&p| self.holders[p as usize] == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_conserved_through_take_share_and_release() {
        let mut pages = PageAllocator::new(5);
        let taken: Vec<u32> = pages.take(3).expect("five are free").collect();
        assert_eq!(taken, [0, 1, 2]);
        pages.share(1);
        taken.iter().for_each(|&p| pages.release(p));
        assert_eq!(pages.free(), 4);
        assert!(pages.is_conserved());
        assert!(matches!(pages.take(5).err(), Some(CacheError::NoPages { needed: 5, free: 4, total: 5 })));
        pages.release(1);
        assert_eq!(pages.free(), 5);
        assert!(pages.is_conserved());
    }
}
