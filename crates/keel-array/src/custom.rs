//! Kernels brought by the user of the library.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::{Array, ArrayError, DType, Result, Shape};

/// Elements of an operand as the host sees them.
#[derive(Clone, Copy, Debug)]
pub enum HostSlice<'a> {
    /// bool and u8.
    U8(&'a [u8]),
    /// u32.
    U32(&'a [u32]),
    /// i32.
    I32(&'a [i32]),
    /// i64.
    I64(&'a [i64]),
    /// f16.
    F16(&'a [half::f16]),
    /// bf16.
    BF16(&'a [half::bf16]),
    /// f32.
    F32(&'a [f32]),
}

/// Elements of an output as the host sees them.
#[derive(Debug)]
pub enum HostSliceMut<'a> {
    /// bool and u8.
    U8(&'a mut [u8]),
    /// u32.
    U32(&'a mut [u32]),
    /// i32.
    I32(&'a mut [i32]),
    /// i64.
    I64(&'a mut [i64]),
    /// f16.
    F16(&'a mut [half::f16]),
    /// bf16.
    BF16(&'a mut [half::bf16]),
    /// f32.
    F32(&'a mut [f32]),
}

/// What a kernel on the CPU is called with. All operands are contiguous.
pub struct HostCall<'a> {
    /// Inputs in order.
    pub inputs: Vec<HostSlice<'a>>,
    /// Shapes of the inputs.
    pub input_shapes: Vec<&'a Shape>,
    /// Outputs in order, filled with the initial value.
    pub outputs: Vec<HostSliceMut<'a>>,
    /// Shapes of the outputs.
    pub output_shapes: Vec<&'a Shape>,
}

/// The body of a kernel on the CPU.
pub type HostFn = dyn Fn(&mut HostCall<'_>) -> Result<(), String> + Send + Sync;

struct Definition {
    name: String,
    body: Box<HostFn>,
    outputs: Vec<(Shape, DType)>,
    initial: f32,
}

/// A kernel of the user's own that composes lazily with every other operation.
///
/// ```
/// # use keel_array::{CustomKernel, DType, HostSlice, HostSliceMut, Shape};
/// let scale = CustomKernel::new("scale", vec![(Shape::from([4]), DType::F32)], 0.0, |call| {
///     let (HostSlice::F32(x), HostSliceMut::F32(y)) = (call.inputs[0], &mut call.outputs[0]) else {
///         return Err("scale works on f32".into());
///     };
///     y.iter_mut().zip(x).for_each(|(y, x)| *y = 2.0 * x);
///     Ok(())
/// });
/// assert_eq!(scale.name(), "scale");
/// ```
#[derive(Clone)]
pub struct CustomKernel(Arc<Definition>);

impl CustomKernel {
    /// A kernel with the given name, output shapes and types, value the outputs are filled with before it
    /// runs, and body.
    pub fn new(
        name: impl Into<String>,
        outputs: Vec<(Shape, DType)>,
        initial: f32,
        body: impl Fn(&mut HostCall<'_>) -> Result<(), String> + Send + Sync + 'static,
    ) -> CustomKernel {
        CustomKernel(Arc::new(Definition { name: name.into(), body: Box::new(body), outputs, initial }))
    }

    /// The name in errors.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The value that outputs hold when the body starts.
    pub fn initial(&self) -> f32 {
        self.0.initial
    }

    /// Runs the body; called by a backend.
    ///
    /// # Errors
    /// What the body returns, under the kernel's name.
    pub fn call(&self, call: &mut HostCall<'_>) -> Result<()> {
        (self.0.body)(call).map_err(|reason| ArrayError::Kernel { op: self.0.name.clone(), reason })
    }

    /// Applies the kernel lazily and returns its outputs.
    ///
    /// # Errors
    /// If there is no input, or the inputs belong to different runtimes.
    pub fn apply(&self, inputs: &[&Array]) -> Result<Vec<Array>> {
        Array::build_many(crate::Op::Custom(self.clone()), inputs, self.0.outputs.clone())
    }
}

impl PartialEq for CustomKernel {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for CustomKernel {}

impl Hash for CustomKernel {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.0).hash(state);
    }
}

impl std::fmt::Debug for CustomKernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CustomKernel({})", self.0.name)
    }
}
