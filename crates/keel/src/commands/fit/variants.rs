//! The forms that a model's weights can have.

use std::ops::Range;

use anyhow::Result;
use keel_array::{DType, WeightFormat, WeightSpec};
use keel_models::loading::{Parameters, RowSink};
use keel_weights::{RotationValues, TensorSource};

use crate::args::{Subject, SubjectArgs};
use evenkeel::{ModelFiles, WeightFiles};

/// Bits per weight to try for a model that can be quantised.
const BITS: [u8; 5] = [8, 6, 5, 4, 3];
const GROUP_SIZE: u16 = 64;

/// A form of the weights, and the command that starts a server with it.
pub struct Variant<'a> {
    /// Name for people: `as it is`, or the bits.
    pub name: String,
    /// The subject to plan.
    pub subject: Subject<'a>,
    /// The command that serves it, without the bounds.
    pub command: String,
}

impl<'a> Variant<'a> {
    /// A shape with random weights. It cannot be served, so its command is `keel plan`.
    ///
    /// # Errors
    /// There is no such shape or format.
    pub fn of_shape(args: SubjectArgs) -> Result<Variant<'a>> {
        let flags = args.flags();
        let name = flags.split(" --").skip(2).collect::<Vec<_>>().join(" ");
        let name = name.replace("bits ", "").replace("dtype ", "");
        let name = if name.parse::<usize>().is_ok() { format!("{name} bits") } else { name };
        Ok(Variant { name, subject: args.shape_subject()?, command: format!("keel plan{flags}") })
    }

    /// The model as it is, and quantised to fewer bits where that is possible.
    /// `source` is its name for a shell, `None` for the built-in model; `tower` the option of its vision tower.
    pub fn of_model(model: &'a ModelFiles, source: Option<&str>, tower: &str) -> Vec<Variant<'a>> {
        let named = source.map_or(String::new(), |source| format!(" --model {source}"));
        let command = format!("keel serve{named}{tower}");
        let mut variants = vec![Variant { name: "as it is".into(), subject: Subject::of(model), command }];
        let file_bits = match &model.weights {
            // A quantised checkpoint cannot be quantised again.
            WeightFiles::Checkpoint(checkpoint) if checkpoint.quantization().is_some() => return variants,
            WeightFiles::Checkpoint(_) => 16.0,
            WeightFiles::Gguf(file) => {
                let entries = file.header().tensors().values();
                let (bytes, elements) = entries.fold((0, 0), |(bytes, elements), entry| {
                    (bytes + entry.range.len(), elements + entry.shape.iter().product::<usize>())
                });
                8.0 * bytes as f64 / elements.max(1) as f64
            }
        };
        let Some(source) = source else { return variants };
        // The 0.5 is for a 16-bit scale and a 16-bit offset per group of 64.
        for bits in BITS.into_iter().filter(|&bits| f64::from(bits) + 0.5 < file_bits - 0.5) {
            let format = WeightFormat::Affine { bits, group_size: GROUP_SIZE, scale_dtype: DType::BF16 };
            let parameters = Box::new(Quantised { inner: model.parameters(), format });
            let of_file = Subject::of(model);
            // `keel quantize` of a GGUF file leaves the tower, which is a file of its own.
            let with_tower = of_file.with_tower && matches!(model.weights, WeightFiles::Checkpoint(_));
            let subject = Subject { parameters, quantised: true, with_tower, ..of_file };
            let out = format!("{}-{bits}bit", source.trim_matches('\'').trim_end_matches(".gguf"));
            let out = crate::args::quoted(out.trim_end_matches('/'));
            let command = format!("keel quantize {source} {out} --bits {bits} && keel serve --model {out}");
            variants.push(Variant { name: format!("{bits} bits"), subject, command });
        }
        variants
    }
}

/// Parameters with quantised linear layers, for plans only. Their rows are never read.
struct Quantised<'a> {
    inner: Box<dyn Parameters + 'a>,
    format: WeightFormat,
}

impl Parameters for Quantised<'_> {
    fn contains(&self, name: &str) -> bool {
        self.inner.contains(name)
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.inner.shape(name)
    }

    fn linear_format(
        &self,
        module: &str,
        experts: Option<usize>,
        rows: usize,
        cols: usize,
    ) -> keel_models::Result<WeightFormat> {
        let own = self.inner.linear_format(module, experts, rows, cols)?;
        Ok(if cols.is_multiple_of(usize::from(GROUP_SIZE)) { self.format } else { own })
    }

    fn linear_rows(
        &self,
        module: &str,
        expert: Option<usize>,
        rows: Range<usize>,
        spec: &WeightSpec,
        sink: &mut RowSink<'_>,
    ) -> keel_models::Result<()> {
        self.inner.linear_rows(module, expert, rows, spec, sink)
    }

    fn rotation(&self, module: &str) -> keel_models::Result<Option<RotationValues>> {
        self.inner.rotation(module)
    }

    fn shared_rotation(&self, prefix: &str, module: &str) -> keel_models::Result<Option<RotationValues>> {
        self.inner.shared_rotation(prefix, module)
    }

    fn values(&self, name: &str, elements: usize) -> keel_models::Result<Vec<f32>> {
        self.inner.values(name, elements)
    }

    fn norms_are_scales(&self) -> bool {
        self.inner.norms_are_scales()
    }

    fn column_tiles(&self, module: &str) -> usize {
        self.inner.column_tiles(module)
    }
}
