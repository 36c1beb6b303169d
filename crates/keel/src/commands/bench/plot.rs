//! Draws memory over time.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use keel_array::{Category, Ledger, MemoryReport};
use plotters::prelude::*;

/// Short enough to show loading, long enough not to disturb the runs.
const INTERVAL: Duration = Duration::from_millis(20);
/// Largest number of samples. When it is reached, every second sample is dropped and the interval doubles.
const SAMPLES_MAX: usize = 4096;
const SIZE: (u32, u32) = (960, 480);

/// Samples a ledger at intervals on a separate thread.
pub struct Recorder {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Record>,
}

/// Bytes per category, each with its time in seconds.
pub struct Record(Vec<(f64, MemoryReport)>);

impl Recorder {
    /// Starts sampling.
    pub fn start(ledger: &Ledger) -> Recorder {
        let stop = Arc::new(AtomicBool::new(false));
        let (ledger, flag) = (ledger.clone(), Arc::clone(&stop));
        Recorder { stop, thread: thread::spawn(move || record(&ledger, &flag)) }
    }

    /// Stops sampling and returns the samples.
    pub fn stop(self) -> Record {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or(Record(Vec::new()))
    }
}

fn record(ledger: &Ledger, stop: &AtomicBool) -> Record {
    let start = Instant::now();
    let mut samples = Vec::new();
    let mut interval = INTERVAL;
    loop {
        samples.push((start.elapsed().as_secs_f64(), ledger.active()));
        if stop.load(Ordering::Relaxed) {
            return Record(samples);
        }
        if samples.len() == SAMPLES_MAX {
            let mut index = 0;
            samples.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            interval *= 2;
        }
        thread::sleep(interval);
    }
}

impl Record {
    /// Draws the categories as stacked areas.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn draw(&self, path: &Path) -> Result<()> {
        let mut svg = String::new();
        self.draw_into(&mut svg).map_err(|error| anyhow!("cannot draw {}: {error}", path.display()))?;
        std::fs::write(path, svg).map_err(|error| anyhow!("cannot write {}: {error}", path.display()))
    }

    fn draw_into(&self, svg: &mut String) -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
        const MIB: f64 = (1 << 20) as f64;
        let end = self.0.last().map_or(1.0, |sample| sample.0.max(0.001));
        let top = self.0.iter().map(|(_, report)| report.total()).max().unwrap_or(1).max(1) as f64 / MIB;
        let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption("memory by category", ("sans-serif", 24))
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(72)
            .build_cartesian_2d(0.0..end, 0.0..top * 1.05)?;
        chart.configure_mesh().x_desc("seconds").y_desc("MiB").label_style(("sans-serif", 18)).draw()?;
        // The largest sum is drawn first, so that the following areas cover the lower part.
        for (i, category) in Category::ALL.into_iter().enumerate().rev() {
            if self.0.iter().all(|(_, report)| report.get(category) == 0) {
                continue;
            }
            let up_to = |report: &MemoryReport| {
                report.iter().filter(|(c, _)| *c <= category).map(|(_, bytes)| bytes).sum::<u64>() as f64
                    / MIB
            };
            let color = Palette99::pick(i).to_rgba();
            let points = self.0.iter().map(|(time, report)| (*time, up_to(report)));
            chart
                .draw_series(AreaSeries::new(points, 0.0, color))?
                .label(category.name())
                .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 10, y + 5)], color.filled()));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .background_style(WHITE.mix(0.8))
            .label_font(("sans-serif", 18))
            .draw()?;
        root.present()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_becomes_a_drawing_with_a_label_for_each_category_in_use() {
        let ledger = Ledger::default();
        let recorder = Recorder::start(&ledger);
        let weights = ledger.charge(Category::Weights, 5 << 20).expect("there is no limit");
        let kv = ledger.charge(Category::Kv, 1 << 20).expect("there is no limit");
        let record = recorder.stop();
        drop((weights, kv));
        let mut svg = String::new();
        record.draw_into(&mut svg).expect("draws");
        assert!(svg.starts_with("<svg") && svg.contains("weights") && svg.contains("kv"), "{svg}");
        assert!(!svg.contains("workspace"));
    }
}
