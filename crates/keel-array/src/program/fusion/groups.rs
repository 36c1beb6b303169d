//! Consecutive kernels that a backend runs together.

use std::ops::Range;

use super::super::Kernel;

/// A backend's answer about the first of some kernels: it runs this many of them together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelGroup {
    /// The backend's name for such a group. It chooses the code that runs the group by this name.
    pub name: &'static str,
    /// How many kernels; at least 2.
    pub len: usize,
}

/// Kernels of a program that are run together, or one kernel alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramGroup {
    /// The backend's name for the group; `None` for a kernel alone.
    pub name: Option<&'static str>,
    /// The kernels, by number.
    pub kernels: Range<usize>,
}

/// Divides kernels into groups. `group_of` is the backend's [answer](crate::Programs::group_of). No group reaches from
/// one piece into the next, because each piece is a submission.
///
/// # Panics
/// If the backend names a group of fewer than two kernels, or of more than there are: a bug of the backend.
pub(in crate::program) fn group(
    kernels: &[Kernel],
    pieces: &[Range<usize>],
    group_of: impl Fn(&[Kernel]) -> Option<KernelGroup>,
) -> Vec<ProgramGroup> {
    let mut groups = Vec::with_capacity(kernels.len());
    for piece in pieces {
        let mut first = piece.start;
        while first < piece.end {
            let rest = &kernels[first..piece.end];
            let found = group_of(rest);
            if let Some(KernelGroup { name, len }) = found {
                let of = rest.len();
                assert!((2..=of).contains(&len), "the backend names a group {name} of {len} of {of} kernels");
            }
            let end = first + found.map_or(1, |group| group.len);
            groups.push(ProgramGroup { name: found.map(|group| group.name), kernels: first..end });
            first = end;
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Op;

    fn kernels(count: usize) -> Vec<Kernel> {
        (0..count).map(|_| Kernel::new(Op::Copy, Vec::new(), Vec::new())).collect()
    }

    /// Three kernels at a time, or two at the end.
    fn threes(rest: &[Kernel]) -> Option<KernelGroup> {
        let len = rest.len().min(3);
        (len > 1).then_some(KernelGroup { name: "some", len })
    }

    #[test]
    fn each_kernel_is_in_one_group_and_no_group_crosses_pieces() {
        let groups = group(&kernels(9), &[0..4, 4..9], threes);
        let ranges: Vec<_> = groups.iter().map(|group| (group.name, group.kernels.clone())).collect();
        assert_eq!(ranges, [(Some("some"), 0..3), (None, 3..4), (Some("some"), 4..7), (Some("some"), 7..9)]);
        assert!(group(&kernels(3), &[0..1, 1..3], |_| None).iter().all(|group| group.kernels.len() == 1));
    }

    #[test]
    #[should_panic(expected = "a group wide of 4 of 2 kernels")]
    fn a_group_is_of_the_kernels_that_there_are() {
        group(&kernels(3), &[0..2, 2..3], |_| Some(KernelGroup { name: "wide", len: 4 }));
    }
}
