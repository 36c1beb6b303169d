//! Limits on a server's connections: their number and their timeouts.

use std::time::Duration;

use clap::Args;
use clap::builder::RangedU64ValueParser;

/// One year. Larger values are mistakes, and could overflow a clock.
const SECONDS_MAX: u64 = 365 * 24 * 3600;

/// Parses a number of seconds that can be added to a clock.
pub fn seconds() -> RangedU64ValueParser<u64> {
    RangedU64ValueParser::new().range(1..=SECONDS_MAX)
}

/// How many connections a server keeps, and for how long.
#[derive(Clone, Copy, Debug, Args)]
pub struct TimeoutArgs {
    /// Connections at once. There are fewer if the system allows fewer file descriptors. When there is no room for a
    /// new connection, the connection that has been idle longest is closed.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(4..))]
    connections: u32,
    /// Seconds in which the head of a request must arrive.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = seconds())]
    head_timeout: u64,
    /// Seconds in which a body must arrive. A body that arrives at 16 KiB per second or faster may take longer.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = seconds())]
    body_timeout: u64,
    /// Seconds that a connection may be open without a request.
    #[arg(long, value_name = "SECONDS", default_value_t = 75, value_parser = seconds())]
    idle_timeout: u64,
    /// Seconds that a client may go without reading any of its answer.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = seconds())]
    write_timeout: u64,
    /// Seconds that an unused model stays loaded, if --model is given more than once. By default until another model
    /// needs its memory.
    #[arg(long, value_name = "SECONDS", value_parser = seconds())]
    keep_alive: Option<u64>,
    /// Seconds that requests may continue after SIGTERM before they are cut off. Remembered prefixes are saved after
    /// them.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = RangedU64ValueParser::<u64>::new().range(0..=SECONDS_MAX))]
    grace: u64,
}

impl TimeoutArgs {
    /// How long an unused model stays loaded.
    pub fn keep_alive(&self) -> Option<Duration> {
        self.keep_alive.map(Duration::from_secs)
    }

    /// Copies these values into the server's options.
    pub fn apply(&self, options: &mut keel_server::ServerOptions) {
        options.connections_max = self.connections as usize;
        options.head_timeout = Duration::from_secs(self.head_timeout);
        options.body_timeout = Duration::from_secs(self.body_timeout);
        options.idle_timeout = Duration::from_secs(self.idle_timeout);
        options.write_timeout = Duration::from_secs(self.write_timeout);
        options.grace = Duration::from_secs(self.grace);
    }
}
