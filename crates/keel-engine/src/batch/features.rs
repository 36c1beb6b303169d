//! Features of pictures. They are kept within a budget, for requests that show the same picture.
//!
//! The budget is part of the plan. A request that may have to run the tower *holds* its pictures from its start until
//! its prompt has been run, so there is room for all of them. Pictures that no request holds stay until their room is
//! needed. The least recently used go first.

use std::collections::HashMap;
use std::sync::Arc;

use keel_cache::Features;

/// Identifies a picture as the tower reads it: a full hash of pixels and processor settings.
pub type PictureKey = [u8; 32];

/// A picture to hold, and the bytes of its features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub key: PictureKey,
    pub bytes: u64,
}

#[derive(Debug)]
struct Entry {
    bytes: u64,
    holders: usize,
    /// `None` until the tower has encoded the picture.
    features: Option<Arc<Features>>,
    last_used: u64,
}

/// The features that are kept.
#[derive(Debug)]
pub(super) struct FeatureStore {
    limit: u64,
    entries: HashMap<PictureKey, Entry>,
    clock: u64,
}

impl FeatureStore {
    pub fn new(limit: u64) -> FeatureStore {
        FeatureStore { limit, entries: HashMap::new(), clock: 0 }
    }

    /// Bytes that may be kept.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes kept or promised.
    pub fn used(&self) -> u64 {
        self.entries.values().map(|entry| entry.bytes).sum()
    }

    /// Bytes that requests hold.
    pub fn held(&self) -> u64 {
        self.entries.values().filter(|entry| entry.holders > 0).map(|entry| entry.bytes).sum()
    }

    /// How many pictures have their features here.
    pub fn len(&self) -> usize {
        self.entries.values().filter(|entry| entry.features.is_some()).count()
    }

    /// Whether all of these pictures can be held at once.
    pub fn can_hold(&self, wanted: &[Wanted]) -> bool {
        let is_held = |key| self.entries.get(key).is_some_and(|entry| entry.holders > 0);
        let more: u64 = distinct(wanted).filter(|one| !is_held(&one.key)).map(|one| one.bytes).sum();
        self.held().saturating_add(more) <= self.limit
    }

    /// Holds all of these pictures, and forgets others as far as needed. If there is no room, holds none and returns
    /// false.
    pub fn hold(&mut self, wanted: &[Wanted]) -> bool {
        if !self.can_hold(wanted) {
            return false;
        }
        self.clock += 1;
        for Wanted { key, bytes } in wanted {
            let fresh = Entry { bytes: *bytes, holders: 0, features: None, last_used: 0 };
            let entry = self.entries.entry(*key).or_insert(fresh);
            entry.holders += 1;
            entry.last_used = self.clock;
        }
        while self.used() > self.limit {
            let idle = self.entries.iter().filter(|(_, entry)| entry.holders == 0);
            let oldest = idle.min_by_key(|(key, entry)| (entry.last_used, **key)).map(|(key, _)| *key);
            let Some(oldest) = oldest else { break };
            self.entries.remove(&oldest);
        }
        true
    }

    /// The features of a picture, if the tower has encoded it.
    pub fn get(&self, key: &PictureKey) -> Option<Arc<Features>> {
        self.entries.get(key)?.features.clone()
    }

    /// Keeps the features of a picture that is held.
    pub fn fill(&mut self, key: &PictureKey, features: Arc<Features>) {
        if let Some(entry) = self.entries.get_mut(key) {
            let bytes: usize = features.levels.iter().map(|level| size_of_val(&level[..])).sum();
            debug_assert_eq!(bytes as u64, entry.bytes, "as was planned");
            entry.features = Some(features);
        }
    }

    /// Takes a hold back. A picture that the tower never encoded is forgotten.
    pub fn let_go(&mut self, key: &PictureKey) {
        let Some(entry) = self.entries.get_mut(key) else { return };
        entry.holders = entry.holders.saturating_sub(1);
        if entry.holders == 0 && entry.features.is_none() {
            self.entries.remove(key);
        }
    }

    /// Forgets the pictures that no request holds.
    pub fn clear(&mut self) {
        self.entries.retain(|_, entry| entry.holders > 0);
    }
}

/// Each picture once.
fn distinct(wanted: &[Wanted]) -> impl Iterator<Item = &Wanted> {
    wanted
        .iter()
        .enumerate()
        .filter(|(i, one)| wanted[..*i].iter().all(|other| other.key != one.key))
        .map(|(_, one)| one)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(name: u8, bytes: u64) -> Wanted {
        Wanted { key: [name; 32], bytes }
    }

    fn features(values: usize) -> Arc<Features> {
        Arc::new(Features { levels: vec![vec![0.5; values]] })
    }

    #[test]
    fn what_is_held_stays_and_the_oldest_of_the_rest_goes() {
        let mut store = FeatureStore::new(100);
        for name in [1, 2] {
            assert!(store.hold(&[wanted(name, 40)]));
            store.fill(&[name; 32], features(10));
        }
        assert!(!store.can_hold(&[wanted(3, 40)]), "both are held");
        store.let_go(&[1; 32]);
        store.let_go(&[2; 32]);
        assert_eq!((store.used(), store.held(), store.len()), (80, 0, 2), "nobody needs the room");
        assert!(store.hold(&[wanted(2, 40)]), "the first is the oldest now");
        assert!(store.hold(&[wanted(3, 40)]));
        assert!(store.get(&[1; 32]).is_none() && store.get(&[2; 32]).is_some());
        assert!(store.get(&[3; 32]).is_none(), "the tower has not encoded it");
        assert_eq!((store.used(), store.held()), (80, 80));
    }

    #[test]
    fn all_or_none_are_held_and_a_picture_counts_once() {
        let mut store = FeatureStore::new(100);
        assert!(!store.hold(&[wanted(1, 60), wanted(2, 60)]));
        assert_eq!(store.used(), 0);
        assert!(store.hold(&[wanted(1, 60), wanted(1, 60)]));
        assert_eq!((store.used(), store.held()), (60, 60));
        store.let_go(&[1; 32]);
        assert_eq!(store.held(), 60, "one hold is left");
        store.let_go(&[1; 32]);
        assert_eq!(store.used(), 0, "the tower never encoded it");
    }

    #[test]
    fn clearing_spares_what_is_held() {
        let mut store = FeatureStore::new(100);
        assert!(store.hold(&[wanted(1, 40), wanted(2, 40)]));
        store.fill(&[1; 32], features(10));
        store.let_go(&[1; 32]);
        store.clear();
        assert_eq!((store.used(), store.held()), (40, 40));
    }
}
