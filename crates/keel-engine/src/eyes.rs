//! A vision tower with its memory, ready to look at pictures.

use keel_array::AttentionSpec;
use keel_array::{
    Array, ArrayError, Batch, Category, Charge, Compute, DType, Executable, KvFormat, KvPool, Runtime,
};
use keel_cache::Features;
use keel_models::loading::Loader;
use keel_models::vision::{self, Tower, TowerInput, TowerKind, TowerRows, VisionConfig};
use serde_json::Value;

use crate::{EngineError, Result};

/// How many prepared runs are kept: one for each number of patches.
const RUNS_MAX: usize = 8;

/// The pictures that memory is planned for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VisionOptions {
    /// Patches of the largest picture, or of the largest group of a video's frames.
    pub patches: usize,
    /// How many pictures of this size have their features kept on the host at once; 0 if the caller keeps features.
    pub pictures: usize,
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
pub(crate) struct Eyes {
    tower: Tower,
    patches_max: usize,
    patches: Array,
    positions: Array,
    entries: Array,
    shares: Array,
    until: Array,
    batch: Batch,
    pool: KvPool,
    outputs: Vec<Array>,
    /// Host memory for kept features. It is charged in full at the start, and used as features come.
    kept: Charge,
    /// Runs by number of patches, the least recently used first.
    prepared: Vec<(usize, Executable)>,
}

/// The tower's numbers in a config, if the options ask for a tower.
pub(crate) fn config(json: &Value, options: Option<VisionOptions>) -> Result<Option<VisionConfig>> {
    if options.is_none() {
        return Ok(None);
    }
    vision::read_vision(json)?.map(Some).ok_or(EngineError::NoEyes)
}

impl Eyes {
    pub fn load(
        runtime: &Runtime,
        loader: &Loader<'_>,
        config: VisionConfig,
        options: VisionOptions,
        compute: Compute,
    ) -> Result<Eyes> {
        let block = config.block_side().pow(2);
        let whole = config.grid_side().pow(2);
        let patches_max = options.patches.next_multiple_of(block).max(whole).max(block);
        let tower = Tower::load(loader, config)?;
        let config = &tower.config;
        let array = |shape: &[usize], dtype| Array::persistent(runtime, Category::Vision, shape, dtype);
        let pages = patches_max.div_ceil(AttentionSpec::PAGE);
        let kv = if compute == Compute::F32 { KvFormat::F32 } else { KvFormat::F16 };
        let pool_shape = [pages, config.heads, AttentionSpec::PAGE, Tower::padded_head(config)];
        let word = |count: usize| array(&[count], DType::U32);
        let batch = Batch {
            row_start: word(2)?,
            slot: word(1)?,
            position: word(1)?,
            table: array(&[1, pages], DType::U32)?,
            accepted: word(1)?,
        };
        for (array, values) in
            [(&batch.slot, vec![0]), (&batch.position, vec![0]), (&batch.accepted, vec![0])]
        {
            array.write::<u32>(&values)?;
        }
        batch.table.write(&(0..pages as u32).collect::<Vec<_>>())?;
        let rows = patches_max / block;
        let feature_bytes = rows * config.text_hidden * config.levels() * size_of::<f32>();
        let kept_bytes = feature_bytes.saturating_mul(options.pictures) as u64;
        let eyes = Eyes {
            kept: runtime.ledger().charge(Category::Vision, kept_bytes)?,
            patches_max,
            patches: array(&[patches_max, config.patch_values()], DType::F32)?,
            positions: array(&[3 * patches_max], DType::I32)?,
            entries: array(&[TowerRows::TAPS * patches_max], DType::U32)?,
            shares: array(&[TowerRows::TAPS * patches_max], DType::F32)?,
            until: word(patches_max)?,
            batch,
            pool: KvPool { keys: array(&pool_shape, kv.dtype())?, values: array(&pool_shape, kv.dtype())? },
            outputs: (0..config.levels())
                .map(|_| array(&[rows, config.text_hidden], DType::F32))
                .collect::<Result<_, _>>()?,
            prepared: Vec::new(),
            tower,
        };
        let mut eyes = eyes;
        eyes.run_of(runtime, patches_max)?;
        Ok(eyes)
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
        self.patches_max
    }

