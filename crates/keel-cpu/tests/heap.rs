//! Large blocks return to the system when they are freed. The only test of its process, because it sets the allocator.

#![cfg(all(target_os = "linux", target_env = "gnu"))]

const MB: usize = 1 << 20;

/// Resident bytes of this process.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("this is Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a field");
    line.trim().trim_end_matches(" kB").parse::<usize>().expect("a number") << 10
}

#[test]
fn freed_blocks_leave_no_holes_in_the_heap() {
    keel_cpu::process::heap::stay_small();
    let block = || vec![1u8; 16 * MB];
    // By default freeing this block makes the allocator put the next ones into the heap.
    drop(std::hint::black_box(block()));
    let before = resident();
    let blocks: Vec<(Vec<u8>, Vec<u8>)> = (0..4).map(|_| (block(), vec![1u8; 1000])).collect();
    assert!(resident() >= before + 60 * MB);
    // The small blocks stay. They would keep the heap from shrinking.
    let small: Vec<Vec<u8>> = blocks.into_iter().map(|(_, small)| small).collect();
    let after = resident();
    assert!(after < before + 4 * MB, "{} MB stay after 64 MB were freed", after.saturating_sub(before) / MB);
    drop(std::hint::black_box(small));
}
