//! A node: the process whose devices a leader uses.

mod devices;

use std::collections::VecDeque;
use std::io::{self, BufReader};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use keel_array::{Backend, Runtime};
use serde_json::Value;

use crate::connection::{HEARTBEAT, MessageSender, SILENCE_MAX, UntilDeadline, locked, silence_or, spawn};
use crate::leaders::Leaders;
use crate::message::{
    ControlMessage, DeviceFacts, GroupPlacement, Hello, HelloReply, Refusal, Welcome, version,
};
use crate::{Members, frame};
use devices::{Connection, Device, Devices};

/// How long a new connection may take to say what it is.
const HELLO_TIME_MAX: Duration = Duration::from_secs(5);

/// Most connections that have not said what they are. One more closes the oldest of them.
const HELLOS_MAX: usize = 16;

/// Most devices of a group.
const GROUP_MAX: usize = 64;

/// Most threads that connect devices. Those of earlier rounds end when they hear of an absence.
const CONNECTING_MAX: usize = 4;

/// How long the end of a session waits for the work of its devices. A stream of a GPU whose exchanges are ended drains
/// within 10 s.
const END_MAX: Duration = Duration::from_secs(15);

/// Between two looks at threads that end.
const LOOK: Duration = Duration::from_millis(10);

/// What a leader asks a node to open.
pub struct OpenRequest {
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
pub struct OpenDevices {
    /// Their runtimes by rank, each with the limit of its memory.
    pub runtimes: Vec<Runtime>,
    /// What they can be told.
    pub members: Arc<dyn Members>,
}

/// What all connections of a leader share.
pub(crate) struct Session {
    number: u64,
    /// How many devices the node has.
    count: usize,
    control: MessageSender,
    stream: TcpStream,
    round: Mutex<Round>,
    devices: Mutex<Devices>,
    /// Whether the leader has asked for the devices.
    is_asked: AtomicBool,
}

/// The last round in which the devices of all processes were connected.
#[derive(Default)]
struct Round {
    number: u64,
    /// How many of this node's devices have ended its exchanges. When all have, absences of this round are old news.
    ended: usize,
}

/// Serves one leader after the other, without end. `devices` names this node's devices and says what they have room
/// for, and `open` opens them. Only connections from `leaders` are served. Their addresses are looked up now, and again
/// when a connection comes from another address, at most once a second: a leader may start again with a new one. If
/// none are found, the last ones stay. A refused connection is told to try again, unless the look-up for it has found
/// other addresses.
///
/// `closed` is called when a leader that has asked for the devices is gone, before another one is served. The devices
/// are dropped then, unless one has not ended its work within 15 s. A driver may keep memory of its own until the
/// process ends, so `closed` may start the process again.
pub fn serve(
    listener: &TcpListener,
    devices: impl Fn() -> Vec<DeviceFacts> + Send + Sync + 'static,
    leaders: impl Fn() -> Vec<IpAddr> + Send + Sync + 'static,
    open: impl Fn(OpenRequest) -> Result<OpenDevices, String> + Send + Sync + 'static,
    closed: impl Fn() + Send + Sync + 'static,
) {
    let node = Arc::new(Node {
        devices: Box::new(devices),
        leaders: Leaders::new(leaders),
        open: Box::new(open),
        closed: Box::new(closed),
        present: Mutex::default(),
        sessions: AtomicU64::new(0),
        silent: Mutex::default(),
    });
    for stream in listener.incoming() {
        let stream = match stream {
            Ok(stream) => Arc::new(stream),
            Err(error) => {
                // The system has no files left, for example; the next connection may come through.
                tracing::warn!("no connection can be accepted: {error}");
                std::thread::sleep(HEARTBEAT);
                continue;
            }
        };
        node.admit(&stream);
        // On a thread of its own: neither a connection that says nothing nor a slow look-up of a name must keep the
        // leader waiting.
        let own = Arc::clone(&node);
        if let Err(error) = spawn("keel-session", move || own.receive_hello(&stream)) {
            tracing::warn!("a connection is closed: {error}");
            locked(&node.silent).pop_back();
        }
    }
}

/// What all connections of a node share.
struct Node {
    devices: Box<dyn Fn() -> Vec<DeviceFacts> + Send + Sync>,
    leaders: Leaders,
    open: Box<dyn Fn(OpenRequest) -> Result<OpenDevices, String> + Send + Sync>,
    closed: Box<dyn Fn() + Send + Sync>,
    /// The leader's session.
    present: Mutex<Option<Arc<Session>>>,
    /// Sessions so far.
    sessions: AtomicU64,
    /// Connections that have not said what they are, the oldest first.
    silent: Mutex<VecDeque<Arc<TcpStream>>>,
}

impl Node {
    /// Makes room for a new connection.
    fn admit(&self, stream: &Arc<TcpStream>) {
        let mut silent = locked(&self.silent);
        silent.push_back(Arc::clone(stream));
        if silent.len() > HELLOS_MAX
            && let Some(oldest) = silent.pop_front()
        {
            // Its thread sees the end.
            let _ = oldest.shutdown(Shutdown::Both);
        }
    }

