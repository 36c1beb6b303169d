//! Requests with pictures: their input, and when the tower encodes them.
//!
//! ```text
//! submit     pictures known by their keys; pictures that never fit are refused
//! start      room for the features of those pictures that the prompt's remembered part does not cover
//! each step  the tower does a piece of its work at most, so that it delays requests by no more; known pictures cost
//!            nothing.
//!            A tower with a device of its own is handed a piece, and steps run until it has ended
//! prompt     runs once all are seen; then the features are let go, and stay for others as long as there is room
//! ```

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use keel_cache::{SeenPicture, VisionInputs};
use keel_models::vision::{ImageRun, VisionConfig, prompt_layout, run_ends};

use super::features::{PictureKey, Wanted};
use super::prompts::PromptRows;
use super::sequence::Running;
use super::{BatchRequest, Batcher};
use crate::vision::EncodeStatus;
use crate::{EngineError, PatchGrid, Result};

/// How long a step waits for a tower with a thread of its own while no sequence has other work. After that it returns,
/// so that arrivals and cancellations are seen.
const TOWER_PATIENCE: Duration = Duration::from_millis(2);

/// A picture or a video, ready for the tower.
#[derive(Clone)]
pub struct PictureInput {
    /// Identifies it.
    pub key: PictureKey,
    /// Rows of patches, or planes.
    pub values: Arc<Vec<f32>>,
    /// The patches.
    pub grid: PatchGrid,
    /// Whether it is a video.
    pub is_video: bool,
}

/// The pictures of a prompt, and the positions of its tokens.
#[derive(Clone)]
pub struct RequestVision {
    inputs: VisionInputs,
    /// Pictures, then videos, in the order in which their rows are counted.
    pictures: Vec<Placed>,
}

/// A picture in a prompt.
#[derive(Clone)]
struct Placed {
    input: PictureInput,
    /// Its rows, counted over all pictures.
    rows: Range<usize>,
    /// From its first token to its last.
    tokens: Range<usize>,
}

impl RequestVision {
    /// Finds the pictures in the prompt that shows them, in order.
    ///
    /// # Errors
    /// The prompt's tokens of pictures are not those of these pictures.
    pub fn new(config: &VisionConfig, prompt: &[u32], pictures: Vec<PictureInput>) -> Result<RequestVision> {
        let (videos, images): (Vec<_>, Vec<_>) = pictures.into_iter().partition(|one| one.is_video);
        let mut first = 0;
        let mut runs: [Vec<ImageRun>; 2] = [Vec::new(), Vec::new()];
        let mut placed = Vec::with_capacity(images.len() + videos.len());
        for (kind, inputs) in [images, videos].into_iter().enumerate() {
            for input in inputs {
                let PatchGrid { t, h, w } = input.grid;
                let before = first;
                runs[kind].extend(config.runs_of(t, h, w, &mut first));
                placed.push(Placed { input, rows: before..first, tokens: 0..0 });
            }
        }
        let layout = prompt_layout(config, prompt, &runs[0], &runs[1])?;
        let ends = if config.is_bidirectional() { run_ends(config, &layout) } else { Vec::new() };
        for (token, row) in layout.features.iter().enumerate() {
            let Some(row) = row.map(|row| row as usize) else { continue };
            let of = placed.partition_point(|one| one.rows.end <= row);
            if let Some(one) = placed.get_mut(of) {
                one.tokens =
                    if one.tokens.is_empty() { token..token + 1 } else { one.tokens.start..token + 1 };
            }
        }
        let vision = VisionInputs {
            positions: layout.positions,
            delta: layout.delta,
            rows: layout.features,
            ends,
            pictures: Vec::new(),
            width: config.text_hidden,
        };
        Ok(RequestVision { inputs: vision, pictures: placed })
    }

    /// Tokens of the prompt.
    pub fn len(&self) -> usize {
        self.inputs.positions.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the tower's input.
    pub fn input_bytes(&self) -> usize {
        self.pictures.iter().map(|one| size_of_val(&one.input.values[..])).sum()
    }

    /// The prompt with each token of a picture replaced by the picture's name. These keys tell prefixes apart.
    pub(super) fn key<'a>(
        &self,
        prompt: &'a [u32],
        mut name: impl FnMut(&PictureKey) -> u32,
    ) -> Cow<'a, [u32]> {
        let mut key = Cow::Borrowed(prompt);
        for one in &self.pictures {
            let name = name(&one.input.key);
            for token in one.tokens.clone() {
                if self.inputs.rows[token].is_some_and(|row| one.rows.contains(&(row as usize))) {
                    key.to_mut()[token] = name;
                }
            }
        }
        key
    }
}

