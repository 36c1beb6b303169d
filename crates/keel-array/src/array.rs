//! The array: a handle to a lazy node or to storage.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use crate::ops::{View, bytes_of};
use crate::runtime::Fence;
use crate::{ArrayError, Buffer, DType, Layout, Op, Result, Runtime, Shape, Weight};

/// An n-dimensional array, lazy until it is evaluated. Cloning shares it.
///
/// An evaluated array has no parents: the inputs it was computed from are freed once no other handle holds them.
#[derive(Clone)]
pub struct Array(pub(crate) Arc<Node>);

/// One value of the graph.
pub(crate) struct Node {
    pub runtime: Runtime,
    pub shape: Shape,
    pub dtype: DType,
    pub state: Mutex<State>,
}

/// Where a node's value is.
pub(crate) enum State {
    /// Output `output` of a call that has not been evaluated.
    Pending { call: Arc<Call>, output: usize },
    /// In memory, once the fence's work is done.
    Ready(Storage),
}

/// A value in memory.
#[derive(Clone)]
pub(crate) struct Storage {
    pub buffer: Buffer,
    pub layout: Layout,
    pub fence: Option<Fence>,
}

/// Extents and element type of a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ArraySpec {
    /// Extents.
    pub shape: Shape,
    /// Element type.
    pub dtype: DType,
}

impl ArraySpec {
    /// A value of these extents and this type.
    pub fn new(shape: impl Into<Shape>, dtype: DType) -> ArraySpec {
        ArraySpec { shape: shape.into(), dtype }
    }
}

/// An operation applied to operands, not yet evaluated.
pub(crate) struct Call {
    /// Increases with each call built: the order of execution.
    pub id: u64,
    pub op: Op,
    pub inputs: Mutex<Vec<Array>>,
    pub outputs: Mutex<Vec<Weak<Node>>>,
    pub specs: Vec<ArraySpec>,
    pub runtime: Runtime,
}

static NEXT_CALL: AtomicU64 = AtomicU64::new(0);

impl Call {
    pub fn inputs(&self) -> MutexGuard<'_, Vec<Array>> {
        self.inputs.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Bytes of the results. A view has no bytes of its own.
    fn pending_bytes(&self) -> usize {
        if matches!(self.op, Op::View(_)) { 0 } else { bytes_of_all(&self.specs) }
    }
}

/// Bytes of values of these shapes and types; `usize::MAX` if they cannot be counted.
fn bytes_of_all(specs: &[ArraySpec]) -> usize {
    specs.iter().map(|spec| bytes_of(spec.dtype, spec.shape.elements())).fold(0, usize::saturating_add)
}

impl Drop for Call {
    fn drop(&mut self) {
        self.runtime.note_dropped(self.pending_bytes());
        // Take long chains apart one by one: dropping them recursively would overflow the stack.
        let mut pending = std::mem::take(&mut *self.inputs());
        while let Some(array) = pending.pop() {
            let Some(node) = Arc::into_inner(array.0) else { continue };
            if let State::Pending { call, .. } = node.state.into_inner().unwrap_or_else(|e| e.into_inner())
                && let Some(call) = Arc::into_inner(call)
            {
                pending.append(&mut call.inputs());
            }
        }
    }
}

impl Node {
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The value, if it has been evaluated.
    pub fn storage(&self) -> Option<Storage> {
        match &*self.state() {
            State::Ready(storage) => Some(storage.clone()),
            State::Pending { .. } => None,
        }
    }
}

impl Array {
    /// An array in memory.
    pub(crate) fn ready(runtime: &Runtime, dtype: DType, storage: Storage) -> Array {
        Array(Arc::new(Node {
            runtime: runtime.clone(),
            shape: storage.layout.shape.clone(),
            dtype,
            state: Mutex::new(State::Ready(storage)),
        }))
    }

    /// An operation without inputs.
    pub(crate) fn create(runtime: &Runtime, op: Op, shape: Shape, dtype: DType) -> Result<Array> {
        let outputs = Array::call(runtime, op, &[], vec![ArraySpec { shape, dtype }])?;
        Ok(outputs.into_iter().next().unwrap_or_else(|| unreachable!("one output was asked for")))
    }

    /// An operation with one output.
    pub(crate) fn build(op: Op, inputs: &[&Array], shape: Shape, dtype: DType) -> Result<Array> {
        let outputs = Array::build_many(op, inputs, vec![ArraySpec { shape, dtype }])?;
        Ok(outputs.into_iter().next().unwrap_or_else(|| unreachable!("one output was asked for")))
    }

    /// An operation with any number of outputs. Shapes and types have been checked by the caller.
    pub(crate) fn build_many(op: Op, inputs: &[&Array], specs: Vec<ArraySpec>) -> Result<Vec<Array>> {
        let Some(first) = inputs.first() else {
            return Err(ArrayError::Argument {
                op: "custom kernel",
                reason: "needs at least one input".into(),
            });
        };
        if inputs.iter().any(|a| !a.0.runtime.is_same(&first.0.runtime)) {
            return Err(ArrayError::Argument {
                op: "apply",
                reason: format!("the operands of {} belong to different runtimes", op.name()),
            });
        }
        let is_plain = |state: &&Array| state.0.storage().is_some_and(|of| of.layout.is_contiguous());
        if let Some(state) = op.mutated_inputs().map(|i| inputs[i]).find(|state| !is_plain(state)) {
            return Err(ArrayError::Argument {
                op: "state",
                reason: format!(
                    "{} writes to {state:?} in place: it must be contiguous memory, such as a persistent array",
                    op.name()
                ),
            });
        }
        Array::call(&first.0.runtime, op, inputs, specs)
    }

