//! The nodes, as the leader sees them.

use std::collections::BTreeSet;
use std::io::BufReader;
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use keel_array::Backend;
use serde_json::Value;

use crate::connection::{MessageSender, PAUSE, SILENCE_MAX, greet, locked, silence_or, spawn};
use crate::link::Link;
use crate::message::{ControlMessage, DeviceFacts, GroupPlacement, Hello, Welcome, version};
use crate::{Members, RemoteBackend, RemoteError, Result, frame};

/// How long nodes may take to open their devices, and to connect them.
const OPEN_MAX: Duration = Duration::from_secs(120);

/// Most answers of a node that wait to be heard. It gives one when its devices are open, and one in each round.
const SAID_MAX: usize = 16;

/// A node and its control connection.
pub(crate) struct Node {
    /// From 1 on: the leader is node 0.
    number: usize,
    address: String,
    session: u64,
    devices: Vec<DeviceFacts>,
    stream: TcpStream,
    control: MessageSender,
    /// Whether it was found to be lost.
    is_lost: AtomicBool,
    /// Ranks of its devices, once they are open.
    ranks: OnceLock<Range<usize>>,
    /// What it says of its devices being opened or connected.
    replies: Mutex<Receiver<ControlMessage>>,
    links: Mutex<Vec<Weak<Link>>>,
}

/// The nodes that a leader has devices of.
pub struct Cluster {
    nodes: Vec<Node>,
    /// How long nodes may take to accept all control connections, and later those of all devices.
    patience: Duration,
    members: OnceLock<Arc<dyn Members>>,
    round: Mutex<Round>,
    lost: Mutex<Option<String>>,
    /// Called when a node is lost.
    watchers: Mutex<Vec<Box<dyn FnOnce() + Send>>>,
}

/// The last round in which the devices of all processes were connected. An absence of an earlier round is old news.
#[derive(Default)]
struct Round {
    number: u64,
    /// Ranks of the nodes' devices that have ended its exchanges. When all have, absences of this round are old news,
    /// too: the leader's devices forget them before the next round begins.
    ended: BTreeSet<usize>,
}

impl Cluster {
    /// Connects with the nodes at these addresses, which are numbered from 1 on. Waits up to `patience` until they are
    /// there. [`Cluster::open`] waits as long for the connections of their devices.
    ///
    /// # Errors
    /// A node cannot be reached, is another version, or has a leader.
    pub fn connect(addresses: &[String], patience: Duration) -> Result<Arc<Cluster>> {
        let until = Instant::now() + patience;
        let (mut nodes, mut readers) = (Vec::new(), Vec::new());
        for (i, address) in addresses.iter().enumerate() {
            let (node, reader) = Node::connect(i + 1, address, until)?;
            nodes.push(node);
            readers.push(reader);
        }
        let (members, round) = (OnceLock::new(), Mutex::default());
        let (lost, watchers) = (Mutex::default(), Mutex::default());
        let cluster = Arc::new(Cluster { nodes, patience, members, round, lost, watchers });
        for (i, reader) in readers.into_iter().enumerate() {
            let weak = Arc::downgrade(&cluster);
            spawn("keel-control", move || listen(&weak, i, reader))?;
        }
        Ok(cluster)
    }

    /// The nodes' devices, in the order of their ranks: `1/cuda:0` is the first GPU of node 1.
    pub fn devices(&self) -> Vec<DeviceFacts> {
        let of = |node: &Node| -> Vec<DeviceFacts> {
            let named = |DeviceFacts { name, room }: &DeviceFacts| {
                let name = format!("{}/{name}", node.number);
                DeviceFacts { name, room: *room }
            };
            node.devices.iter().map(named).collect()
        };
        self.nodes.iter().flat_map(of).collect()
    }

    /// Opens the nodes' devices as the first members of a group of `size` devices, each `shares` of which share the
    /// layers of a stage. `settings` are for the code that opens them. `planners` are planning backends for them, by
    /// rank. `members` are the leader's own devices, which have the last ranks.
    ///
    /// # Errors
    /// A node cannot open its devices, or is lost.
    ///
    /// # Panics
    /// If it is called twice.
    pub fn open(
        self: &Arc<Self>,
        size: usize,
        shares: usize,
        settings: &Value,
        planners: Vec<Arc<dyn Backend>>,
        members: Arc<dyn Members>,
    ) -> Result<Vec<RemoteBackend>> {
        let is_first = self.members.set(members).is_ok();
        assert!(is_first, "the devices of a cluster are opened once");
        let mut first_rank = 0;
        for node in &self.nodes {
            let ranks = first_rank..first_rank + node.devices.len();
            let seats = GroupPlacement { size, shares, first_rank, settings: settings.clone() };
            let _ = node.ranks.set(ranks.clone());
            node.control.tell(&ControlMessage::Open(seats), &[]);
            first_rank = ranks.end;
        }
        self.nodes.iter().try_for_each(|node| self.wait(node, None))?;
        let until = Instant::now() + self.patience;
        let mut planners = planners.into_iter();
        let mut backends = Vec::with_capacity(first_rank);
        for node in &self.nodes {
            for (index, planner) in (0..node.devices.len()).zip(planners.by_ref()) {
                let link = self.link(node, index, until)?;
                backends.push(RemoteBackend::new(link, planner, Arc::downgrade(self)));
            }
        }
        Ok(backends)
    }

