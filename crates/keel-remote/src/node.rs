//! A node: the process whose devices a leader uses.

use std::io::BufReader;
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use keel_array::Backend;
use serde_json::Value;

use crate::connection::{HEARTBEAT, NewsLine, SILENCE_MAX, locked, silence_or, spawn};
use crate::message::{DeviceFacts, Greeting, News, Seats, VERSION, Welcome};
use crate::{Members, Result, frame, work};

/// How long a new connection may take to say what it is.
const GREETING_MAX: Duration = Duration::from_secs(5);

/// What a leader asks a node to open.
pub struct Opening {
    /// Devices of the whole group.
    pub size: usize,
    /// How many of them share the layers of a stage.
    pub shares: usize,
    /// Ranks of this node's devices.
    pub ranks: Range<usize>,
    /// The leader's settings.
    pub settings: Value,
    /// Tells the leader that a device of this node does not come to its exchanges any more.
    pub abandon: Arc<dyn Fn(usize) + Send + Sync>,
}

/// The open devices of a node.
pub struct Opened {
    /// By rank.
    pub backends: Vec<Arc<dyn Backend>>,
    /// What they can be told.
    pub members: Arc<dyn Members>,
}

/// What all connections of a leader share.
pub(crate) struct Session {
    number: u64,
    /// How many devices the node has.
    count: usize,
    news: NewsLine,
    stream: TcpStream,
    round: Mutex<Round>,
    devices: Mutex<Devices>,
}

/// The last round in which the devices of all processes were connected.
#[derive(Default)]
struct Round {
    number: u64,
    /// How many of this node's devices have ended its exchanges. When all have, absences of this round are old news.
    ended: usize,
}

/// Devices of a session, and its connections.
#[derive(Default)]
struct Devices {
    size: usize,
    ranks: Range<usize>,
    members: Option<Arc<dyn Members>>,
    /// A device is taken out when its connection comes.
    backends: Vec<Option<Arc<dyn Backend>>>,
    streams: Vec<TcpStream>,
    threads: Vec<JoinHandle<()>>,
}

/// Serves one leader after the other, without end. `devices` names this node's devices, and `open` opens them. Only
/// connections from `leaders` are served, if there are any.
///
/// # Errors
/// No thread can be started.
pub fn serve(
    listener: &TcpListener,
    devices: impl Fn() -> Vec<DeviceFacts>,
    leaders: &[IpAddr],
    open: impl Fn(Opening) -> std::result::Result<Opened, String> + Send + Sync + 'static,
) -> Result<()> {
    let open = Arc::new(open);
    let present: Arc<Mutex<Option<Arc<Session>>>> = Arc::default();
    let mut sessions = 0;
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else {
            // The system has no files left, for example; the next connection may come through.
            std::thread::sleep(HEARTBEAT);
            continue;
        };
        let peer = stream.peer_addr().map(|peer| peer.ip().to_canonical());
        let is_foreign = !leaders.is_empty() && !peer.as_ref().is_ok_and(|peer| leaders.contains(peer));
        if is_foreign {
            let who = peer.map_or_else(|error| error.to_string(), |peer| peer.to_string());
            tracing::warn!("a connection from {who} is refused: the leader is {leaders:?}");
            let reason =
                format!("its leader is {leaders:?} by its --nodes, and this connection is from {who}");
            let _ = frame::write(&mut stream, &Welcome::Refused { reason }, &[]);
            continue;
        }
        let _ = stream.set_read_timeout(Some(GREETING_MAX));
        match frame::read::<Greeting>(&mut stream, &mut Vec::new()) {
            Ok(Greeting::Lead { version }) => {
                sessions += 1;
                if let Some(session) = welcome(stream, &version, sessions, &devices, &present) {
                    let (present, open) = (Arc::clone(&present), Arc::clone(&open));
                    spawn("keel-session", move || {
                        let ending = Ending { session: &session, present: &present };
                        follow(&session, &*open);
                        drop(ending);
                    })?;
                }
            }
            Ok(Greeting::Device { session, index }) => {
                let found = locked(&present).clone().filter(|present| present.number == session);
                if let Some(session) = found {
                    session.serve_device(stream, index)?;
                }
            }
            Err(error) => tracing::warn!("a connection says nothing that can be read: {error}"),
        }
    }
    Ok(())
}