    fn call(runtime: &Runtime, op: Op, inputs: &[&Array], specs: Vec<ArraySpec>) -> Result<Vec<Array>> {
        let shapes = || specs.iter().map(|spec| &spec.shape);
        if let Some(shape) = shapes().find(|shape| shape.rank() > Layout::RANK_MAX) {
            return Err(ArrayError::Argument {
                op: "shape",
                reason: format!(
                    "{} gives {shape}; at most {} axes are supported",
                    op.name(),
                    Layout::RANK_MAX
                ),
            });
        }
        if bytes_of_all(&specs) > isize::MAX as usize {
            return Err(ArrayError::Argument {
                op: "allocate",
                reason: format!("{} gives {}, which cannot be addressed", op.name(), specs[0].shape),
            });
        }
        let call = Arc::new(Call {
            id: NEXT_CALL.fetch_add(1, Ordering::Relaxed),
            op,
            inputs: Mutex::new(inputs.iter().map(|&a| a.clone()).collect()),
            outputs: Mutex::new(Vec::new()),
            specs,
            runtime: runtime.clone(),
        });
        let crowded = runtime.note_built(call.pending_bytes());
        let outputs: Vec<Array> = call
            .specs
            .iter()
            .enumerate()
            .map(|(output, ArraySpec { shape, dtype })| {
                Array(Arc::new(Node {
                    runtime: runtime.clone(),
                    shape: shape.clone(),
                    dtype: *dtype,
                    state: Mutex::new(State::Pending { call: Arc::clone(&call), output }),
                }))
            })
            .collect();
        *call.outputs.lock().unwrap_or_else(|e| e.into_inner()) =
            outputs.iter().map(|a| Arc::downgrade(&a.0)).collect();
        drop(call);
        // A graph that has grown past the bound is submitted here; its nodes lose their parents.
        if crowded {
            runtime.async_eval(&outputs.iter().collect::<Vec<_>>())?;
        }
        Ok(outputs)
    }

    /// Extents.
    pub fn shape(&self) -> &Shape {
        &self.0.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// Bytes that the elements take.
    pub fn bytes(&self) -> usize {
        bytes_of(self.dtype(), self.shape().elements())
    }

    /// The runtime that the array belongs to.
    pub fn runtime(&self) -> &Runtime {
        &self.0.runtime
    }

    /// True once the value has been submitted for evaluation. Reading it may still wait.
    pub fn is_evaluated(&self) -> bool {
        self.0.storage().is_some()
    }

    /// Bytes of the memory that the evaluated array keeps alive; `None` before evaluation.
    pub fn held_bytes(&self) -> Option<usize> {
        self.0.storage().map(|s| s.buffer.bytes())
    }

    /// Evaluates and waits.
    ///
    /// # Errors
    /// If the memory limit would be exceeded, or a kernel fails.
    pub fn eval(&self) -> Result<()> {
        self.0.runtime.eval(&[self])
    }

    /// The same value without its parents: evaluates, and shares the result.
    ///
    /// # Errors
    /// As [`Array::eval`].
    pub fn detach(&self) -> Result<Array> {
        self.eval()?;
        Ok(self.clone())
    }

    /// The weight's memory as an operand.
    pub(crate) fn of_weight(weight: &Weight) -> Array {
        let layout =
            Layout { offset: weight.place.start, ..Layout::contiguous(Shape::from([weight.bytes()])) };
        Array::ready(
            &weight.runtime,
            DType::U8,
            Storage { buffer: weight.buffer.clone(), layout, fence: None },
        )
    }

    /// The view's storage if this is a pure view of evaluated storage.
    pub(crate) fn resolve_view(&self) -> Option<Storage> {
        let (call, shape) = match &*self.0.state() {
            State::Ready(storage) => return Some(storage.clone()),
            State::Pending { call, .. } => (Arc::clone(call), self.shape().clone()),
        };
        let Op::View(view) = &call.op else { return None };
        let base = call.inputs().first()?.clone();
        let storage = base.resolve_view()?;
        let layout = apply_view(view, &storage.layout, &shape)?;
        Some(Storage { layout, ..storage })
    }
}

/// The layout of a view, or `None` if the elements would have to move.
pub(crate) fn apply_view(view: &View, base: &Layout, shape: &Shape) -> Option<Layout> {
    match view {
        View::Reshape => base.reshape(shape),
        View::Permute(axes) => Some(base.permute(axes)),
        View::Slice(starts) => Some(base.slice(starts, shape)),
        View::Broadcast => Some(base.broadcast(shape)),
    }
}

impl std::fmt::Debug for Array {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = if self.is_evaluated() { "evaluated" } else { "lazy" };
        write!(f, "Array({} {}, {state})", self.dtype(), self.shape())
    }
}
