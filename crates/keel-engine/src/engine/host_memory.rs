//! Memory of the host that is not in arrays: in which tokens are drawn, and for hidden states that wait on the host.

use keel_array::{Category, Charge};

use crate::options::HOST_ROWS_MAX;
use crate::speculation::{SamplerChooser, Speculation};
use crate::{Engine, LogitsRow, Result};

/// The memory in which tokens are drawn, and the charge of all host memory outside arrays.
#[derive(Default)]
pub(super) struct HostMemory {
    logits_row: LogitsRow,
    _charge: Option<Charge>,
}

impl Engine {
    /// Charges the most host memory that steps and their sequences take, and allocates the part that they share. A
    /// sequence allocates its own part when it starts.
    pub(super) fn allocate_host_memory(&self) -> Result<HostMemory> {
        let (options, config) = (&self.options, &self.model().config);
        let hidden_bytes = config.hidden * size_of::<f32>();
        let prompt_bytes = self.stepper.buckets().prefill_rows_max() * hidden_bytes;
        let mut bytes = config.vocab * LogitsRow::TOKEN_BYTES;
        if options.drafts > 0 {
            let sequence =
                Speculation::bytes_max(config.hidden) + options.drafts * SamplerChooser::DRAFT_BYTES;
            // Hidden states: of rows of rounds while the host shares them out, of the rows that a pass of the head
            // takes, and a row of each sequence in the step taken last.
            let hidden_rows = 2 * options.decode_rows() + options.sequences;
            bytes += options.sequences * sequence + hidden_rows * hidden_bytes;
        } else if self.stages() > 1 {
            // Steps of micro-batches that wait to be taken, one of prompts, and the one taken last keep logits.
            let rows = (self.stages() + 2) * options.host_rows(HOST_ROWS_MAX);
            bytes += rows * config.vocab * size_of::<f32>();
        }
        // Rows that are added up to their mean, and features of pictures on their way to the device.
        bytes += (usize::from(options.row_hidden) + usize::from(options.vision.is_some())) * prompt_bytes;
        // The sums of a prompt of each sequence.
        bytes += usize::from(options.row_hidden) * options.sequences * config.hidden * size_of::<f64>();
        let charge = self.runtime().ledger().charge(Category::Host, bytes as u64)?;
        let logits_row = match self.runtime().backend().is_planning() {
            true => LogitsRow::default(),
            false => LogitsRow::for_vocab(config.vocab),
        };
        Ok(HostMemory { logits_row, _charge: Some(charge) })
    }

    /// Lends the memory in which tokens are drawn on the host.
    pub(crate) fn with_logits_row<T>(&mut self, draw: impl FnOnce(&mut Engine, &mut LogitsRow) -> T) -> T {
        let mut row = std::mem::take(&mut self.host_memory.logits_row);
        let drawn = draw(self, &mut row);
        self.host_memory.logits_row = row;
        drawn
    }
}
