//! The list of compilations.

use keel_cuda::kernels::{KernelKey, Source};

/// An entry point with constants as a model would give them.
fn key(source: Source, entry: &'static str, defines: &[(&'static str, &str)]) -> KernelKey {
    defines.iter().fold(KernelKey::new(source, entry), |key, (name, value)| key.define(name, value))
}

/// The list of compilations.
#[derive(Default)]
pub struct Keys(pub Vec<KernelKey>);

impl Keys {
    pub fn add(&mut self, source: Source, entries: &[&'static str], defines: &[(&'static str, &str)]) {
        self.0.extend(entries.iter().map(|entry| key(source, entry, defines)));
    }
}
