//! Writes weights into a GGUF file, matrices in block codings.

use std::{collections::BTreeMap, path::Path};

use keel_array::{BlockFormat, DType};

use super::{
    QuantizeProgress, QuantizeReport, plan::TensorConversion, recipe::is_tail, run::write_weights,
    source::RowSource,
};
use crate::{
    Result, TensorSpec, WeightsError, cols,
    gguf::{GgmlType, GgufMetadata, GgufTensorSpec, GgufWriter, PART_KEYS, can_encode},
};

/// The type of each tensor of a GGUF file.
///
/// Matrices have the type `base`, with these exceptions:
///
/// * vectors, norms, the convolution and routers stay f32: they are small, and errors in them have large effects;
/// * `mixed` gives more bits to some matrices that matter most for the result;
/// * rows that are not whole blocks of 256 take a coding with blocks of 32 and at least as many bits;
/// * `overrides` win over all of these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufRecipe {
    /// The type of all other matrices.
    pub base: GgmlType,
    /// If true, `Q6_K` for: the output head (or the embedding that serves as one), and the value and second
    /// feed-forward matrices in the first and last eighth of the layers and in every third layer between.
    pub mixed: bool,
    /// Types by tensor name without `.weight`, or by its last parts: `output`, `blk.0.attn_v`, `ffn_down`. The longest
    /// match wins.
    pub overrides: BTreeMap<String, GgmlType>,
}

impl GgufRecipe {
    /// The recipe with this name: a type's name, or `Q4_K_M` and `Q5_K_M` for mixed recipes.
    pub fn from_name(name: &str) -> Option<GgufRecipe> {
        let upper = name.to_ascii_uppercase();
        let (base, mixed) = match upper.strip_suffix("_M") {
            Some(base @ ("Q4_K" | "Q5_K")) => (base, true),
            Some(_) => return None,
            None => (upper.as_str(), false),
        };
        let base = GgmlType::from_name(base).filter(|&kind| is_written(kind))?;
        Some(GgufRecipe { base, mixed, overrides: BTreeMap::new() })
    }

    /// The recipe's number in files, `general.file_type`.
    fn file_type(&self) -> u32 {
        match (self.base, self.mixed) {
            (GgmlType::Plain(DType::F16), _) => 1,
            (GgmlType::Plain(DType::BF16), _) => 32,
            (GgmlType::Blocks(BlockFormat::Q4_0), _) => 2,
            (GgmlType::Blocks(BlockFormat::Q8_0), _) => 7,
            (GgmlType::Blocks(BlockFormat::Q5_0), _) => 8,
            (GgmlType::Blocks(BlockFormat::Q4K), false) => 14,
            (GgmlType::Blocks(BlockFormat::Q4K), true) => 15,
            (GgmlType::Blocks(BlockFormat::Q5K), false) => 16,
            (GgmlType::Blocks(BlockFormat::Q5K), true) => 17,
            (GgmlType::Blocks(BlockFormat::Q6K), _) => 18,
            _ => 0,
        }
    }

    /// The type of a tensor in a model of this many layers, if its rows are whole blocks.
    fn type_of(&self, spec: &TensorSpec, layers: usize, tied: bool) -> GgmlType {
        let module = spec.name.strip_suffix(".weight").unwrap_or(&spec.name);
        let matching = self.overrides.iter().filter(|(path, _)| is_tail(module, path));
        if let Some((_, kind)) = matching.max_by_key(|(path, _)| path.len()) {
            return *kind;
        }
        if !can_be_blocks(spec) {
            return GgmlType::Plain(if spec.dtype.is_float() { DType::F32 } else { spec.dtype });
        }
        match self.mixed && matters_more(module, layers, tied) {
            true => GgmlType::Blocks(BlockFormat::Q6K),
            false => self.base,
        }
    }
}

/// Whether [`write_gguf`] can write a type.
pub fn is_written(kind: GgmlType) -> bool {
    match kind {
        GgmlType::Plain(dtype) => dtype.is_float(),
        GgmlType::Blocks(format) => can_encode(format),
    }
}

