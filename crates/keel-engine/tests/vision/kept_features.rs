//! Where the features of pictures lie.

use std::sync::Arc;

use crate::common::looking::seeing;
use keel_array::{Backend, Category, MemoryReport};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_cuda::{CudaBackend, CudaOptions};
use keel_engine::{EngineOptions, VisionOptions, plan};
use keel_models::loading::CheckpointParameters;
use keel_testkit::fixtures::{SEEING, seeing_fixture};
use keel_weights::Checkpoint;

/// A GPU has memory of its own, and kept features do not lie there.
#[test]
fn kept_features_are_the_hosts() {
    let gpu: Arc<dyn Backend> = Arc::new(CudaBackend::planning(&CudaOptions::default()));
    let cpu: Arc<dyn Backend> = Arc::new(CpuBackend::planning(CpuOptions::default()));
    for name in SEEING {
        let source = Checkpoint::open(&seeing_fixture(name)).expect("opens");
        let parameters = CheckpointParameters(&source);
        let plan = |backend: &Arc<dyn Backend>, pictures| {
            let vision = VisionOptions { patches: 64, pictures, piece_tokens: VisionOptions::WHOLE };
            let options = EngineOptions { vision: Some(vision), ..seeing() };
            plan::plan(backend, &parameters, source.config(), options).expect("plans")
        };
        for backend in [&gpu, &cpu] {
            let (few, many) = (plan(backend, 1), plan(backend, 9));
            let on_device = |report: MemoryReport| report.total() - report.on_host();
            assert_eq!(on_device(many), on_device(few), "{name}: none of them on the device");
            let [few, many] = [few, many].map(|report| report.get(Category::Features));
            assert!(few > 0, "{name}");
            assert_eq!(many, 9 * few, "{name}: the features of a picture each");
        }
    }
}
