//! The arrays that assign rows to sequences, checked before a kernel trusts them.
//!
//! Every worker makes the same check of the same data, so either all of them run the kernel or none does.

use super::Bound;
use crate::kernels::attention::{PAGE, PageTable};
use crate::kernels::rows::Batch;

/// The batch of a step of `rows` rows.
pub(super) fn batch<'a>(
    row_start: &Bound<'a>,
    position: &'a [u32],
    rows: usize,
) -> Result<Batch<'a>, String> {
    let row_start: &[u32] = row_start.values();
    let grows = row_start.first() == Some(&0) && row_start.is_sorted();
    if !grows || row_start.last().is_some_and(|&end| end as usize > rows) {
        return Err(format!("rows {row_start:?} of the sequences do not divide {rows} rows"));
    }
    Ok(Batch { row_start, position })
}

/// The slots of the sequences. They must exist and differ, because each sequence writes its own. A sequence with no
/// rows in this step and none to commit may have no slot.
pub(super) fn slots<'a>(
    slot: &Bound<'a>,
    available: usize,
    batch: &Batch<'_>,
    accepted: Option<&[u32]>,
) -> Result<&'a [u32], String> {
    let slots: &[u32] = slot.values();
    let is_idle = |b: usize| batch.rows_of(b).is_empty() && accepted.is_none_or(|accepted| accepted[b] == 0);
    for (b, &slot) in slots.iter().enumerate() {
        if slot == keel_array::Batch::NO_SLOT && is_idle(b) {
            continue;
        }
        if slot as usize >= available {
            return Err(format!("sequence {b} is in slot {slot} of {available}"));
        }
        if let Some(other) = slots[..b].iter().position(|&earlier| earlier == slot) {
            return Err(format!("sequences {other} and {b} are both in slot {slot}"));
        }
    }
    Ok(slots)
}

/// The page tables of the sequences, after a check that every page that is read or written exists, that no two
/// sequences write the same one, and that rows which are written together overwrite no keys that they see. Those of a
/// sequence are cut at multiples of `run`.
pub(super) fn page_table<'a>(
    table: &Bound<'a>,
    batch: &Batch<'_>,
    window: Option<usize>,
    run: usize,
    pages: usize,
) -> Result<PageTable<'a>, String> {
    let (entries, stride) = (table.values::<u32>(), table.width());
    let seen = |first: usize| window.map_or(0, |window| (first + 1).saturating_sub(window.max(1))) / PAGE;
    let mut written = Vec::new();
    for b in 0..batch.sequences() {
        let (rows, first) = (batch.rows_of(b).len(), batch.position[b] as usize);
        if rows == 0 {
            continue;
        }
        let end = (first + rows).div_ceil(PAGE);
        if end > stride {
            return Err(format!(
                "sequence {b} ends at position {} but its table has {stride} pages of {PAGE}",
                first + rows
            ));
        }
        let own = &entries[b * stride..][..end];
        if let Some(page) = own[seen(first)..].iter().find(|&&page| page as usize >= pages) {
            return Err(format!("sequence {b} is in page {page} of {pages}"));
        }
        let mut at = first;
        while at < first + rows {
            let end = (at - at % run).saturating_add(run).min(first + rows);
            for i in at / PAGE..end.div_ceil(PAGE) {
                if own[seen(at)..i].contains(&own[i]) {
                    return Err(format!(
                        "sequence {b} writes positions {at} to {} to page {}, where its rows still see earlier keys",
                        end - 1,
                        own[i]
                    ));
                }
            }
            at = end;
        }
        written.extend(own[first / PAGE..].iter().map(|&page| (page, b)));
    }
    written.sort_unstable();
    // A run of a sequence may come back to a page of an earlier one.
    let both = written.windows(2).find(|pair| pair[0].0 == pair[1].0 && pair[0].1 != pair[1].1);
    if let Some(&[(page, a), (_, b)]) = both {
        return Err(format!("sequences {a} and {b} both write to page {page}"));
    }
    Ok(PageTable { pages: entries, stride })
}