/// The types that [`write_gguf`] can write.
pub fn written_types() -> impl Iterator<Item = GgmlType> {
    GgmlType::all().filter(|&kind| is_written(kind))
}

/// Whether a tensor is a matrix, or a stack, whose values may be rounded.
fn can_be_blocks(spec: &TensorSpec) -> bool {
    let kept =
        ["norm", "ssm_conv1d", "ffn_gate_inp", "rope_freqs"].iter().any(|part| spec.name.contains(part));
    spec.shape.len() > 1 && spec.dtype.is_float() && !kept && spec.name.ends_with(".weight")
}

/// Whether a mixed recipe gives a matrix more bits.
fn matters_more(module: &str, layers: usize, tied: bool) -> bool {
    let Some((layer, part)) = module.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
        return module == "output" || tied && module == "token_embd";
    };
    let Ok(layer) = layer.parse::<usize>() else { return false };
    let eighth = layers / 8;
    let is_chosen = layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2;
    is_chosen && (part == "attn_v" || part.starts_with("ffn_down"))
}

/// The type, or a replacement if rows are not whole blocks.
fn fitting(kind: GgmlType, cols: usize) -> GgmlType {
    let fits = |kind: GgmlType| kind.row_bytes(cols).is_some();
    let shorter = match kind {
        _ if fits(kind) => return kind,
        GgmlType::Blocks(BlockFormat::Q4K) => GgmlType::Blocks(BlockFormat::Q5_0),
        _ => GgmlType::Blocks(BlockFormat::Q8_0),
    };
    if fits(shorter) { shorter } else { GgmlType::Plain(DType::F16) }
}