/// Answers a leader. `None` if it is refused.
fn welcome(
    mut stream: TcpStream,
    version: &str,
    number: u64,
    devices: &impl Fn() -> Vec<DeviceFacts>,
    present: &Mutex<Option<Arc<Session>>>,
) -> Option<Arc<Session>> {
    let mut present = locked(present);
    let refusal = if version != VERSION {
        Some(format!("it is version {VERSION}, and the leader {version}: run the same version"))
    } else {
        present.is_some().then(|| "it has a leader; end that one first".into())
    };
    if let Some(reason) = refusal {
        let _ = frame::write(&mut stream, &Welcome::Refused { reason }, &[]);
        return None;
    }
    let devices = devices();
    let count = devices.len();
    frame::write(&mut stream, &Welcome::Accepted { session: number, devices }, &[]).ok()?;
    let _ = stream.set_nodelay(true);
    let _ = stream.set_read_timeout(Some(SILENCE_MAX));
    let _ = stream.set_write_timeout(Some(SILENCE_MAX));
    let news = NewsLine::new(stream.try_clone().ok()?).ok()?;
    let (round, devices) = (Mutex::default(), Mutex::default());
    let session = Arc::new(Session { number, count, news, stream, round, devices });
    *present = Some(Arc::clone(&session));
    Some(session)
}

/// The end of a session, also by a panic: the next leader is served.
struct Ending<'a> {
    session: &'a Session,
    present: &'a Mutex<Option<Arc<Session>>>,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.session.end();
        *locked(self.present) = None;
        tracing::info!("the leader is gone; its memory is freed");
    }
}

/// Does what the leader says until it is gone.
fn follow(session: &Arc<Session>, open: &impl Fn(Opening) -> std::result::Result<Opened, String>) {
    let Ok(stream) = session.stream.try_clone() else { return };
    let (mut stream, mut bytes) = (BufReader::new(stream), Vec::new());
    loop {
        match frame::read::<News>(&mut stream, &mut bytes) {
            Ok(News::Open(seats)) => {
                let opened = session.open(seats, open);
                session.news.tell(&News::Opened(opened), &[]);
            }
            Ok(News::Connect { round }) => session.connect(round, std::mem::take(&mut bytes)),
            Ok(News::Absent { rank, round }) => session.note_absent(rank, round),
            Ok(News::Here | News::Opened(_) | News::Connected { .. }) => {}
            Err(error) => return tracing::info!("the leader is lost: {}", silence_or(&error)),
        }
    }
}

impl Session {
    fn members(&self) -> Option<Arc<dyn Members>> {
        locked(&self.devices).members.clone()
    }

    fn open(
        self: &Arc<Self>,
        seats: Seats,
        open: &impl Fn(Opening) -> std::result::Result<Opened, String>,
    ) -> std::result::Result<(), String> {
        let Seats { size, shares, first_rank, settings } = seats;
        let end = first_rank.checked_add(self.count).filter(|end| *end <= size && self.count > 0);
        let Some(end) = end else {
            return Err(format!(
                "its {} devices from rank {first_rank} on are not in a group of {size}",
                self.count
            ));
        };
        let leader = Arc::downgrade(self);
        let abandon = Arc::new(move |rank| {
            if let Some(session) = leader.upgrade() {
                let round = locked(&session.round).number;
                session.news.tell(&News::Absent { rank, round }, &[]);
            }
        });
        let ranks = first_rank..end;
        let Opened { backends, members } =
            open(Opening { size, shares, ranks: ranks.clone(), settings, abandon })?;
        let mut devices = locked(&self.devices);
        devices.size = size;
        devices.ranks = ranks;
        devices.backends = backends.into_iter().map(Some).collect();
        devices.members = Some(members);
        Ok(())
    }

    /// Connects the devices on a thread of its own: the news of an absence ends it.
    fn connect(self: &Arc<Self>, round: u64, ids: Vec<u8>) {
        *locked(&self.round) = Round { number: round, ended: 0 };
        let session = Arc::clone(self);
        let connect = move || {
            let members = session.members();
            let outcome =
                members.map_or(Err("its devices are not open".into()), |members| members.connect(&ids));
            session.news.tell(&News::Connected { round, outcome }, &[]);
        };
        match std::thread::Builder::new().name("keel-connect".into()).spawn(connect) {
            Ok(thread) => locked(&self.devices).threads.push(thread),
            Err(error) => self.news.tell(&News::Connected { round, outcome: Err(error.to_string()) }, &[]),
        }
    }

    fn note_absent(&self, rank: usize, round: u64) {
        let Some(members) = self.members() else { return };
        let present = locked(&self.round);
        if present.number == round && present.ended < self.count {
            members.note_absent(rank);
        }
    }

