//! A vision tower with its memory, ready to encode pictures.
//!
//! The passes of a short list (`passes.rs`) are traced when the engine is made. A picture runs through one of them,
//! piece by piece.

mod passes;
mod tower_thread;

use std::ops::Range;

use keel_array::{
    Array, ArrayError, AttentionSpec, Batch, Category, Charge, Compute, DType, Executable, KvFormat, KvPool,
    Runtime,
};
use keel_cache::Features;
use keel_models::HybridConfig;
use keel_models::loading::Loader;
use keel_models::vision::{
    self, LevelFeatures, PassPiece, Tower, TowerInput, TowerKind, TowerRows, VisionConfig,
};
use serde_json::Value;

pub(crate) use passes::Passes;

use crate::step::{Pairs, append_rows, trace};
use crate::{EngineError, EngineOptions, Result};
use tower_thread::TowerThread;

/// The pictures that memory is planned for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VisionOptions {
    /// Patches of the largest picture, or of the largest group of a video's frames.
    pub patches: usize,
    /// How many pictures of this size have their features kept on the host at once; 0 if the caller keeps features.
    pub pictures: usize,
    /// A piece of the tower's work costs no more than this many tokens of a prompt, or than one block of the tower.
    /// With [`VisionOptions::WHOLE`] a pass is one piece.
    pub piece_tokens: usize,
}

impl VisionOptions {
    /// For [`VisionOptions::piece_tokens`]: no other sequence waits, so the tower's work is not cut.
    pub const WHOLE: usize = usize::MAX;
}

/// Patches of a picture or a video.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchGrid {
    /// Groups of frames.
    pub t: usize,
    /// Rows of patches.
    pub h: usize,
    /// Patches in a row.
    pub w: usize,
}

/// A tower and its buffers. Every layer writes its keys and values to the same pages.
pub(crate) struct VisionRunner {
    /// Runs the pieces of a tower with a device of its own. It is dropped first: its last piece uses the fields below.
    thread: Option<TowerThread>,
    tower: Tower,
    passes: Passes,
    input: InputBuffers,
    pool: KvPool,
    /// The output of the last block of a piece, where passes are cut.
    state: Option<Array>,
    outputs: Vec<Array>,
    /// Host memory for kept features. It is charged in full at the start, and used as features come.
    kept: Charge,
    /// The pieces of each pass of the list, the largest pass first.
    prepared: Vec<(usize, Vec<Executable>)>,
    /// Pieces traced so far.
    traced: u64,
    /// The number of the job that the buffers belong to.
    current: u64,
}

/// The buffers that the host fills before a pass.
#[derive(Clone)]
struct InputBuffers {
    patches: Array,
    positions: Array,
    entries: Array,
    shares: Array,
    until: Array,
    batch: Batch,
}

/// The next piece of a job.
struct NextPiece {
    step: Executable,
    /// The input that the host writes before the first piece of a group of frames; `None` for the other pieces.
    input: Option<PieceInput>,
}

/// The input of a pass.
#[derive(Clone, Copy)]
struct PieceInput {
    grid: PatchGrid,
    /// The group of frames.
    group: usize,
    /// Patches of the pass.
    padded: usize,
}

/// A picture or video that the tower is encoding.
pub(crate) struct EncodeJob {
    number: u64,
    grid: PatchGrid,
    /// Pieces done, counted over all groups of frames.
    done: usize,
    features: Features,
}

/// How far a job has come.
pub(crate) enum EncodeStatus {
    /// No further piece has ended.
    InFlight,
    /// A piece has ended, and another follows.
    Piece,
    /// The last piece has ended.
    All(Features),
}

/// The tower's numbers in a config, if the options ask for a tower.
pub(crate) fn config(json: &Value, options: Option<VisionOptions>) -> Result<Option<VisionConfig>> {
    if options.is_none() {
        return Ok(None);
    }
    vision::read_vision(json)?.map(Some).ok_or(EngineError::NoVisionTower)
}