    /// Serves a new connection.
    fn receive_hello(&self, stream: &Arc<TcpStream>) {
        // A stranger's hello is read, too: a reply is lost if a connection is closed with bytes that were not read.
        let mut until = UntilDeadline { stream, deadline: Instant::now() + HELLO_TIME_MAX };
        let hello = frame::read_first::<Hello>(&mut until);
        locked(&self.silent).retain(|other| !Arc::ptr_eq(other, stream));
        let served = self.leaders.expect(stream).and_then(|()| match hello {
            Ok(Hello::Lead { version }) => self.lead(stream, &version),
            Ok(Hello::Device { session, index }) => self.lend(stream, session, index),
            Err(error) => Err(Refusal::last(format!("it says nothing that can be read: {error}"))),
        });
        if let Err(refusal) = served {
            refuse(stream, refusal);
        }
    }

    /// Follows a leader until it is gone.
    fn lead(&self, stream: &TcpStream, leader: &str) -> Result<(), Refusal> {
        let own = version();
        if leader != own {
            return Err(Refusal::last(format!(
                "it is version {own}, and the leader {leader}: run the same build of keel on all nodes"
            )));
        }
        let session = self.welcome(stream)?;
        let ending = Ending { session: &session, node: self };
        follow(&session, &*self.open);
        drop(ending);
        Ok(())
    }

    /// Accepts a leader if there is no other.
    fn welcome(&self, stream: &TcpStream) -> Result<Arc<Session>, Refusal> {
        let mut present = locked(&self.present);
        if present.is_some() {
            return Err(Refusal::passing("it has a leader; end that one first"));
        }
        let number = self.sessions.fetch_add(1, Ordering::SeqCst) + 1;
        let begun = Session::begin(stream, number, (self.devices)());
        let session = Arc::new(begun.map_err(|error| Refusal::passing(error.to_string()))?);
        *present = Some(Arc::clone(&session));
        Ok(session)
    }

    /// Lends a device to its leader.
    fn lend(&self, stream: &Arc<TcpStream>, session: u64, index: usize) -> Result<(), Refusal> {
        let present = locked(&self.present).clone().filter(|present| present.number == session);
        let gone = || Refusal::last("it has lost the control connection of this leader");
        present.ok_or_else(gone)?.serve_device(stream, index)
    }
}

/// Answers a connection that is not served.
fn refuse(mut stream: &TcpStream, refusal: Refusal) {
    let reason = &refusal.reason;
    match refusal.may_pass {
        // A leader tries again five times a second.
        true => tracing::debug!("a connection is refused: {reason}"),
        false => tracing::warn!("a connection is refused: {reason}"),
    }
    let _ = stream.set_write_timeout(Some(SILENCE_MAX));
    let _ = frame::write(&mut stream, &HelloReply::<()>::Refused(refusal), &[]);
}

/// The end of a session, also by a panic: the next leader is served.
struct Ending<'a> {
    session: &'a Session,
    node: &'a Node,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        let is_asked = self.session.is_asked.load(Ordering::SeqCst);
        match self.session.end(END_MAX) {
            true if is_asked => tracing::info!("the leader is gone; its memory is freed"),
            true => tracing::debug!("the leader is gone; it has opened nothing"),
            false => tracing::error!("the leader is gone; a device has not ended its work after {END_MAX:?}"),
        }
        if is_asked {
            (self.node.closed)();
        }
        *locked(&self.node.present) = None;
    }
}

/// Does what the leader says until it is gone.
fn follow(session: &Arc<Session>, open: &dyn Fn(OpenRequest) -> Result<OpenDevices, String>) {
    let Ok(stream) = session.stream.try_clone() else { return };
    let (mut stream, mut bytes) = (BufReader::new(stream), Vec::new());
    loop {
        match frame::read::<ControlMessage>(&mut stream, &mut bytes) {
            Ok(ControlMessage::Open(seats)) => {
                let opened = session.open(seats, open);
                session.control.tell(&ControlMessage::Opened(opened), &[]);
            }
            Ok(ControlMessage::Connect { round }) => session.connect(round, std::mem::take(&mut bytes)),
            Ok(ControlMessage::Absent { rank, round }) => session.note_absent(rank, round),
            Ok(ControlMessage::Here | ControlMessage::Opened(_) | ControlMessage::Connected { .. }) => {}
            // A leader that waits for another node comes and goes every 2 s.
            Err(error) if !session.is_asked.load(Ordering::SeqCst) => {
                return tracing::debug!("the leader has left: {}", silence_or(&error));
            }
            Err(error) => return tracing::info!("the leader is lost: {}", silence_or(&error)),
        }
    }
}