    /// Tells the nodes to connect their devices with these ids. The leader does the same now, and then
    /// [waits](Cluster::finish) for them.
    ///
    /// # Errors
    /// A node is lost.
    pub fn announce(&self, ids: &[u8]) -> Result<()> {
        if let Some(reason) = self.lost() {
            return Err(RemoteError::Gone(reason));
        }
        let mut present = locked(&self.round);
        let round = present.number + 1;
        *present = Round { number: round, ended: BTreeSet::new() };
        drop(present);
        self.tell(&ControlMessage::Connect { round }, ids, None);
        Ok(())
    }

    /// Waits until the nodes have connected their devices.
    ///
    /// # Errors
    /// Why a node has not.
    pub fn finish(&self) -> Result<()> {
        let round = locked(&self.round).number;
        // All are waited for, so that no answer is left for a later round.
        let outcomes: Vec<Result<()>> = self.nodes.iter().map(|node| self.wait(node, Some(round))).collect();
        outcomes.into_iter().collect()
    }

    /// Waits for a node to say that its devices are open, or that they are connected in this round.
    fn wait(&self, node: &Node, wanted: Option<u64>) -> Result<()> {
        let until = Instant::now() + OPEN_MAX;
        let refused =
            |reason| RemoteError::Refused { node: node.number, address: node.address.clone(), reason };
        loop {
            let patience = until.saturating_duration_since(Instant::now());
            match (locked(&node.replies).recv_timeout(patience), wanted) {
                (Ok(ControlMessage::Opened(outcome)), None) => return outcome.map_err(refused),
                (Ok(ControlMessage::Connected { round, outcome }), Some(wanted)) if round == wanted => {
                    return outcome.map_err(refused);
                }
                // The answer of an earlier round, which was not waited for.
                (Ok(_), _) => {}
                (Err(_), _) => {
                    let silent = RemoteError::Lost { peer: node.name(), reason: "it does not answer".into() };
                    return Err(self.lost().map_or(silent, RemoteError::Gone));
                }
            }
        }
    }

    /// Opens the connection of a device. The node is lost if it does not answer.
    fn link(self: &Arc<Self>, node: &Node, index: usize, until: Instant) -> Result<Arc<Link>> {
        let lost =
            |error: std::io::Error| RemoteError::Lost { peer: node.name(), reason: silence_or(&error) };
        let hello = Hello::Device { session: node.session, index };
        let is_last = || self.lost().is_some() || Instant::now() + PAUSE >= until;
        let greeted = greet(node.number, &node.address, &hello, is_last).inspect_err(|error| {
            if let RemoteError::Unreachable { reason, .. } = error {
                self.lose(node, reason);
            }
        });
        let (stream, ()) = greeted?;
        let (cluster, at) = (Arc::downgrade(self), node.number - 1);
        let when_ended = Box::new(move |reason: &str| {
            if let Some(cluster) = cluster.upgrade() {
                cluster.lose(&cluster.nodes[at], reason);
            }
        });
        let link = Link::new(node.name(), stream, when_ended).map_err(lost)?;
        locked(&node.links).push(Arc::downgrade(&link));
        Ok(link)
    }

    /// Tells all nodes that a device does not come to its exchanges any more.
    pub fn abandon(&self, rank: usize) {
        let round = locked(&self.round).number;
        self.tell(&ControlMessage::Absent { rank, round }, &[], None);
    }

    /// A device of a node does not come to its exchanges any more: the leader's own devices and all nodes but `from`
    /// learn it.
    pub(crate) fn note_absent(&self, rank: usize, from: Option<&Node>) {
        if let Some(members) = self.members.get() {
            members.note_absent(rank);
        }
        let round = locked(&self.round).number;
        self.tell(&ControlMessage::Absent { rank, round }, &[], from.map(|node| node.number));
    }

    /// A node says the same of a device and a round.
    fn hear_absent(&self, rank: usize, round: u64, from: &Node) {
        let devices: usize = self.nodes.iter().map(|node| node.devices.len()).sum();
        let present = locked(&self.round);
        if present.number != round || present.ended.len() == devices {
            return;
        }
        // Under the lock: what is noted after the end of the round would concern the next one.
        if let Some(members) = self.members.get() {
            members.note_absent(rank);
        }
        drop(present);
        self.tell(&ControlMessage::Absent { rank, round }, &[], Some(from.number));
    }

    /// A device of a node is ready to meet again.
    pub(crate) fn note_rejoined(&self, rank: usize) {
        locked(&self.round).ended.insert(rank);
        if let Some(members) = self.members.get() {
            members.note_rejoined(rank);
        }
    }

