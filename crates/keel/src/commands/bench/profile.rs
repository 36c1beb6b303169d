//! Time per operation.

use std::time::Duration;

use anyhow::Result;
use keel_cpu::{CpuBackend, KernelTime};
use keel_engine::Engine;
use serde_json::{Value, json};

use super::drawing::Drawing;
use super::runs;

/// In text, operations below this share of a regime's time are summed.
const SHARE_MIN: f64 = 0.005;

/// The operations of one run, longest first.
pub struct Profile {
    prefill: Vec<KernelTime>,
    decode: Vec<KernelTime>,
}

impl Profile {
    /// Runs a prompt and `gen_len` steps after it, once.
    ///
    /// # Errors
    /// Errors of the engine, or logits that are not finite.
    pub fn take(
        engine: &mut Engine,
        backend: &CpuBackend,
        prompt: usize,
        gen_len: usize,
        drawing: Drawing,
    ) -> Result<Profile> {
        // Discards the times of earlier runs.
        backend.take_profile();
        let mut sequences = runs::prefill(engine, prompt)?;
        let prefill = backend.take_profile();
        runs::decode(engine, &mut sequences, gen_len, drawing)?;
        let decode = backend.take_profile();
        runs::release(engine, sequences)?;
        Ok(Profile { prefill, decode })
    }

    /// `{"prefill": [{"name", "count", "seconds"}], "decode": ..}`
    pub fn to_json(&self) -> Value {
        let list = |times: &[KernelTime]| -> Vec<Value> {
            let entry =
                |t: &KernelTime| json!({ "name": t.name, "count": t.count, "seconds": t.time.as_secs_f64() });
            times.iter().map(entry).collect()
        };
        json!({ "prefill": list(&self.prefill), "decode": list(&self.decode) })
    }

    /// One table per regime.
    pub fn to_text(&self) -> String {
        table("prefill", &self.prefill) + &table("decode", &self.decode)
    }
}

fn table(regime: &str, times: &[KernelTime]) -> String {
    let total: Duration = times.iter().map(|t| t.time).sum();
    let share = |time: Duration| time.as_secs_f64() / total.as_secs_f64().max(f64::MIN_POSITIVE);
    let row = |name: &str, count: u64, time: Duration| {
        format!("{name:<32} {count:>7} {:>10.2} ms {:>5.1}%\n", time.as_secs_f64() * 1e3, 100.0 * share(time))
    };
    let (long, short): (Vec<_>, Vec<_>) = times.iter().partition(|t| share(t.time) >= SHARE_MIN);
    let mut text = format!("\ntime of {regime} by operation, barriers included\n");
    text.extend(long.iter().map(|t| row(&t.name, t.count, t.time)));
    text += &row("all others", short.iter().map(|t| t.count).sum(), short.iter().map(|t| t.time).sum());
    text + &row("all", times.iter().map(|t| t.count).sum(), total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rare_operations_are_summed_up() {
        let time =
            |name: &str, count, us| KernelTime { name: name.into(), count, time: Duration::from_micros(us) };
        let text = table("prefill", &[time("linear", 2, 9990), time("cast", 3, 6), time("slice", 1, 4)]);
        assert!(text.contains("linear") && text.contains("99.9%"), "{text}");
        assert!(!text.contains("cast") && text.contains("all others"), "{text}");
        let all = text.lines().last().unwrap_or_default();
        assert!(all.starts_with("all ") && all.contains("10.00 ms") && all.contains(" 6 "), "{text}");
    }
}
