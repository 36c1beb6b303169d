//! Prompts: cut into steps on the 64-token grid, alone or several in a step.

use keel_array::Regime;
use keel_array::sampling::Draw;
use keel_cache::{SequenceCache, VisionInputs};

use super::Engine;
use crate::PREFILL_GRID;
use crate::step::{Outcome, Rows, StepKind};
use crate::{EngineError, Result};

/// Runs one step of a prompt: its tokens, and the token after them unless they are the last.
type PrefillStep<'a> = dyn FnMut(&mut Engine, &SequenceCache, &[u32], Option<u32>) -> Result<()> + 'a;

/// The next tokens of a prompt, in [`Engine::prefill_chunks`].
pub struct Chunk<'a> {
    /// The sequence that holds the tokens before them, a multiple of 64.
    pub sequence: &'a mut SequenceCache,
    /// The tokens, a multiple of 64 unless the prompt ends with them.
    pub tokens: &'a [u32],
    /// The prompt's token after them; `None` if the prompt ends.
    pub next: Option<u32>,
    /// How the device draws the token after the prompt, if it does.
    pub draw: Option<Draw>,
}

impl Chunk<'_> {
    fn rows(&self) -> Rows<'_> {
        Rows { next: self.next, draws: self.draw.as_slice(), ..Rows::after(self.sequence, self.tokens) }
    }
}

impl Engine {
    /// Runs all tokens of a sequence that has outgrown its rotary frequencies again, with those of long sequences.
    pub(crate) fn run_as_long(&mut self, sequence: &mut SequenceCache, tokens: &[u32]) -> Result<()> {
        self.finish_in_flight()?;
        self.cache.reset(sequence)?;
        sequence.set_long(true);
        for (i, step) in tokens.chunks(self.options.prefill_step).enumerate() {
            let next = tokens.get((i + 1) * self.options.prefill_step).copied();
            self.prefill_chunks(&mut [Chunk { sequence, tokens: step, next, draw: None }])?;
        }
        Ok(())
    }

