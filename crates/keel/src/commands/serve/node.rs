//! `keel serve` on several machines: a node that does what another one says, and a leader that waits for its nodes.

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

/// Between two looks at what has come.
const LOOK: Duration = Duration::from_millis(100);

/// How often a leader that has lost a node tries to load although there is too little memory.
const TRIES: usize = 15;

/// How long one attempt to reach a lost node takes, and the pause after a load that found too little memory.
const ATTEMPT: Duration = Duration::from_secs(2);

/// A node that has gone without a word is found to be lost after 5 s. What fails because of it may fail sooner.
const LOSS_MAX: Duration = Duration::from_secs(6);

/// Does what node 0 says, with the devices of this process, until a signal ends the process.
///
/// # Errors
/// Devices of the CPU, or an address that cannot be listened on.
pub fn follow(device: &DeviceArgs) -> Result<()> {
    let nodes = &device.split.nodes;
    device.split.expect_gpus()?;
    device.check_limits()?;
    // The driver starts before a leader waits for an answer.
    Survey::take();
    let (own, leaders) = (nodes.own_address()?, nodes.leaders()?);
    let listener = TcpListener::bind(own)
        .map_err(|error| RemoteError::Listen { address: own.into(), reason: error.to_string() })?;
    tracing::info!("{} at {own} for the leader at {leaders:?}", device.split.list());
    let (facts, opened) = (device.clone(), device.clone());
    let open = move |opening| nodes::open(&opened, opening);
    keel_remote::serve(&listener, move || nodes::facts(&facts), &leaders, open, start_again);
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
    /// How often it may still try if there is too little memory: a process that was killed may still hold some.
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
        let is_too_large = error.is_some_and(is_out_of_memory) && self.tries > 0;
        let mut why = match (split.nodes.lost(), error) {
            (Some(why), _) => {
                self.tries = TRIES;
                why
            }
            (None, Some(error)) if is_too_large => {
                self.tries -= 1;
                std::thread::sleep(ATTEMPT);
                format!("{error:#}; the node that was lost may still hold memory")
            }
            _ => return false,
        };
        tracing::warn!("{why}; serving again when it is back");
        loop {
            match split.meet_within(ATTEMPT) {
                Ok(()) => return true,
                Err(error) if error.to_string() != why => {
                    why = error.to_string();
                    tracing::warn!("{why}");
                }
                Err(_) => {}
            }
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

fn is_out_of_memory(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| matches!(cause.downcast_ref(), Some(Error::OutOfMemory(_))))
}
