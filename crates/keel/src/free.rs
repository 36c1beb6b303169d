//! Memory that a device has free: the one place that knows, for CPU and GPU.

use keel_array::{Category, MemoryReport, Runtime};
use keel_cpu::memory::{self, Bound};

use crate::driver::{Driver, ROOM_BYTES};
use crate::report::human_bytes;

/// Bytes of the host's memory that a plan leaves free: for the program itself, its heap and its threads.
const HOST_ROOM_BYTES: u64 = 64 << 20;

/// What a plan may take, and why no more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// Bytes of the plan's categories that lie on the device.
    pub bytes: u64,
    /// Said after the number.
    pub why: String,
}

impl Room {
    /// What is free on the device of a runtime that holds nothing yet; `None` where nothing tells.
    pub fn of(runtime: &Runtime) -> Option<Room> {
        match Driver::measure(runtime) {
            Some(driver) => Some(Room::of_gpu(&driver)),
            None => Room::of_host(),
        }
    }

    /// What the host has free.
    pub fn of_host() -> Option<Room> {
        let free = memory::free()?;
        let who = match free.bound {
            Bound::Machine => "this machine",
            Bound::ControlGroup => "the control group (container) of this process",
        };
        let (bytes, room) = (free.bytes.saturating_sub(HOST_ROOM_BYTES), human_bytes(HOST_ROOM_BYTES));
        Some(Room { bytes, why: format!("what {who} has free now less {room} for the program") })
    }

    /// What a GPU has free.
    pub fn of_gpu(driver: &Driver) -> Room {
        let room = human_bytes(ROOM_BYTES);
        Room { bytes: driver.limit(), why: format!("what the GPU has free now less {room} for its driver") }
    }
}

/// What a plan takes on the device: parked sequences are in the host's memory.
pub fn on_device(planned: &MemoryReport, is_gpu: bool) -> u64 {
    if is_gpu { planned.total() - planned.get(Category::Swap) } else { planned.total() }
}

/// What a plan takes of the host's memory.
pub fn on_host(planned: &MemoryReport, is_gpu: bool) -> u64 {
    if is_gpu { planned.get(Category::Swap) } else { planned.total() }
}
