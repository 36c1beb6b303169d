//! Stage 1: the pending calls that some arrays depend on, as plain data.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use crate::array::{Array, ArraySpec, Call, Node, State, Storage};
use crate::ops::{Op, Regime};
use crate::{DType, Layout};

/// An operand of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Ref {
    /// Memory that exists.
    External(usize),
    /// Output of an earlier call.
    Call { call: usize, output: usize },
}

/// A call with its operands by number.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GraphCall {
    pub op: Op,
    pub inputs: Vec<Ref>,
    pub specs: Vec<ArraySpec>,
}

/// A result of a call, by the numbers of the call and of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CallOutput {
    pub call: usize,
    pub output: usize,
}

/// Memory that the graph reads. The layout's offset is left out: it is part of the binding.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct External {
    pub layout: Layout,
    pub dtype: DType,
    /// Only the graph holds it, so an output may take its memory.
    pub donatable: bool,
}

/// A graph in order of execution; the key of the program cache.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Graph {
    pub calls: Vec<GraphCall>,
    pub externals: Vec<External>,
    /// Values that outlive the evaluation.
    pub outputs: Vec<CallOutput>,
}

impl Graph {
    /// The regime of the operations with memory. `None` if there are none, or if both regimes occur.
    pub fn regime(&self) -> Option<Regime> {
        let mut regimes = self.calls.iter().filter_map(|call| call.op.regime());
        let first = regimes.next()?;
        regimes.all(|other| other == first).then_some(first)
    }
}

/// A graph with its memory and nodes.
pub(crate) struct Collected {
    pub graph: Graph,
    pub externals: Vec<Storage>,
    pub outputs: Vec<Arc<Node>>,
}

/// The use of a collected graph.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Computed once. Inner values with a handle outside the graph become outputs, too: they lose their parents and are
    /// not computed again later. Memory that only the graph holds may be reused.
    Evaluate,
    /// Run many times: only the targets are outputs, and every input stays unchanged.
    Prepare,
}

/// Collects the calls that `targets` need.
pub(crate) fn collect(targets: &[&Array], purpose: Purpose) -> Collected {
    let calls = pending_calls(targets);
    let number: HashMap<u64, usize> = calls.iter().enumerate().map(|(i, c)| (c.id, i)).collect();
    let handles = count_inner_handles(&calls);
    let mut externals = Externals::default();
    let graph_calls = calls
        .iter()
        .map(|call| GraphCall {
            op: call.op.clone(),
            inputs: call.inputs().iter().map(|a| reference(a, &number, &handles, &mut externals)).collect(),
            specs: call.specs.clone(),
        })
        .collect();
    if purpose == Purpose::Prepare {
        externals.described.iter_mut().for_each(|e| e.donatable = false);
    }
    let Outputs { outputs, nodes } = find_outputs(&calls, targets, &handles, purpose);
    let graph = Graph { calls: graph_calls, externals: externals.described, outputs };
    Collected { graph, externals: externals.storages, outputs: nodes }
}

/// All pending calls that the targets depend on, oldest first.
fn pending_calls(targets: &[&Array]) -> Vec<Arc<Call>> {
    let mut found: HashMap<u64, Arc<Call>> = HashMap::new();
    let mut open: Vec<Array> = targets.iter().map(|&a| a.clone()).collect();
    while let Some(array) = open.pop() {
        let State::Pending { call, .. } = &*array.0.state() else { continue };
        if found.insert(call.id, Arc::clone(call)).is_none() {
            open.extend(call.inputs().iter().cloned());
        }
    }
    let mut calls: Vec<_> = found.into_values().collect();
    calls.sort_unstable_by_key(|c| c.id);
    calls
}

/// For each node, how many operands of these calls are handles to it.
fn count_inner_handles(calls: &[Arc<Call>]) -> HashMap<*const Node, usize> {
    let mut handles = HashMap::new();
    for call in calls {
        for input in call.inputs().iter() {
            *handles.entry(Arc::as_ptr(&input.0)).or_insert(0) += 1;
        }
    }
    handles
}

#[derive(Default)]
struct Externals {
    described: Vec<External>,
    storages: Vec<Storage>,
    number: HashMap<*const Node, usize>,
}

fn reference(
    array: &Array,
    number: &HashMap<u64, usize>,
    handles: &HashMap<*const Node, usize>,
    externals: &mut Externals,
) -> Ref {
    let node = Arc::as_ptr(&array.0);
    let storage = match &*array.0.state() {
        State::Pending { call, output } => return Ref::Call { call: number[&call.id], output: *output },
        State::Ready(storage) => storage.clone(),
    };
    let next = externals.storages.len();
    let i = *externals.number.entry(node).or_insert(next);
    if i == next {
        let whole = storage.layout.is_contiguous() && array.bytes() == storage.buffer.bytes();
        // Two handles to the buffer: the node's, and `storage` here.
        let alone = Arc::strong_count(&array.0) == handles[&node] && storage.buffer.handles() == 2;
        externals.described.push(External {
            layout: Layout { offset: 0, ..storage.layout.clone() },
            dtype: array.dtype(),
            donatable: whole && alone,
        });
        externals.storages.push(storage);
    }
    Ref::External(i)
}

/// The outputs of a graph: as plain data, and their nodes.
#[derive(Default)]
struct Outputs {
    outputs: Vec<CallOutput>,
    nodes: Vec<Arc<Node>>,
}

fn find_outputs(
    calls: &[Arc<Call>],
    targets: &[&Array],
    handles: &HashMap<*const Node, usize>,
    purpose: Purpose,
) -> Outputs {
    let wanted: Vec<*const Node> = targets.iter().map(|a| Arc::as_ptr(&a.0)).collect();
    let mut found = Outputs::default();
    for (i, call) in calls.iter().enumerate() {
        let weak = call.outputs.lock().unwrap_or_else(|e| e.into_inner());
        for (output, node) in weak.iter().enumerate() {
            let inner = handles.get(&node.as_ptr()).copied().unwrap_or(0);
            let held = purpose == Purpose::Evaluate && Weak::strong_count(node) > inner;
            if !(held || wanted.contains(&node.as_ptr())) {
                continue;
            }
            if let Some(node) = node.upgrade() {
                found.outputs.push(CallOutput { call: i, output });
                found.nodes.push(node);
            }
        }
    }
    found
}
