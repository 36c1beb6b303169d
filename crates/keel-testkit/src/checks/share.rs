//! Names cases, so that a slow tool can run only some of them, and can be told which one is running.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::OnceLock;

/// Called with the name of a case.
type Watcher = Box<dyn FnMut(&str)>;

thread_local! {
    /// The check that this thread is running.
    static CHECK: RefCell<String> = const { RefCell::new(String::new()) };
    static WATCHER: RefCell<Option<Watcher>> = const { RefCell::new(None) };
}

/// Names of the cases that a process runs.
#[derive(Debug, PartialEq, Eq)]
struct Share(HashSet<String>);

impl Share {
    /// Reads one name a line. Text after a tab is ignored.
    fn parse(text: &str) -> Share {
        let name = |line: &str| line.split('\t').next().unwrap_or_default().to_owned();
        Share(text.lines().map(name).filter(|name| !name.is_empty()).collect())
    }

    /// The cases of this process, from the file that the variable `KEEL_TEST_CASES` names; `None` for all cases.
    fn of_process() -> Option<&'static Share> {
        static SHARE: OnceLock<Option<Share>> = OnceLock::new();
        let read = || {
            let file = std::env::var_os("KEEL_TEST_CASES")?;
            let text = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
            Some(Share::parse(&text))
        };
        SHARE.get_or_init(read).as_ref()
    }

    fn has_any_of(&self, check: &str) -> bool {
        self.0.iter().any(|case| case.strip_prefix(check).is_some_and(|rest| rest.starts_with(' ')))
    }
}

/// Calls `watcher` on this thread with the name of each case before it runs. Data that a check makes for several cases
/// counts as part of the case before.
pub fn watch_cases(watcher: impl FnMut(&str) + 'static) {
    WATCHER.set(Some(Box::new(watcher)));
}

/// Begins a check. False if this process runs none of its cases.
pub(super) fn begin(check: String) -> bool {
    let is_mine = Share::of_process().is_none_or(|share| share.has_any_of(&check));
    CHECK.set(check);
    is_mine
}

/// Whether this process runs a case; its debug output distinguishes it from others of its check. If so, it runs now.
pub(super) fn is_mine(case: &impl Debug) -> bool {
    let name = CHECK.with_borrow(|check| format!("{check} {case:?}"));
    let is_mine = CHECK.with_borrow(|check| has_case(Share::of_process(), check, &name));
    if is_mine {
        WATCHER.with_borrow_mut(|watcher| watcher.iter_mut().for_each(|watcher| watcher(&name)));
    }
    is_mine
}

/// A check run outside the list has no name, and always runs all of its cases.
fn has_case(share: Option<&Share>, check: &str, name: &str) -> bool {
    check.is_empty() || share.is_none_or(|share| share.0.contains(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    #[test]
    fn a_share_is_read() {
        let share = Share::parse(
            "3 sum (F32, [5, 31])\tsum.cu:sum []\n3 sum (F32, [5, 31])\n\n12 sort \"whole\"\t\n",
        );
        assert_eq!(share, Share(["3 sum (F32, [5, 31])", "12 sort \"whole\""].map(String::from).into()));
        assert!(share.has_any_of("3 sum") && share.has_any_of("12 sort"));
        assert!(!share.has_any_of("3 su") && !share.has_any_of("2 sort") && !share.has_any_of("4 sum"));
    }

    #[test]
    fn a_share_is_of_the_list_of_checks_alone() {
        let share = Share::parse("3 sum 5\n");
        assert!(has_case(Some(&share), "3 sum", "3 sum 5") && !has_case(Some(&share), "3 sum", "3 sum 6"));
        assert!(has_case(None, "4 max", "4 max 5"));
        assert!(has_case(Some(&share), "", " 6"));
    }

    #[test]
    fn cases_are_told_apart_by_their_check() {
        let seen = Rc::new(RefCell::new(Vec::new()));
        let names = Rc::clone(&seen);
        watch_cases(move |case| names.borrow_mut().push(case.to_owned()));
        for check in ["3 sum", "4 max"] {
            assert!(begin(check.into()));
            assert!(is_mine(&("f32", [5, 31])));
        }
        assert_eq!(*seen.borrow(), ["3 sum (\"f32\", [5, 31])", "4 max (\"f32\", [5, 31])"]);
    }
}
