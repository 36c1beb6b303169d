//! Reports memory and speed, as tables and as JSON.

use std::fmt::Write as _;
use std::time::Duration;

use evenkeel::{DriverMemory, human_bytes};
use keel_array::{DeviceUsage, MemoryReport, Runtime};
use keel_server::DeviceReport;
use serde_json::{Map, Value, json};

use crate::placed_model::DevicePlan;

/// Planned and measured memory; of several devices, the sums.
#[derive(Clone, Debug)]
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
    pub driver: Option<DriverMemory>,
    /// The devices, if there are several.
    pub devices: Vec<DeviceReport>,
}

impl Memory {
    /// Reads the ledgers, the system and the driver now. `planned` is the plan to report. `devices` are the plans of
    /// several devices; it is empty if there is one.
    pub fn measure<'a>(
        planned: MemoryReport,
        runtimes: impl Iterator<Item = &'a Runtime>,
        devices: &[DevicePlan],
    ) -> Memory {
        let runtimes: Vec<&Runtime> = runtimes.collect();
        let device = |(plan, runtime): (&DevicePlan, &&Runtime)| DeviceReport {
            name: plan.name.clone(),
            planned: plan.planned,
            allocated: runtime.ledger().active(),
            peak: runtime.ledger().peak(),
        };
        Memory {
            planned,
            allocated: runtimes.iter().map(|runtime| runtime.ledger().active()).sum(),
            peak: runtimes.iter().map(|runtime| runtime.ledger().peak()).sum(),
            resident: resident_bytes(),
            driver: runtimes.first().and_then(|runtime| DriverMemory::measure(runtime)),
            devices: devices.iter().zip(&runtimes).map(device).collect(),
        }
    }

    /// The fields `planned`, `allocated` and `peak` by category, `resident` and `driver`; of several devices also
    /// `devices`.
    pub fn to_json(&self) -> Value {
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
        if !self.devices.is_empty() {
            let device = |DeviceReport { name, planned, allocated, peak }: &DeviceReport| {
                json!({
                    "device": name,
                    "planned": categories(planned),
                    "allocated": categories(allocated),
                    "peak": categories(peak),
                })
            };
            object["devices"] = self.devices.iter().map(device).collect();
        }
        object
    }

    /// One line per category in use, then the sum, the driver's bytes, and the resident set. Several devices have a
    /// table each, before that of the sums.
    pub fn to_table(&self) -> String {
        let mut table = String::new();
        for DeviceReport { name, planned, allocated, peak } in &self.devices {
            memory_table(&mut table, name, [planned, allocated, peak]);
        }
        memory_table(&mut table, "memory", [&self.planned, &self.allocated, &self.peak]);
        if let Some(driver) = self.driver {
            let _ = writeln!(table, "{:<12}{:>36}  {}", "driver", human_bytes(driver.bytes), driver.what());
        }
        if let Some(resident) = self.resident {
            let _ = writeln!(table, "{:<12}{:>36}", "resident", human_bytes(resident));
        }
        table
    }
}

/// Appends a table of planned, allocated and peak bytes.
fn memory_table(table: &mut String, what: &str, columns: [&MemoryReport; 3]) {
    let _ = writeln!(table, "{what:<12}{:>12}{:>12}{:>12}", "planned", "allocated", "peak");
    let mut row = |name: &str, cells: [u64; 3]| {
        let [planned, allocated, peak] = cells.map(human_bytes);
        let _ = writeln!(table, "{name:<12}{planned:>12}{allocated:>12}{peak:>12}");
    };
    for (category, _) in columns[0].iter() {
        let cells = columns.map(|report| report.get(category));
        if cells.iter().any(|&bytes| bytes > 0) {
            row(category.name(), cells);
        }
    }
    row("total", columns.map(|report| report.total()));
}

/// A JSON object that maps each category to its bytes.
pub fn categories(report: &MemoryReport) -> Value {
    Value::Object(report.iter().map(|(c, bytes)| (c.name().to_string(), bytes.into())).collect::<Map<_, _>>())
}

/// The driver's `bytes`; `others` (null if they cannot be measured, and are therefore part of `bytes`); and the
/// device's
/// `free` and `total`.
pub fn driver_json(driver: &DriverMemory) -> Value {
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

/// A table with a column for each device and one for their sum.
pub fn devices_table(devices: &[DevicePlan]) -> String {
    let sum: MemoryReport = devices.iter().map(|plan| plan.planned).sum();
    let own = devices.iter().map(|plan| (plan.name.as_str(), plan.planned));
    let columns: Vec<(&str, MemoryReport)> = own.chain([("all", sum)]).collect();
    let mut table = String::new();
    let mut row = |name: &str, cells: &mut dyn Iterator<Item = String>| {
        let cells: String = cells.map(|cell| format!("{cell:>16}")).collect();
        let _ = writeln!(table, "{name:<12}{cells}");
    };
    row("", &mut columns.iter().map(|(name, _)| (*name).to_string()));
    for (category, _) in sum.iter().filter(|(_, bytes)| *bytes > 0) {
        row(category.name(), &mut columns.iter().map(|(_, planned)| planned.get(category).to_string()));
    }
    row("total", &mut columns.iter().map(|(_, planned)| planned.total().to_string()));
    row("", &mut columns.iter().map(|(_, planned)| human_bytes(planned.total())));
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
