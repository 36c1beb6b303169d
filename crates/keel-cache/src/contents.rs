//! Everything that a sequence holds, as a list, for saving or parking it.

use keel_array::{Array, AttentionSpec};

use crate::{LayerStorage, PageId, SequenceCache};

/// A sequence's entries in one array.
pub(crate) struct HeldEntries<'a> {
    /// Their name in files.
    pub name: String,
    /// The array with the entries of all sequences.
    pub pool: &'a Array,
    /// The entries of this sequence.
    pub entries: Vec<usize>,
    /// True if the entries are an axis of the shape: pages, but not a slot.
    stacked: bool,
}

impl HeldEntries<'_> {
    pub fn shape(&self) -> Vec<usize> {
        let entry = self.pool.shape()[1..].iter().copied();
        self.stacked.then_some(self.entries.len()).into_iter().chain(entry).collect()
    }

    pub fn entry_bytes(&self) -> usize {
        self.pool.bytes() / self.pool.shape()[0]
    }

    /// Bytes of all entries.
    pub fn bytes(&self) -> usize {
        self.entries.len() * self.entry_bytes()
    }
}

/// Everything that a sequence holds of its first `len` tokens, in the order of the layers. These are all its tokens,
/// now or after loading. The first `first_page` pages of layers without a window are left out.
pub(crate) fn contents<'a>(
    layers: &'a [LayerStorage],
    sequence: &SequenceCache,
    first_page: usize,
    len: usize,
) -> Vec<HeldEntries<'a>> {
    let used = len.div_ceil(AttentionSpec::PAGE);
    let window_used = used.min(sequence.sliding_pages().len());
    let indices = |pages: &[PageId]| pages.iter().map(|page| page.index()).collect::<Vec<_>>();
    let pages = &indices(&sequence.pages()[first_page..used]);
    let sliding_pages = &indices(&sequence.sliding_pages()[..window_used]);
    let mut contents = Vec::new();
    for (i, layer) in layers.iter().enumerate() {
        let mut add = |name: &str, pool, entries: &[usize], stacked| {
            contents.push(HeldEntries {
                name: format!("layers.{i}.{name}"),
                pool,
                entries: entries.to_vec(),
                stacked,
            });
        };
        match layer {
            LayerStorage::Attention(pool) => {
                add("keys", &pool.keys, pages, true);
                add("values", &pool.values, pages, true);
            }
            LayerStorage::Sliding(pool) => {
                add("keys", &pool.keys, sliding_pages, true);
                add("values", &pool.values, sliding_pages, true);
            }
            LayerStorage::Recurrent { window, state } => {
                add("window", &window.rows, &[sequence.slot().index()], false);
                add("state", &state.state, &[sequence.slot().index()], false);
            }
        }
    }
    contents
}
