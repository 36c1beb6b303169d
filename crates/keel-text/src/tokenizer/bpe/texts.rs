//! Maps texts to ids and ids to texts, with one allocation for each.

use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;

/// The texts of a vocabulary. A *place* is the rank of an id among all ids. Without gaps in the ids, it is the id
/// itself.
///
/// # Memory
/// The bytes of the texts and about 14 bytes per token. Two maps with separate strings would take 150 bytes per token.
pub(super) struct Texts {
    /// All texts, concatenated by place.
    joined: String,
    /// The end of each place's text in `joined`.
    ends: Vec<u32>,
    /// The id of each place; empty if each id equals its place.
    ids: Vec<u32>,
    /// Places by text.
    places: HashTable<u32>,
    hasher: RandomState,
}

impl Texts {
    /// The text of a place.
    pub(super) fn text(&self, place: u32) -> &str {
        let place = place as usize;
        let start = if place == 0 { 0 } else { self.ends[place - 1] };
        &self.joined[start as usize..self.ends[place] as usize]
    }

    /// The place of a text.
    pub(super) fn place(&self, text: &str) -> Option<u32> {
        self.places.find(self.hasher.hash_one(text), |&place| self.text(place) == text).copied()
    }

    /// The id of a place.
    pub(super) fn id(&self, place: u32) -> u32 {
        if self.ids.is_empty() { place } else { self.ids[place as usize] }
    }

    /// The place of an id.
    pub(super) fn place_of_id(&self, id: u32) -> Option<u32> {
        match self.ids.is_empty() {
            true => (id < self.len()).then_some(id),
            false => self.ids.binary_search(&id).ok().map(|place| place as u32),
        }
    }

    /// The number of tokens.
    pub(super) fn len(&self) -> u32 {
        self.ends.len() as u32
    }
}

/// Collects texts in any order.
#[derive(Default)]
pub(super) struct TextsBuilder {
    joined: String,
    tokens: Vec<TextSpan>,
}

/// A token's id, and the bytes of its text.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct TextSpan {
    id: u32,
    start: u32,
    end: u32,
}

impl TextsBuilder {
    /// Adds a token. The error describes a defect of the token.
    pub(super) fn push(&mut self, text: &str, id: u32) -> Result<(), String> {
        let start = self.joined.len() as u32;
        let end = u32::try_from(self.joined.len() + text.len());
        let end = end.map_err(|_| "the texts of the vocabulary have more than 4 GiB".to_string())?;
        self.joined.push_str(text);
        self.tokens.push(TextSpan { id, start, end });
        Ok(())
    }

    /// Builds the vocabulary. No id and no text may occur twice.
    pub(super) fn build(mut self) -> Result<Texts, String> {
        if self.tokens.is_empty() {
            return Err("the vocabulary is empty".to_string());
        }
        self.tokens.sort_unstable();
        let text = |span: &TextSpan| &self.joined[span.start as usize..span.end as usize];
        if let Some(pair) = self.tokens.windows(2).find(|pair| pair[0].id == pair[1].id) {
            let (token, id) = (text(&pair[1]), pair[1].id);
            return Err(format!("token {token:?} has id {id}, which another token has too"));
        }
        let mut joined = String::with_capacity(self.joined.len());
        let mut ends = Vec::with_capacity(self.tokens.len());
        for token in &self.tokens {
            joined.push_str(text(token));
            ends.push(joined.len() as u32);
        }
        let dense = self.tokens.iter().zip(0..).all(|(token, place)| token.id == place);
        let ids = if dense { Vec::new() } else { self.tokens.iter().map(|token| token.id).collect() };
        let places = HashTable::with_capacity(self.tokens.len());
        drop(self);
        let mut texts = Texts { joined, ends, ids, places, hasher: RandomState::new() };
        for place in 0..texts.len() {
            texts.insert(place)?;
        }
        Ok(texts)
    }
}

impl Texts {
    fn insert(&mut self, place: u32) -> Result<(), String> {
        let text = self.text(place);
        if self.place(text).is_some() {
            return Err(format!("token {text:?} is listed twice"));
        }
        let hash = self.hasher.hash_one(text);
        // The capacity was reserved, so the table never hashes again.
        self.places.insert_unique(hash, place, |_| unreachable!("there is room for every token"));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(tokens: &[(&str, u32)]) -> Result<Texts, String> {
        let mut builder = TextsBuilder::default();
        tokens.iter().try_for_each(|(text, id)| builder.push(text, *id))?;
        builder.build()
    }

    #[test]
    fn texts_and_ids_are_found_from_each_other() {
        for tokens in [[("b", 1), ("ab", 2), ("", 0)], [("b", 7), ("ab", 4_000_000_000), ("", 3)]] {
            let texts = texts(&tokens).unwrap();
            assert_eq!(texts.len(), 3);
            for (text, id) in tokens {
                let place = texts.place(text).unwrap();
                assert_eq!((texts.text(place), texts.id(place)), (text, id));
                assert_eq!(texts.place_of_id(id), Some(place));
            }
            assert_eq!((texts.place("a"), texts.place_of_id(5)), (None, None));
        }
    }

    #[test]
    fn nothing_comes_twice() {
        assert_eq!(texts(&[("a", 1), ("a", 0)]).err().unwrap(), "token \"a\" is listed twice");
        assert!(texts(&[("a", 1), ("b", 1)]).err().unwrap().contains("has id 1, which another token has"));
        assert_eq!(texts(&[]).err().unwrap(), "the vocabulary is empty");
    }
}
