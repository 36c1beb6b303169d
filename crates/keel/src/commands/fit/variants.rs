//! The forms that a model's weights can have.

use anyhow::Result;
use keel_array::{DType, WeightFormat};
use keel_models::loading::{Altered, Parameters};
use keel_weights::gguf::PartName;
use keel_weights::quantize::QuantizeRecipe;
use keel_weights::{AffineFormat, TensorSource};

use crate::args::{Subject, SubjectArgs, quoted};
use evenkeel::{ModelFiles, WeightFiles};

/// Bits per weight to try for a model that can be quantised.
const BITS: [usize; 5] = [8, 6, 5, 4, 3];
const GROUP_SIZE: usize = 64;

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
    /// `source` is its name as the user gave it, `None` for the built-in model; `tower` the option of its vision tower.
    pub fn of_model(model: &'a ModelFiles, source: Option<&str>, tower: &str) -> Vec<Variant<'a>> {
        let named = source.map_or(String::new(), |source| format!(" --model {}", quoted(source)));
        let command = format!("keel serve{named}{tower}");
        let mut variants = vec![Variant { name: "as it is".into(), subject: Subject::of(model), command }];
        let file_bits = match &model.weights {
            // A quantised checkpoint cannot be quantised again.
            WeightFiles::Checkpoint(checkpoint) if checkpoint.quantization().is_some() => return variants,
            WeightFiles::Checkpoint(_) => 16.0,
            WeightFiles::Gguf(file) => {
                let (bytes, elements) = file.entries().fold((0, 0), |(bytes, elements), (_, entry)| {
                    (bytes + entry.range.len(), elements + entry.shape.iter().product::<usize>())
                });
                8.0 * bytes as f64 / elements.max(1) as f64
            }
        };
        let Some(source) = source else { return variants };
        // The 0.5 is for a 16-bit scale and a 16-bit offset per group of 64.
        for bits in BITS.into_iter().filter(|&bits| bits as f64 + 0.5 < file_bits - 0.5) {
            let Some(format) = AffineFormat::new(bits, GROUP_SIZE) else { continue };
            let parameters =
                Box::new(Quantised { inner: model.parameters(), recipe: QuantizeRecipe::new(format) });
            let of_file = Subject::of(model);
            // `keel quantize` of a GGUF file leaves the tower, which is a file of its own.
            let with_tower = of_file.with_tower && matches!(model.weights, WeightFiles::Checkpoint(_));
            let subject = Subject { parameters, quantised: true, with_tower, ..of_file };
            let (from, to) = (quoted(source), quoted(&name_of_copy(source, bits)));
            let command = format!("keel quantize {from} {to} --bits {bits} && keel serve --model {to}");
            variants.push(Variant { name: format!("{bits} bits"), subject, command });
        }
        variants
    }
}

/// The name of a quantised copy. It is next to the source, also where the source ends with a slash, and has no number
/// of a part.
fn name_of_copy(source: &str, bits: usize) -> String {
    let mut name = source.trim_end_matches('/').to_string();
    // These two are no names. With the bits appended they would be a name inside the source.
    if matches!(name.rsplit('/').next(), Some("." | ".."))
        && let Ok(path) = std::fs::canonicalize(source)
    {
        name = path.display().to_string();
    }
    let stem = PartName::parse(&name).map_or(name.trim_end_matches(".gguf"), |first| first.stem);
    format!("{stem}-{bits}bit")
}

/// The parameters of the copy that `keel quantize` writes, for plans only. Their rows are never read.
struct Quantised<'a> {
    inner: Box<dyn Parameters + 'a>,
    recipe: QuantizeRecipe,
}

impl Altered for Quantised<'_> {
    fn inner(&self) -> &dyn Parameters {
        &*self.inner
    }

    fn linear_format(
        &self,
        module: &str,
        experts: Option<usize>,
        rows: usize,
        cols: usize,
    ) -> keel_models::Result<WeightFormat> {
        let own = self.inner.linear_format(module, experts, rows, cols)?;
        let Some(format) = self.recipe.format_for(module, cols) else { return Ok(own) };
        // Scales have the type of the values. Values in blocks are read as f16.
        let scale_dtype = if let WeightFormat::Dense(dtype) = own { dtype } else { DType::F16 };
        let (bits, group_size) = (format.bits() as u8, format.group_size() as u16);
        Ok(WeightFormat::Affine { bits, group_size, scale_dtype })
    }
}

#[cfg(test)]
mod tests {
    use keel_testkit::fixtures::fixture;

    use super::*;

    #[test]
    fn a_quantised_copy_is_next_to_its_source() {
        assert_eq!(name_of_copy("models/a/", 3), "models/a-3bit");
        assert_eq!(name_of_copy("models/a//", 3), "models/a-3bit");
        assert_eq!(name_of_copy("models/a-Q8_0.gguf", 4), "models/a-Q8_0-4bit");
        assert_eq!(name_of_copy("models/a-Q8_0-00002-of-00003.gguf", 4), "models/a-Q8_0-4bit");
        assert_eq!(name_of_copy("owner/name", 4), "owner/name-4bit");
        let here = std::env::current_dir().expect("there is one").display().to_string();
        assert_eq!(name_of_copy(".", 4), format!("{here}-4bit"));
        assert_eq!(name_of_copy("./", 4), format!("{here}-4bit"));
    }

    #[test]
    fn a_name_is_quoted_once() {
        let model = ModelFiles::open(fixture("qwen3_5")).expect("the fixture opens");
        let last = |source| Variant::of_model(&model, Some(source), "").pop().expect("variants").command;
        assert_eq!(
            last("it's/"),
            r"keel quantize 'it'\''s/' 'it'\''s-3bit' --bits 3 && keel serve --model 'it'\''s-3bit'"
        );
        let first = Variant::of_model(&model, Some("it's"), "").swap_remove(0).command;
        assert_eq!(first, r"keel serve --model 'it'\''s'");
    }
}
