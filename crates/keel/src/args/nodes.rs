//! A model on the devices of several processes, each usually on a machine of its own.

use std::net::{IpAddr, ToSocketAddrs};
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use evenkeel::{Determinism, room_on_gpu};
use keel_array::{Backend, Compute, Runtime};
use keel_cuda::{CudaBackend, CudaGroup, CudaOptions, GroupIds, PeerProcesses, Role, Survey};
use keel_remote::{Cluster, DeviceFacts, Members, OpenDevices, OpenRequest, RemoteBackend};
use serde_json::{Value, json};

use super::{Device, DeviceArgs, Member};
use crate::failure::usage;
use crate::signals::Signals;

/// How long the first start of a leader waits for its nodes.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The processes that share a model.
#[derive(Clone, Debug, Default, Args)]
pub struct NodeArgs {
    /// Addresses of all processes that share the model, the same list for each, for example
    /// 10.0.0.1:7000,10.0.0.2:7000. Usually each is on a machine of its own, and lists its own GPUs with --devices.
    /// Node 0 reads the model, leads and serves; the others run keel serve with --node, and need no model. Whoever
    /// reaches a node's port can use its GPUs, so use a network that you trust.
    #[arg(long, value_name = "HOST:PORT,...", value_delimiter = ',', requires = "devices")]
    nodes: Vec<String>,
    /// The number of this process in --nodes.
    #[arg(long, value_name = "K", default_value_t = 0, requires = "nodes")]
    node: usize,
    /// The other nodes, once this process leads them.
    #[arg(skip)]
    pub cluster: Option<Arc<Cluster>>,
    /// Of a server.
    #[arg(skip)]
    pub signals: Option<Signals>,
}

impl NodeArgs {
    /// Whether the model is on several processes.
    pub fn are_several(&self) -> bool {
        !self.nodes.is_empty()
    }

    /// Whether this process follows node 0.
    pub fn follows(&self) -> bool {
        self.node > 0
    }

    /// This process's own address.
    pub fn own_address(&self) -> Result<&str> {
        let missing = || {
            let (node, count) = (self.node, self.nodes.len());
            usage(format!("--node {node}: --nodes lists {count} addresses, which are numbered from 0 on"))
        };
        self.nodes.get(self.node).map(String::as_str).ok_or_else(missing)
    }

    /// The addresses that node 0 has now, for a node that serves no other. None if its name cannot be looked up.
    pub fn leaders(&self) -> Vec<IpAddr> {
        let first = &self.nodes[0];
        match first.to_socket_addrs() {
            Ok(found) => found.map(|address| address.ip().to_canonical()).collect(),
            Err(error) => {
                tracing::warn!("--nodes {first}: {error}; it is looked up again when a leader connects");
                Vec::new()
            }
        }
    }

    /// Refuses a single address, a number that is none of the addresses, and several nodes for a command that runs in
    /// one process.
    ///
    /// # Errors
    /// A usage error that names the problem.
    pub fn check(&self) -> Result<()> {
        if self.nodes.len() == 1 {
            return Err(usage(
                "--nodes lists one address: several processes share a model; leave it out for one",
            ));
        }
        if !self.are_several() {
            return Ok(());
        }
        self.own_address()?;
        if self.cluster.is_none() {
            return Err(usage(
                "--nodes: this command runs in one process; serve, generate, chat and bench run a model on several, and \
                 keel serve --node K is the process of each other node. Plan with all devices in --devices",
            ));
        }
        Ok(())
    }

    /// Connects with the other nodes, waiting up to `patience` until they are there. Returns their devices.
    pub fn meet(&mut self, patience: Duration) -> Result<Vec<Member>> {
        let cluster = Cluster::connect(&self.nodes[1..], patience)?;
        let member = |DeviceFacts { name, room }: DeviceFacts| Member {
            name,
            device: Device::Cuda(0),
            remote: Some(room),
        };
        let members = cluster.devices().into_iter().map(member).collect();
        self.cluster = Some(cluster);
        Ok(members)
    }

    /// Why a node is lost, if this process leads others.
    pub fn lost(&self) -> Option<String> {
        self.cluster.as_ref().and_then(|cluster| cluster.lost())
    }
}

/// Passes news about devices of other processes to the group of the local GPUs.
struct Gpus(CudaGroup);

impl Members for Gpus {
    fn note_absent(&self, rank: usize) {
        self.0.note_absent(rank);
    }

    fn note_rejoined(&self, rank: usize) {
        self.0.note_rejoined(rank);
    }

    fn connect(&self, ids: &[u8]) -> Result<(), String> {
        let ids = GroupIds::from_bytes(ids).map_err(|error| error.to_string())?;
        self.0.connect_with(&ids).map_err(|error| error.to_string())
    }
}

/// The nodes, as the leader's GPUs reach them.
struct Followers(Weak<Cluster>);

impl Followers {
    fn cluster(&self) -> Result<Arc<Cluster>, String> {
        self.0.upgrade().ok_or_else(|| "the nodes are left".into())
    }
}

impl PeerProcesses for Followers {
    fn announce(&self, ids: &GroupIds) -> Result<(), String> {
        self.cluster()?.announce(&ids.to_bytes()).map_err(|error| error.to_string())
    }

    fn finish(&self) -> Result<(), String> {
        self.cluster()?.finish().map_err(|error| error.to_string())
    }

