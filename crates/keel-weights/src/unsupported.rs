//! Errors for weights in forms that this crate does not read: the form, the tensor, and what to do.

use crate::{ModuleQuantization, Result, TensorSource, WeightsError};

/// The advice for a checkpoint of such weights.
pub(crate) const CHECKPOINT_ADVICE: &str = "read are bf16, f16 and f32, MLX's affine forms, mxfp4 and nvfp4, AWQ and GPTQ in \
     4 bits, and FP8 (E4M3) with scales for blocks of 128 by 128, for rows or for a whole matrix; use the unquantised weights, \
     which `keel quantize` makes smaller, or a GGUF file of the model, such as one in Q4_K_M";

/// The advice for a GGUF file of such tensors.
pub(crate) const GGUF_ADVICE: &str = "read are F32, F16, BF16, Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS and MXFP4; use a file \
     of the model in one of these, such as Q4_K_M";

/// Methods whose forms are read, as config.json names them: a tensor in another form is not explained by the method.
const READ_METHODS: [&str; 6] = ["awq", "gptq", "fp8", "paroquant", "auto-round", "intel/auto-round"];

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
    let method = configured(source, module);
    let name = match &error {
        WeightsError::UnsupportedDType { name, .. } => Some(name.clone()),
        WeightsError::MissingTensor { .. } => unknown_part(source, module, method),
        _ => None,
    };
    let Some(name) = name else { return error };
    let has = |part: &str| source.contains(&format!("{module}.{part}"));
    let by_name = form_of(&name).or_else(|| SIGNS.iter().find(|(part, _)| has(part)).map(|(_, form)| *form));
    match described(method, by_name) {
        Some(form) => refusal(source, name, &form),
        None => error,
    }
}

/// The form in words: the config's method if it is known, with the form that the tensors' names tell if the method
/// alone does not say which form is not read.
fn described(method: Option<&str>, by_name: Option<&str>) -> Option<String> {
    match (method, by_name) {
        (Some(method), Some(form)) if is_read(method) => Some(format!("{method}, {form}")),
        (method, by_name) => method.or(by_name).map(String::from),
    }
}

/// Whether a method, as [`configured`] gives it, has forms that are read.
fn is_read(method: &str) -> bool {
    READ_METHODS.iter().any(|name| method.starts_with(&format!("quant_method '{name}'")))
}

/// Checks that a tensor is no part of a form that is not read.
///
/// # Errors
/// [`WeightsError::UnsupportedForm`].
pub(crate) fn check_part<S: TensorSource + ?Sized>(source: &S, name: &str) -> Result<()> {
    let Some(form) = form_of(name) else { return Ok(()) };
    let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
    let form = described(configured(source, module), Some(form)).unwrap_or_else(|| form.into());
    Err(refusal(source, name.into(), &form))
}

/// The error for `qweight` of a method whose order of codes is not known.
pub(crate) fn method_of_words<S: TensorSource + ?Sized>(source: &S, module: &str) -> WeightsError {
    refusal(source, format!("{module}.qweight"), configured(source, module).unwrap_or("an unknown method"))
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
/// next to where the stack would be. A tensor whose name tells no form is one only if the config's method is not read:
/// else it may be another parameter of a module whose weight is missing.
fn unknown_part<S: TensorSource + ?Sized>(source: &S, module: &str, method: Option<&str>) -> Option<String> {
    let tells_form =
        |parent: &str| source.names().find(|name| part_of(name, parent).is_some() && form_of(name).is_some());
    let unknown = || {
        let is_unknown = |name: &&str| part_of(name, module).is_some_and(|part| !KNOWN_PARTS.contains(&part));
        source.names().find(is_unknown).filter(|_| method.is_some_and(|method| !is_read(method)))
    };
    let parent = || module.rsplit_once('.').map(|(parent, _)| parent);
    let found = tells_form(module).or_else(unknown).or_else(|| tells_form(parent()?));
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