/// The pictures of a running sequence.
#[derive(Default)]
pub(super) struct Pictures {
    asked: Option<RequestVision>,
    /// The prompt as prefixes know it, where that differs from its tokens.
    pub key: Option<Vec<u32>>,
    /// Pictures that it holds.
    held: Vec<PictureKey>,
    /// Pictures that the tower has not encoded yet, as numbers in `asked`. The next one is the last.
    unseen: Vec<usize>,
    seen: Vec<SeenPicture>,
}

impl Pictures {
    pub fn new(asked: Option<RequestVision>, key: Option<Vec<u32>>) -> Pictures {
        Pictures { asked, key, ..Pictures::default() }
    }

    /// Whether its prompt cannot be run yet.
    pub fn are_unseen(&self) -> bool {
        !self.unseen.is_empty()
    }

    /// The picture that the tower encodes next.
    fn next(&self) -> Option<&PictureInput> {
        self.unseen.last().zip(self.asked.as_ref()).map(|(&of, asked)| &asked.pictures[of].input)
    }

    fn next_key(&self) -> Option<PictureKey> {
        self.next().map(|input| input.key)
    }

    /// Whether features are held.
    fn are_held(&self) -> bool {
        !self.held.is_empty()
    }
}

impl Batcher {
    /// The pictures of a request that the tower may have to encode, if the first `known` tokens of the prompt are
    /// remembered.
    pub(super) fn wanted(&self, asked: Option<&RequestVision>, known: usize) -> Vec<(usize, Wanted)> {
        let (Some(asked), Some(runner)) = (asked, self.engine.vision_runner()) else { return Vec::new() };
        // A sequence that outgrows its rotary frequencies is run again from its start.
        let may_run_again = self.engine.model().config.short_context().is_some();
        let is_needed = |one: &Placed| one.tokens.end > known || may_run_again;
        let pictures = asked.pictures.iter().enumerate().filter(|(_, one)| is_needed(one));
        pictures
            .map(|(i, one)| (i, Wanted { key: one.input.key, bytes: runner.feature_bytes(one.input.grid) }))
            .collect()
    }

    /// Refuses pictures that can never be shown.
    pub(super) fn check_pictures(&self, request: &BatchRequest) -> Result<()> {
        let Some(asked) = &request.vision else { return Ok(()) };
        let runner = self.engine.vision_runner().ok_or(EngineError::NoVisionTower)?;
        if asked.len() != request.prompt.len() {
            let reason = format!(
                "pictures for a prompt of {} tokens with one of {}",
                asked.len(),
                request.prompt.len()
            );
            return Err(EngineError::Option(reason));
        }
        self.engine.check_runs(&asked.inputs)?;
        for one in &asked.pictures {
            let (patches, planned) = (one.input.grid.h * one.input.grid.w, runner.patches_max());
            if patches > planned {
                return Err(EngineError::PicturePatches { patches, planned });
            }
        }
        let mut wanted: Vec<_> = self.wanted(Some(asked), 0).into_iter().map(|(_, wanted)| wanted).collect();
        wanted.sort_unstable_by_key(|one| one.key);
        wanted.dedup_by_key(|one| one.key);
        let (needed_bytes, total_bytes) = (wanted.iter().map(|one| one.bytes).sum(), self.features.limit());
        if needed_bytes > total_bytes {
            return Err(EngineError::PicturesNeverFit { needed_bytes, total_bytes });
        }
        Ok(())
    }

    /// Whether there is room for the features of a request.
    pub(super) fn can_see(&self, request: &BatchRequest, known: usize) -> bool {
        let wanted: Vec<_> =
            self.wanted(request.vision.as_ref(), known).into_iter().map(|(_, one)| one).collect();
        self.features.can_hold(&wanted)
    }

    /// Holds the features that a sequence needs which starts now, and gives it the positions of its tokens.
    pub(super) fn hold_pictures(&mut self, running: &mut Running, known: usize) {
        let wanted = self.wanted(running.pictures.asked.as_ref(), known);
        let Some(asked) = &running.pictures.asked else { return };
        running.cache.set_vision_inputs(Some(Arc::new(asked.inputs.clone())));
        let (mut unseen, wanted): (Vec<usize>, Vec<Wanted>) = wanted.into_iter().unzip();
        let is_held = self.features.hold(&wanted);
        debug_assert!(is_held, "it was asked before");
        unseen.reverse();
        running.pictures.unseen = unseen;
        running.pictures.held = wanted.iter().map(|one| one.key).collect();
    }

