//! Remembered prefixes and the memory that they hold.

use std::borrow::Cow;
use std::collections::HashMap;

use keel_array::AttentionSpec;
use keel_cache::{CheckpointLease, ModelCache, PageId, PrefixHit, PrefixTree, SequenceCache};

use super::features::PictureKey;
use super::pictures::RequestVision;
use crate::{PREFILL_GRID, Result};

/// The tree, and whether it is used.
pub(super) struct Prefixes {
    tree: PrefixTree,
    enabled: bool,
    names: PictureNames,
}

impl Prefixes {
    pub fn new(cache: &ModelCache, enabled: bool) -> Prefixes {
        // The pages of sliding layers are overwritten again and again, so they cannot be shared.
        let enabled = enabled && cache.spec().sliding_window().is_none();
        Prefixes { tree: PrefixTree::new(cache), enabled, names: PictureNames::default() }
    }

    /// A prompt as the tree knows it: tokens of pictures become the names of the pictures.
    pub fn name_pictures(&mut self, prompt: &[u32], vision: &RequestVision) -> Vec<u32> {
        let key = vision.key(prompt, |key| self.names.name(key)).into_owned();
        // After 2^30 pictures all names are given, and two pictures could share one. Prefixes are not used from then
        // on.
        self.enabled &= !self.names.are_spent;
        key
    }

    /// Writes the pictures of a text of the tree without their names: each token of a picture becomes the number of the
    /// picture in the returned list. `None` if a name was forgotten.
    pub fn unname(&self, key: &mut [u32]) -> Option<Vec<PictureKey>> {
        let mut pictures: Vec<PictureKey> = Vec::new();
        let mut last = None;
        for token in key.iter_mut().filter(|token| **token & PICTURE != 0) {
            let (name, number) = match last {
                Some((name, number)) if name == *token => (name, number),
                _ => {
                    let picture = self.names.picture(*token)?;
                    let known = pictures.iter().position(|one| *one == picture);
                    let number = known.unwrap_or(pictures.len());
                    if known.is_none() {
                        pictures.push(picture);
                    }
                    (*token, number)
                }
            };
            last = Some((name, number));
            *token = PICTURE | number as u32;
        }
        Some(pictures)
    }

    /// Undoes [`Prefixes::unname`]; `None` if a number has no picture.
    pub fn rename(&mut self, key: &mut [u32], pictures: &[PictureKey]) -> Option<()> {
        let names: Vec<u32> = pictures.iter().map(|picture| self.names.name(picture)).collect();
        for token in key.iter_mut().filter(|token| **token & PICTURE != 0) {
            *token = *names.get((*token & (PICTURE - 1)) as usize)?;
        }
        Some(())
    }

    /// Whether prompts leave states from which others can go on.
    pub fn keeps_states(&self, cache: &ModelCache) -> bool {
        self.enabled && (!cache.spec().is_recurrent() || cache.size().checkpoints > 0)
    }

    pub fn tree(&self) -> &PrefixTree {
        &self.tree
    }

    /// The remembered tokens with which a prompt can begin. `is_long` says which rotary frequencies it uses.
    pub fn find(&mut self, prompt: &[u32], is_long: bool) -> PrefixHit {
        if !self.enabled {
            return nothing(0);
        }
        self.tree.find(&key(prompt, is_long))
    }

    /// How many of these pages could be freed by forgetting.
    pub fn evictable_of(&self, cache: &ModelCache, pages: &[PageId]) -> usize {
        pages.iter().filter(|&&page| cache.page_holders(page) == 1).count()
    }

    /// Forgets prefixes until `pages` pages are free.
    pub fn make_room(&mut self, cache: &ModelCache, pages: usize) {
        while cache.free_pages() < pages && self.tree.evict() {}
    }

    /// Saves the state of a sequence in a checkpoint, if one is free or can be freed.
    pub fn save_checkpoint(
        &mut self,
        cache: &mut ModelCache,
        sequence: &SequenceCache,
    ) -> Result<Option<CheckpointLease>> {
        if !self.enabled {
            return Ok(None);
        }
        if cache.free_checkpoints() == 0 {
            self.tree.evict_state();
        }
        Ok(cache.save_checkpoint(sequence)?)
    }

    /// Remembers the first tokens of a sequence, with the state after them. A state that is known already is freed.
    pub fn remember(&mut self, tokens: &[u32], sequence: &SequenceCache, state: Option<CheckpointLease>) {
        if self.enabled {
            let pages = &sequence.pages()[..tokens.len().div_ceil(AttentionSpec::PAGE)];
            self.tree.insert(&key(tokens, sequence.is_long()), pages, state);
        }
    }

