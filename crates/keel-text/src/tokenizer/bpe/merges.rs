//! Ranks of the pairs of tokens that merge.

/// Ranks of pairs, sorted by left and then right token.
///
/// # Memory
/// 8 bytes per pair and 4 bytes per token.
pub(super) struct Merges {
    /// Start of each left token's pairs, followed by the end of the last.
    starts: Vec<u32>,
    rights: Vec<u32>,
    ranks: Vec<u32>,
}

impl Merges {
    /// Builds the ranks from pairs of places below `tokens`, in merge order. If a pair is listed twice, the last entry
    /// counts.
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

    /// The rank of a pair in merge order: 0 merges first.
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
