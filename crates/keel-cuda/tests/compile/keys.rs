//! The list of compilations.

use keel_cuda::kernels::{KernelKey, Source};

/// An entry point with constants as a model would give them. The last value of a constant counts.
fn key(source: Source, entry: &'static str, defines: &[(&'static str, &str)]) -> KernelKey {
    let last = |i: usize| defines[i + 1..].iter().all(|(later, _)| *later != defines[i].0);
    let defines = defines.iter().enumerate().filter(|(i, _)| last(*i));
    defines.fold(KernelKey::new(source, entry), |key, (_, (name, value))| key.define(name, value))
}

/// The list of compilations.
#[derive(Default)]
pub struct Keys(pub Vec<KernelKey>);

impl Keys {
    pub fn add(&mut self, source: Source, entries: &[&'static str], defines: &[(&'static str, &str)]) {
        self.0.extend(entries.iter().map(|entry| key(source, entry, defines)));
    }
}
