//! Counters and histograms, and the timer of each request.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use keel_array::{Category, DeviceReading, MemoryReport};
use keel_engine::SpeculationCounters;
use keel_engine::batch::ParkingStatus;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use tracing::Span;

use crate::answer::{Ending, Usage};
use crate::engine::view::DeviceReport;
use crate::memory::requests::RequestMemory;
use crate::model_manager::{SplitModel, Totals};

/// A label with a fixed set of values.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Word(&'static str);

impl EncodeLabelValue for Word {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.0.encode(encoder)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: Word,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Bytes {
    category: Word,
    kind: Word,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeviceBytes {
    model: String,
    device: String,
    category: Word,
    kind: Word,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    kind: Word,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Direction {
    direction: Word,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Position {
    position: u64,
}

/// The server's metrics. Clones share them.
#[derive(Clone)]
pub struct Metrics(Arc<Inner>);

struct Inner {
    registry: Registry,
    running: Gauge,
    waiting: Gauge,
    parked: Gauge,
    parkings: Counter,
    failed_steps: Counter,
    late_work: Family<Kind, Counter>,
    lost: Counter,
    swap_bytes: Family<Direction, Counter>,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    generated_tokens: Counter,
    finished: Family<Reason, Counter>,
    refused: Family<Reason, Counter>,
    queue_time: Histogram,
    first_token: Histogram,
    between_tokens: Histogram,
    request_time: Histogram,
    prefix_pages: Gauge,
    free_pages: Gauge,
    prefix_states: Gauge,
    memory: Family<Bytes, Gauge>,
    split_memory: Family<DeviceBytes, Gauge>,
    device_memory: Family<Kind, Gauge>,
    request_memory: Family<Kind, Gauge>,
    drafted: Family<Position, Counter>,
    accepted: Family<Position, Counter>,
    /// Held while the gauges are set and read.
    exposing: Mutex<()>,
}

/// Buckets in seconds, from 1 ms to 1 minute.
const SECONDS: [f64; 15] =
    [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0];

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics::new()
    }
}

/// Reasons of refusals that have an alert. They are there from the start, because a counter that appears has no
/// increase.
const ALERTED: [&str; 2] = ["engine_stopped", "model_load_failure"];

impl Metrics {
    /// Creates the metrics, all at zero.
    pub fn new() -> Metrics {
        let histogram = || Histogram::new(SECONDS);
        let mut inner = Inner {
            registry: Registry::with_prefix("keel"),
            running: Gauge::default(),
            waiting: Gauge::default(),
            parked: Gauge::default(),
            parkings: Counter::default(),
            failed_steps: Counter::default(),
            late_work: Family::default(),
            lost: Counter::default(),
            swap_bytes: Family::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            generated_tokens: Counter::default(),
            finished: Family::default(),
            refused: Family::default(),
            queue_time: histogram(),
            first_token: histogram(),
            between_tokens: histogram(),
            request_time: histogram(),
            prefix_pages: Gauge::default(),
            free_pages: Gauge::default(),
            prefix_states: Gauge::default(),
            memory: Family::default(),
            split_memory: Family::default(),
            device_memory: Family::default(),
            request_memory: Family::default(),
            drafted: Family::default(),
            accepted: Family::default(),
            exposing: Mutex::default(),
        };
        for code in ALERTED {
            drop(inner.refused.get_or_create(&Reason { reason: Word(code) }));
        }
        inner.register();
        Metrics(Arc::new(inner))
    }

    /// The current metrics in Prometheus' text format. Two scrapes at once may come with their totals in any order, so
    /// counters keep the largest count.
    pub(crate) fn expose(&self, totals: Totals, requests: &RequestMemory) -> String {
        let inner = &self.0;
        let Totals { status, leaks, engines, split } = totals;
        let _exposing = inner.exposing.lock().unwrap_or_else(|e| e.into_inner());
        inner.running.set(status.running.len() as i64);
        inner.waiting.set(status.waiting as i64);
        self.count_parking(&status.parking);
        inner.free_pages.set(status.free_pages as i64);
        inner.prefix_pages.set(status.prefix_pages as i64);
        inner.prefix_states.set(status.prefix_states as i64);
        raise(&inner.failed_steps, status.failed_steps);
        self.count_drafts(&status.speculation);
        for (kind, count) in status.late_work.named() {
            raise(&inner.late_work.get_or_create(&Kind { kind: Word(kind) }), count);
        }
        self.set_all_memory(&engines.iter().map(|engine| engine.devices()).collect::<Vec<_>>());
        // A model that was unloaded since then has no memory.
        inner.split_memory.clear();
        split.iter().for_each(|model| self.set_split_memory(model));
        for (kind, bytes) in
            [("planned", requests.limit()), ("allocated", requests.used()), ("peak", requests.peak())]
        {
            inner.request_memory.get_or_create(&Kind { kind: Word(kind) }).set(bytes as i64);
        }
        raise(&inner.lost, leaks);
        self.set_device_memory(engines.iter().filter_map(|engine| engine.device_usage()).collect());
        self.encoded()
    }