    /// Why a node is lost; `None` if all are there. Nothing runs any more on a cluster that has lost a node: a leader
    /// drops it with the engine, and connects again.
    pub fn lost(&self) -> Option<String> {
        locked(&self.lost).clone()
    }

    /// Calls `then` when a node is lost, or now if one is.
    pub fn when_lost(&self, then: impl FnOnce() + Send + 'static) {
        locked(&self.watchers).push(Box::new(then));
        if self.lost().is_some() {
            self.call_watchers();
        }
    }

    fn call_watchers(&self) {
        let watchers = std::mem::take(&mut *locked(&self.watchers));
        watchers.into_iter().for_each(|then| then());
    }

    /// Sends a message to all nodes but one.
    fn tell(&self, message: &ControlMessage, bytes: &[u8], but: Option<usize>) {
        self.nodes
            .iter()
            .filter(|node| Some(node.number) != but)
            .for_each(|node| node.control.tell(message, bytes));
    }

    /// The node of a device is lost.
    pub(crate) fn lose_device(&self, rank: usize, reason: &str) {
        let has_it = |node: &&Node| node.ranks.get().is_some_and(|ranks| ranks.contains(&rank));
        if let Some(node) = self.nodes.iter().find(has_it) {
            self.lose(node, reason);
        }
    }

    /// A node is lost: whoever waits for its devices learns it.
    fn lose(&self, node: &Node, reason: &str) {
        if node.is_lost.swap(true, Ordering::SeqCst) {
            return;
        }
        let name = node.name();
        tracing::error!("{name} is lost: {reason}");
        locked(&self.lost).get_or_insert_with(|| format!("{name} is lost: {reason}"));
        let _ = node.stream.shutdown(Shutdown::Both);
        let links: Vec<Arc<Link>> = locked(&node.links).iter().filter_map(Weak::upgrade).collect();
        links.iter().for_each(|link| link.close(reason));
        let ranks = node.ranks.get().cloned().unwrap_or_default();
        ranks.for_each(|rank| self.note_absent(rank, Some(node)));
        self.call_watchers();
    }
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.nodes.iter().map(Node::name)).finish()
    }
}

impl Drop for Cluster {
    /// The nodes see the end, and free what they had.
    fn drop(&mut self) {
        for node in &self.nodes {
            let _ = node.stream.shutdown(Shutdown::Both);
        }
    }
}

/// The incoming side of a node's control connection.
struct Reader {
    stream: BufReader<TcpStream>,
    replies: SyncSender<ControlMessage>,
}

impl Node {
    fn connect(number: usize, address: &str, until: Instant) -> Result<(Node, Reader)> {
        let hello = Hello::Lead { version: version() };
        let is_last = || Instant::now() + PAUSE >= until;
        let (stream, Welcome { session, devices }) = greet(number, address, &hello, is_last)?;
        let as_error = |error: std::io::Error| RemoteError::Unreachable {
            node: number,
            address: address.into(),
            reason: error.to_string(),
        };
        stream.set_write_timeout(Some(SILENCE_MAX)).map_err(as_error)?;
        // The heartbeat starts now: connecting the other nodes may take longer than the allowed silence.
        let own = stream.try_clone().map_err(as_error)?;
        let control = MessageSender::new(own, &ControlMessage::Here, ControlMessage::Here)?;
        let reader = BufReader::new(stream.try_clone().map_err(as_error)?);
        let (said, heard) = sync_channel(SAID_MAX);
        let node = Node {
            number,
            address: address.into(),
            session,
            devices,
            stream,
            control,
            is_lost: AtomicBool::new(false),
            ranks: OnceLock::new(),
            replies: Mutex::new(heard),
            links: Mutex::default(),
        };
        Ok((node, Reader { stream: reader, replies: said }))
    }

    fn name(&self) -> String {
        format!("node {} ({})", self.number, self.address)
    }
}

impl Reader {
    /// Keeps an answer until it is waited for.
    fn hear(&self, cluster: &Cluster, from: &Node, said: ControlMessage) {
        if self.replies.try_send(said).is_err() {
            cluster.lose(from, "it has sent more answers than it was asked for");
        }
    }
}

/// Reads the control messages of a node until it is lost, or the cluster is dropped.
fn listen(cluster: &Weak<Cluster>, node: usize, mut reader: Reader) {
    let mut bytes = Vec::new();
    loop {
        let message = frame::read::<ControlMessage>(&mut reader.stream, &mut bytes);
        let Some(cluster) = cluster.upgrade() else { return };
        let from = &cluster.nodes[node];
        match message {
            Ok(reply @ (ControlMessage::Opened(_) | ControlMessage::Connected { .. })) => {
                reader.hear(&cluster, from, reply);
            }
            Ok(ControlMessage::Absent { rank, round }) => cluster.hear_absent(rank, round, from),
            Ok(ControlMessage::Here | ControlMessage::Open(_) | ControlMessage::Connect { .. }) => {}
            Err(error) => return cluster.lose(from, &silence_or(&error)),
        }
    }
}

#[cfg(test)]
mod tests;