    /// Notes that a text was used just now.
    pub fn touch(&mut self, text: &[u32], is_long: bool) {
        self.tree.use_now(&key(text, is_long));
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.tree.clear();
    }
}

/// An empty hit. `known_len` tokens are remembered, but cannot be used.
pub(super) fn nothing(known_len: usize) -> PrefixHit {
    PrefixHit { len: 0, pages: Vec::new(), state: None, known_len }
}

/// Set in the first token of texts with the rotary frequencies of long sequences. No token id has this bit.
const LONG: u32 = 1 << 31;

/// Set in a key's tokens of pictures. The other bits are the name of the picture. No token id has this bit.
const PICTURE: u32 = 1 << 30;

/// How many pictures may have names. When there are more, all names are forgotten, and prefixes with them are not
/// found.
const NAMES_MAX: usize = 1 << 16;

/// Short names of pictures. A name is never given to a second picture, so equal names mean equal pictures.
#[derive(Default)]
struct PictureNames {
    names: HashMap<PictureKey, u32>,
    given: u32,
    /// Whether all names have been given.
    are_spent: bool,
}

impl PictureNames {
    fn name(&mut self, key: &PictureKey) -> u32 {
        if let Some(name) = self.names.get(key) {
            return PICTURE | name;
        }
        if self.names.len() == NAMES_MAX {
            self.names.clear();
        }
        let name = self.given;
        self.given = (name + 1) % PICTURE;
        self.are_spent |= self.given == 0;
        self.names.insert(*key, name);
        PICTURE | name
    }

    fn picture(&self, token: u32) -> Option<PictureKey> {
        let name = token & (PICTURE - 1);
        self.names.iter().find(|(_, known)| **known == name).map(|(key, _)| *key)
    }
}

/// A text as a key of the tree. Long sequences share nothing with others.
pub(super) fn key(tokens: &[u32], is_long: bool) -> Cow<'_, [u32]> {
    let mut key = Cow::Borrowed(tokens);
    if is_long && !tokens.is_empty() {
        key.to_mut()[0] |= LONG;
    }
    key
}

/// A remembered text, without its pages.
pub(super) struct PrefixText {
    pub tokens: Vec<u32>,
    /// Whether it belongs to a long sequence.
    pub is_long: bool,
}

/// The text of a key of the tree.
pub(super) fn text_of(mut key: Vec<u32>) -> PrefixText {
    let is_long = key.first().is_some_and(|first| first & LONG != 0);
    key.iter_mut().take(1).for_each(|first| *first &= !LONG);
    PrefixText { tokens: key, is_long }
}

/// Where the state of a prompt is saved, after `start`: at the marks, where the known part ends, and as late as
/// possible.
pub(super) fn save_points(prompt_len: usize, start: usize, known_len: usize, marks: &[usize]) -> Vec<usize> {
    let last = prompt_len.saturating_sub(1);
    let positions = marks.iter().copied().chain([known_len, last]);
    let on_grid = positions.map(|at| at.min(last) / PREFILL_GRID * PREFILL_GRID);
    let mut save_points: Vec<usize> = on_grid.filter(|&at| at > start).collect();
    save_points.sort_unstable();
    save_points.dedup();
    save_points
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_names_mean_equal_pictures() {
        let mut names = PictureNames::default();
        let (one, other) = (names.name(&[1; 32]), names.name(&[2; 32]));
        assert_ne!(one, other);
        assert_eq!(names.name(&[1; 32]), one);
        assert_eq!(names.picture(one), Some([1; 32]));
        // After this many others all names are forgotten. The picture then gets a new name, not one that was given
        // before.
        let key = |n: u32| -> PictureKey { std::array::from_fn(|i| n.to_le_bytes()[i % 4]) };
        let given: Vec<u32> = (1000..1000 + NAMES_MAX as u32).map(|n| names.name(&key(n))).collect();
        assert_eq!(names.picture(one), None);
        let again = names.name(&[1; 32]);
        assert!(again != one && again != other && !given.contains(&again));
    }

    #[test]
    fn states_are_saved_on_the_grid_after_the_start() {
        assert_eq!(save_points(300, 0, 0, &[100]), [64, 256]);
        assert_eq!(save_points(300, 64, 192, &[100]), [192, 256]);
        assert_eq!(save_points(257, 0, 0, &[999]), [256]);
        assert_eq!(save_points(256, 0, 0, &[]), [192], "the last token is always run again");
        assert_eq!(save_points(64, 0, 0, &[]), [0; 0]);
        assert_eq!(save_points(0, 0, 0, &[]), [0; 0]);
    }
}