    /// The metrics as they were set last.
    pub(crate) fn encoded(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.0.registry);
        text
    }

    fn count_drafts(&self, now: &SpeculationCounters) {
        for (i, (&drafted, &accepted)) in now.drafted.iter().zip(&now.accepted).enumerate() {
            let position = Position { position: i as u64 + 1 };
            raise(&self.0.drafted.get_or_create(&position), drafted);
            raise(&self.0.accepted.get_or_create(&position), accepted);
        }
    }

    fn count_parking(&self, now: &ParkingStatus) {
        let inner = &self.0;
        inner.parked.set(now.parked as i64);
        raise(&inner.parkings, now.times);
        for (direction, bytes) in [("out", now.bytes_out), ("in", now.bytes_in)] {
            raise(&inner.swap_bytes.get_or_create(&Direction { direction: Word(direction) }), bytes);
        }
    }

    /// Sets the memory of the device of the first reading. Each reading is that of one engine, with the name of its
    /// device. A driver has one account for a device. Its own part is the rest after the tensors of all engines on the
    /// device.
    fn set_device_memory(&self, readings: Vec<(String, DeviceReading)>) {
        self.0.device_memory.clear();
        let Some(((name, DeviceReading { usage, driver_bytes }), others)) = readings.split_first() else {
            return;
        };
        let tensors = |reading: &DeviceReading| {
            let DeviceReading { usage, driver_bytes } = reading;
            usage.in_use().saturating_sub(usage.others().unwrap_or(0)).saturating_sub(*driver_bytes)
        };
        let of_others: u64 =
            others.iter().filter(|(other, _)| other == name).map(|(_, reading)| tensors(reading)).sum();
        let driver_bytes = driver_bytes.saturating_sub(of_others);
        for (kind, bytes) in [("total", usage.total), ("free", usage.free), ("driver", driver_bytes)] {
            self.0.device_memory.get_or_create(&Kind { kind: Word(kind) }).set(bytes as i64);
        }
    }

    /// Sets the memory of these engines, the sums of all devices.
    fn set_all_memory(&self, engines: &[Vec<DeviceReport>]) {
        let all = || engines.iter().flatten();
        for category in Category::ALL {
            let sum = |of: &dyn Fn(&DeviceReport) -> MemoryReport| {
                all().map(|device| of(device).get(category)).sum()
            };
            self.set_memory(category, "planned", sum(&|device| device.planned));
            self.set_memory(category, "allocated", sum(&|device| device.allocated));
            self.set_memory(category, "peak", sum(&|device| device.peak));
        }
    }

    /// Sets the memory of each device that shares a model.
    fn set_split_memory(&self, split: &SplitModel) {
        for device in &split.devices {
            let kinds = [("planned", device.planned), ("allocated", device.allocated), ("peak", device.peak)];
            for (kind, report) in kinds {
                for (category, bytes) in report.iter() {
                    let (model, device) = (split.model.clone(), device.name.clone());
                    let labels =
                        DeviceBytes { model, device, category: Word(category.name()), kind: Word(kind) };
                    self.0.split_memory.get_or_create(&labels).set(bytes as i64);
                }
            }
        }
    }

    fn set_memory(&self, category: Category, kind: &'static str, bytes: u64) {
        let labels = Bytes { category: Word(category.name()), kind: Word(kind) };
        self.0.memory.get_or_create(&labels).set(bytes as i64);
    }

    /// How many requests have ended for a reason.
    #[cfg(test)]
    pub(crate) fn finished(&self, reason: &'static str) -> u64 {
        self.0.finished.get_or_create(&Reason { reason: Word(reason) }).get()
    }

