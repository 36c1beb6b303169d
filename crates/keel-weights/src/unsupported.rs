//! Errors for weights in forms that this crate does not read: the form, the tensor, and what to do.

use crate::{ModuleQuantization, Result, TensorSource, WeightsError};

/// What to do with a checkpoint of such weights.
pub(crate) const CHECKPOINT_ADVICE: &str = "read are bf16, f16 and f32, MLX's affine forms, mxfp4 and nvfp4, AWQ and GPTQ in \
     4 bits, and FP8 with weight_scale_inv for blocks of 128 by 128 or for a whole matrix; use the unquantised weights, which \
     `keel quantize` makes smaller, or a GGUF file of the model, such as one in Q4_K_M";

/// What to do with a GGUF file of such tensors.
pub(crate) const GGUF_ADVICE: &str = "read are F32, F16, BF16, Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS and MXFP4; use a file \
     of the model in one of these, such as Q4_K_M";

/// Last parts of names that only forms have that are not read, and the form.
const SIGNS: [(&str, &str); 8] = [
    ("weight_packed", "compressed-tensors"),
    ("weight_scale", "8 or 4 bits with weight_scale"),
    ("weight.absmax", "bitsandbytes"),
    ("SCB", "bitsandbytes"),
    ("codebooks", "AQLM"),
    ("W_q", "HQQ"),
    ("q_weight", "EXL2"),
    ("trellis", "EXL3"),
];

/// Last parts of names of tensors that are read, or that belong to forms that are read.
const KNOWN_PARTS: [&str; 13] = [
    "weight",
    "bias",
    "scales",
    "biases",
    "qweight",
    "qzeros",
    "g_idx",
    "weight_scale_inv",
    "activation_scale",
    "input_scale",
    "theta",
    "pairs",
    "channel_scales",
];

/// The error of reading `module`. If its weight is there in a form that is not read, the error names that form instead
/// of a tensor that is missing or an element type.
pub(crate) fn explained<S: TensorSource + ?Sized>(
    source: &S,
    module: &str,
    error: WeightsError,
) -> WeightsError {
    let name = match &error {
        WeightsError::UnsupportedDType { name, .. } => Some(name.clone()),
        WeightsError::MissingTensor { .. } => unknown_part(source, module),
        _ => None,
    };
    let Some(name) = name else { return error };
    let has = |part: &str| source.contains(&format!("{module}.{part}"));
    let by_name = form_of(&name).or_else(|| SIGNS.iter().find(|(part, _)| has(part)).map(|(_, form)| *form));
    match configured(source, module).or(by_name) {
        Some(form) => refusal(source, name, form),
        None => error,
    }
}

/// Checks that a tensor is no part of a form that is not read.
///
/// # Errors
/// [`WeightsError::UnsupportedForm`].
pub(crate) fn check_part<S: TensorSource + ?Sized>(source: &S, name: &str) -> Result<()> {
    let Some(form) = form_of(name) else { return Ok(()) };
    let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
    Err(refusal(source, name.into(), configured(source, module).unwrap_or(form)))
}

/// The method that the config gives for a module, if it is not MLX's. Tensors may tell more: AWQ, for example, is read.
fn configured<'s, S: TensorSource + ?Sized>(source: &'s S, module: &str) -> Option<&'s str> {
    match source.quantization()?.of_module(module) {
        ModuleQuantization::Unsupported(what) => Some(what.as_str()),
        _ => None,
    }
}

/// The form that has tensors of this name.
fn form_of(name: &str) -> Option<&'static str> {
    let ends_with = |part: &str| name.strip_suffix(part).is_some_and(|module| module.ends_with('.'));
    SIGNS.iter().find(|(part, _)| ends_with(part)).map(|(_, form)| *form)
}

/// A tensor that stores a module's weight in a form that is not read. The experts of a stack may be stored one by one,
/// next to where the stack would be.
fn unknown_part<S: TensorSource + ?Sized>(source: &S, module: &str) -> Option<String> {
    let mut names = source.names();
    let of_module = names.find(|name| part_of(name, module).is_some_and(|part| !KNOWN_PARTS.contains(&part)));
    let found = of_module.or_else(|| {
        let (parent, _) = module.rsplit_once('.')?;
        source.names().find(|name| part_of(name, parent).is_some() && form_of(name).is_some())
    });
    found.map(str::to_string)
}

/// The rest of a tensor's name after a module's path.
fn part_of<'n>(name: &'n str, module: &str) -> Option<&'n str> {
    name.strip_prefix(module)?.strip_prefix('.')
}

fn refusal<S: TensorSource + ?Sized>(source: &S, name: String, form: &str) -> WeightsError {
    let element = match source.info(&name) {
        Ok(info) => info.dtype.to_string(),
        Err(WeightsError::UnsupportedDType { found, .. }) => found,
        Err(_) => "an unknown type".into(),
    };
    WeightsError::UnsupportedForm { name, found: format!("{element} ({form})"), advice: CHECKPOINT_ADVICE }
}
