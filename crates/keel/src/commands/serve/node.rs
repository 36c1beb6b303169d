//! `keel serve` on several machines: a node that does what another one says, and a leader that waits for its nodes.

use std::net::TcpListener;
use std::time::Duration;

use anyhow::{Context, Result};
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
    match &nodes.cluster {
        Some(cluster) => cluster.when_lost(move || {
            let _ = tell.send(());
        }),
        // No node can be lost.
        None => std::mem::forget(tell),
    }
    async {
        tokio::select! {
            () = wait_for_signal() => {}
            _ = told => {}
        }
    }
}

/// Waits until all nodes are there again. False if a signal came first.
///
/// # Errors
/// A node refuses.
pub fn meet_again(split: &mut SplitArgs) -> Result<bool> {
    let signal = std::thread::spawn(|| {
        let waiting = tokio::runtime::Builder::new_current_thread().enable_all().build();
        waiting.map(|waiting| waiting.block_on(wait_for_signal()))
    });
    while !signal.is_finished() {
        match split.meet_within(ATTEMPT) {
            Ok(()) => return Ok(true),
            Err(error) => tracing::debug!("{error}"),
        }
    }
    Ok(false)
}
