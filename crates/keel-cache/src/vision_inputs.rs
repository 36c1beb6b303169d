//! The pictures of a sequence: positions of its tokens on three axes, and the features.

use std::sync::Arc;

/// A tower's output for a picture: rows of the text model's width, level by level.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Features {
    /// Those that replace embeddings, then those that are added after the first layers.
    pub levels: Vec<Vec<f32>>,
}

/// A picture whose features are there.
#[derive(Clone, Debug, PartialEq)]
pub struct SeenPicture {
    /// The first of its rows, counted over all pictures of the sequence.
    pub first: usize,
    /// Its rows.
    pub features: Arc<Features>,
}

/// The pictures of a sequence, kept with it. Steps read from it which rows belong to a picture. Every later token takes
/// its position from it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VisionInputs {
    /// Time, row and column of each token, from the first on.
    pub positions: Vec<[i32; 3]>,
    /// Position of a later token minus its number.
    pub delta: i32,
    /// For each token of a picture: the row, counted over all pictures, that replaces its embedding.
    pub rows: Vec<Option<u32>>,
    /// The last token that each token sees, if the tokens of a picture see each other; otherwise empty.
    pub ends: Vec<u32>,
    /// Pictures whose features are there, by their first row. A step needs those whose tokens it runs.
    pub pictures: Vec<SeenPicture>,
    /// Values of a row of features.
    pub width: usize,
}

impl VisionInputs {
    /// The position of token number `token`.
    pub fn position(&self, token: usize) -> [i32; 3] {
        match self.positions.get(token) {
            Some(position) => *position,
            None => [token as i32 + self.delta; 3],
        }
    }

    /// The features of a picture's token at a level.
    pub fn feature(&self, level: usize, token: usize) -> Option<&[f32]> {
        let row = (*self.rows.get(token)?)? as usize;
        let after = self.pictures.partition_point(|picture| picture.first <= row);
        let picture = self.pictures.get(after.checked_sub(1)?)?;
        let row = row - picture.first;
        picture.features.levels.get(level)?.get(row * self.width..(row + 1) * self.width)
    }

    /// Whether a token is a picture's.
    pub fn is_picture(&self, token: usize) -> bool {
        self.rows.get(token).is_some_and(Option::is_some)
    }

    /// Whether any of these tokens belongs to a picture.
    pub fn has_picture_in(&self, tokens: std::ops::Range<usize>) -> bool {
        let end = tokens.end.min(self.rows.len());
        self.rows.get(tokens.start..end).is_some_and(|rows| rows.iter().any(Option::is_some))
    }

    /// The last token that a token sees.
    pub fn end(&self, token: usize) -> usize {
        self.ends.get(token).map_or(token, |&end| end as usize)
    }

    /// The most tokens that see each other; 0 if those of a picture do not. Pictures next to each other are one run.
    pub fn longest_run(&self) -> usize {
        self.ends.chunk_by(|end, next| end == next).map(<[u32]>::len).max().unwrap_or(0)
    }

    /// The run of tokens that see each other and contains both `cut - 1` and `cut`, if there is one.
    pub fn run_around(&self, cut: usize) -> Option<std::ops::Range<usize>> {
        let end = self.end(cut.checked_sub(1)?);
        if end < cut {
            return None;
        }
        let start = (0..cut).rev().take_while(|&token| self.end(token) == end).last()?;
        Some(start..end + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A token, a picture of one row of four, a token.
    fn vision() -> VisionInputs {
        let positions = vec![[0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 1, 3], [1, 1, 4], [5, 5, 5]];
        let rows = vec![None, Some(0), Some(1), Some(2), Some(3), None];
        let picture = |first, values: &[f32]| SeenPicture {
            first,
            features: Arc::new(Features { levels: vec![values.to_vec()] }),
        };
        let pictures = vec![picture(0, &[1.0, 2.0]), picture(2, &[3.0, 4.0])];
        VisionInputs { positions, delta: 0, rows, ends: vec![0, 4, 4, 4, 4, 5], pictures, width: 1 }
    }

    #[test]
    fn a_picture_that_was_not_seen_has_no_features() {
        let mut vision = vision();
        vision.pictures.remove(0);
        assert!(vision.is_picture(2) && !vision.is_picture(5) && !vision.is_picture(9));
        assert_eq!((vision.feature(0, 2), vision.feature(0, 3)), (None, Some(&[3.0][..])));
    }

    #[test]
    fn a_cut_within_a_run_is_found() {
        let vision = vision();
        assert_eq!([1, 2, 4, 5].map(|cut| vision.run_around(cut)), [None, Some(1..5), Some(1..5), None]);
        assert_eq!((vision.longest_run(), VisionInputs::default().longest_run()), (4, 0));
        assert!(vision.has_picture_in(0..2) && !vision.has_picture_in(5..9));
        assert_eq!(vision.feature(0, 3), Some(&[3.0][..]));
        assert_eq!((vision.feature(0, 5), vision.feature(1, 3), vision.position(7)), (None, None, [7; 3]));
    }
}