    /// Runs a prompt in steps after the tokens that the sequence holds, which must end on the 64-token grid. Leaves the
    /// logits of the prompt's last token in `logits`. Saves a checkpoint at the last grid point, if there is room.
    /// `progress` gets the number of tokens done after each step.
    ///
    /// # Errors
    /// Ids out of range, a prompt that does not fit, an error of the runtime. The sequence then holds the steps done.
    /// Exception: the failed step changed recurrent state, or may have overwritten keys that sliding layers need, and
    /// did not begin at the start or at a checkpoint. The sequence then answers [`keel_cache::CacheError::TornState`]
    /// or [`keel_cache::CacheError::AheadState`] until it is rewound.
    pub fn prefill(
        &mut self,
        sequence: &mut SequenceCache,
        prompt: &[u32],
        logits: &mut Vec<f32>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<()> {
        self.run_prompt(sequence, prompt, None, progress)?;
        self.stepper.read_logits(0, logits)
    }

    /// As [`Engine::prefill`], but does not read the logits. With `draw`, the device draws the token after the prompt
    /// in the last step, and 4 bytes come to the host.
    pub(crate) fn run_prompt(
        &mut self,
        sequence: &mut SequenceCache,
        prompt: &[u32],
        draw: Option<Draw>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Option<u32>> {
        let (mut done, mut first) = (0, None);
        let rows_max = self.lone_prompt_rows_max(sequence);
        self.each_prefill_step(sequence, prompt, rows_max, &mut |engine, sequence, tokens, next| {
            let draws = if next.is_none() { draw.as_slice() } else { &[] };
            let drawn = engine.run_prefill(&[Rows { next, draws, ..Rows::after(sequence, tokens) }])?;
            first = drawn.first().copied();
            done += tokens.len();
            progress(done);
            Ok(())
        })?;
        Ok(first)
    }

    /// Cuts a prompt into steps of at most `rows_max` rows. With checkpoints, one step ends at the last grid point.
    pub(super) fn each_prefill_step(
        &mut self,
        sequence: &mut SequenceCache,
        prompt: &[u32],
        rows_max: usize,
        step: &mut PrefillStep<'_>,
    ) -> Result<()> {
        self.choose_rope_frequencies(sequence, sequence.len() + prompt.len());
        self.admit(sequence, prompt)?;
        sequence.vision_inputs().map_or(Ok(()), |vision| self.check_runs(vision))?;
        if !sequence.offset().is_multiple_of(PREFILL_GRID) {
            let reason =
                format!("a prompt cannot start at token {}, off the 64-token grid", sequence.offset());
            return Err(EngineError::Option(reason));
        }
        self.commit(sequence)?;
        self.cache.reserve(sequence, prompt.len())?;
        let end = sequence.offset() + prompt.len();
        let save_at = if self.options.checkpoints > 0 { (end - 1) / PREFILL_GRID * PREFILL_GRID } else { 0 };
        let mut rest = prompt;
        while !rest.is_empty() {
            let at = sequence.offset();
            let to_save = if at < save_at { save_at - at } else { usize::MAX };
            let rows = rest.len().min(rows_max).min(to_save);
            let rows = self.whole_pictures(sequence, at, self.chunk_rows(rows)).min(rest.len());
            let (tokens, after) = rest.split_at(rows);
            if let Err(error) = step(self, sequence, tokens, after.first().copied()) {
                self.give_up(sequence, tokens.len(), false);
                return Err(error);
            }
            sequence.advance(tokens.len());
            if save_at > 0 && sequence.offset() == save_at {
                self.cache.checkpoint(sequence)?;
            }
            rest = after;
        }
        Ok(())
    }

    /// Refuses pictures that fit into no step: rows that see each other are run together.
    pub(crate) fn check_runs(&self, vision: &VisionInputs) -> Result<()> {
        let (longest, most) = (vision.longest_run(), self.prefill_rows_max());
        if longest <= most {
            return Ok(());
        }
        let reason = format!(
            "pictures side by side of {longest} tokens must be run in one step, and a step has at most {most}: put \
             text between them, or start with a larger --prefill-step"
        );
        Err(EngineError::Option(reason))
    }

    /// Returns `count`, or another number so that a step from token `at` on does not end within a picture whose rows
    /// see each other.
    pub(crate) fn whole_pictures(&self, sequence: &SequenceCache, at: usize, count: usize) -> usize {
        let Some(vision) = sequence.vision_inputs() else { return count };
        let Some(run) = vision.run_around(at + count) else { return count };
        // Cut at the grid point before the picture. If that is within another picture, cut before that one, and so on.
        // If no grid point is left, cut right before the picture.
        let mut cut = run.start / PREFILL_GRID * PREFILL_GRID;
        while let Some(other) = vision.run_around(cut).filter(|_| cut > at) {
            cut = other.start / PREFILL_GRID * PREFILL_GRID;
        }
        match (cut > at, run.start > at) {
            (true, _) => cut - at,
            (false, true) => run.start - at,
            (false, false) => run.end - at,
        }
    }

    /// Whether a step of a prompt may begin and end off the grid, at a picture.
    pub(crate) fn leaves_grid(&self) -> bool {
        self.stepper.buckets().leaves_grid()
    }

    /// Runs a step of prompts. Returns the tokens drawn after them; none if no prompt asks for one.
    fn run_prefill(&mut self, rows: &[Rows<'_>]) -> Result<Vec<u32>> {
        let goes_on = rows.len() == 1 && rows[0].next.is_some();
        let outcome = if goes_on { Outcome::State } else { Outcome::LastLogits };
        if rows.iter().all(|row| row.draws.is_empty()) {
            return self.run(Regime::Prefill, outcome, rows).map(|()| Vec::new());
        }
        self.run_and_draw(StepKind::prefill(outcome), rows, rows.len())
    }

    /// How many of a prompt's next `rows` tokens a step should run if the prompt is alone in it: all, or fewer on the
    /// grid.
    pub fn chunk_rows(&self, rows: usize) -> usize {
        self.stepper.buckets().chunk_rows(rows)
    }

    /// How many prompts one step may run.
    pub fn chunks_max(&self) -> usize {
        self.stepper.buckets().prompts()
    }

    /// How many rows one step of prompts may run. A prompt that is alone may have more
    /// ([`Engine::lone_prompt_rows_max`]).
    pub fn prefill_rows_max(&self) -> usize {
        self.stepper.buckets().prefill_rows_max()
    }

    /// Runs the next tokens of several prompts in one step. Returns the token drawn after each prompt that asks for
    /// one. The logits after prompt `i` are row `i` of [`Engine::logits`].
    ///
    /// # Errors
    /// As [`Engine::prefill`]. Each sequence is then as before, or has to be rewound.
    pub fn prefill_chunks(&mut self, chunks: &mut [Chunk<'_>]) -> Result<Vec<Option<u32>>> {
        let rows: usize = chunks.iter().map(|chunk| chunk.tokens.len()).sum();
        let rows_max = match chunks {
            [only] => self.lone_prompt_rows_max(only.sequence),
            _ => self.prefill_rows_max(),
        };
        let chunks_max = self.chunks_max();
        if chunks.is_empty() || chunks.len() > chunks_max || rows > rows_max {
            let count = chunks.len();
            let reason = format!(
                "a step of {rows} tokens of {count} prompt(s): at most {rows_max} tokens, and {chunks_max} prompts"
            );
            return Err(EngineError::Option(reason));
        }
        for Chunk { sequence, tokens, next, .. } in chunks.iter_mut() {
            self.admit(sequence, tokens)?;
            let (start, rows) = (sequence.offset(), tokens.len());
            let ends_on_grid = next.is_none() || rows.is_multiple_of(PREFILL_GRID);
            if !self.leaves_grid() && (!start.is_multiple_of(PREFILL_GRID) || !ends_on_grid) {
                let reason = format!(
                    "a step of {rows} prompt tokens from token {start}: steps begin on the 64-token grid, and end on it \
                     unless the prompt ends"
                );
                return Err(EngineError::Option(reason));
            }
            self.commit(sequence)?;
            self.cache.reserve(sequence, rows)?;
        }
        let rows: Vec<Rows<'_>> = chunks.iter().map(Chunk::rows).collect();
        match self.run_prefill(&rows) {
            Ok(drawn) => {
                let drawn = drawn.into_iter().map(Some).chain(std::iter::repeat(None));
                let drawn =
                    chunks.iter().zip(drawn).map(|(chunk, token)| token.filter(|_| chunk.draw.is_some()));
                let drawn = drawn.collect();
                chunks.iter_mut().for_each(|chunk| chunk.sequence.advance(chunk.tokens.len()));
                Ok(drawn)
            }
            Err(error) => {
                chunks.iter_mut().for_each(|chunk| self.give_up(chunk.sequence, chunk.tokens.len(), false));
                Err(error)
            }
        }
    }
}
