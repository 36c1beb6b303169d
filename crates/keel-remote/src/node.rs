//! A node: the process whose devices a leader uses.

use std::io::{BufReader, BufWriter, Write};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use keel_array::Backend;
use serde_json::Value;

use crate::absences::Absences;
use crate::cluster::{HEARTBEAT, SILENCE_MAX, silence_or, spawn};
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
struct Session {
    number: u64,
    /// How many devices the node has.
    count: usize,
    absences: Arc<Absences>,
    out: Mutex<BufWriter<TcpStream>>,
    stream: TcpStream,
    devices: Mutex<Devices>,
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
    threads: Vec<std::thread::JoinHandle<()>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// Serves one leader after the other, without end. `devices` names this node's devices, and `open` opens
/// them.
/// Only connections from `leaders` are served, if there are any.
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
        // The system refuses a connection when it has no files left; the next one may come through.
        let Ok(mut stream) = stream else { continue };
        let peer = stream.peer_addr().map(|peer| peer.ip().to_canonical());
        if !leaders.is_empty() && !peer.as_ref().is_ok_and(|peer| leaders.contains(peer)) {
            tracing::warn!("a connection from {peer:?} is refused: the leader is {leaders:?}");
            continue;
        }
        let _ = stream.set_read_timeout(Some(GREETING_MAX));
        match frame::read::<Greeting>(&mut stream, &mut Vec::new()) {
            Ok(Greeting::Lead { version }) => {
                sessions += 1;
                if let Some(session) = welcome(stream, &version, sessions, &devices, &present) {
                    let (present, open) = (Arc::clone(&present), Arc::clone(&open));
                    spawn("keel-session", move || {
                        follow(&session, &*open);
                        *locked(&present) = None;
                        tracing::info!("the leader is gone; its memory is freed");
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
    let devices = devices();
    let count = devices.len();
    let answer = match refusal {
        Some(reason) => Welcome::Refused { reason },
        None => Welcome::Accepted { session: number, devices },
    };
    let is_accepted = matches!(answer, Welcome::Accepted { .. });
    let sent = frame::write(&mut stream, &answer, &[]);
    if !is_accepted || sent.is_err() {
        return None;
    }
    let _ = stream.set_nodelay(true);
    let _ = stream.set_read_timeout(Some(SILENCE_MAX));
    let _ = stream.set_write_timeout(Some(SILENCE_MAX));
    let out = Mutex::new(BufWriter::new(stream.try_clone().ok()?));
    let (absences, devices) = (Arc::default(), Mutex::default());
    let session = Arc::new(Session { number, count, absences, out, stream, devices });
    *present = Some(Arc::clone(&session));
    Some(session)
}

/// Does what the leader says until it is gone, and frees everything.
fn follow(session: &Arc<Session>, open: &impl Fn(Opening) -> std::result::Result<Opened, String>) {
    let beat = Arc::downgrade(session);
    let _ = spawn("keel-heartbeat", move || {
        while let Some(session) = beat.upgrade() {
            session.tell(&News::Here);
            drop(session);
            std::thread::sleep(HEARTBEAT);
        }
    });
    let Ok(stream) = session.stream.try_clone() else { return };
    let (mut stream, mut bytes) = (BufReader::new(stream), Vec::new());
    let reason = loop {
        match frame::read::<News>(&mut stream, &mut bytes) {
            Ok(News::Open(seats)) => {
                let opened = session.open(seats, open);
                session.tell(&News::Opened(opened));
            }
            Ok(News::Connect) => {
                let members = locked(&session.devices).members.clone();
                let connected = members.map_or(Err("its devices are not open".into()), |m| m.connect(&bytes));
                session.tell(&News::Connected(connected));
            }
            Ok(News::Absent { rank }) => {
                if let Some(members) = &locked(&session.devices).members {
                    members.note_absent(rank);
                }
                session.absences.hear();
            }
            Ok(News::Here | News::Opened(_) | News::Connected(_)) => {}
            Err(error) => break silence_or(&error),
        }
    };
    tracing::info!("the leader is lost: {reason}");
    session.end();
}

impl Session {
    fn tell(&self, news: &News) {
        if matches!(news, News::Absent { .. }) {
            self.absences.tell();
        }
        let mut out = locked(&self.out);
        let _ = frame::write(&mut *out, news, &[]).and_then(|()| out.flush());
    }

    fn open(
        self: &Arc<Self>,
        seats: Seats,
        open: &impl Fn(Opening) -> std::result::Result<Opened, String>,
    ) -> std::result::Result<(), String> {
        let Seats { size, shares, first_rank, settings } = seats;
        let leader = Arc::downgrade(self);
        let abandon = Arc::new(move |rank| {
            if let Some(session) = leader.upgrade() {
                session.tell(&News::Absent { rank });
            }
        });
        let ranks = first_rank..first_rank + self.count;
        let Opened { backends, members } =
            open(Opening { size, shares, ranks: ranks.clone(), settings, abandon })?;
        let mut devices = locked(&self.devices);
        devices.size = size;
        devices.ranks = ranks;
        devices.backends = backends.into_iter().map(Some).collect();
        devices.members = Some(members);
        Ok(())
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
        let absences = Arc::clone(&self.absences);
        let started = std::thread::Builder::new().name(format!("keel-device-{index}")).spawn(move || {
            if let Err(error) = work::serve(stream, backend, absences) {
                tracing::warn!("device {index}: {error}");
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
