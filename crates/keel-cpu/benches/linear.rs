//! Linear layers beside the floors of the machine. Run with `cargo bench -p keel-cpu --bench linear`.

use std::time::Duration;

use keel_cpu::floors;
use keel_cpu::isa::Isa;
use keel_cpu::pool::ThreadPool;

fn main() {
    let pool = ThreadPool::new(std::thread::available_parallelism().map_or(1, usize::from));
    let budget = Duration::from_millis(300);
    for isa in Isa::available() {
        let peaks = floors::peaks(&pool, isa, budget);
        let giga = |rate: Option<f64>| rate.map_or("-".into(), |r| format!("{:.0}", r / 1e9));
        println!(
            "{isa}: f32 FMA {} GFLOP/s, int8 dot {} GOP/s, bf16 dot {} GFLOP/s",
            giga(peaks.f32_fma),
            giga(peaks.int8_dot),
            giga(peaks.bf16_dot)
        );
    }
    let buffer = vec![1u64; 64 << 20];
    let read = floors::read_bandwidth(&pool, &buffer, 3 * budget);
    println!("memory read: {:.1} GB/s, {} threads", read / 1e9, pool.workers());
    let one = ThreadPool::new(1);
    println!("memory read: {:.1} GB/s, 1 thread", floors::read_bandwidth(&one, &buffer, 3 * budget) / 1e9);
}
