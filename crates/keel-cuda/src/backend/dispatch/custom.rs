//! Kernels of the user's own: their text, put into a kernel with the operands' names, shapes and strides.

use super::{Bound, Call, Geometry};
use crate::backend::operand::c_type;
use crate::driver::Arguments;
use crate::kernels::{CUSTOM, CUSTOM_ENTRY, KernelKey};
use crate::parameters::{Fill, Wide};
use keel_array::{ArrayError, CudaSource, CustomKernel, Kernel};
use std::fmt::Write;

/// Refuses a kernel without a body for this device, or with more or fewer names than operands.
pub(super) fn supports(custom: &CustomKernel, kernel: &Kernel) -> Result<(), String> {
    let Some(source) = custom.cuda_source() else {
        return Err("has a body for the CPU alone; give it one for CUDA with with_cuda".into());
    };
    let names = (source.inputs.len(), source.outputs.len());
    let operands = (kernel.inputs.len(), kernel.outputs.len());
    if names == operands {
        return Ok(());
    }
    Err(format!("names (inputs, outputs) {names:?} for operands {operands:?}"))
}

pub(super) fn run(kernel: &CustomKernel, call: &Call<'_>) -> Result<(), ArrayError> {
    let source = kernel.cuda_source().unwrap_or_else(|| unreachable!("asked when the program was made"));
    for y in &call.outputs {
        let key = KernelKey::new(CUSTOM, "initial").define("ELEM", c_type(y.dtype));
        let parameters = Fill { y: y.address, n: Wide(y.len()), value: kernel.initial() };
        call.launch(&key, Geometry::elements(y.len()), &parameters)?;
    }
    let (text, user) = (text(source, call).into(), Some(kernel.name().into()));
    let key = KernelKey { source: text, user, ..KernelKey::new(CUSTOM, CUSTOM_ENTRY) };
    let operands = call.inputs.iter().chain(&call.outputs);
    let arguments = operands.fold(Arguments::default(), |arguments, operand| arguments.with(operand.address));
    let geometry =
        Geometry { grid: source.grid.into(), block: source.block.into(), shared_bytes: source.shared_bytes };
    call.launch_generated(&key, geometry, arguments)
}

/// The whole source.
fn text(source: &CudaSource, call: &Call<'_>) -> String {
    // The user's conditions may name constants that are not given.
    let mut text = String::from("#include \"common.cuh\"\n#pragma nv_diag_default 193\n");
    // Writing to a String cannot fail.
    for (name, value) in &source.constants {
        let _ = writeln!(text, "#define {name} {value}");
    }
    let inputs = source.inputs.iter().zip(&call.inputs);
    let outputs = source.outputs.iter().zip(&call.outputs);
    for (name, operand) in inputs.clone().chain(outputs.clone()) {
        text += &constants(name, operand);
    }
    let parameters: Vec<String> = inputs
        .map(|(name, x)| format!("const {}* {name}", c_type(x.dtype)))
        .chain(outputs.map(|(name, y)| format!("{}* {name}", c_type(y.dtype))))
        .collect();
    let parameters = parameters.join(", ");
    text + &format!(
        "{}\nextern \"C\" __global__ void {CUSTOM_ENTRY}({parameters}) {{\n{}\n}}\n",
        source.header, source.body
    )
}

/// Shape and strides of an operand. A C++ array has at least one element.
fn constants(name: &str, operand: &Bound<'_>) -> String {
    let list = |values: &[usize]| {
        let values: Vec<String> = values.iter().chain([&1]).map(|v| format!("{v}ll")).collect();
        format!("{{{}}}", values.join(", "))
    };
    let (shape, strides) = (list(&operand.layout.shape), list(&operand.layout.strides));
    format!(
        "constexpr int {name}_ndim = {};\nconstexpr i64 {name}_size = {}ll;\n\
         constexpr i64 {name}_shape[] = {shape};\nconstexpr i64 {name}_strides[] = {strides};\n",
        operand.layout.shape.rank(),
        operand.len(),
    )
}
