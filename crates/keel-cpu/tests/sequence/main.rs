//! The sequence kernels against their oracles, and their law: how work is cut never changes a bit.

mod attention;
mod causal_conv;
mod delta_steps;
mod gated_delta;
mod rows;
mod same_bits_everywhere;

/// The first row of each sequence, given the number of rows of each, then the total.
fn row_starts(rows: impl IntoIterator<Item = usize>) -> Vec<u32> {
    let mut starts = vec![0];
    for rows in rows {
        starts.push(starts[starts.len() - 1] + rows as u32);
    }
    starts
}
