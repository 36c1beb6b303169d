//! NCCL's settings, and the device memory that it takes with them.
//!
//! The sizes are those of NCCL 2.30 (`src/init.cc`, `src/channel.cc`, `src/transport/p2p.cc`, `src/include/device.h`).
//! Each allocation takes whole pages of [`PAGE`], because NCCL maps them one by one.
//!
//! ```text
//! a channel        3 tables                                                   3 pages
//! a connection     receiving: buffers of three protocols     512 KiB + 4.7 MiB + 4 MiB = 5 pages
//!                  sending: one page of flags                                 1 page
//! a communicator   its own tables                                             at most 8 pages
//! ```
//!
//! Between machines (`src/transport/net.cc`) a device has as many buffers for a connection that sends, if the network
//! card reads its memory. And a tree of several machines gives it more neighbours.

use std::sync::Once;

/// Channels of a communicator, which share its work. The library would take up to 24 on Hopper, and 64 elsewhere.
const CHANNELS: u64 = 16;

/// Settings of the library, each unless the user has set it:
///
/// - No NVLink multicast.
/// - All connections are made at the start. So a device that fails later cannot leave a peer in the middle of a
///   connection, and the memory of connections is already taken when plans are compared with free memory.
/// - No access to another device's operands: arenas are mapped for their own device only. Exchanges go through the
///   library's buffers, also in graphs.
/// - A number of channels that does not depend on the machine, so that a plan knows it: [`CHANNELS`].
const SETTINGS: [(&str, &str); 5] = [
    ("NCCL_NVLS_ENABLE", "0"),
    ("NCCL_RUNTIME_CONNECT", "0"),
    ("NCCL_P2P_DIRECT_DISABLE", "1"),
    ("NCCL_GRAPH_REGISTER", "0"),
    ("NCCL_MAX_NCHANNELS", "16"),
];

/// The smallest number of bytes that a device maps.
const PAGE: u64 = 2 << 20;

/// Tables of a channel, and of a communicator.
const CHANNEL_TABLES: u64 = 3;
const OWN_TABLES: u64 = 8;

/// Bytes of a connection's buffers: for short messages, for those of medium length, and for long ones.
const BUFFERS: [(&str, u64); 3] = [
    ("NCCL_LL_BUFFSIZE", 8 * 512 * 8 * 16),
    ("NCCL_LL128_BUFFSIZE", 120 * 640 * 8 * 8),
    ("NCCL_BUFFSIZE", 4 << 20),
];

/// Bytes of flags next to the buffers of a connection.
const FLAGS: u64 = 8 << 10;

/// Most channels of any communicator.
const CHANNELS_MAX: u64 = 64;

/// Devices of a communicator with which one is connected to add and gather: its neighbours in a ring and in a tree,
/// which branches only between machines.
const NEIGHBOURS_MAX: u64 = 3;
const NEIGHBOURS_BETWEEN_MACHINES_MAX: u64 = 5;

/// NCCL's setting against access to another device's memory.
const P2P_DISABLE: &str = "NCCL_P2P_DISABLE";

/// Makes the settings. The library reads them when it is first used.
pub(crate) fn apply() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for (name, value) in SETTINGS {
            if std::env::var_os(name).is_none() {
                // SAFETY: no other thread may read the environment outside of Rust, whose own readers wait for this
                // call. A group is made before its first device is opened, so no thread of the driver or of NCCL runs
                // yet; and no other library of this process starts threads that read it.
                unsafe { std::env::set_var(name, value) };
            }
        }
    });
}

/// A setting of the environment: the user's, or that of [`apply`].
fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.trim().parse().ok()
}

/// Whether devices may write to each other's memory. The user forbids it where it does not work, as in some virtual
/// machines.
pub(crate) fn allows_peer_access() -> bool {
    allows_peers(setting)
}

fn allows_peers(setting: impl Fn(&str) -> Option<u64>) -> bool {
    setting(P2P_DISABLE).is_none_or(|value| value == 0)
}

/// The most bytes of a device's memory that a communicator takes.
pub(crate) fn communicator_bytes(extent: Extent) -> u64 {
    bytes_with(extent, setting)
}

/// The devices that a communicator connects.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Extent {
    pub devices: usize,
    /// Devices that arrays go to and come from one by one.
    pub messages: Messages,
    /// Whether the devices may be of several machines.
    pub spans_machines: bool,
}

