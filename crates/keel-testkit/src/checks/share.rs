//! Sharing the checks out among processes, for tools under which one takes too long.

use super::Check;
use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::OnceLock;

/// Which share of the cases is whose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Share {
    index: u64,
    count: u64,
}

/// All of them.
const WHOLE: Share = Share { index: 0, count: 1 };

impl Share {
    /// `2/64` is the third of 64.
    fn parse(text: &str) -> Option<Share> {
        let (index, count) = text.split_once('/')?;
        let share = Share { index: index.parse().ok()?, count: count.parse().ok()? };
        (share.index < share.count).then_some(share)
    }

    /// That of this process, as the variable `KEEL_TEST_SHARD` has it.
    fn of_process() -> Share {
        static SHARE: OnceLock<Share> = OnceLock::new();
        *SHARE.get_or_init(|| match std::env::var("KEEL_TEST_SHARD") {
            Ok(text) => Share::parse(&text).unwrap_or_else(|| panic!("{text:?} is no share such as 2/64")),
            Err(_) => WHOLE,
        })
    }

    fn has(self, case: &impl Debug) -> bool {
        let mut hasher = DefaultHasher::new();
        format!("{case:?}").hash(&mut hasher);
        hasher.finish() % self.count == self.index
    }
}

/// Whether a case, told from the others of its check by what it prints, is one of this process. Every case is that of one
/// process.
pub(super) fn is_mine(case: &impl Debug) -> bool {
    Share::of_process().has(case)
}

/// The checks of this process: those that share their cases out themselves, and some of the others.
pub fn mine(by_case: &[&[Check]], whole: &[&[Check]]) -> Vec<Check> {
    let share = Share::of_process();
    let whole = whole.concat().into_iter().enumerate().filter(|(i, check)| share.has(&(check.op, i)));
    by_case.concat().into_iter().chain(whole.map(|(_, check)| check)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_is_in_one_share() {
        for count in [1, 3, 64] {
            for case in 0..200 {
                let owners =
                    (0..count).filter(|&index| Share { index, count }.has(&("linear", case))).count();
                assert_eq!(owners, 1, "{case} of {count}");
            }
        }
        assert!(WHOLE.has(&1) && WHOLE.has(&"what"));
    }

    #[test]
    fn a_share_is_read() {
        assert_eq!(Share::parse("2/64"), Some(Share { index: 2, count: 64 }));
        for wrong in ["", "3", "3/3", "-1/2", "0/0", "a/b"] {
            assert_eq!(Share::parse(wrong), None, "{wrong:?}");
        }
    }
}
