//! Kernels brought by the user of the library.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::{Array, ArrayError, ArraySpec, Result, Shape};

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

/// Arguments of a kernel's body on the CPU. All operands are contiguous.
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

/// The body of a kernel on an NVIDIA GPU, in CUDA C++.
///
/// The body is placed in a kernel whose parameters are the pointers `inputs` and `outputs`, by these names.
/// For each operand `x` the body may use the constants `x_ndim`, `x_shape[]`, `x_strides[]` (in elements) and `x_size`.
/// It may also use the types `f16`, `bf16` and `flag` with `to_f32(v)` and `From<type>::f32(v)`.
#[derive(Clone, Debug, Default)]
pub struct CudaSource {
    /// Names of the inputs, in order.
    pub inputs: Vec<String>,
    /// Names of the outputs, in order.
    pub outputs: Vec<String>,
    /// Text before the kernel: its functions and types.
    pub header: String,
    /// Statements of the kernel.
    pub body: String,
    /// Template arguments: constants by name, as C++ expressions or types.
    pub constants: Vec<(String, String)>,
    /// Blocks along x, y and z.
    pub grid: [usize; 3],
    /// Threads of a block along x, y and z.
    pub block: [usize; 3],
    /// Bytes of dynamic shared memory, which the body declares as `extern __shared__`.
    pub shared_bytes: usize,
    /// Inputs may have any strides. By default the program copies inputs that are not gap-free.
    pub any_strides: bool,
}

struct Definition {
    name: String,
    body: Option<Arc<HostFn>>,
    cuda: Option<CudaSource>,
    outputs: Vec<ArraySpec>,
    initial: f32,
}

/// A kernel of the user's own that composes lazily with every other operation.
///
/// ```
/// # use keel_array::{ArraySpec, CustomKernel, DType, HostSlice, HostSliceMut};
/// let scale = CustomKernel::new("scale", vec![ArraySpec::new([4], DType::F32)], 0.0, |call| {
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
    /// A kernel for the CPU: name, output shapes and types, value of all outputs before the body runs, and body.
    pub fn new(
        name: impl Into<String>,
        outputs: Vec<ArraySpec>,
        initial: f32,
        body: impl Fn(&mut HostCall<'_>) -> Result<(), String> + Send + Sync + 'static,
    ) -> CustomKernel {
        let body: Option<Arc<HostFn>> = Some(Arc::new(body));
        CustomKernel(Arc::new(Definition { name: name.into(), body, cuda: None, outputs, initial }))
    }

    /// A kernel for NVIDIA GPUs; `outputs` and `initial` as in [`CustomKernel::new`].
    pub fn cuda(
        name: impl Into<String>,
        outputs: Vec<ArraySpec>,
        initial: f32,
        source: CudaSource,
    ) -> CustomKernel {
        let cuda = Some(source);
        CustomKernel(Arc::new(Definition { name: name.into(), body: None, cuda, outputs, initial }))
    }

    /// The same kernel with a body for NVIDIA GPUs, too. Operands are then always gap-free, because the CPU's body
    /// needs it.
    #[must_use]
    pub fn with_cuda(self, source: CudaSource) -> CustomKernel {
        let Definition { name, outputs, initial, .. } = &*self.0;
        let (name, outputs, initial) = (name.clone(), outputs.clone(), *initial);
        let body = self.0.body.clone();
        let cuda = Some(CudaSource { any_strides: false, ..source });
        CustomKernel(Arc::new(Definition { name, body, cuda, outputs, initial }))
    }

    /// True if the kernel has a body for the CPU.
    pub fn has_cpu_body(&self) -> bool {
        self.0.body.is_some()
    }

    /// The body for NVIDIA GPUs.
    pub fn cuda_source(&self) -> Option<&CudaSource> {
        self.0.cuda.as_ref()
    }

    /// True if inputs may come in any strides.
    pub(crate) fn takes_any_strides(&self) -> bool {
        self.0.body.is_none() && self.0.cuda.as_ref().is_some_and(|source| source.any_strides)
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
    /// The body's error, with the kernel's name.
    pub fn call(&self, call: &mut HostCall<'_>) -> Result<()> {
        let outcome = match &self.0.body {
            Some(body) => body(call),
            None => Err("has a body for CUDA alone".into()),
        };
        outcome.map_err(|reason| ArrayError::Kernel { op: self.0.name.clone(), reason })
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
