//! Several backends of one process that exchange arrays.
//!
//! A member offers memory and waits until its peers have read it, so an exchange takes no memory of its own. Members
//! read while they hold the group's lock. So no peer reads the memory of a member that has given up waiting.
//!
//! ```text
//! send      offer ──▶ peer copies ──▶ go on
//! all_*     offer ──▶ wait for the offers of all peers ──▶ read them all ──▶ wait until all peers have read
//! ```
//!
//! Where there are fewer threads than members, a member computes only while it has one of the group's *turns*. It gives
//! the turn up while it waits for its peers, so no two members wait for each other.
//!
//! `tests/interleavings.rs` compiles this file with loom's types and checks each order of the members' steps.

use crate::sync::{Arc, Condvar, Mutex, MutexGuard};
use keel_array::{Group, Peers};

/// The values that a member lends while it waits.
#[derive(Clone, Copy)]
struct Offer {
    start: *const f32,
    len: usize,
}

// SAFETY: a member reads an offer under the group's lock, before the member that made it goes on. See the module's
// first comment.
unsafe impl Send for Offer {}

impl Offer {
    fn of(values: &[f32]) -> Offer {
        Offer { start: values.as_ptr(), len: values.len() }
    }

    /// The values.
    ///
    /// # Safety
    /// The member that made the offer must wait for as long as the result is used.
    unsafe fn values<'a>(self) -> &'a [f32] {
        // SAFETY: the offer is of a slice, which its member borrows while it waits.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

/// A member's exchanges with one set of peers.
#[derive(Clone, Copy)]
struct Rounds {
    peers: Peers,
    /// How many it has begun.
    arrived: u64,
    /// In how many of these it has read the operands of all peers.
    finished: u64,
}

/// A member's side of its exchanges.
#[derive(Clone, Default)]
struct Seat {
    /// An array that it sends to one other member, with the receiver's rank.
    letter: Option<(usize, Offer)>,
    /// Its operand in the current exchange among several members.
    share: Option<Offer>,
    /// The name of the operation of that exchange.
    kind: &'static str,
    /// Sets of peers may overlap, so each has rounds of its own.
    rounds: Vec<Rounds>,
}

impl Seat {
    fn rounds_with(&self, peers: Peers) -> Rounds {
        let none = Rounds { peers, arrived: 0, finished: 0 };
        self.rounds.iter().find(|rounds| rounds.peers == peers).copied().unwrap_or(none)
    }

    fn keep(&mut self, now: Rounds) {
        match self.rounds.iter_mut().find(|rounds| rounds.peers == now.peers) {
            Some(rounds) => *rounds = now,
            None => self.rounds.push(now),
        }
    }
}

#[derive(Default)]
struct State {
    seats: Vec<Seat>,
    /// The member that gave up.
    absent: Option<usize>,
    /// How many more members may compute now.
    turns: usize,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Whether there is a turn for each member.
    is_concurrent: bool,
}

/// A backend's membership of a group.
#[derive(Clone)]
pub struct CpuGroup {
    shared: Arc<Shared>,
    rank: usize,
    size: usize,
}

impl CpuGroup {
    /// The memberships of a group of `size` backends, by rank.
    pub fn of(size: usize) -> Vec<CpuGroup> {
        CpuGroup::with_turns(size, size)
    }

    /// As [`CpuGroup::of`]. At most `turns` members, and at least one, compute at the same time.
    pub fn with_turns(size: usize, turns: usize) -> Vec<CpuGroup> {
        let state = State { seats: vec![Seat::default(); size], absent: None, turns: turns.max(1) };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
            is_concurrent: turns >= size,
        });
        (0..size).map(|rank| CpuGroup { shared: Arc::clone(&shared), rank, size }).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Waits until this member may compute. It may until the result is dropped.
    pub(super) fn turn(&self) -> Turn<'_> {
        let mut state = self.state();
        while state.turns == 0 {
            state = self.shared.changed.wait(state).unwrap_or_else(|e| e.into_inner());
        }
        state.turns -= 1;
        Turn(self)
    }