    /// Counts a refused request, by the error's code.
    pub fn refused(&self, code: &'static str) {
        self.0.refused.get_or_create(&Reason { reason: Word(code) }).inc();
    }
}

/// Raises a counter to a count that is kept elsewhere.
fn raise(counter: &Counter, count: u64) {
    counter.inner().fetch_max(count, Ordering::Relaxed);
}

impl Inner {
    fn register(&mut self) {
        let r = &mut self.registry;
        r.register("requests_running", "Sequences that run", self.running.clone());
        r.register("requests_waiting", "Requests in the queue", self.waiting.clone());
        r.register("requests_parked", "Sequences in host memory", self.parked.clone());
        r.register("parkings", "Times that a sequence was parked", self.parkings.clone());
        let failed = "Steps that failed, tried again or not, and states that could not be saved";
        r.register("failed_steps", failed, self.failed_steps.clone());
        r.register("late_work", "What was prepared after the start, by kind", self.late_work.clone());
        r.register(
            "idle_losses",
            "Times that pages or bytes were missing when nothing ran",
            self.lost.clone(),
        );
        r.register("swap_bytes", "Bytes copied to host memory and back", self.swap_bytes.clone());
        r.register("prompt_tokens", "Prompt tokens of started requests", self.prompt_tokens.clone());
        r.register(
            "prompt_tokens_cached",
            "Prompt tokens that an earlier request had run",
            self.cached_tokens.clone(),
        );
        r.register("generated_tokens", "Tokens generated", self.generated_tokens.clone());
        r.register("requests_finished", "Requests that ended, by reason", self.finished.clone());
        r.register("requests_refused", "Requests that were not answered, by error", self.refused.clone());
        let mut time = |name: &str, help: &str, histogram: &Histogram| {
            r.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        };
        time("queue", "Time in the queue", &self.queue_time);
        time("time_to_first_token", "From arrival to the first token", &self.first_token);
        time("time_between_tokens", "Between tokens of an answer", &self.between_tokens);
        time("request", "From arrival to the last token", &self.request_time);
        r.register("pages_free", "Pages of keys and values that nobody holds", self.free_pages.clone());
        r.register("pages_prefix", "Pages that remembered prefixes hold", self.prefix_pages.clone());
        r.register("states_prefix", "Saved states of remembered prefixes", self.prefix_states.clone());
        r.register("drafts", "Drafts made, by position after the last token", self.drafted.clone());
        r.register("drafts_accepted", "Drafts accepted, by position", self.accepted.clone());
        r.register(
            "request_memory_bytes",
            "Bytes of bodies, texts and their copies",
            self.request_memory.clone(),
        );
        r.register("memory_bytes", "Bytes per category of the ledger", self.memory.clone());
        r.register(
            "split_memory_bytes",
            "Bytes per category of the ledger of each device, where several share a model",
            self.split_memory.clone(),
        );
        r.register(
            "device_memory_bytes",
            "Bytes of a GPU as its driver counts them: all, free, and what the driver has in addition to the ledger",
            self.device_memory.clone(),
        );
    }
}

/// Times one request. At the end it logs one line within the request's span.
pub struct RequestTimer {
    metrics: Metrics,
    span: Span,
    arrived: Instant,
    /// The time in the queue, once the request has started.
    queued: Option<Duration>,
    first: Option<Instant>,
    last: Option<Instant>,
    usage: Usage,
    ending: Option<Ending>,
    failure: Option<&'static str>,
}

impl RequestTimer {
    /// A timer for a request. The fields `cached`, `generated` and `reason` of its span are filled later.
    pub fn new(metrics: Metrics, span: Span, prompt_tokens: usize, arrived: Instant) -> RequestTimer {
        RequestTimer {
            metrics,
            span,
            arrived,
            queued: None,
            first: None,
            last: None,
            usage: Usage { prompt: prompt_tokens, ..Usage::default() },
            ending: None,
            failure: None,
        }
    }

    /// The request starts to run.
    pub fn started(&mut self, cached_tokens: usize, queued: Duration) {
        let m = &self.metrics.0;
        self.queued = Some(queued);
        self.usage.cached = cached_tokens;
        self.span.record("cached", cached_tokens);
        m.queue_time.observe(queued.as_secs_f64());
        m.prompt_tokens.inc_by(self.usage.prompt as u64);
        m.cached_tokens.inc_by(cached_tokens as u64);
    }

    /// A token was generated at this time.
    pub fn token(&mut self, now: Instant) {
        let m = &self.metrics.0;
        match self.last {
            None => {
                self.first = Some(now);
                m.first_token.observe((now - self.arrived).as_secs_f64());
            }
            Some(last) => m.between_tokens.observe((now - last).as_secs_f64()),
        }
        self.last = Some(now);
        self.usage.completion += 1;
        m.generated_tokens.inc();
    }

    /// The request ended normally.
    pub fn ended(&mut self, ending: Ending, usage: Usage) {
        self.ending = Some(ending);
        self.usage = usage;
    }

    /// The request failed with this code of [`crate::Reply`]. The first one counts.
    pub fn failed(&mut self, code: &'static str) {
        self.failure.get_or_insert(code);
    }
}

impl Drop for RequestTimer {
    fn drop(&mut self) {
        let m = &self.metrics.0;
        let reason = match self.ending {
            Some(Ending::Stop) => "stop",
            Some(Ending::Length) => "length",
            Some(Ending::ToolCalls) => "tool_calls",
            None => self.failure.unwrap_or("cancelled"),
        };
        m.finished.get_or_create(&Reason { reason: Word(reason) }).inc();
        // Without a token, the request has ended now.
        let last = self.last.unwrap_or_else(Instant::now);
        m.request_time.observe((last - self.arrived).as_secs_f64());
        let ms = |d: Duration| (d.as_secs_f64() * 1e4).round() / 10.0;
        self.span.record("generated", self.usage.completion);
        self.span.record("reason", reason);
        self.span.in_scope(|| {
            tracing::info!(
                queued_ms = ms(self.queued.unwrap_or_else(|| self.arrived.elapsed())),
                first_token_ms = self.first.map(|at| ms(at - self.arrived)),
                total_ms = ms(self.arrived.elapsed()),
                "ended"
            );
        });
    }
}

#[cfg(test)]
mod tests;