    fn abandon(&self, rank: usize) {
        if let Ok(cluster) = self.cluster() {
            cluster.abandon(rank);
        }
    }
}

/// The leader, as a node's GPUs reach it.
struct Leader(Arc<dyn Fn(usize) + Send + Sync>);

impl PeerProcesses for Leader {
    fn announce(&self, _ids: &GroupIds) -> Result<(), String> {
        Err("a node does not lead".into())
    }

    fn finish(&self) -> Result<(), String> {
        Err("a node does not lead".into())
    }

    fn abandon(&self, rank: usize) {
        (self.0)(rank);
    }
}

/// The settings that the kernels of all nodes must share.
fn settings(device: &DeviceArgs, compute: Compute) -> Value {
    json!({ "f32": compute == Compute::F32, "determinism": device.options().determinism as u8 })
}

/// The backends of the leader's GPUs and of all others, by rank: the others come first.
///
/// # Errors
/// A node or a GPU cannot be used, or they cannot be connected.
pub fn lead(
    device: &DeviceArgs,
    cluster: &Arc<Cluster>,
    shares: usize,
    compute: Compute,
) -> Result<Vec<Arc<dyn Backend>>> {
    let (size, others) = (device.split.members().len(), cluster.devices().len());
    let options = |group, ordinal| CudaOptions {
        group: Some(group),
        ..device.options().cuda_options(ordinal, compute)
    };
    let planner = |group| Arc::new(CudaBackend::planning(&options(group, 0))) as Arc<dyn Backend>;
    let planners = CudaGroup::planned(size, shares).into_iter().take(others).map(planner).collect();
    let role = Role::Leads(Arc::new(Followers(Arc::downgrade(cluster))));
    let groups = CudaGroup::across(size, shares, others..size, role);
    let Some(first) = groups.first().cloned() else {
        return Err(usage("--devices lists no device of node 0"));
    };
    let members = Arc::new(Gpus(first.clone()));
    let remote = cluster.open(size, shares, &settings(device, compute), planners, members)?;
    let mut backends: Vec<Arc<dyn Backend>> =
        remote.into_iter().map(|r: RemoteBackend| Arc::new(r) as _).collect();
    for (group, member) in groups.into_iter().zip(&device.split.members()[others..]) {
        let Device::Cuda(ordinal) = member.device else { unreachable!("all devices are GPUs") };
        let backend = CudaBackend::new(&options(group, ordinal)).map_err(evenkeel::Error::from)?;
        backends.push(Arc::new(backend));
    }
    first.connect().map_err(evenkeel::Error::from)?;
    Ok(backends)
}

/// The devices of this process, and the bytes that they have room for now, as a leader hears of them.
pub fn facts(device: &DeviceArgs) -> Vec<DeviceFacts> {
    let survey = Survey::take();
    let of = |(i, member): (usize, &Member)| {
        let Device::Cuda(ordinal) = member.device else { unreachable!("all devices are GPUs") };
        let (room, limit) = (room_on_gpu(&survey, ordinal), device.limit_of(i));
        DeviceFacts { name: member.name.clone(), room: room.into_iter().chain(limit).min() }
    };
    device.split.members().iter().enumerate().map(of).collect()
}

/// Opens this process's devices for a leader.
///
/// # Errors
/// One sentence.
pub fn open(device: &DeviceArgs, opening: OpenRequest) -> Result<OpenDevices, String> {
    let OpenRequest { size, shares, ranks, settings, abandon } = opening;
    let is = |name: &str| settings.get(name).and_then(Value::as_bool).unwrap_or(false);
    let compute = if is("f32") { Compute::F32 } else { Compute::Auto };
    let kinds = [Determinism::Off, Determinism::Steps, Determinism::Devices];
    let of_leader = settings.get("determinism").and_then(Value::as_u64);
    let Some(determinism) = kinds.into_iter().find(|kind| Some(*kind as u64) == of_leader) else {
        return Err(format!(
            "node 0 asks for determinism {of_leader:?}; all nodes need the same version of keel"
        ));
    };
    let members: &[Member] = device.split.members();
    let groups = groups(size, shares, ranks, abandon)?;
    let Some(first) = groups.first().cloned() else { return Err("--devices lists no device".into()) };
    let mut runtimes: Vec<Runtime> = Vec::with_capacity(members.len());
    for (i, (group, member)) in groups.into_iter().zip(members).enumerate() {
        let Device::Cuda(ordinal) = member.device else { unreachable!("all devices are GPUs") };
        let own = device.options_of(i);
        let options = CudaOptions { group: Some(group), determinism, ..own.cuda_options(ordinal, compute) };
        let backend = CudaBackend::new(&options).map_err(|error| format!("{}: {error}", member.name))?;
        runtimes.push(own.runtime_on(Arc::new(backend)));
    }
    Ok(OpenDevices { runtimes, members: Arc::new(Gpus(first)) })
}

fn groups(
    size: usize,
    shares: usize,
    ranks: Range<usize>,
    abandon: Arc<dyn Fn(usize) + Send + Sync>,
) -> Result<Vec<CudaGroup>, String> {
    if shares == 0 || !size.is_multiple_of(shares) || ranks.end > size {
        return Err(format!("{size} devices are no stages of {shares}, or do not have the ranks {ranks:?}"));
    }
    Ok(CudaGroup::across(size, shares, ranks, Role::Follows(Arc::new(Leader(abandon)))))
}
