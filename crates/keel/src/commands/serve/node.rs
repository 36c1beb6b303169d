//! `keel serve` on several machines: a node that does what another one says, and a leader that waits for its nodes.

use std::net::TcpListener;
use std::time::Duration;

use anyhow::{Context, Result};
use evenkeel::machine;
use keel_remote::RemoteError;
use keel_server::wait_for_signal;

use crate::args::{DeviceArgs, NodeArgs, SplitArgs, nodes};

/// How long a leader tries before it looks whether it should end.
const ATTEMPT: Duration = Duration::from_secs(2);

/// Does what node 0 says, with the devices of this process, until a signal ends the process.
///
/// # Errors
/// Devices of the CPU, or an address that cannot be listened on.
pub fn follow(device: &DeviceArgs) -> Result<()> {
    let nodes = &device.split.nodes;
    device.split.expect_gpus()?;
    // Asked once, before a leader waits for an answer.
    machine();
    let (own, leaders) = (nodes.own_address()?, nodes.leaders()?);
    let listener = TcpListener::bind(own)
        .map_err(|error| RemoteError::Listen { address: own.into(), reason: error.to_string() })?;
    tracing::info!("{} at {own} for the leader at {leaders:?}", device.split.list());
    let (facts, opened) = (device.clone(), device.clone());
    let open = move |opening| nodes::open(&opened, opening);
    keel_remote::serve(&listener, || nodes::facts(&facts), &leaders, open).context("this node cannot go on")
}

/// Ends at a signal, or when a node is lost.
pub fn signal_or_loss(nodes: &NodeArgs) -> impl Future<Output = ()> + Send + use<> {
    let (tell, told) = tokio::sync::oneshot::channel();
    let led = nodes.cluster.as_ref().zip(nodes.signals.clone());
    let signals = led.map(|(cluster, signals)| {
        cluster.when_lost(move || {
            let _ = tell.send(());
        });
        signals
    });
    async {
        let Some(signals) = signals else { return wait_for_signal().await };
        tokio::select! {
            () = signals.come() => {}
            _ = told => {}
        }
    }
}

/// After a server has ended: waits until all nodes are there again. False if there is nothing to wait for: no node was
/// lost, or a signal has come.
pub fn meet_again(split: &mut SplitArgs, has_failed: bool) -> bool {
    let Some(signals) = split.nodes.signals.clone().filter(|signals| !signals.have_come()) else {
        return false;
    };
    if has_failed {
        // What has failed may have heard of the end of a connection a little sooner.
        std::thread::sleep(Duration::from_millis(500));
    }
    let Some(mut why) = split.nodes.lost() else { return false };
    tracing::warn!("{why}; serving again when it is back");
    while !signals.have_come() {
        match split.meet_within(ATTEMPT) {
            Ok(()) => return true,
            Err(error) if error.to_string() != why => {
                why = error.to_string();
                tracing::warn!("{why}");
            }
            Err(_) => {}
        }
    }
    false
}