    /// Lets the tower do one piece of its work, for a sequence that waits for it. Known features are taken at once.
    pub(super) fn encode_pictures(&mut self) {
        self.let_go_of_seen();
        self.take_known();
        if !self.running.iter().any(|running| running.pictures.are_unseen()) {
            self.encoding = None;
            return;
        }
        if !self.engine.has_tower_thread() {
            // The tower runs alone, so steps under way are taken first.
            self.settle();
        }
        let Some(i) = self.waiting_for_tower() else { return };
        if let Err(error) = self.advance_encoding(i) {
            self.count_failed_step(&error);
            self.encoding = None;
            self.fail(i, error);
        }
        self.take_known();
    }

    /// The sequence that the tower works for: one that waits for the picture under way, else the first that waits for a
    /// picture.
    fn waiting_for_tower(&self) -> Option<usize> {
        let current = self.encoding.as_ref().map(|(key, _)| *key);
        let waits = |running: &Running| current.is_some() && running.pictures.next_key() == current;
        let mut running = self.running.iter();
        running
            .position(waits)
            .or_else(|| self.running.iter().position(|running| running.pictures.are_unseen()))
    }

    fn advance_encoding(&mut self, i: usize) -> Result<()> {
        let Some(PictureInput { key, values, grid, .. }) = self.running[i].pictures.next() else {
            return Ok(());
        };
        let mut job = match self.encoding.take() {
            Some((of, job)) if of == *key => job,
            _ => self.engine.begin_encoding(values, *grid)?,
        };
        let has_other_work =
            !self.pending.is_empty() || self.running.iter().any(|r| !r.pictures.are_unseen());
        let patience = if has_other_work { Duration::ZERO } else { TOWER_PATIENCE };
        let status = self.engine.advance_encoding(&mut job, values, patience)?;
        self.encoded_pieces += u64::from(!matches!(status, EncodeStatus::InFlight));
        match status {
            EncodeStatus::InFlight | EncodeStatus::Piece => self.encoding = Some((*key, job)),
            EncodeStatus::All(features) => {
                self.features.fill(key, Arc::new(features));
                self.encoded += 1;
            }
        }
        Ok(())
    }

    /// Gives sequences the features that are known.
    fn take_known(&mut self) {
        for running in &mut self.running {
            let pictures = &mut running.pictures;
            let Some(asked) = pictures.asked.as_mut().filter(|_| !pictures.unseen.is_empty()) else {
                continue;
            };
            while let Some(&of) = pictures.unseen.last() {
                let Some(features) = self.features.get(&asked.pictures[of].input.key) else { break };
                pictures.unseen.pop();
                pictures.seen.push(SeenPicture { first: asked.pictures[of].rows.start, features });
                // The tower's input is not needed again.
                asked.pictures[of].input.values = Arc::default();
            }
            if pictures.unseen.is_empty() {
                let mut seen = std::mem::take(&mut pictures.seen);
                seen.sort_unstable_by_key(|one| one.first);
                running.cache.set_vision_inputs(Some(Arc::new(VisionInputs {
                    pictures: seen,
                    ..asked.inputs.clone()
                })));
            }
        }
    }

    /// Lets go of features that no step will read: those of prompts that have been run. A step under way has its
    /// features in its staging arrays.
    fn let_go_of_seen(&mut self) {
        for running in &mut self.running {
            let is_done = running.pictures.are_held()
                && running.is_decoding()
                && !self.engine.may_outgrow(&running.cache);
            if is_done {
                running.pictures.held.drain(..).for_each(|key| self.features.let_go(&key));
                running.cache.set_vision_inputs(
                    running.pictures.asked.as_ref().map(|asked| Arc::new(asked.inputs.clone())),
                );
            }
        }
    }

    /// Lets go of the pictures of a sequence that ends.
    pub(super) fn let_go_of_pictures(&mut self, running: &mut Running) {
        running.cache.set_vision_inputs(None);
        running.pictures.held.drain(..).for_each(|key| self.features.let_go(&key));
    }

    /// Changes the shares of a step so that pictures whose rows see each other stay whole. Together the shares stay
    /// within the rows of a step.
    pub(super) fn keep_pictures_whole(&self, shares: &mut Vec<PromptRows>) {
        if !self.engine.leaves_grid() {
            return;
        }
        let (most, mut sum) = (self.engine.prefill_rows_max(), 0);
        shares.retain_mut(|PromptRows { i, rows }| {
            let running = &self.running[*i];
            let whole = self.engine.whole_pictures(&running.cache, running.virtual_len(), *rows);
            *rows = whole.min(running.prompt_rows_left());
            sum += *rows;
            sum <= most
        });
    }
}
