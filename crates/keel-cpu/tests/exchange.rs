//! Several CPU backends that exchange arrays.

use keel_array::{Array, Backend, DType, Peers, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuGroup, CpuOptions};
use keel_testkit::checks;
use std::sync::Arc;

fn group(count: usize, threads: usize) -> Vec<Runtime> {
    let runtime = |group| {
        let options = CpuOptions {
            threads: Some(threads),
            poison_freed: true,
            group: Some(group),
            ..CpuOptions::default()
        };
        Runtime::new(Arc::new(CpuBackend::new(options)), RuntimeOptions::default())
    };
    CpuGroup::of(count).into_iter().map(runtime).collect()
}

fn of_three() -> Peers {
    Peers { first: 0, count: 3 }
}

#[test]
fn groups_of_two_three_and_four_agree_with_the_oracle_and_keep_nothing() {
    for (count, threads) in [(2, 1), (2, 2), (3, 1), (4, 1)] {
        let runtimes = group(count, threads);
        checks::exchange(&runtimes);
        for runtime in &runtimes {
            runtime.clear_cache();
            assert_eq!(runtime.ledger().active().total(), 0, "of {count}");
        }
    }
}

/// The sums of these round differently in another order.
#[test]
fn all_devices_get_the_bits_of_the_sum_in_the_order_of_their_ranks() {
    let runtimes = group(3, 1);
    let shares = [[1e8f32, 1.0 / 3.0, -1e8], [-1e8, 1e8, 1e8], [1.0 / 3.0, -1e8, 0.1]];
    let want = [0, 1, 2].map(|i| shares[0][i] + shares[1][i] + shares[2][i]);
    assert!((0..3).all(|i| want[i] != shares[2][i] + shares[1][i] + shares[0][i]), "the order matters");
    std::thread::scope(|scope| {
        for (runtime, share) in runtimes.iter().zip(shares) {
            scope.spawn(move || {
                let (x, peers) = (Array::from_slice(runtime, &share, [3]).expect("memory"), of_three());
                let sum = x.all_reduce(peers).expect("f32");
                assert_eq!(sum.to_vec::<f32>().expect("runs"), want);
                let parts = x.reduce_scatter(peers).and_then(|part| part.all_gather(peers)).expect("3 rows");
                assert_eq!(parts.to_vec::<f32>().expect("runs"), want);
            });
        }
    });
}

#[test]
fn rows_that_do_not_divide_among_the_devices_are_refused_when_the_operation_is_built() {
    let runtimes = group(3, 1);
    let refusal = |shape: &[usize], peers| {
        let x = Array::zeros(&runtimes[0], shape, DType::F32).expect("a shape");
        x.reduce_scatter(peers).expect_err("refused").to_string()
    };
    assert_eq!(
        refusal(&[7, 6], of_three()),
        "reduce_scatter: x (7, 6) has 7 rows, which 3 devices cannot share equally; pad it to a multiple of 3 rows"
    );
    assert_eq!(
        refusal(&[], of_three()),
        "reduce_scatter: x () has no rows that 3 devices can share; reshape it to [n, ..]"
    );
    let x = Array::zeros(&runtimes[0], [6], DType::F32).expect("a shape");
    let nobody = x.reduce_scatter(Peers { first: 0, count: 0 }).and_then(|part| part.eval());
    let nobody = nobody.expect_err("there is nobody").to_string();
    assert!(nobody.contains("cannot run reduce_scatter: devices 0..0 are not all in the group"), "{nobody}");
    let error = x.cast(DType::F16).expect("a type").reduce_scatter(of_three()).expect_err("f16").to_string();
    assert_eq!(error, "reduce_scatter: x expected f32, got f16");
}

fn backend(runtime: &Runtime) -> &dyn keel_array::Group {
    runtime.backend().group().expect("it is in a group")
}

#[test]
fn devices_do_not_wait_for_one_that_gave_up_and_meet_again_later() {
    let runtimes = group(3, 1);
    let peers = of_three();
    let share = |runtime: &Runtime| Array::from_slice(runtime, &[1.0f32, 2.0], [2]).expect("memory");
    std::thread::scope(|scope| {
        for runtime in &runtimes[..2] {
            scope.spawn(move || {
                let error =
                    share(runtime).all_reduce(peers).expect("f32").to_vec::<f32>().expect_err("nobody comes");
                assert!(error.to_string().contains("device 2 of the group has failed"), "{error}");
            });
        }
        backend(&runtimes[2]).abandon();
    });
    runtimes.iter().for_each(|runtime| backend(runtime).rejoin());
    std::thread::scope(|scope| {
        for runtime in &runtimes {
            scope.spawn(move || {
                let sum = share(runtime).all_reduce(peers).expect("f32").to_vec::<f32>();
                assert_eq!(sum.expect("all come"), [3.0, 6.0]);
            });
        }
    });
}

#[test]
fn shares_of_different_lengths_are_errors_of_all() {
    let runtimes = group(2, 1);
    std::thread::scope(|scope| {
        for (runtime, len) in runtimes.iter().zip([3, 4]) {
            scope.spawn(move || {
                let x = Array::zeros(runtime, [len], DType::F32).expect("a shape");
                let error =
                    x.all_reduce(Peers { first: 0, count: 2 }).expect("f32").eval().expect_err("they differ");
                backend(runtime).abandon();
                let text = error.to_string();
                assert!(
                    ["brings", "has refused", "has failed"].iter().any(|why| text.contains(why)),
                    "{text}"
                );
            });
        }
    });
}

#[test]
fn a_device_alone_refuses_exchanges_when_the_program_is_made() {
    let alone = Runtime::new(Arc::new(CpuBackend::new(CpuOptions::default())), RuntimeOptions::default());
    assert!(alone.backend().group().is_none());
    let x = Array::zeros(&alone, [2], DType::F32).expect("a shape");
    let error = x.send(1).expect("f32").eval().expect_err("there is nobody").to_string();
    assert!(error.contains("cannot run send") && error.contains("this device is alone"), "{error}");
    let of_two = group(2, 1);
    let x = Array::zeros(&of_two[0], [2], DType::F32).expect("a shape");
    let error = x.send(2).expect("f32").eval().expect_err("there are two").to_string();
    assert!(error.contains("not all in the group, which has 2"), "{error}");
    let error = x.cast(DType::F16).expect("a type").send(1).expect_err("f16").to_string();
    assert!(error.contains("f32"), "{error}");
    let planning: Arc<dyn Backend> = Arc::new(CpuBackend::planning(CpuOptions::default()));
    assert!(planning.group().is_none());
}