impl VisionRunner {
    pub fn load(
        runtime: &Runtime,
        loader: &Loader<'_>,
        config: VisionConfig,
        text: &HybridConfig,
        sizes: VisionOptions,
        options: &EngineOptions,
    ) -> Result<VisionRunner> {
        let passes = Passes::new(&config, text, sizes, runtime.backend().is_compiling());
        let (block, patches_max) = (config.block_side().pow(2), passes.patches_max());
        let tower = Tower::load(loader, config)?;
        let config = &tower.config;
        let array = |shape: &[usize], dtype| Array::persistent(runtime, Category::Vision, shape, dtype);
        let pages = patches_max.div_ceil(AttentionSpec::PAGE);
        let kv = if options.compute == Compute::F32 { KvFormat::F32 } else { KvFormat::F16 };
        let pool_shape = [pages, config.heads, AttentionSpec::PAGE, Tower::padded_head(config)];
        let word = |count: usize| array(&[count], DType::U32);
        let batch = Batch {
            row_start: word(2)?,
            slot: word(1)?,
            position: word(1)?,
            table: array(&[1, pages], DType::U32)?,
            accepted: word(1)?,
        };
        for array in [&batch.slot, &batch.position, &batch.accepted] {
            array.write(&[0u32])?;
        }
        batch.table.write(&(0..pages as u32).collect::<Vec<_>>())?;
        let rows = patches_max / block;
        let feature_bytes = rows * config.text_hidden * config.levels() * size_of::<f32>();
        let kept_bytes = feature_bytes.saturating_mul(sizes.pictures) as u64;
        let state = passes.are_cut().then(|| array(&[patches_max, config.hidden], DType::F32)).transpose()?;
        let mut runner = VisionRunner {
            kept: runtime.ledger().charge(Category::Features, kept_bytes)?,
            state,
            input: InputBuffers {
                patches: array(&[patches_max, config.patch_values()], DType::F32)?,
                positions: array(&[3 * patches_max], DType::I32)?,
                entries: array(&[TowerRows::TAPS * patches_max], DType::U32)?,
                shares: array(&[TowerRows::TAPS * patches_max], DType::F32)?,
                until: word(patches_max)?,
                batch,
            },
            pool: KvPool { keys: array(&pool_shape, kv.dtype())?, values: array(&pool_shape, kv.dtype())? },
            outputs: (0..config.levels())
                .map(|_| array(&[rows, config.text_hidden], DType::F32))
                .collect::<Result<_, _>>()?,
            prepared: Vec::new(),
            traced: 0,
            current: 0,
            thread: None,
            passes,
            tower,
        };
        // The largest first, so that the arena has its full size at once.
        let count = if options.largest_steps { 1 } else { runner.passes.patches().len() };
        for patches in runner.passes.patches().to_vec().into_iter().rev().take(count) {
            let pass = runner.trace(runtime, patches)?;
            runner.prepared.push((patches, pass));
        }
        Ok(runner)
    }

    pub fn config(&self) -> &VisionConfig {
        &self.tower.config
    }

    /// How many bytes of features may be kept.
    pub fn kept_bytes(&self) -> u64 {
        self.kept.bytes()
    }

    /// Bytes of the features of a picture, or of a video with all its groups of frames.
    pub fn feature_bytes(&self, grid: PatchGrid) -> u64 {
        let config = &self.tower.config;
        let values = config.rows_of(grid.h, grid.w) * grid.t * config.text_hidden * config.levels();
        (values * size_of::<f32>()) as u64
    }

    /// Patches of the largest picture.
    pub fn patches_max(&self) -> usize {
        self.passes.patches_max()
    }

    /// Pieces traced so far.
    pub fn traced(&self) -> u64 {
        self.traced
    }

    /// All pieces that are prepared.
    pub fn listed(&self) -> impl Iterator<Item = &Executable> {
        self.prepared.iter().flat_map(|(_, pieces)| pieces)
    }