/// Neighbours that send arrays to a device, and to which it sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Messages {
    pub received: usize,
    pub sent: usize,
}

fn bytes_with(extent: Extent, setting: impl Fn(&str) -> Option<u64>) -> u64 {
    let Extent { devices, messages, spans_machines } = extent;
    let channels = setting("NCCL_MAX_NCHANNELS").unwrap_or(CHANNELS);
    let channels = channels.max(setting("NCCL_MIN_NCHANNELS").unwrap_or(0)).clamp(1, CHANNELS_MAX);
    // Messages use a power of two.
    let channels = channels.next_power_of_two();
    let buffers = BUFFERS.iter().map(|&(name, bytes)| setting(name).unwrap_or(bytes));
    let receiving = buffers.fold(FLAGS, u64::saturating_add).div_ceil(PAGE);
    let sending = if spans_machines { receiving } else { 1 };
    let most = if spans_machines { NEIGHBOURS_BETWEEN_MACHINES_MAX } else { NEIGHBOURS_MAX };
    let neighbours = most.min(devices as u64 - 1);
    let received = (neighbours + messages.received as u64).saturating_mul(receiving);
    let sent = (neighbours + messages.sent as u64).saturating_mul(sending);
    let pages = CHANNEL_TABLES.saturating_add(received).saturating_add(sent);
    channels.saturating_mul(pages).saturating_add(OWN_TABLES).saturating_mul(PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_communicator_takes_pages_for_each_channel_and_connection() {
        let none = |_: &str| None;
        let of = |devices| Extent { devices, ..Extent::default() };
        assert_eq!(bytes_with(of(2), none), (16 * (3 + 5 + 1) + 8) * PAGE);
        assert_eq!(bytes_with(of(8), none), (16 * (3 + 3 * 6) + 8) * PAGE);
        let messages = Messages { received: 1, sent: 0 };
        assert_eq!(bytes_with(Extent { messages, ..of(2) }, none), (16 * (3 + 2 * 5 + 1) + 8) * PAGE);
    }

    #[test]
    fn between_machines_a_sender_has_buffers_too() {
        let of = |devices| Extent { devices, spans_machines: true, ..Extent::default() };
        assert_eq!(bytes_with(of(2), |_| None), (16 * (3 + 5 + 5) + 8) * PAGE);
        assert_eq!(bytes_with(of(8), |_| None), (16 * (3 + 5 * 10) + 8) * PAGE);
        assert!(bytes_with(of(8), |_| Some(u64::MAX)) > 1 << 60, "no overflow");
    }

    #[test]
    fn what_the_user_sets_is_counted() {
        let two = Extent { devices: 2, ..Extent::default() };
        let set =
            |wanted: &'static str, value: u64| bytes_with(two, move |name| (name == wanted).then_some(value));
        assert_eq!(set("NCCL_MAX_NCHANNELS", 4), (4 * 9 + 8) * PAGE);
        assert_eq!(set("NCCL_MAX_NCHANNELS", 6), (8 * 9 + 8) * PAGE);
        assert_eq!(set("NCCL_MIN_NCHANNELS", 32), (32 * 9 + 8) * PAGE);
        assert_eq!(set("NCCL_BUFFSIZE", 1 << 20), (16 * 8 + 8) * PAGE);
        assert_eq!(set("NCCL_MAX_NCHANNELS", u64::MAX), (64 * 9 + 8) * PAGE, "more than there are");
        assert!(set("NCCL_BUFFSIZE", u64::MAX) > 1 << 60, "no overflow");
    }

    #[test]
    fn the_user_may_forbid_access_to_other_devices() {
        assert!(allows_peers(|_| None));
        assert!(allows_peers(|name| (name == "NCCL_P2P_DISABLE").then_some(0)));
        assert!(!allows_peers(|name| (name == "NCCL_P2P_DISABLE").then_some(1)));
    }

    #[test]
    fn the_number_of_channels_is_that_of_the_setting() {
        let (_, value) = SETTINGS.iter().find(|(name, _)| *name == "NCCL_MAX_NCHANNELS").expect("it is set");
        assert_eq!(value.parse(), Ok(CHANNELS));
    }
}