    /// Ends the exchanges of a device after a failure. The leader asks for it after every failure, and may do so before
    /// the news of the failure has come.
    pub fn rejoin(&self, backend: &dyn Backend) {
        let (Some(group), Some(members)) = (backend.group(), self.members()) else { return };
        let mut present = locked(&self.round);
        members.note_absent(group.size() - 1);
        present.ended += 1;
        drop(present);
        group.rejoin();
    }

    /// Gives a device to the connection that the leader has opened for it.
    fn serve_device(self: &Arc<Self>, stream: TcpStream, index: usize) -> Result<()> {
        let mut devices = locked(&self.devices);
        let backend = devices.backends.get_mut(index).and_then(Option::take);
        let (Some(backend), Ok(end)) = (backend, stream.try_clone()) else {
            tracing::warn!("device {index} is not there, or has a connection");
            return Ok(());
        };
        let _ = stream.set_read_timeout(None);
        let session = Arc::clone(self);
        let started = std::thread::Builder::new().name(format!("keel-device-{index}")).spawn(move || {
            let news = session.stream.try_clone();
            if let Err(error) = work::serve(stream, backend, session) {
                tracing::warn!("device {index}: {error}");
                // Without this device there is nothing that the leader can run.
                let _ = news.map(|news| news.shutdown(Shutdown::Both));
            }
        });
        match started {
            Ok(thread) => {
                devices.streams.push(end);
                devices.threads.push(thread);
            }
            Err(error) => tracing::error!("no thread can be started: {error}"),
        }
        Ok(())
    }

    /// Ends the work of all devices and frees them. Those that wait for the leader's devices stop waiting.
    fn end(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
        let mut devices = std::mem::take(&mut *locked(&self.devices));
        if let Some(members) = &devices.members {
            let others = (0..devices.size).filter(|rank| !devices.ranks.contains(rank));
            others.for_each(|rank| members.note_absent(rank));
        }
        devices.backends.clear();
        for stream in &devices.streams {
            let _ = stream.shutdown(Shutdown::Both);
        }
        for thread in devices.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::net::Ipv4Addr;
    use std::sync::mpsc::{Sender, channel};

    use keel_cpu::{CpuBackend, CpuGroup, CpuOptions};

    use super::*;

    /// Tells the test what devices hear.
    struct Heard(Sender<String>);

    impl Members for Heard {
        fn note_absent(&self, rank: usize) {
            self.0.send(format!("absent {rank}")).expect("the test listens");
        }

        fn note_rejoined(&self, _rank: usize) {}

        fn connect(&self, ids: &[u8]) -> std::result::Result<(), String> {
            self.0.send(format!("connect {ids:?}")).expect("the test listens");
            Ok(())
        }
    }

    /// A session of a node with this many devices, and the leader's end of its connection.
    pub(crate) fn session(count: usize) -> (Arc<Session>, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let leader = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
        let (stream, _) = listener.accept().expect("the leader connects");
        let news = NewsLine::new(stream.try_clone().expect("a handle")).expect("a thread");
        let (round, devices) = (Mutex::default(), Mutex::default());
        (Arc::new(Session { number: 1, count, news, stream, round, devices }), leader)
    }

    #[test]
    fn absences_of_a_round_are_old_news_once_all_devices_have_ended_it() {
        let (session, _leader) = session(2);
        let (tell, heard) = channel();
        let groups = CpuGroup::of(3);
        locked(&session.devices).members = Some(Arc::new(Heard(tell)));
        let backend = |rank: usize| {
            CpuBackend::planning(CpuOptions { group: Some(groups[rank].clone()), ..CpuOptions::default() })
        };
        let all = || heard.try_iter().collect::<Vec<_>>();
        session.note_absent(2, 0);
        assert_eq!(all(), ["absent 2"]);
        session.rejoin(&backend(0));
        session.note_absent(2, 0);
        assert_eq!(
            all(),
            ["absent 2", "absent 2"],
            "by the rejoining itself, and while a device has not ended"
        );
        session.rejoin(&backend(1));
        all();
        session.note_absent(2, 0);
        assert_eq!(all(), [""; 0], "all have ended");
        session.connect(1, vec![7]);
        assert_eq!(heard.recv().as_deref(), Ok("connect [7]"));
        session.note_absent(2, 0);
        session.note_absent(1, 1);
        assert_eq!(all(), ["absent 1"], "of this round alone");
        session.end();
    }
}
