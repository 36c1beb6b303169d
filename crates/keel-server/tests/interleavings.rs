//! Every order in which threads can charge a budget. The file under test is the crate's own, compiled with loom's
//! types, so no special build is needed.

#[path = "../src/memory/charge.rs"]
#[allow(dead_code)]
mod charge;

mod sync {
    pub(crate) use loom::sync::{Arc, atomic};
}

use charge::{Budget, Meter, Refused};
use loom::sync::Arc;
use loom::thread;

const LIMIT: u64 = 100;

fn budget() -> Arc<Budget> {
    Arc::new(Budget::new(LIMIT, 0))
}

#[test]
fn charges_never_exceed_the_budget_and_all_come_back() {
    loom::model(|| {
        let budget = budget();
        let client = |bytes: u64| {
            let budget = Arc::clone(&budget);
            move || {
                let charge = Meter::new(&budget);
                let taken = charge.take(bytes);
                assert!(budget.used() <= LIMIT, "{}", budget.used());
                assert_eq!(charge.held(), if taken.is_ok() { bytes } else { 0 });
                assert!(!matches!(taken, Err(Refused::Always { .. })), "it fits when it is alone");
                taken.is_ok()
            }
        };
        let other = thread::spawn(client(60));
        let here = client(70)();
        let there = other.join().expect("it ends");
        assert!(here || there, "the first is not refused");
        assert_eq!(budget.used(), 0);
        assert!(budget.peak() <= LIMIT && budget.peak() >= 60, "{}", budget.peak());
    });
}

#[test]
fn parts_of_a_request_keep_one_account() {
    loom::model(|| {
        let budget = budget();
        let request = Meter::new(&budget);
        let part = request.part();
        let other = thread::spawn(move || {
            let taken = part.take(30).is_ok();
            part.give_back(if taken { 10 } else { 0 });
            assert_eq!(part.held(), if taken { 20 } else { 0 });
            drop(part);
        });
        let hold = request.hold(60).expect("it fits next to the part");
        hold.keep(40);
        assert_eq!(request.held(), 40);
        other.join().expect("it ends");
        assert_eq!(budget.used(), 40, "the part has given back its bytes");
        // All that is held is the request's own: it never fits.
        assert_eq!(request.take(61), Err(Refused::Always { needed: 101, limit: LIMIT }));
        drop(request);
        assert_eq!(budget.used(), 0);
    });
}
