//! Reports memory and speed, as tables and as JSON.

use std::fmt::Write as _;
use std::time::Duration;

use evenkeel::{Driver, human_bytes};
use keel_array::{DeviceUsage, MemoryReport, Runtime};
use serde_json::{Map, Value, json};

/// Planned and measured memory.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// The plan, made before anything was loaded.
    pub planned: MemoryReport,
    /// Bytes in use at the end.
    pub allocated: MemoryReport,
    /// Peak bytes in use, for each category separately.
    pub peak: MemoryReport,
    /// Resident set of the process, as the system reports it. `None` if it cannot be read.
    pub resident: Option<u64>,
    /// Bytes of the device's driver, in addition to all the others. `None` on the CPU.
    pub driver: Option<Driver>,
}

impl Memory {
    /// Reads the ledger, the system and the driver now. `planned` is the plan to report.
    pub fn measure(planned: MemoryReport, runtime: &Runtime) -> Memory {
        let ledger = runtime.ledger();
        Memory {
            planned,
            allocated: ledger.active(),
            peak: ledger.peak(),
            resident: resident_bytes(),
            driver: Driver::measure(runtime),
        }
    }

    /// The fields `planned`, `allocated` and `peak` by category, `resident` and `driver`.
    pub fn to_json(self) -> Value {
        let mut object = json!({
            "planned": categories(&self.planned),
            "allocated": categories(&self.allocated),
            "peak": categories(&self.peak),
        });
        if let Some(resident) = self.resident {
            object["resident"] = resident.into();
        }
        if let Some(driver) = self.driver {
            object["driver"] = driver_json(&driver);
        }
        object
    }

    /// One line per category in use, then the sum, the driver's bytes, and the resident set.
    pub fn to_table(self) -> String {
        let columns = [self.planned, self.allocated, self.peak];
        let mut table = format!("{:<12}{:>12}{:>12}{:>12}\n", "memory", "planned", "allocated", "peak");
        let mut row = |name: &str, cells: [u64; 3]| {
            let [planned, allocated, peak] = cells.map(human_bytes);
            let _ = writeln!(table, "{name:<12}{planned:>12}{allocated:>12}{peak:>12}");
        };
        for (category, _) in self.planned.iter() {
            let cells = columns.map(|report| report.get(category));
            if cells.iter().any(|&bytes| bytes > 0) {
                row(category.name(), cells);
            }
        }
        row("total", columns.map(|report| report.total()));
        if let Some(driver) = self.driver {
            let _ = writeln!(table, "{:<12}{:>36}  {}", "driver", human_bytes(driver.bytes), driver.what());
        }
        if let Some(resident) = self.resident {
            let _ = writeln!(table, "{:<12}{:>36}", "resident", human_bytes(resident));
        }
        table
    }
}

/// A JSON object that maps each category to its bytes.
pub fn categories(report: &MemoryReport) -> Value {
    Value::Object(report.iter().map(|(c, bytes)| (c.name().to_string(), bytes.into())).collect::<Map<_, _>>())
}

/// The driver's `bytes`; `others` (null if they cannot be measured, and are therefore part of `bytes`); and the device's
/// `free` and `total`.
pub fn driver_json(driver: &Driver) -> Value {
    let DeviceUsage { total, free, .. } = driver.usage;
    json!({"bytes": driver.bytes, "others": driver.usage.others(), "free": free, "total": total, "pinned": driver.pinned})
}

/// A table of the bytes per category in use, and their sum.
pub fn plan_table(planned: &MemoryReport) -> String {
    let mut table = String::new();
    let mut row = |name: &str, bytes: u64| {
        let _ = writeln!(table, "{name:<12}{bytes:>16}{:>12}", human_bytes(bytes));
    };
    planned.iter().filter(|(_, bytes)| *bytes > 0).for_each(|(c, bytes)| row(c.name(), bytes));
    row("total", planned.total());
    table
}

/// Resident set of this process. Only Linux reports it in a file.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Times of a run.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Time to read and pack the weights.
    pub load: Duration,
    /// Time to run the prompt.
    pub prefill: Duration,
    /// Time of all steps after the prompt, including sampling.
    pub decode: Duration,
    /// Number of prompt tokens that were run.
    pub prompt_tokens: usize,
    /// Number of tokens that were run after the prompt.
    pub decode_steps: usize,
}

impl Timing {
    /// Prompt tokens per second.
    pub fn prefill_rate(&self) -> f64 {
        rate(self.prompt_tokens, self.prefill)
    }

    /// Tokens per second after the prompt.
    pub fn decode_rate(&self) -> f64 {
        rate(self.decode_steps, self.decode)
    }

    /// The fields of `timing` as JSON.
    pub fn to_json(self) -> Value {
        json!({
            "load_s": self.load.as_secs_f64(),
            "prefill_s": self.prefill.as_secs_f64(),
            "decode_s": self.decode.as_secs_f64(),
            "prefill_tokens_per_second": self.prefill_rate(),
            "decode_tokens_per_second": self.decode_rate(),
        })
    }

    /// One line for people.
    pub fn to_line(self) -> String {
        format!(
            "load {:.2} s, prefill {} tokens at {:.1} tokens/s, decode {} tokens at {:.1} tokens/s",
            self.load.as_secs_f64(),
            self.prompt_tokens,
            self.prefill_rate(),
            self.decode_steps,
            self.decode_rate()
        )
    }
}

/// Tokens per second; 0 if nothing was run.
pub fn rate(tokens: usize, time: Duration) -> f64 {
    if tokens == 0 || time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_run_has_no_rate() {
        assert_eq!(rate(0, Duration::from_secs(1)), 0.0);
        assert_eq!(rate(5, Duration::ZERO), 0.0);
        assert_eq!(rate(5, Duration::from_millis(500)), 10.0);
    }
}