    /// The features of a picture: rows of patches with their grid, or `[3, size, size]` where the tower reads one size.
    pub fn see(&mut self, runtime: &Runtime, values: &[f32], grid: PatchGrid) -> Result<Features> {
        let config = &self.tower.config;
        let (side, block) = (config.grid_side(), config.block_side());
        let (rows, grid) = match config.kind {
            TowerKind::Qwen { .. } => (None, grid),
            TowerKind::Siglip { image_size, .. } => {
                if values.len() != 3 * image_size * image_size {
                    let reason = format!(
                        "a picture of {} values; the tower reads 3 planes of {image_size} by {image_size}: the processor's \
                         size and the config's image_size differ",
                        values.len()
                    );
                    return Err(EngineError::Option(reason));
                }
                let rows = vision::siglip::patches(values, image_size, config.patch, block);
                (Some(rows), PatchGrid { t: 1, h: side, w: side })
            }
        };
        let values = rows.as_deref().unwrap_or(values);
        let PatchGrid { t, h, w } = grid;
        let (count, width) = (h * w, config.patch_values());
        let fits = h.is_multiple_of(block) && w.is_multiple_of(block) && count > 0;
        if !fits || values.len() != t * count * width {
            let reason = format!(
                "{} values are no {t} x {h} x {w} patches of {width} in blocks of {block} by {block}: the processor and the \
                 config differ in patch, merge or temporal size",
                values.len()
            );
            return Err(EngineError::Option(reason));
        }
        if count > self.patches_max {
            return Err(EngineError::PicturePatches { patches: count, planned: self.patches_max });
        }
        let places = Tower::rows(config, h, w);
        self.positions.write(&places.positions)?;
        self.entries.write(&places.entries)?;
        self.shares.write(&places.shares)?;
        self.until.write(&vec![count as u32 - 1; count])?;
        self.batch.row_start.write(&[0, count as u32])?;
        let mut features = Features { levels: vec![Vec::new(); config.levels()] };
        for group in values.chunks_exact(count * width) {
            self.patches.write(group)?;
            self.run_of(runtime, count)?.run().map_err(ArrayError::from)?;
            for (output, level) in self.outputs.iter().zip(&mut features.levels) {
                let row = output.shape()[1];
                crate::step::append_rows(output, 0, count / (block * block), level)?;
                debug_assert!(level.len().is_multiple_of(row));
            }
        }
        Ok(features)
    }

    /// The prepared run over `count` patches.
    fn run_of(&mut self, runtime: &Runtime, count: usize) -> Result<&Executable> {
        if let Some(i) = self.prepared.iter().position(|(patches, _)| *patches == count) {
            let found = self.prepared.remove(i);
            self.prepared.push(found);
        } else {
            let executable = runtime.trace(|| {
                let columns = |array: &Array, rows: usize| array.prefix(rows * count)?.reshape([rows, count]);
                let (positions, taps) = (columns(&self.positions, 3)?, TowerRows::TAPS);
                let features = self.tower.features(&TowerInput {
                    patches: &self.patches.prefix(count)?,
                    positions: &positions,
                    entries: &columns(&self.entries, taps)?,
                    shares: &columns(&self.shares, taps)?,
                    until: &self.until.prefix(count)?,
                    batch: &self.batch,
                    pool: &self.pool,
                })?;
                let places = self.outputs.iter().map(|output| output.prefix(features[0].shape()[0]));
                let places = places.collect::<Result<Vec<_>, _>>()?;
                let pairs: Vec<(&Array, &Array)> = features.iter().zip(&places).collect();
                Ok::<_, EngineError>(runtime.prepare(&pairs)?)
            })?;
            if self.prepared.len() == RUNS_MAX {
                self.prepared.remove(0);
            }
            self.prepared.push((count, executable));
        }
        match self.prepared.last() {
            Some((_, executable)) => Ok(executable),
            None => unreachable!("a run was just pushed"),
        }
    }
}
