//! Numbers of entries in the cache's arrays. Each kind has a type of its own, so that none stands for another.

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u32);

        impl $name {
            /// All numbers below `total`, the highest first: the order in which a list of free ones is filled.
            pub(crate) fn all(total: usize) -> Vec<$name> {
                (0..total as u32).rev().map($name).collect()
            }

            /// The entry in an array.
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }
    )*};
}

ids! {
    /// A page of 256 tokens of keys and values, the same in every attention layer.
    PageId
    /// A slot: one sequence's recurrent state in all layers.
    SlotId
    /// A checkpoint: a saved copy of a slot.
    CheckpointId
    /// A block of host memory for parked sequences.
    HostBlockId
}
