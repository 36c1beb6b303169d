//! The nodes, as the leader sees them.

use std::io::{BufReader, BufWriter, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use keel_array::Backend;
use serde_json::Value;

use crate::absences::Absences;
use crate::link::Link;
use crate::message::{DeviceFacts, Greeting, News, Seats, VERSION, Welcome};
use crate::{Members, RemoteBackend, RemoteError, Result, frame};

/// How often each end says that it is there.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(1);

/// A connection that is silent for this long is lost.
pub(crate) const SILENCE_MAX: Duration = Duration::from_secs(5);

/// How long nodes may take to open their devices, and to connect them.
const OPEN_MAX: Duration = Duration::from_secs(120);

/// How long a connection may take to be made.
const CONNECT_MAX: Duration = Duration::from_secs(2);

/// Between two attempts to reach a node.
const PAUSE: Duration = Duration::from_millis(200);

/// A node and its connection for news.
struct Node {
    /// From 1 on: the leader is node 0.
    number: usize,
    address: String,
    session: u64,
    devices: Vec<DeviceFacts>,
    absences: Arc<Absences>,
    stream: TcpStream,
    out: Mutex<BufWriter<TcpStream>>,
    /// Ranks of its devices, once they are open.
    ranks: OnceLock<Range<usize>>,
    /// What it says of its devices being opened or connected.
    said: Mutex<Receiver<std::result::Result<(), String>>>,
    links: Mutex<Vec<Weak<Link>>>,
}

/// The nodes that a leader has devices of.
pub struct Cluster {
    nodes: Vec<Node>,
    members: OnceLock<Arc<dyn Members>>,
    lost: Mutex<Option<String>>,
    /// Called when a node is lost.
    watchers: Mutex<Vec<Box<dyn FnOnce() + Send>>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Cluster {
    /// Connects with the nodes at these addresses, which are numbered from 1 on. Waits up to `patience` until they are
    /// there.
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
        let (members, lost, watchers) = (OnceLock::new(), Mutex::default(), Mutex::default());
        let cluster = Arc::new(Cluster { nodes, members, lost, watchers });
        for (i, reader) in readers.into_iter().enumerate() {
            let weak = Arc::downgrade(&cluster);
            spawn("keel-news", move || listen(&weak, i, reader))?;
        }
        let weak = Arc::downgrade(&cluster);
        spawn("keel-heartbeat", move || {
            while let Some(cluster) = weak.upgrade() {
                cluster.tell(&News::Here, &[], None);
                drop(cluster);
                std::thread::sleep(HEARTBEAT);
            }
        })?;
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
            let seats = Seats { size, shares, first_rank, settings: settings.clone() };
            let _ = node.ranks.set(ranks.clone());
            node.tell(&News::Open(seats), &[]);
            first_rank = ranks.end;
        }
        self.nodes.iter().try_for_each(|node| node.wait(OPEN_MAX))?;
        let everyone: Arc<dyn Members> = Arc::new(Everyone(Arc::downgrade(self)));
        let mut planners = planners.into_iter();
        let mut backends = Vec::with_capacity(first_rank);
        for node in &self.nodes {
            for (index, planner) in (0..node.devices.len()).zip(planners.by_ref()) {
                backends.push(RemoteBackend::new(node.link(index)?, planner, Arc::clone(&everyone)));
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
            return Err(RemoteError::Lost { peer: "a node".into(), reason });
        }
        self.tell(&News::Connect, ids, None);
        Ok(())
    }

    /// Waits until the nodes have connected their devices.
    ///
    /// # Errors
    /// Why a node has not.
    pub fn finish(&self) -> Result<()> {
        self.nodes.iter().try_for_each(|node| node.wait(OPEN_MAX))
    }

    /// Tells all nodes that a device does not come to its exchanges any more.
    pub fn abandon(&self, rank: usize) {
        self.tell(&News::Absent { rank }, &[], None);
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

    /// Tells news to all nodes but one.
    fn tell(&self, news: &News, bytes: &[u8], but: Option<usize>) {
        self.nodes.iter().filter(|node| Some(node.number) != but).for_each(|node| node.tell(news, bytes));
    }

    /// A node is lost: whoever waits for its devices learns it.
    fn lose(&self, node: &Node, reason: &str) {
        let name = node.name();
        tracing::error!("{name} is lost: {reason}");
        locked(&self.lost).get_or_insert_with(|| format!("{name} is lost: {reason}"));
        let _ = node.stream.shutdown(Shutdown::Both);
        for link in locked(&node.links).iter().filter_map(Weak::upgrade) {
            link.close(reason);
        }
        if let (Some(members), Some(ranks)) = (self.members.get(), node.ranks.get()) {
            for rank in ranks.clone() {
                members.note_absent(rank);
                self.tell(&News::Absent { rank }, &[], Some(node.number));
            }
        }
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

/// The leader's own devices, and the nodes, which learn the same.
struct Everyone(Weak<Cluster>);

impl Members for Everyone {
    fn note_absent(&self, rank: usize) {
        let Some(cluster) = self.0.upgrade() else { return };
        if let Some(members) = cluster.members.get() {
            members.note_absent(rank);
        }
        cluster.abandon(rank);
    }

    fn note_rejoined(&self, rank: usize) {
        if let Some(members) = self.0.upgrade().as_ref().and_then(|cluster| cluster.members.get()) {
            members.note_rejoined(rank);
        }
    }

    fn connect(&self, _ids: &[u8]) -> std::result::Result<(), String> {
        unreachable!("the leader connects its own devices")
    }
}

/// The incoming side of a node's connection for news.
struct Reader {
    stream: BufReader<TcpStream>,
    said: Sender<std::result::Result<(), String>>,
}

impl Node {
    fn connect(number: usize, address: &str, until: Instant) -> Result<(Node, Reader)> {
        let unreachable =
            |reason: String| RemoteError::Unreachable { node: number, address: address.into(), reason };
        let refused = |reason: String| RemoteError::Refused { node: number, address: address.into(), reason };
        loop {
            let attempt = greet(address, &Greeting::Lead { version: VERSION.into() });
            let is_last = Instant::now() + PAUSE >= until;
            match attempt {
                Ok((stream, Welcome::Accepted { session, devices })) => {
                    let as_error = |error: std::io::Error| unreachable(error.to_string());
                    let out = Mutex::new(BufWriter::new(stream.try_clone().map_err(as_error)?));
                    let reader = BufReader::new(stream.try_clone().map_err(as_error)?);
                    let (said, heard) = channel();
                    let node = Node {
                        number,
                        address: address.into(),
                        session,
                        devices,
                        absences: Arc::default(),
                        stream,
                        out,
                        ranks: OnceLock::new(),
                        said: Mutex::new(heard),
                        links: Mutex::default(),
                    };
                    return Ok((node, Reader { stream: reader, said }));
                }
                // It may still be freeing what its last leader had.
                Ok((_, Welcome::Refused { reason })) if is_last => return Err(refused(reason)),
                Err(error) if is_last => return Err(unreachable(error.to_string())),
                Ok(_) | Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    fn name(&self) -> String {
        format!("node {} ({})", self.number, self.address)
    }

    fn tell(&self, news: &News, bytes: &[u8]) {
        if matches!(news, News::Absent { .. }) {
            self.absences.tell();
        }
        let mut out = locked(&self.out);
        // If it fails, the reader of this connection learns it, too.
        let _ = frame::write(&mut *out, news, &[bytes]).and_then(|()| out.flush());
    }

    /// Waits for the node to say that its devices are open, or connected.
    fn wait(&self, patience: Duration) -> Result<()> {
        let refused =
            |reason| RemoteError::Refused { node: self.number, address: self.address.clone(), reason };
        match locked(&self.said).recv_timeout(patience) {
            Ok(said) => said.map_err(refused),
            Err(_) => Err(RemoteError::Lost { peer: self.name(), reason: "it does not answer".into() }),
        }
    }

    /// Opens the connection of a device.
    fn link(&self, index: usize) -> Result<Arc<Link>> {
        let lost = |error: std::io::Error| RemoteError::Lost { peer: self.name(), reason: error.to_string() };
        let stream = open(&self.address, &Greeting::Device { session: self.session, index }).map_err(lost)?;
        let link = Link::new(self.name(), stream, Arc::clone(&self.absences)).map_err(lost)?;
        locked(&self.links).push(Arc::downgrade(&link));
        Ok(link)
    }
}

/// Connects and sends the first message.
fn open(address: &str, greeting: &Greeting) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::other("the name has no address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT_MAX) {
            Ok(mut stream) => {
                stream.set_nodelay(true)?;
                frame::write(&mut stream, greeting, &[])?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The same, and the node's answer. From then on a silent connection is lost.
fn greet(address: &str, greeting: &Greeting) -> std::io::Result<(TcpStream, Welcome)> {
    let mut stream = open(address, greeting)?;
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    stream.set_write_timeout(Some(SILENCE_MAX))?;
    let welcome = frame::read(&mut stream, &mut Vec::new())?;
    Ok((stream, welcome))
}

/// Hears news of a node until it is lost, or the cluster is dropped.
fn listen(cluster: &Weak<Cluster>, node: usize, mut reader: Reader) {
    let mut bytes = Vec::new();
    loop {
        let news = frame::read::<News>(&mut reader.stream, &mut bytes);
        let Some(cluster) = cluster.upgrade() else { return };
        let from = &cluster.nodes[node];
        match news {
            Ok(News::Opened(said) | News::Connected(said)) => drop(reader.said.send(said)),
            Ok(News::Absent { rank }) => {
                if let Some(members) = cluster.members.get() {
                    members.note_absent(rank);
                }
                cluster.tell(&News::Absent { rank }, &[], Some(from.number));
                from.absences.hear();
            }
            Ok(News::Here | News::Open(_) | News::Connect) => {}
            Err(error) => return cluster.lose(from, &silence_or(&error)),
        }
    }
}

/// An error of a connection in words.
pub(crate) fn silence_or(error: &std::io::Error) -> String {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            format!("it has said nothing for {} s", SILENCE_MAX.as_secs())
        }
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => "its connection has ended".into(),
        _ => error.to_string(),
    }
}

/// Starts a thread.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let started = std::thread::Builder::new().name(name.into()).spawn(run);
    started
        .map(drop)
        .map_err(|error| RemoteError::Lost { peer: "this process".into(), reason: error.to_string() })
}
