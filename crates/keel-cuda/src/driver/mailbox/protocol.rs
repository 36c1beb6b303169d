//! The protocol of `one_shot_all_reduce.cu` for one thread, in every order in which devices can take their steps.
//!
//! This model assumes sequentially consistent memory. `one_shot_all_reduce.cu` explains why the ends of launches order
//! the accesses.

use super::PARITIES;
use std::collections::HashSet;

const DEVICES: usize = 3;
const SUMS: usize = 4;

/// Steps of a sum, one for each peer: writes to the peers' slots, waits until the own ones are not empty, reads of
/// them, writes that make them empty.
const PEERS: usize = DEVICES - 1;
const STEPS: usize = 4 * PEERS;
const WAITS: usize = 1;

/// The number of a sum, from 1 on.
type Number = usize;
const EMPTY: Number = 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum State {
    Runs,
    /// It never comes again.
    Failed,
    /// It was told to stop while it waited.
    Left,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Device {
    state: State,
    /// Steps of all sums so far.
    steps: usize,
    /// The sum whose data are in each slot, by parity and peer.
    slots: [[Number; PEERS]; PARITIES],
}

type Devices = [Device; DEVICES];

/// Variants of the protocol, of which only one is right.
#[derive(Clone, Copy)]
struct Rules {
    parities: usize,
    /// A device makes its slots empty after it has read them.
    empties: bool,
    /// A device that has stopped waiting does nothing more. Otherwise it goes on with the next sum.
    stays_away: bool,
}

const RIGHT: Rules = Rules { parities: PARITIES, empties: true, stays_away: true };

fn peer_of(device: usize, number: usize) -> usize {
    (device + 1 + number) % DEVICES
}

/// The number of `peer` among the peers of `device`.
fn number_of(peer: usize, device: usize) -> usize {
    (peer + DEVICES - device - 1) % DEVICES
}

fn is_at_rest(device: &Device) -> bool {
    device.state != State::Runs || device.steps == SUMS * STEPS
}

/// The devices after `device` has taken its next step; `None` if it must wait or is done.
///
/// # Errors
/// A slot holds another sum than it should.
fn step(devices: &Devices, device: usize, rules: Rules) -> Result<Option<Devices>, String> {
    let steps = devices[device].steps;
    if is_at_rest(&devices[device]) {
        return Ok(None);
    }
    let (sum, step) = (steps / STEPS + 1, steps % STEPS);
    let (phase, number, parity) = (step / PEERS, step % PEERS, sum % rules.parities);
    let peer = peer_of(device, number);
    let mut next = *devices;
    next[device].steps += 1;
    let own = &mut next[device].slots[parity][number];
    match phase {
        0 => {
            let slot = &mut next[peer].slots[parity][number_of(device, peer)];
            if rules.empties && *slot != EMPTY {
                return Err(format!("{device} overwrites sum {slot} at {peer} with {sum}: {devices:?}"));
            }
            *slot = sum;
        }
        WAITS if *own == EMPTY => return Ok(None),
        WAITS => {}
        _ if *own != sum => {
            return Err(format!("{device} reads sum {own} of {peer} for {sum}: {devices:?}"));
        }
        2 => {}
        _ if rules.empties => *own = EMPTY,
        _ => {}
    }
    Ok(Some(next))
}

/// Every state that can follow.
fn followers(devices: &Devices, rules: Rules) -> Result<Vec<Devices>, String> {
    let mut all = Vec::new();
    let with = |device: usize, changed: Device| {
        let mut next = *devices;
        next[device] = changed;
        next
    };
    for (i, device) in devices.iter().enumerate() {
        all.extend(step(devices, i, rules)?);
        if is_at_rest(device) {
            continue;
        }
        if i == 0 {
            all.push(with(i, Device { state: State::Failed, ..*device }));
        }
        // The host of a device stops it if a peer has failed, or has learnt that one has.
        let waits = device.steps % STEPS / PEERS == WAITS;
        if waits && devices.iter().any(|device| device.state != State::Runs) {
            let next_sum = (device.steps / STEPS + 1) * STEPS;
            all.push(match rules.stays_away {
                true => with(i, Device { state: State::Left, ..*device }),
                false => with(i, Device { steps: next_sum, ..*device }),
            });
        }
    }
    Ok(all)
}

/// Visits every state.
///
/// # Errors
/// A slot holds another sum than it should, or a device waits for ever.
fn explore(rules: Rules) -> Result<usize, String> {
    let start = [Device { state: State::Runs, steps: 0, slots: [[EMPTY; PEERS]; PARITIES] }; DEVICES];
    let (mut seen, mut open) = (HashSet::from([start]), vec![start]);
    while let Some(devices) = open.pop() {
        let next = followers(&devices, rules)?;
        if next.is_empty() && !devices.iter().all(is_at_rest) {
            return Err(format!("no device moves: {devices:?}"));
        }
        open.extend(next.into_iter().filter(|devices| seen.insert(*devices)));
    }
    Ok(seen.len())
}

#[test]
fn every_order_of_steps_and_failures_reads_the_right_slots_and_ends() {
    let states = explore(RIGHT).expect("the protocol is right");
    assert!(states > 5_000, "{states}");
}

#[test]
fn a_slot_without_a_second_parity_is_overwritten() {
    let error = explore(Rules { parities: 1, ..RIGHT }).expect_err("a fast peer overwrites it");
    assert!(error.contains("overwrites sum"), "{error}");
}

#[test]
fn a_slot_that_is_not_emptied_is_taken_for_the_next_sum() {
    let error = explore(Rules { empties: false, ..RIGHT }).expect_err("old data are there");
    assert!(error.contains("reads sum"), "{error}");
}

#[test]
fn a_device_that_has_stopped_must_not_go_on() {
    let error =
        explore(Rules { stays_away: false, ..RIGHT }).expect_err("it writes or reads a slot too early");
    assert!(error.contains("overwrites sum") || error.contains("reads sum"), "{error}");
}