/// Writes `metadata` and then the tensors of `source`, which have GGUF's names.
///
/// # Memory
/// A chunk of rows: 16 MiB of f32, or one row if that is larger, and the chunk's blocks.
///
/// # Errors
/// [`WeightsError::Module`] for an override that matches nothing or does not fit, [`WeightsError::NotFinite`] for
/// weights that are not finite or too large for a coding's scales, [`WeightsError::Output`] and [`WeightsError::Io`] if
/// the file cannot be written. No unfinished file remains.
pub fn write_gguf(
    source: &dyn RowSource,
    target: &Path,
    mut metadata: GgufMetadata,
    recipe: &GgufRecipe,
    progress: &mut dyn FnMut(QuantizeProgress<'_>),
) -> Result<QuantizeReport> {
    let tensors = source.tensors()?;
    let (outputs, other_forms) = outputs(&tensors, recipe)?;
    metadata.u32("general.file_type", recipe.file_type());
    metadata.u32("general.quantization_version", 2);
    let mut writer = GgufWriter::create(target, &metadata, &outputs)?;
    let conversion = |(spec, output): (&TensorSpec, &GgufTensorSpec)| {
        TensorConversion::whole(spec, spec.dtype.is_float().then_some(output.kind))
    };
    let tensors: Vec<_> = tensors.iter().zip(&outputs).map(conversion).collect();
    let report = write_weights(source, &tensors, &mut |name, bytes| writer.append(name, bytes), progress)?;
    writer.finish()?;
    let output_bytes = outputs.iter().filter_map(GgufTensorSpec::bytes).map(|bytes| bytes as u64).sum();
    Ok(QuantizeReport { output_bytes, other_forms, ..report })
}

/// The tensors of the file, and how many of them have another type than the recipe's.
fn outputs(tensors: &[TensorSpec], recipe: &GgufRecipe) -> Result<(Vec<GgufTensorSpec>, usize)> {
    let wrong = |module: &str, problem: String| Err(WeightsError::Module { module: module.into(), problem });
    for (path, kind) in &recipe.overrides {
        let named =
            |spec: &TensorSpec| is_tail(spec.name.strip_suffix(".weight").unwrap_or(&spec.name), path);
        let Some(spec) = tensors.iter().find(|spec| named(spec)) else {
            return wrong(path, "an override names it, but no tensor of the file is called that".into());
        };
        let fits = kind.row_bytes(cols(&spec.shape)).is_some();
        if !is_written(*kind) || !fits || !spec.dtype.is_float() {
            return wrong(
                path,
                format!("{} of shape {:?} cannot be written as {kind}", spec.name, spec.shape),
            );
        }
    }
    let layer = |spec: &TensorSpec| spec.name.strip_prefix("blk.")?.split('.').next()?.parse::<usize>().ok();
    let layers = tensors.iter().filter_map(layer).max().map_or(0, |last| last.saturating_add(1));
    let tied = !tensors.iter().any(|spec| spec.name == "output.weight");
    let mut other_forms = 0;
    let output = |spec: &TensorSpec| {
        let wanted = recipe.type_of(spec, layers, tied);
        let kind = fitting(wanted, cols(&spec.shape));
        other_forms += usize::from(kind != wanted);
        GgufTensorSpec { name: spec.name.clone(), kind, shape: spec.shape.clone() }
    };
    Ok((tensors.iter().map(output).collect(), other_forms))
}

/// The metadata of a file, for another file of the same model.
pub fn metadata_of(file: &crate::gguf::GgufFile) -> GgufMetadata {
    let mut metadata = GgufMetadata::default();
    // The new file is whole.
    for key in file.metadata().keys().filter(|key| !key.starts_with(PART_KEYS)) {
        if let Some(value) = file.raw_value(key) {
            metadata.raw(key, value);
        }
    }
    metadata
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantize::run::CHUNK_VALUES;

    fn spec(name: &str, shape: &[usize]) -> TensorSpec {
        TensorSpec { name: name.into(), dtype: DType::BF16, shape: shape.into() }
    }

    #[test]
    fn a_mixed_recipe_gives_more_bits_where_they_matter() {
        let mut recipe = GgufRecipe::from_name("q4_k_m").unwrap();
        recipe.overrides.insert("blk.7.attn_v".into(), GgmlType::Plain(DType::F16));
        let tensors: Vec<TensorSpec> = (0..16)
            .flat_map(|layer| {
                ["attn_v", "attn_q", "ffn_down"].map(|part| format!("blk.{layer}.{part}.weight"))
            })
            .chain(["token_embd.weight".to_string()])
            .map(|name| spec(&name, &[3, 256]))
            .collect();
        let (outputs, other_forms) = outputs(&tensors, &recipe).unwrap();
        assert_eq!(other_forms, 0);
        let of = |name: &str| outputs.iter().find(|output| output.name == name).unwrap().kind.to_string();
        assert_eq!(of("token_embd.weight"), "Q6_K", "it is the output head as well");
        for (layer, more) in
            [(0, true), (1, true), (2, false), (3, false), (4, true), (13, true), (14, true), (12, false)]
        {
            for part in ["attn_v", "ffn_down"] {
                let expected = if more { "Q6_K" } else { "Q4_K" };
                assert_eq!(of(&format!("blk.{layer}.{part}.weight")), expected, "layer {layer}");
            }
        }
        assert_eq!((of("blk.7.attn_v.weight"), of("blk.4.attn_q.weight")), ("F16".into(), "Q4_K".into()));
    }

    #[test]
    fn what_steers_much_and_what_does_not_fit_has_another_type() {
        let recipe = GgufRecipe::from_name("Q4_K").unwrap();
        let of = |name: &str, shape: &[usize]| {
            let (outputs, other_forms) = outputs(&[spec(name, shape)], &recipe).unwrap();
            assert_eq!(other_forms, usize::from(shape[0] == 8 && shape[1] < 256 && name.contains("ffn_up")));
            outputs[0].kind.to_string()
        };
        assert_eq!(of("blk.0.attn_norm.weight", &[256]), "F32");
        assert_eq!(of("blk.0.ffn_gate_inp.weight", &[8, 256]), "F32");
        assert_eq!(of("blk.0.ssm_conv1d.weight", &[512, 4]), "F32");
        assert_eq!(of("blk.0.ssm_a", &[4]), "F32");
        assert_eq!(of("blk.0.ffn_up_exps.weight", &[2, 8, 512]), "Q4_K");
        assert_eq!(of("blk.0.ffn_up.weight", &[8, 96]), "Q5_0");
        assert_eq!(of("blk.0.ffn_up.weight", &[8, 40]), "F16");
        for unknown in ["Q2_K", "Q8_0_M", "I32", "Q9"] {
            assert_eq!(GgufRecipe::from_name(unknown), None);
        }
    }

    #[test]
    fn overrides_that_match_nothing_or_do_not_fit_are_refused() {
        let mut recipe = GgufRecipe::from_name("F16").unwrap();
        let blocks = GgmlType::Blocks(BlockFormat::Q6K);
        let message =
            |recipe: &GgufRecipe| outputs(&[spec("a.weight", &[2, 96])], recipe).unwrap_err().to_string();
        recipe.overrides.insert("b".into(), blocks);
        assert!(message(&recipe).starts_with("module 'b': an override names it"));
        recipe.overrides = BTreeMap::from([("a".into(), blocks)]);
        assert!(message(&recipe).ends_with("a.weight of shape [2, 96] cannot be written as Q6_K"));
    }

    /// Has one tensor, of ones.
    struct Ones(TensorSpec);

    impl RowSource for Ones {
        fn tensors(&self) -> Result<Vec<TensorSpec>> {
            Ok(vec![self.0.clone()])
        }

        fn rows_f32(&self, _: &str, _: std::ops::Range<usize>, out: &mut [f32]) -> Result<()> {
            out.fill(1.0);
            Ok(())
        }

        fn check_intact(&self) -> Result<()> {
            Ok(())
        }
    }

    /// Has one tensor of blocks, and notes which rows are released.
    struct Blocks {
        spec: TensorSpec,
        bytes: Vec<u8>,
        released: std::sync::Mutex<Vec<std::ops::Range<usize>>>,
    }

    impl RowSource for Blocks {
        fn tensors(&self) -> Result<Vec<TensorSpec>> {
            Ok(vec![self.spec.clone()])
        }

        fn rows_f32(&self, _: &str, _: std::ops::Range<usize>, _: &mut [f32]) -> Result<()> {
            unreachable!("blocks are copied")
        }

        fn blocks(&self, _: &str, _: BlockFormat) -> Option<&[u8]> {
            Some(&self.bytes)
        }

        fn release_rows(&self, _: &str, rows: std::ops::Range<usize>) {
            self.released.lock().unwrap().push(rows);
        }

        fn check_intact(&self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn copied_blocks_are_released_while_they_are_written() {
        let (rows, cols) = (10, CHUNK_VALUES / 4);
        let row_bytes = cols / 32 * 34;
        let bytes: Vec<u8> = (0..rows * row_bytes).map(|i| (i % 251) as u8).collect();
        let spec = spec("blk.0.ffn_up.weight", &[rows, cols]);
        let source = Blocks { spec, bytes, released: Default::default() };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let recipe = GgufRecipe::from_name("Q8_0").unwrap();
        write_gguf(&source, &path, GgufMetadata::default(), &recipe, &mut |_| ()).unwrap();
        assert_eq!(*source.released.lock().unwrap(), [0..4, 4..8, 8..10]);
        let file = crate::gguf::GgufFile::open(&path).unwrap();
        let written = RowSource::blocks(&file, "blk.0.ffn_up.weight", BlockFormat::Q8_0).unwrap();
        assert!(written == source.bytes, "the blocks are the source's");
    }

    #[test]
    fn a_tensor_may_be_empty() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let recipe = GgufRecipe::from_name("Q8_0").unwrap();
        for (shape, bytes) in [([2, 32], 2 * 34), ([2, 0], 0), ([0, 32], 0)] {
            let source = Ones(spec("blk.0.ffn_up.weight", &shape));
            let report = write_gguf(&source, &path, GgufMetadata::default(), &recipe, &mut |_| ()).unwrap();
            assert_eq!(report.output_bytes, bytes, "{shape:?}");
        }
    }
}