    /// Runs every piece twice without a picture, so that the extra work of a first and a second run is done.
    pub fn warm_up(&self) -> Result<()> {
        self.input.batch.row_start.write(&[0u32, 0])?;
        for piece in self.listed() {
            for _ in 0..2 {
                piece.run().map_err(ArrayError::from)?;
            }
        }
        Ok(())
    }

    /// Begins to encode a picture: rows of patches with their grid, or `[3, size, size]` where the tower reads one
    /// size.
    ///
    /// # Errors
    /// A picture that does not fit.
    pub fn begin(&self, values: &[f32], grid: PatchGrid) -> Result<EncodeJob> {
        let config = &self.tower.config;
        let (side, block, width) = (config.grid_side(), config.block_side(), config.patch_values());
        let grid = match config.kind {
            TowerKind::Qwen { .. } => grid,
            TowerKind::Siglip { image_size, .. } if values.len() != 3 * image_size * image_size => {
                let reason = format!(
                    "a picture of {} values; the tower reads 3 planes of {image_size} by {image_size}: the processor's \
                     size and the config's image_size differ",
                    values.len()
                );
                return Err(EngineError::Option(reason));
            }
            TowerKind::Siglip { .. } => PatchGrid { t: 1, h: side, w: side },
        };
        let PatchGrid { t, h, w } = grid;
        let count = h.saturating_mul(w);
        let fits = h.is_multiple_of(block) && w.is_multiple_of(block) && count > 0 && t > 0;
        if !fits || values.len() != t.saturating_mul(count).saturating_mul(width) {
            let reason = format!(
                "{} values are no {t} x {h} x {w} patches of {width} in blocks of {block} by {block}: the processor and the \
                 config differ in patch, merge or temporal size",
                values.len()
            );
            return Err(EngineError::Option(reason));
        }
        if self.passes.fit(count).is_none() {
            return Err(EngineError::PicturePatches { patches: count, planned: self.patches_max() });
        }
        let features = Features { levels: vec![Vec::new(); config.levels()] };
        Ok(EncodeJob { number: 0, grid, done: 0, features })
    }

    /// Runs the next piece over the values that the job began with. A job whose buffers another one has taken begins
    /// anew.
    ///
    /// # Errors
    /// An error of the runtime.
    pub fn advance(&mut self, job: &mut EncodeJob, values: &[f32]) -> Result<EncodeStatus> {
        let NextPiece { step, input } = self.next_piece(job)?;
        if let Some(input) = input {
            self.input.write(&self.tower.config, input, values)?;
        }
        step.run().map_err(ArrayError::from)?;
        self.take_piece(job)
    }

    /// The next piece of a job.
    fn next_piece(&mut self, job: &mut EncodeJob) -> Result<NextPiece> {
        if job.number != self.current || job.number == 0 {
            self.current += 1;
            job.number = self.current;
            job.done = 0;
            job.features.levels.iter_mut().for_each(Vec::clear);
        }
        let (patches, pieces) = self.pass_of(job)?;
        let (group, piece) = (job.done / pieces.len(), job.done % pieces.len());
        let input = PieceInput { grid: job.grid, group, padded: *patches };
        Ok(NextPiece { step: pieces[piece].clone(), input: (piece == 0).then_some(input) })
    }

    /// The prepared pass of a job.
    fn pass_of(&self, job: &EncodeJob) -> Result<&(usize, Vec<Executable>)> {
        let count = job.grid.h * job.grid.w;
        let fits = self.passes.fit(count);
        let pass = self.prepared.iter().find(|(patches, _)| Some(*patches) == fits);
        pass.ok_or(EngineError::PicturePatches { patches: count, planned: self.patches_max() })
    }

    /// Notes that the piece which was staged last has run, and takes the features after the last piece of a group.
    fn take_piece(&self, job: &mut EncodeJob) -> Result<EncodeStatus> {
        let pieces = self.pass_of(job)?.1.len();
        job.done += 1;
        if !job.done.is_multiple_of(pieces) {
            return Ok(EncodeStatus::Piece);
        }
        let rows = self.tower.config.rows_of(job.grid.h, job.grid.w);
        for (output, level) in self.outputs.iter().zip(&mut job.features.levels) {
            if level.is_empty() {
                level.reserve_exact(rows * job.grid.t * self.tower.config.text_hidden);
            }
            append_rows(output, 0, rows, level)?;
        }
        if job.done < pieces * job.grid.t {
            return Ok(EncodeStatus::Piece);
        }
        Ok(EncodeStatus::All(std::mem::take(&mut job.features)))
    }

