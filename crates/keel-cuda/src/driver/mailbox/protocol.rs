//! The protocol of `one_shot_sum.cu` for one block, in every order in which devices can take their steps.
//!
//! Each word of memory has one writer, so all memory follows from how far each device is. Memory is sequentially
//! consistent here. Why releases and acquires order what matters stands in the kernel.

use super::PARITIES;
use std::collections::HashSet;

const DEVICES: usize = 3;
const EPOCHS: usize = 4;

/// Steps of an epoch: a write to each peer's slot, a write of each peer's flag, a wait for each peer, a read of each
/// peer's slot.
const PEERS: usize = DEVICES - 1;
const STEPS: usize = 4 * PEERS;

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
    /// Steps of all epochs so far.
    steps: usize,
}

type Devices = [Device; DEVICES];

/// Variants of the protocol, of which only one is right.
#[derive(Clone, Copy)]
struct Rules {
    parities: usize,
    /// A device that has stopped waiting does nothing more. Otherwise it goes on with the next epoch.
    stays_away: bool,
}

fn peer_of(device: usize, number: usize) -> usize {
    (device + 1 + number) % DEVICES
}

/// The number of `peer` among the peers of `device`.
fn number_of(peer: usize, device: usize) -> usize {
    (peer + DEVICES - device - 1) % DEVICES
}

/// The last epoch, from 1 on, in which step `wanted` of a device was taken; 0 if it was in none. Only epochs of this
/// parity count.
fn last_epoch(device: Device, wanted: usize, parity: usize, parities: usize) -> usize {
    let taken = |epoch: &usize| (epoch - 1) * STEPS + wanted < device.steps;
    (1..=EPOCHS).rev().filter(|epoch| epoch % parities == parity).find(taken).unwrap_or(0)
}

/// What happens if `device` takes its next step; `None` if it must wait or is done.
///
/// # Errors
/// It reads a slot that holds another epoch.
fn step(devices: &Devices, device: usize, rules: Rules) -> Result<Option<Devices>, String> {
    let Device { state, steps } = devices[device];
    if state != State::Runs || steps == EPOCHS * STEPS {
        return Ok(None);
    }
    let (epoch, step) = (steps / STEPS + 1, steps % STEPS);
    let (phase, peer) = (step / PEERS, peer_of(device, step % PEERS));
    let of_peer = number_of(device, peer);
    if phase == 2 && last_epoch(devices[peer], PEERS + of_peer, 0, 1) < epoch {
        return Ok(None);
    }
    if phase == 3 {
        let found = last_epoch(devices[peer], of_peer, epoch % rules.parities, rules.parities);
        if found != epoch {
            return Err(format!("device {device} reads epoch {found} of {peer} for {epoch}: {devices:?}"));
        }
    }
    let mut next = *devices;
    next[device].steps += 1;
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
        if device.state != State::Runs || device.steps == EPOCHS * STEPS {
            continue;
        }
        if i == 0 {
            all.push(with(i, Device { state: State::Failed, ..*device }));
        }
        // The host of a device stops it if a peer has failed, or has learnt that one has.
        let waits = device.steps % STEPS / PEERS == 2;
        if waits && devices.iter().any(|device| device.state != State::Runs) {
            let next_epoch = (device.steps / STEPS + 1) * STEPS;
            all.push(match rules.stays_away {
                true => with(i, Device { state: State::Left, ..*device }),
                false => with(i, Device { steps: next_epoch, ..*device }),
            });
        }
    }
    Ok(all)
}

/// Visits every state.
///
/// # Errors
/// A device reads a wrong slot, or waits for ever.
fn explore(rules: Rules) -> Result<usize, String> {
    let start = [Device { state: State::Runs, steps: 0 }; DEVICES];
    let (mut seen, mut open) = (HashSet::from([start]), vec![start]);
    while let Some(devices) = open.pop() {
        let next = followers(&devices, rules)?;
        let is_at_rest = |device: &Device| device.state != State::Runs || device.steps == EPOCHS * STEPS;
        if next.is_empty() && !devices.iter().all(is_at_rest) {
            return Err(format!("no device moves: {devices:?}"));
        }
        open.extend(next.into_iter().filter(|devices| seen.insert(*devices)));
    }
    Ok(seen.len())
}

#[test]
fn every_order_of_steps_and_failures_reads_the_right_slots_and_ends() {
    let states = explore(Rules { parities: PARITIES, stays_away: true }).expect("the protocol is right");
    assert!(states > 5_000, "{states}");
}

#[test]
fn a_slot_without_a_second_parity_is_overwritten() {
    let error = explore(Rules { parities: 1, stays_away: true }).expect_err("a fast peer overwrites it");
    assert!(error.contains("reads epoch"), "{error}");
}

#[test]
fn a_device_that_has_stopped_must_not_go_on() {
    let error = explore(Rules { parities: PARITIES, stays_away: false }).expect_err("it overwrites a slot");
    assert!(error.contains("reads epoch"), "{error}");
}