    /// Waits until `is_ready` holds. If a member has given up, takes back the offers of this one. Others may compute
    /// meanwhile.
    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        is_ready: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'a, State>, String> {
        let is_over = |state: &State| state.absent.is_some() || is_ready(state);
        if !is_over(&state) {
            state.turns += 1;
            self.shared.changed.notify_all();
            while !is_over(&state) || state.turns == 0 {
                state = self.shared.changed.wait(state).unwrap_or_else(|e| e.into_inner());
            }
            state.turns -= 1;
        }
        let Some(absent) = state.absent else { return Ok(state) };
        let seat = &mut state.seats[self.rank];
        (seat.letter, seat.share) = (None, None);
        Err(format!("device {absent} of the group has failed, and device {} waited for it", self.rank))
    }

    /// Lends `x` to member `to` until it has read it.
    pub(super) fn send(&self, to: usize, x: &[f32]) -> Result<(), String> {
        let mut state = self.state();
        state.seats[self.rank].letter = Some((to, Offer::of(x)));
        self.shared.changed.notify_all();
        self.wait(state, |state| state.seats[self.rank].letter.is_none()).map(drop)
    }

    /// Copies the values that member `from` sends into `y`.
    pub(super) fn receive(&self, from: usize, y: &mut [f32]) -> Result<(), String> {
        let is_mine = |state: &State| state.seats[from].letter.is_some_and(|(to, _)| to == self.rank);
        let mut state = self.wait(self.state(), is_mine)?;
        let Some((_, offer)) = state.seats[from].letter else {
            return Err("there is nothing to receive".into());
        };
        if offer.len != y.len() {
            return Err(format!("device {from} sends {} values, and {} are expected", offer.len, y.len()));
        }
        // SAFETY: the sender waits until its letter is taken, which happens below, under the same lock.
        y.copy_from_slice(unsafe { offer.values() });
        state.seats[from].letter = None;
        self.shared.changed.notify_all();
        Ok(())
    }

    /// Brings `x` to an exchange of several, passes the shares of all peers to `read` in the order of their ranks, and
    /// waits until the peers have read theirs. All must come to an operation of the same `kind`.
    pub(super) fn exchange(
        &self,
        kind: &'static str,
        peers: Peers,
        x: &[f32],
        mut read: impl FnMut(usize, &[f32]),
    ) -> Result<(), String> {
        let mut state = self.state();
        let seat = &mut state.seats[self.rank];
        (seat.share, seat.kind) = (Some(Offer::of(x)), kind);
        let mut rounds = seat.rounds_with(peers);
        rounds.arrived += 1;
        seat.keep(rounds);
        self.shared.changed.notify_all();
        let has_arrived = |seat: &Seat| seat.rounds_with(peers).arrived >= rounds.arrived;
        let mut state =
            self.wait(state, |state| peers.ranks().all(|peer| has_arrived(&state.seats[peer])))?;
        for (i, peer) in peers.ranks().enumerate() {
            let Seat { share, kind: other, .. } = state.seats[peer];
            match share {
                // SAFETY: the peer stays in this exchange until this member has finished it, which it tells below,
                // under the same lock.
                Some(offer) if other == kind && offer.len == x.len() => read(i, unsafe { offer.values() }),
                Some(Offer { len: brought, .. }) => {
                    let (own, rank) = (x.len(), self.rank);
                    state.seats[rank].share = None;
                    return Err(format!(
                        "device {peer} brings {brought} values to {other}, and device {rank} brings {own} to {kind}"
                    ));
                }
                // It has noticed the difference, and left.
                None => {
                    let rank = self.rank;
                    state.seats[rank].share = None;
                    return Err(format!(
                        "device {peer}, which came to {other}, has refused device {rank}, which came to {kind}"
                    ));
                }
            }
        }
        rounds.finished = rounds.arrived;
        state.seats[self.rank].keep(rounds);
        self.shared.changed.notify_all();
        let has_finished = |seat: &Seat| seat.rounds_with(peers).finished >= rounds.finished;
        let mut state =
            self.wait(state, |state| peers.ranks().all(|peer| has_finished(&state.seats[peer])))?;
        state.seats[self.rank].share = None;
        Ok(())
    }
}

/// A member's right to compute.
pub(super) struct Turn<'a>(&'a CpuGroup);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.state().turns += 1;
        self.0.shared.changed.notify_all();
    }
}

impl Group for CpuGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn is_concurrent(&self) -> bool {
        self.shared.is_concurrent
    }

    fn abandon(&self) {
        self.state().absent.get_or_insert(self.rank);
        self.shared.changed.notify_all();
    }

    fn rejoin(&self) {
        let mut state = self.state();
        state.absent = None;
        state.seats.fill(Seat::default());
    }
}

impl std::fmt::Debug for CpuGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CpuGroup({} of {})", self.rank, self.size)
    }
}
