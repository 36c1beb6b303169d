//! Failed reads of a mapped file: the file was cut short, or its disk failed.
//!
//! The system answers such a read with the signal SIGBUS, which ends the process. The handler here instead maps zeros
//! over the rest of the mapping and records the damage. The read goes on, and the caller asks [`Watched::is_damaged`]
//! later. There is no cost while files stay intact. Signals at other addresses go to the handler that was installed
//! before.
#![allow(unsafe_code)]

use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// Most mappings watched at a time. The largest published checkpoints have about 200 files. Further ones are not
/// watched.
const MAPPINGS_MAX: usize = 1024;

/// A place in the table of mappings; free if `start` is 0.
struct Mapping {
    start: AtomicUsize,
    end: AtomicUsize,
    damaged: AtomicBool,
}

static MAPPINGS: [Mapping; MAPPINGS_MAX] = [const {
    Mapping { start: AtomicUsize::new(0), end: AtomicUsize::new(0), damaged: AtomicBool::new(false) }
}; MAPPINGS_MAX];

/// Value of `start` while a place is being filled: no mapping begins here.
const BEING_FILLED: usize = 1;

static PAGE_BYTES: AtomicUsize = AtomicUsize::new(4096);
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

/// Watches a mapping until dropped. Drop it before the mapping.
#[derive(Debug)]
pub(crate) struct Watched(Option<usize>);

impl Watched {
    /// Watches a read-only private mapping of a file.
    pub fn new(mapping: &[u8]) -> Watched {
        install();
        let page = PAGE_BYTES.load(Ordering::Relaxed);
        let start = mapping.as_ptr() as usize;
        let end = (start + mapping.len()).next_multiple_of(page);
        let take = |slot: &Mapping| {
            let (free, relaxed) = (0, Ordering::Relaxed);
            slot.start.compare_exchange(free, BEING_FILLED, Ordering::Acquire, relaxed).is_ok()
        };
        let place = MAPPINGS.iter().position(take);
        if let Some(place) = place {
            let slot = &MAPPINGS[place];
            slot.damaged.store(false, Ordering::Relaxed);
            slot.end.store(end, Ordering::Relaxed);
            slot.start.store(start, Ordering::Release);
        }
        Watched(place)
    }

    /// Whether a read of the mapping has failed and was answered with zeros.
    pub fn is_damaged(&self) -> bool {
        self.0.is_some_and(|place| MAPPINGS[place].damaged.load(Ordering::Acquire))
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if let Some(place) = self.0 {
            MAPPINGS[place].start.store(0, Ordering::Release);
        }
    }
}

/// Installs the handler, once per process.
fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: asks for a constant of the system.
        if let Ok(bytes) = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }) {
            PAGE_BYTES.store(bytes, Ordering::Relaxed);
        }
        // SAFETY: `sigaction` is plain data, for which zeros are valid: no flags, an empty mask.
        let (mut previous, mut ours): (libc::sigaction, libc::sigaction) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        // SAFETY: the pointers are to locals; a null action only reads the present one.
        if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut previous) } != 0 {
            return;
        }
        PREVIOUS.store(Box::into_raw(Box::new(previous)), Ordering::Release);
        ours.sa_sigaction = on_bus_error as *const () as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler has the signature that SA_SIGINFO asks for, and makes only calls that a handler may make.
        unsafe { libc::sigaction(libc::SIGBUS, &ours, std::ptr::null_mut()) };
    });
}

/// Runs in a signal handler: uses only atomics and system calls.
extern "C" fn on_bus_error(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the system hands over a valid description, whose address is set for this signal.
    let address = unsafe { (*info).si_addr() } as usize;
    for slot in &MAPPINGS {
        let start = slot.start.load(Ordering::Acquire);
        let end = slot.end.load(Ordering::Relaxed);
        if start <= BEING_FILLED || !(start..end).contains(&address) {
            continue;
        }
        slot.damaged.store(true, Ordering::Release);
        let page = PAGE_BYTES.load(Ordering::Relaxed);
        let first = address / page * page;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: these are whole pages of a mapping that its owner keeps while it is watched. The mapping is
        // read-only, so no written data is lost. Later reads of these pages give zeros.
        let mapped = unsafe { libc::mmap(first as *mut _, end - first, libc::PROT_READ, flags, -1, 0) };
        if mapped != libc::MAP_FAILED {
            return;
        }
    }
    // Not a watched mapping. After the return the read fails again, and the earlier handler answers.
    let previous = PREVIOUS.load(Ordering::Acquire);
    // SAFETY: stored before this handler was installed, never freed.
    unsafe { libc::sigaction(libc::SIGBUS, previous, std::ptr::null_mut()) };
}
