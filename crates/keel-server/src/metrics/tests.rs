use keel_array::DeviceUsage;
use keel_engine::batch::BatchStatus;

use super::*;

fn exposed(metrics: &Metrics, status: BatchStatus) -> String {
    let totals = Totals { status, leaks: 0, engines: Vec::new(), split: Vec::new() };
    metrics.expose(totals, &RequestMemory::new(1 << 20, 0))
}

/// Two scrapes at once may read their totals in one order and expose them in the other.
#[test]
fn totals_that_come_late_are_not_counted_twice() {
    let status = |count: u64| {
        let mut status = BatchStatus::default();
        (status.speculation.drafted[0], status.speculation.accepted[0]) = (2 * count, count);
        (status.parking.times, status.parking.bytes_out, status.parking.bytes_in) =
            (3 * count, 4 * count, 5 * count);
        status
    };
    let metrics = Metrics::new();
    exposed(&metrics, status(10));
    exposed(&metrics, status(7));
    let text = exposed(&metrics, status(11));
    for line in [
        "keel_drafts_total{position=\"1\"} 22\n",
        "keel_drafts_accepted_total{position=\"1\"} 11\n",
        "keel_parkings_total 33\n",
        "keel_swap_bytes_total{direction=\"out\"} 44\n",
        "keel_swap_bytes_total{direction=\"in\"} 55\n",
    ] {
        assert!(text.contains(line), "{line}{text}");
    }
}

#[test]
fn the_drivers_part_is_what_no_engine_on_the_device_has() {
    let usage = DeviceUsage { total: 1000, free: 400, free_before: Some(900) };
    // Of 500 bytes in use the engines have 300, 120 and 200. The last is on another device.
    let reading =
        |name: &str, tensors: u64| (name.to_string(), DeviceReading { usage, driver_bytes: 500 - tensors });
    let metrics = Metrics::new();
    let readings = vec![reading("cuda:0", 300), reading("cuda:0", 120), reading("cuda:1", 200)];
    metrics.set_device_memory(readings);
    let text = metrics.encoded();
    for (kind, bytes) in [("total", 1000), ("free", 400), ("driver", 80)] {
        let line = format!("keel_device_memory_bytes{{kind=\"{kind}\"}} {bytes}\n");
        assert!(text.contains(&line), "{line}{text}");
    }
}

#[test]
fn memory_of_devices_is_not_exposed_after_their_models_are_gone() {
    let metrics = Metrics::new();
    let usage = DeviceUsage { total: 1000, free: 400, free_before: None };
    metrics.set_device_memory(vec![("cuda:0".into(), DeviceReading { usage, driver_bytes: 9 })]);
    let report = MemoryReport::default();
    let device = DeviceReport { name: "cuda:0".into(), planned: report, allocated: report, peak: report };
    metrics.set_split_memory(&SplitModel { model: "m".into(), devices: vec![device] });
    let samples = |text: &str| {
        ["keel_device_memory_bytes{", "keel_split_memory_bytes{"].map(|name| text.contains(name))
    };
    assert_eq!(samples(&metrics.encoded()), [true, true]);
    assert_eq!(samples(&exposed(&metrics, BatchStatus::default())), [false, false]);
}

#[test]
fn a_request_lasts_until_its_last_token() {
    let (metrics, arrived) = (Metrics::new(), Instant::now());
    let mut timer = RequestTimer::new(metrics.clone(), Span::none(), 1, arrived);
    timer.started(0, Duration::ZERO);
    for seconds in [20, 50] {
        timer.token(arrived + Duration::from_secs(seconds));
    }
    timer.ended(Ending::Stop, Usage::default());
    drop(timer);
    let text = metrics.encoded();
    for line in ["keel_time_to_first_token_seconds_sum 20.0\n", "keel_request_seconds_sum 50.0\n"] {
        assert!(text.contains(line), "{line}{text}");
    }
}
