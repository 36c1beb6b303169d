//! `keel serve` on several machines: a node that lends its devices, and a leader that waits for its nodes.

use std::net::TcpListener;
#[cfg(unix)]
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Result;
use evenkeel::Error;
use keel_cuda::{CudaError, Survey};
use keel_engine::EngineError;
use keel_remote::RemoteError;
use keel_server::{ServerError, wait_for_signal};

use crate::args::{DeviceArgs, NodeArgs, SplitArgs, nodes};
use crate::renderer::own_program;
use crate::signals::Signals;

/// Pause between two checks for a lost node.
const LOOK: Duration = Duration::from_millis(100);

/// How often a leader that has lost a node tries to load although the machines are not ready.
const TRIES: usize = 15;

/// How long one attempt to reach a lost node takes, and the pause after a load for which machines were not ready.
const ATTEMPT: Duration = Duration::from_secs(2);

/// A node that has gone without a word is found to be lost after 5 s. Work that needs it may fail sooner.
const LOSS_MAX: Duration = Duration::from_secs(6);

/// Lends the devices of this process to node 0, until a signal ends the process.
///
/// # Errors
/// Devices of the CPU, or an address that cannot be listened on.
pub fn follow(device: &DeviceArgs) -> Result<()> {
    let nodes = &device.split.nodes;
    device.split.expect_gpus()?;
    device.check_limits()?;
    // The driver starts before a leader waits for an answer.
    Survey::take();
    let own = nodes.own_address()?;
    let listener = TcpListener::bind(own)
        .map_err(|error| RemoteError::Listen { address: own.into(), reason: error.to_string() })?;
    tracing::info!("lends {} at {own}", device.split.list());
    let (facts, nodes, opened) = (device.clone(), nodes.clone(), device.clone());
    let open = move |opening| nodes::open(&opened, opening);
    keel_remote::serve(&listener, move || nodes::facts(&facts), move || nodes.leaders(), open, start_again);
    Ok(())
}

/// Starts this program anew, as the same process. The driver and NCCL keep a context and memory of a GPU until then,
/// and threads that wait for machines that are gone.
fn start_again() {
    #[cfg(unix)]
    {
        use std::os::unix::process::CommandExt;
        let mut own = std::env::args_os();
        let name = own.next().unwrap_or_default();
        let error = Command::new(own_program()).arg0(name).args(own).exec();
        tracing::warn!(
            "the process cannot start again, so the driver keeps its part of a GPU's memory: {error}"
        );
    }
}

/// Ends at a signal, or when a node is lost.
pub fn signal_or_loss(nodes: &NodeArgs) -> impl Future<Output = ()> + Send + use<> {
    let signals = nodes.signals.clone();
    let lost = nodes.cluster.as_ref().map(|cluster| {
        let (tell, told) = tokio::sync::oneshot::channel();
        cluster.when_lost(move || {
            let _ = tell.send(());
        });
        told
    });
    async {
        let signal = async {
            match signals {
                Some(signals) => signals.come().await,
                None => wait_for_signal().await,
            }
        };
        match lost {
            None => signal.await,
            Some(told) => tokio::select! {
                () = signal => {}
                _ = told => {}
            },
        }
    }
}

/// Loads of a leader after it has lost a node.
#[derive(Default)]
pub struct Reloads {
    /// How often it may still try if machines are not ready: a process that was killed may still hold memory, and a
    /// machine that has started may not have its driver yet.
    tries: usize,
}

impl Reloads {
    /// After a server has ended with this outcome: waits until all nodes are there again. False if there is nothing to
    /// wait for: no node was lost, or a signal has ended the server.
    pub fn meet_again(&mut self, split: &mut SplitArgs, outcome: &Result<()>) -> bool {
        if !split.nodes.are_several() || split.nodes.signals.as_ref().is_none_or(Signals::have_come) {
            return false;
        }
        let error = outcome.as_ref().err();
        let patience =
            Instant::now() + if error.is_some_and(is_of_device) { LOSS_MAX } else { Duration::ZERO };
        while split.nodes.lost().is_none() && Instant::now() < patience {
            std::thread::sleep(LOOK);
        }
        let is_passing = error.is_some_and(may_pass) && self.tries > 0;
        let mut why = match (split.nodes.lost(), error) {
            (Some(why), _) => {
                self.tries = TRIES;
                why
            }
            (None, Some(error)) if is_passing => {
                self.tries -= 1;
                std::thread::sleep(ATTEMPT);
                format!("{error:#}; the node that was lost may not be ready")
            }
            _ => return false,
        };
        tracing::warn!("{why}; serving again when it is back");
        loop {
            let next = Instant::now() + ATTEMPT;
            let Err(error) = split.meet_within(ATTEMPT) else { return true };
            if error.to_string() != why {
                why = error.to_string();
                tracing::warn!("{why}");
            }
            // A node that refuses does so at once.
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
        }
    }
}

/// Whether an error may come of a lost node: one of a device, of this process or another one.
fn is_of_device(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let of_library = cause.downcast_ref::<Error>();
        cause.is::<EngineError>()
            || matches!(cause.downcast_ref(), Some(ServerError::EngineLost { .. }))
            || cause.is::<CudaError>()
            || cause.is::<RemoteError>()
            || matches!(
                of_library,
                Some(Error::Cuda(_) | Error::Engine(_) | Error::Array(_) | Error::Cache(_))
            )
    })
}

/// Whether the reason may pass: there is too little memory, or a node cannot open its devices.
fn may_pass(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        matches!(cause.downcast_ref(), Some(Error::OutOfMemory(_)))
            || matches!(cause.downcast_ref(), Some(RemoteError::Refused { .. }))
    })
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use clap::Parser;
    use keel_remote::DeviceFacts;

    use super::*;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        device: DeviceArgs,
    }

    /// A machine may start a node before its driver answers. Here the node also refuses the first connection, because
    /// the name of its leader still has another address.
    #[test]
    fn a_node_that_is_not_ready_is_asked_again_after_a_pause() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let nodes = format!("127.0.0.1:1,{}", listener.local_addr().expect("bound"));
        let facts = || vec![DeviceFacts { name: "cuda:0".into(), room: None }];
        let look_ups = AtomicUsize::new(0);
        let leaders = move || match look_ups.fetch_add(1, Ordering::SeqCst) {
            0 | 1 => vec![Ipv4Addr::new(192, 0, 2, 1).into()],
            _ => vec![Ipv4Addr::LOCALHOST.into()],
        };
        let open = |_| Err("no driver".into());
        std::thread::spawn(move || keel_remote::serve(&listener, facts, leaders, open, || ()));
        let device = ["keel", "--devices", "cuda:0", "--nodes", &nodes];
        let mut split = Arguments::parse_from(device).device.split;
        split.nodes.signals = Some(Signals::watch().expect("a thread"));
        let (node, address, reason) = (1, "tower:7000".into(), "cuda:0: no driver".into());
        let outcome = Err(RemoteError::Refused { node, address, reason }.into());
        let (mut reloads, start) = (Reloads { tries: 1 }, Instant::now());
        assert!(reloads.meet_again(&mut split, &outcome), "it is met again");
        assert!(start.elapsed() >= LOSS_MAX + 2 * ATTEMPT, "after a pause: {:?}", start.elapsed());
        assert!(split.nodes.cluster.is_some() && reloads.tries == 0);
    }
}
