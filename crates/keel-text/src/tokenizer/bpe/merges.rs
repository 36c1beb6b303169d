//! Which pairs of tokens merge, and which of them first.

/// Ranks of pairs, sorted by left and right token.
///
/// # Memory
/// 8 bytes a pair and 4 bytes a token.
pub(super) struct Merges {
    /// Where the pairs of each left token begin, and the end.
    starts: Vec<u32>,
    rights: Vec<u32>,
    ranks: Vec<u32>,
}

impl Merges {
    /// From pairs of places below `tokens`, first merged first. Of equal pairs the last counts.
    pub(super) fn new(pairs: &[(u32, u32)], tokens: u32) -> Merges {
        let mut order: Vec<u32> = (0..pairs.len() as u32).collect();
        order.sort_unstable_by_key(|&rank| (pairs[rank as usize], rank));
        let mut starts = vec![0u32; tokens as usize + 1];
        let (mut rights, mut ranks) = (Vec::with_capacity(order.len()), Vec::with_capacity(order.len()));
        for (i, &rank) in order.iter().enumerate() {
            let (left, right) = pairs[rank as usize];
            if order.get(i + 1).is_some_and(|&next| pairs[next as usize] == (left, right)) {
                continue;
            }
            starts[left as usize + 1] += 1;
            rights.push(right);
            ranks.push(rank);
        }
        let mut total = 0;
        for start in &mut starts {
            total += *start;
            *start = total;
        }
        Merges { starts, rights, ranks }
    }

    /// How early a pair merges: 0 is first.
    pub(super) fn rank(&self, left: u32, right: u32) -> Option<u32> {
        let (start, end) = (self.starts[left as usize] as usize, self.starts[left as usize + 1] as usize);
        let at = self.rights[start..end].binary_search(&right).ok()?;
        Some(self.ranks[start + at])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_have_the_rank_at_which_they_stand_last() {
        let merges = Merges::new(&[(2, 1), (0, 3), (2, 0), (0, 3), (3, 3)], 4);
        let expected = [((2, 1), 0), ((2, 0), 2), ((0, 3), 3), ((3, 3), 4)];
        for left in 0..4 {
            for right in 0..4 {
                let rank = expected.iter().find(|(pair, _)| *pair == (left, right)).map(|(_, rank)| *rank);
                assert_eq!(merges.rank(left, right), rank, "({left}, {right})");
            }
        }
        assert_eq!(Merges::new(&[], 1).rank(0, 0), None);
    }
}