    /// All pieces at once.
    ///
    /// # Errors
    /// As [`VisionRunner::begin`] and [`VisionRunner::advance`].
    pub fn encode(&mut self, values: &[f32], grid: PatchGrid) -> Result<Features> {
        let mut job = self.begin(values, grid)?;
        self.wait_for_thread();
        loop {
            if let EncodeStatus::All(features) = self.advance(&mut job, values)? {
                return Ok(features);
            }
        }
    }

    /// Traces the pieces of a pass over `count` patches.
    fn trace(&mut self, runtime: &Runtime, count: usize) -> Result<Vec<Executable>> {
        let pieces = self.passes.pieces(count);
        self.traced += pieces.len() as u64;
        pieces.into_iter().map(|blocks| self.trace_piece(runtime, count, blocks)).collect()
    }

    fn trace_piece(&self, runtime: &Runtime, count: usize, blocks: Range<usize>) -> Result<Executable> {
        let state = self.state.as_ref().map(|state| state.prefix(count)).transpose()?;
        trace(runtime, || {
            let columns = |array: &Array, rows: usize| array.prefix(rows * count)?.reshape([rows, count]);
            let (buffers, taps) = (&self.input, TowerRows::TAPS);
            let input = TowerInput {
                patches: &buffers.patches.prefix(count)?,
                positions: &columns(&buffers.positions, 3)?,
                entries: &columns(&buffers.entries, taps)?,
                shares: &columns(&buffers.shares, taps)?,
                until: &buffers.until.prefix(count)?,
                batch: &buffers.batch,
                pool: &self.pool,
            };
            let before = state.as_ref().filter(|_| blocks.start > 0);
            let made = self.tower.piece(&input, PassPiece { blocks, state: before })?;
            let mut pairs = Pairs::new();
            for LevelFeatures { level, features } in made.features {
                let place = self.outputs[level].prefix(features.shape()[0])?;
                pairs.push((features, place));
            }
            pairs.extend(made.state.into_iter().zip(state.clone()));
            Ok(pairs)
        })
    }
}

impl InputBuffers {
    /// Writes a group of frames of these values. Rows from the picture's end to the pass's belong to no picture.
    fn write(&self, config: &VisionConfig, input: PieceInput, values: &[f32]) -> Result<()> {
        let PieceInput { grid, group, padded } = input;
        let (values, count) = (group_of(values, grid, group), grid.h * grid.w);
        match config.kind {
            TowerKind::Qwen { .. } => self.patches.write(values)?,
            TowerKind::Siglip { image_size, .. } => {
                let rows = vision::siglip::patches(values, image_size, config.patch, config.block_side());
                self.patches.write(&rows)?;
            }
        }
        let places = Tower::rows(config, grid.h, grid.w);
        self.positions.write(&columns(&places.positions, count, padded))?;
        self.entries.write(&columns(&places.entries, count, padded))?;
        self.shares.write(&columns(&places.shares, count, padded))?;
        self.until.write(&vec![count as u32 - 1; padded])?;
        Ok(self.batch.row_start.write(&[0, count as u32])?)
    }
}

/// The values of a group of frames.
fn group_of(values: &[f32], grid: PatchGrid, group: usize) -> &[f32] {
    let each = values.len() / grid.t.max(1);
    &values[group * each..][..each]
}

/// Columns of `count` values each, padded to `padded`.
fn columns<T: Copy + Default>(values: &[T], count: usize, padded: usize) -> Vec<T> {
    let rest = std::iter::repeat_n(T::default(), padded - count);
    values.chunks_exact(count).flat_map(|column| column.iter().copied().chain(rest.clone())).collect()
}