impl Session {
    fn new(number: u64, count: usize, control: MessageSender, stream: TcpStream) -> Session {
        let (round, devices, is_asked) = (Mutex::default(), Mutex::default(), AtomicBool::new(false));
        Session { number, count, control, stream, round, devices, is_asked }
    }

    /// Accepts a leader. Nothing has been sent to it after an error.
    fn begin(stream: &TcpStream, number: u64, devices: Vec<DeviceFacts>) -> io::Result<Session> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENCE_MAX))?;
        stream.set_write_timeout(Some(SILENCE_MAX))?;
        let (out, own, count) = (stream.try_clone()?, stream.try_clone()?, devices.len());
        let accepted = HelloReply::Accepted(Welcome { session: number, devices });
        let control = MessageSender::new(out, &accepted, ControlMessage::Here).map_err(io::Error::other)?;
        Ok(Session::new(number, count, control, own))
    }

    fn members(&self) -> Option<Arc<dyn Members>> {
        locked(&self.devices).members.clone()
    }

    fn open(
        self: &Arc<Self>,
        seats: GroupPlacement,
        open: &dyn Fn(OpenRequest) -> Result<OpenDevices, String>,
    ) -> Result<(), String> {
        let GroupPlacement { size, shares, first_rank, settings } = seats;
        if size > GROUP_MAX {
            return Err(format!("a group of {size} devices; at most {GROUP_MAX} share a model"));
        }
        if self.members().is_some() {
            return Err("its devices are open already".into());
        }
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
                session.control.tell(&ControlMessage::Absent { rank, round }, &[]);
            }
        });
        let ranks = first_rank..end;
        self.is_asked.store(true, Ordering::SeqCst);
        let OpenDevices { runtimes, members } =
            open(OpenRequest { size, shares, ranks: ranks.clone(), settings, abandon })?;
        let mut devices = locked(&self.devices);
        devices.size = size;
        devices.ranks = ranks;
        devices.all = runtimes.into_iter().map(|runtime| Device { runtime, connection: None }).collect();
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
            session.control.tell(&ControlMessage::Connected { round, outcome }, &[]);
        };
        let mut devices = locked(&self.devices);
        devices.connecting.retain(|thread| !thread.is_finished());
        let started = match devices.connecting.len() < CONNECTING_MAX {
            true => spawn("keel-connect", connect).map_err(|error| error.to_string()),
            false => Err("it waits for earlier connections of its devices".into()),
        };
        match started {
            Ok(thread) => devices.connecting.push(thread),
            Err(reason) => {
                drop(devices);
                self.control.tell(&ControlMessage::Connected { round, outcome: Err(reason) }, &[]);
            }
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

    /// Lends a device to the connection that the leader has opened for it.
    fn serve_device(self: &Arc<Self>, stream: &Arc<TcpStream>, index: usize) -> Result<(), Refusal> {
        let mut devices = locked(&self.devices);
        let missing = || Refusal::last(format!("its device {index} is not open"));
        devices.all.get_mut(index).ok_or_else(missing)?.lend(stream, index, self)
    }

    /// Ends the work of all devices and frees them. Those that wait for the leader's devices stop waiting. Waits for
    /// `patience` at most; false if a device still works then.
    fn end(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let _ = self.stream.shutdown(Shutdown::Both);
        let Devices { size, ranks, members, all, connecting: mut threads } =
            std::mem::take(&mut *locked(&self.devices));
        if let Some(members) = &members {
            let others = (0..size).filter(|rank| !ranks.contains(rank));
            others.for_each(|rank| members.note_absent(rank));
        }
        let mut runtimes = Vec::with_capacity(all.len());
        for Device { runtime, connection } in all {
            runtimes.push(runtime);
            if let Some(Connection { stream, thread }) = connection {
                let _ = stream.shutdown(Shutdown::Both);
                threads.push(thread);
            }
        }
        // Also waits for what a driver does, so not on this thread.
        match spawn("keel-close", move || drop(runtimes)) {
            Ok(thread) => threads.push(thread),
            Err(error) => tracing::error!("{error}"),
        }
        while threads.iter().any(|thread| !thread.is_finished()) {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(LOOK);
        }
        for thread in threads {
            let _ = thread.join();
        }
        true
    }
}

#[cfg(test)]
pub(crate) mod tests;
