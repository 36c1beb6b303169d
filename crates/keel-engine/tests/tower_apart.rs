//! A vision tower on a device of its own: the same features and logits to the bit, and every byte on the device that has it.

mod common;

use std::sync::Arc;

use common::looking::{outcome, seeing};
use common::runtime;
use keel_array::{Backend, Category};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::{Engine, plan};
use keel_models::Part;
use keel_models::loading::CheckpointParameters;
use keel_testkit::fixtures::{SEEING, VLM, seeing_fixture, vlm_fixture};
use keel_weights::Checkpoint;

fn cpu_plan() -> Arc<dyn Backend> {
    Arc::new(CpuBackend::planning(CpuOptions { threads: Some(2), ..CpuOptions::default() }))
}

#[test]
fn a_tower_on_another_device_sees_the_same() {
    let own = SEEING.into_iter().map(|name| (name, seeing_fixture(name)));
    for (name, folder) in own.chain(VLM.into_iter().filter_map(|name| Some((name, vlm_fixture(name)?)))) {
        let source = Checkpoint::open(&folder).expect("opens");
        let parameters = CheckpointParameters(&source);
        let json = source.config();
        let whole = runtime(2);
        let mut engine = Engine::load(&whole, &parameters, json, seeing(), &|_| ()).expect("it loads");
        let want = outcome(&mut engine);
        let all = whole.ledger().active();
        drop(engine);

        let (model, tower) = (runtime(2), runtime(2));
        let devices = [(model.clone(), Part::default())];
        let mut apart =
            Engine::load_seeing_on((&devices, Some(&tower)), &parameters, json, seeing(), &|_| ())
                .expect("it loads");
        apart.make_ready(&mut |_, _, _| ()).expect("it is made ready");
        let planned = [(cpu_plan(), Part::default())];
        let planned =
            plan::plan_seeing_on((&planned, Some(&cpu_plan())), &parameters, json, seeing()).expect("plans");
        let held = || vec![model.ledger().active(), tower.ledger().active()];
        assert_eq!(planned, held(), "{name}");
        for _ in 0..2 {
            let got = outcome(&mut apart);
            assert!(got == want, "{name}: other features or logits");
        }
        assert_eq!(planned, held(), "{name}: nothing else is allocated");
        assert_eq!(planned, vec![model.ledger().peak(), tower.ledger().peak()], "{name}");
        let late = apart.late_work();
        assert_eq!((late.allocate, late.compile), (0, 0), "{name}");
        let [on_model, on_tower] = planned[..] else { panic!("two devices") };
        for category in [Category::Weights, Category::Features] {
            let sum = on_model.get(category) + on_tower.get(category);
            assert_eq!(sum, all.get(category), "{name}: {category}");
        }
        assert_eq!(on_model.get(Category::Features), 0, "{name}");
        assert!(on_tower.get(Category::Vision) > 0 && on_tower.get(Category::Weights) > 0, "{name}");
        assert_eq!(on_tower.get(Category::Kv), 0, "{name}");
        assert!(on_model.total() < all.total(), "{name}: the model's device has less");
        drop(apart);
        // The arena is the runtime's.
        let left = tower.ledger().active();
        assert_eq!(left.total(), left.get(Category::Activations), "{name}: all is given back");
    }
}
