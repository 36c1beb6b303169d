//! The addresses from which a node is led.

use std::net::{IpAddr, TcpStream};
use std::sync::{Mutex, TryLockError};
use std::time::Instant;

use crate::connection::{HEARTBEAT, locked};
use crate::message::Refusal;

/// Looks the addresses up.
type LookUp = Box<dyn Fn() -> Vec<IpAddr> + Send + Sync>;

/// The addresses that leaders may have.
pub(crate) struct Leaders {
    look_up: LookUp,
    /// Those of the last look-up that found any.
    known: Mutex<Vec<IpAddr>>,
    /// The end of the last look-up. It is locked while one runs.
    looked_up: Mutex<Instant>,
}

impl Leaders {
    /// Looks the addresses up.
    pub fn new(look_up: impl Fn() -> Vec<IpAddr> + Send + Sync + 'static) -> Leaders {
        let known = look_up();
        tracing::info!("waits for the leader at {known:?}");
        Leaders {
            look_up: Box::new(look_up),
            known: Mutex::new(known),
            looked_up: Mutex::new(Instant::now()),
        }
    }

    /// Refuses a connection that does not come from a leader. The refusal may pass if a later look-up may find its
    /// address.
    pub fn expect(&self, stream: &TcpStream) -> Result<(), Refusal> {
        let unknown = |error: std::io::Error| Refusal::passing(error.to_string());
        let peer = stream.peer_addr().map_err(unknown)?.ip().to_canonical();
        if locked(&self.known).contains(&peer) {
            return Ok(());
        }
        let found = self.look_up_again();
        let known = locked(&self.known);
        let reason: String = match &known[..] {
            known if known.contains(&peer) => return Ok(()),
            [] => "the name of node 0 in its --nodes has no address so far".into(),
            known => format!("its leader is {known:?} by its --nodes, and this connection is from {peer}"),
        };
        Err(Refusal { reason, may_pass: !found })
    }

    /// Looks the addresses up, at most once a second, and only if no other thread does. Returns whether there are some.
    fn look_up_again(&self) -> bool {
        let mut looked_up = match self.looked_up.try_lock() {
            Ok(looked_up) => looked_up,
            Err(TryLockError::Poisoned(looked_up)) => looked_up.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        if looked_up.elapsed() < HEARTBEAT {
            return false;
        }
        let found = (self.look_up)();
        *looked_up = Instant::now();
        if found.is_empty() {
            return false;
        }
        *locked(&self.known) = found;
        true
    }
}
