//! Compiled programs by graph, bounded in bytes. The least recently used program is evicted first.

use std::collections::HashMap;
use std::sync::Arc;

use super::{Graph, Kernel, Program};

/// The state of a [runtime](crate::Runtime)'s program cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramCacheUse {
    /// Host bytes of cached programs.
    pub bytes: usize,
    /// Programs found.
    pub hits: u64,
    /// Programs not found.
    pub misses: u64,
}

/// The program cache of a runtime.
pub(crate) struct ProgramCache {
    entries: HashMap<Arc<Graph>, Entry>,
    clock: u64,
    bytes: usize,
    bytes_max: usize,
    pub hits: u64,
    pub misses: u64,
}

struct Entry {
    program: Arc<Program>,
    bytes: usize,
    used_at: u64,
}

impl ProgramCache {
    pub fn new(bytes_max: usize) -> ProgramCache {
        ProgramCache { entries: HashMap::new(), clock: 0, bytes: 0, bytes_max, hits: 0, misses: 0 }
    }

    pub fn get(&mut self, graph: &Graph) -> Option<Arc<Program>> {
        self.clock += 1;
        match self.entries.get_mut(graph) {
            Some(entry) => {
                self.hits += 1;
                entry.used_at = self.clock;
                Some(Arc::clone(&entry.program))
            }
            None => {
                self.misses += 1;
                None
            }
        }
    }

    pub fn insert(&mut self, graph: Graph, program: Arc<Program>) {
        let bytes = host_bytes(&graph, &program);
        if bytes > self.bytes_max {
            return;
        }
        while self.bytes + bytes > self.bytes_max {
            let Some(oldest) = self.entries.iter().min_by_key(|(_, e)| e.used_at).map(|(g, _)| Arc::clone(g))
            else {
                break;
            };
            if let Some(entry) = self.entries.remove(&oldest) {
                self.bytes -= entry.bytes;
            }
        }
        self.clock += 1;
        let entry = Entry { program, bytes, used_at: self.clock };
        if let Some(replaced) = self.entries.insert(Arc::new(graph), entry) {
            self.bytes -= replaced.bytes;
        }
        self.bytes += bytes;
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn clear(&mut self) {
        self.entries.clear();
        self.bytes = 0;
    }
}

/// Host memory of an entry. Counts the parts that grow with the graph.
fn host_bytes(graph: &Graph, program: &Program) -> usize {
    // An operand with its boxed shape and strides, for about four axes.
    let operand = size_of::<super::Operand>() + size_of::<[usize; 8]>();
    let kernels: usize = program
        .kernels()
        .iter()
        .map(|k: &Kernel| {
            let kernels = 1 + k.absorbed.len();
            kernels * size_of::<Kernel>() + (k.inputs.len() + k.reads().len() + k.outputs.len()) * operand
        })
        .sum();
    let calls: usize = graph
        .calls
        .iter()
        .map(|c| size_of_val(c) + c.inputs.len() * size_of::<super::graph::Ref>() + c.specs.len() * operand)
        .sum();
    kernels + calls + graph.externals.len() * operand
}
