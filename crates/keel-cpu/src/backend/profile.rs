//! Time of launches, by operation.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

/// Time of one kind of kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelTime {
    /// Operation, and for linear layers the weight's shape.
    pub name: String,
    /// How often it ran.
    pub count: u64,
    /// Wall time, including the barrier after each run.
    pub time: Duration,
}

/// Times summed over launches.
#[derive(Debug, Default)]
pub(super) struct Profile(Mutex<BTreeMap<String, (u64, Duration)>>);

impl Profile {
    pub fn add(&self, name: String, time: Duration) {
        let mut sums = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let sum = sums.entry(name).or_default();
        sum.0 += 1;
        sum.1 += time;
    }

    /// The sums so far, longest first; sets them to zero.
    pub fn take(&self) -> Vec<KernelTime> {
        let sums = std::mem::take(&mut *self.0.lock().unwrap_or_else(|e| e.into_inner()));
        let mut times: Vec<KernelTime> =
            sums.into_iter().map(|(name, (count, time))| KernelTime { name, count, time }).collect();
        times.sort_by_key(|t| std::cmp::Reverse(t.time));
        times
    }
}

/// The name under which a kernel is counted.
pub(super) fn name_of(kernel: &keel_array::Kernel) -> String {
    use keel_array::Op;
    match &kernel.op {
        Op::Linear { weight, .. } | Op::GatherLinear { weight } => {
            format!("{} {}x{}", kernel.op.name(), weight.rows, weight.cols)
        }
        op => op.name().to_string(),
    }
}
