use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use keel_cpu::{CpuBackend, CpuGroup, CpuOptions};

pub(crate) use super::devices::tests::lent_device;
use super::*;
use crate::connection::send_hello;
use crate::connection::tests::NO_THREADS;

/// Tells the test what devices hear.
pub(crate) struct Heard(pub(crate) Sender<String>);

impl Members for Heard {
    fn note_absent(&self, rank: usize) {
        self.0.send(format!("absent {rank}")).expect("the test listens");
    }

    fn note_rejoined(&self, _rank: usize) {}

    fn connect(&self, ids: &[u8]) -> Result<(), String> {
        self.0.send(format!("connect {ids:?}")).expect("the test listens");
        Ok(())
    }
}

/// A node's end of a connection, and the leader's.
pub(crate) fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let leader = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
    (listener.accept().expect("the leader connects").0, leader)
}

/// A session of a node with this many devices, and the leader's end of its connection.
pub(crate) fn session(count: usize) -> (Arc<Session>, TcpStream) {
    let (stream, leader) = connection();
    let own = stream.try_clone().expect("a handle");
    let control = MessageSender::new(own, &ControlMessage::Here, ControlMessage::Here).expect("a thread");
    (Arc::new(Session::new(1, count, control, stream)), leader)
}

/// A node without devices, which listens nowhere.
fn unbound() -> Node {
    Node {
        devices: Box::new(Vec::<DeviceFacts>::new),
        leaders: Leaders::new(here),
        open: Box::new(|_: OpenRequest| Err("it has none".into())),
        closed: Box::new(|| ()),
        present: Mutex::default(),
        sessions: AtomicU64::new(0),
        silent: Mutex::default(),
    }
}

/// The address of all leaders here.
fn here() -> Vec<IpAddr> {
    vec![Ipv4Addr::LOCALHOST.into()]
}

/// A node with this many devices, and its address. Opening them fails.
fn node(count: usize) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("bound");
    let facts = move || vec![DeviceFacts { name: "cpu:0".into(), room: None }; count];
    std::thread::spawn(move || serve(&listener, facts, here, |_| Err("it has none".into()), || ()));
    address
}

/// A health check, for example, which connects and says nothing.
#[test]
fn connections_that_say_nothing_do_not_keep_a_leader_waiting() {
    let address = node(1);
    let silent: Vec<TcpStream> =
        (0..HELLOS_MAX).map(|_| TcpStream::connect(address).expect("it listens")).collect();
    let start = Instant::now();
    let lead = || send_hello::<Welcome>(&address.to_string(), &Hello::Lead { version: version() });
    let (_stream, reply) = lead().expect("it answers");
    assert!(matches!(reply, HelloReply::Accepted(Welcome { session: 1, .. })), "{reply:?}");
    let (_second, reply) = lead().expect("it answers");
    assert!(matches!(reply, HelloReply::Refused(Refusal { may_pass: true, .. })), "{reply:?}");
    assert!(start.elapsed() < HELLO_TIME_MAX, "{:?}", start.elapsed());
    // It has made room.
    let mut oldest = &silent[0];
    oldest.set_read_timeout(Some(HELLO_TIME_MAX)).expect("a limit");
    let closed = io::Read::read(&mut oldest, &mut [0]);
    assert!(matches!(closed, Ok(0)), "{closed:?}");
}

/// All hellos are answered, so that a leader knows whether it should try again.
#[test]
fn what_is_not_served_is_told_why() {
    let address = node(1).to_string();
    let device = |session| send_hello::<()>(&address, &Hello::Device { session, index: 0 });
    let expect_last = |reply: HelloReply<()>, expected: &str| {
        let HelloReply::Refused(Refusal { reason, may_pass: false }) = reply else { panic!("{reply:?}") };
        assert!(reason.contains(expected), "{reason}");
    };
    let (_stream, reply) = device(1).expect("it answers");
    expect_last(reply, "it has lost the control connection of this leader");
    let (_leader, reply) =
        send_hello::<Welcome>(&address, &Hello::Lead { version: version() }).expect("it answers");
    assert!(matches!(reply, HelloReply::Accepted(_)), "{reply:?}");
    let (_stream, reply) = device(1).expect("it answers");
    expect_last(reply, "its device 0 is not open");
    let mut unreadable = TcpStream::connect(&address).expect("it listens");
    frame::write(&mut unreadable, &"hello", &[]).expect("it reads");
    let reply = frame::read(&mut unreadable, &mut Vec::new()).expect("it answers");
    expect_last(reply, "nothing that can be read");
}

/// A refusal after an acceptance is a message that no leader expects.
#[test]
fn a_leader_whose_heartbeat_cannot_start_is_refused_and_not_accepted() {
    let (stream, mut leader) = connection();
    frame::write(&mut leader, &Hello::Lead { version: version() }, &[]).expect("it listens");
    NO_THREADS.set(true);
    unbound().receive_hello(&Arc::new(stream));
    NO_THREADS.set(false);
    let reply: HelloReply<Welcome> = frame::read(&mut leader, &mut Vec::new()).expect("it answers");
    let HelloReply::Refused(Refusal { reason, may_pass: true }) = reply else { panic!("{reply:?}") };
    assert!(reason.contains("no thread can be started"), "{reason}");
}

/// Builds of the same version may mean something else by a message.
#[test]
fn a_leader_of_another_build_is_refused() {
    let hello = Hello::Lead { version: env!("CARGO_PKG_VERSION").into() };
    let (_stream, reply) = send_hello::<Welcome>(&node(1).to_string(), &hello).expect("it answers");
    let HelloReply::Refused(Refusal { reason, may_pass: false }) = reply else { panic!("{reply:?}") };
    assert!(reason.contains("run the same build"), "{reason}");
}

/// A node whose leaders have these addresses, and its own address.
fn led_by(leaders: impl Fn() -> Vec<IpAddr> + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    std::thread::spawn(move || serve(&listener, Vec::new, leaders, |_| Err("it has none".into()), || ()));
    address
}

/// What a node answers to a leader, which then leaves.
fn reply_of(address: &str) -> HelloReply<Welcome> {
    send_hello(address, &Hello::Lead { version: version() }).expect("it answers").1
}

/// Node 0 may start again with another address, and its name may have none while it is away.
#[test]
fn the_addresses_of_leaders_are_looked_up_again() {
    let look_ups = AtomicUsize::new(0);
    let address = led_by(move || match look_ups.fetch_add(1, Ordering::SeqCst) {
        0 | 1 | 3 => Vec::new(),
        2 => vec![Ipv4Addr::new(192, 0, 2, 1).into()],
        _ => here(),
    });
    let (mut passing, mut last) = (Vec::new(), Vec::new());
    let is_served = (0..600).any(|_| {
        let HelloReply::Refused(Refusal { reason, may_pass }) = reply_of(&address) else { return true };
        let refusals = if may_pass { &mut passing } else { &mut last };
        refusals.push(reason);
        std::thread::sleep(HEARTBEAT / 10);
        false
    });
    assert!(is_served);
    // The second look-up finds none, and so does the one after that of another address.
    for expected in ["the name of node 0 in its --nodes has no address so far", "[192.0.2.1]"] {
        assert!(passing.iter().any(|reason| reason.contains(expected)), "{expected}: {passing:?}");
    }
    assert!(last.len() == 1 && last[0].contains("its leader is [192.0.2.1] by its --nodes"), "{last:?}");
}

/// The look-up of a name may take long.
#[test]
fn a_leader_that_comes_during_a_look_up_is_told_to_try_again() {
    let (begin, begun) = channel();
    let (end, ended) = channel::<()>();
    let slow = Mutex::new((begin, ended));
    let look_ups = AtomicUsize::new(0);
    let address = led_by(move || {
        if look_ups.fetch_add(1, Ordering::SeqCst) == 0 {
            return Vec::new();
        }
        let slow = locked(&slow);
        slow.0.send(()).expect("the test listens");
        let _ = slow.1.recv();
        here()
    });
    let to = address.clone();
    let first = std::thread::spawn(move || {
        loop {
            match reply_of(&to) {
                HelloReply::Refused(Refusal { may_pass: true, .. }) => std::thread::sleep(LOOK),
                reply => return reply,
            }
        }
    });
    begun.recv_timeout(Duration::from_secs(20)).expect("a second after the first one");
    let reply = reply_of(&address);
    assert!(matches!(reply, HelloReply::Refused(Refusal { may_pass: true, .. })), "{reply:?}");
    drop(end);
    let reply = first.join().expect("no panic");
    assert!(matches!(reply, HelloReply::Accepted(_)), "{reply:?}");
}

#[test]
fn a_group_that_cannot_be_is_refused() {
    let (session, _leader) = session(2);
    let open = |opening: OpenRequest| -> Result<OpenDevices, String> {
        assert_eq!(opening.ranks, 1..3);
        Ok(OpenDevices { runtimes: Vec::new(), members: Arc::new(Heard(channel().0)) })
    };
    let seats = |size, first_rank| GroupPlacement { size, shares: 1, first_rank, settings: Value::Null };
    for (seats, reason) in [
        (seats(1 << 40, 0), "a group of 1099511627776 devices; at most 64 share a model"),
        (seats(3, 2), "its 2 devices from rank 2 on are not in a group of 3"),
        (seats(3, usize::MAX), "are not in a group of 3"),
    ] {
        let error = session.open(seats, &open).expect_err("it is refused");
        assert!(error.contains(reason), "{error}");
    }
    session.open(seats(3, 1), &open).expect("it is one");
    let error = session.open(seats(3, 1), &open).expect_err("twice");
    assert_eq!(error, "its devices are open already");
}

/// Each time devices are connected again takes a thread, which ends.
#[test]
fn threads_that_connect_do_not_pile_up() {
    let (session, _leader) = session(1);
    let (tell, heard) = channel();
    locked(&session.devices).members = Some(Arc::new(Heard(tell)));
    for round in 0..100 {
        session.connect(round, Vec::new());
        let connected = heard.recv_timeout(Duration::from_secs(20));
        assert_eq!(connected.as_deref(), Ok("connect []"), "round {round}");
        // The thread ends soon after that.
        while !locked(&session.devices).connecting.iter().all(JoinHandle::is_finished) {
            std::thread::yield_now();
        }
    }
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
    assert_eq!(all(), ["absent 2", "absent 2"], "by the rejoining itself, and while a device has not ended");
    session.rejoin(&backend(1));
    all();
    session.note_absent(2, 0);
    assert_eq!(all(), [""; 0], "all have ended");
    session.connect(1, vec![7]);
    assert_eq!(heard.recv().as_deref(), Ok("connect [7]"));
    session.note_absent(2, 0);
    session.note_absent(1, 1);
    assert_eq!(all(), ["absent 1"], "of this round alone");
    assert!(session.end(END_MAX));
}

/// A device whose driver hangs.
#[test]
fn the_end_of_a_session_waits_for_its_devices_only_so_long() {
    let (session, _leader) = session(1);
    let (go, waits) = channel::<()>();
    let stuck = std::thread::spawn(move || {
        let _ = waits.recv();
    });
    locked(&session.devices).connecting.push(stuck);
    assert!(!session.end(Duration::from_millis(50)));
    drop(go);
}

#[test]
fn a_node_is_told_when_a_leader_that_asked_for_its_devices_is_gone() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    let (tell, told) = channel();
    let facts = || vec![DeviceFacts { name: "cpu:0".into(), room: None }];
    let open = |_| Err("it has none".into());
    std::thread::spawn(move || {
        serve(&listener, facts, here, open, move || tell.send(()).expect("the test listens"))
    });
    let lead = || {
        let (stream, reply) = loop {
            let (stream, reply) =
                send_hello::<Welcome>(&address, &Hello::Lead { version: version() }).expect("it answers");
            match reply {
                HelloReply::Refused(Refusal { may_pass: true, .. }) => std::thread::sleep(LOOK),
                reply => break (stream, reply),
            }
        };
        assert!(matches!(reply, HelloReply::Accepted(_)), "{reply:?}");
        stream
    };
    drop(lead());
    let mut asking = lead();
    assert!(told.try_recv().is_err(), "the first leader asked for nothing");
    let seats = GroupPlacement { size: 2, shares: 1, first_rank: 0, settings: Value::Null };
    frame::write(&mut asking, &ControlMessage::Open(seats), &[]).expect("it listens");
    drop(asking);
    told.recv_timeout(Duration::from_secs(60)).expect("the second did");
}

/// When something was logged at INFO and above, and at which level.
#[derive(Default)]
struct Logged(Mutex<Vec<(tracing::Level, Instant)>>);

impl tracing::Subscriber for Logged {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::INFO
    }

    fn new_span(&self, _span: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _span: &tracing::span::Id, _values: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _span: &tracing::span::Id, _follows: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        locked(&self.0).push((*event.metadata().level(), Instant::now()));
    }

    fn enter(&self, _span: &tracing::span::Id) {}

    fn exit(&self, _span: &tracing::span::Id) {}
}

/// While a node is away, its leader comes to the others every 2 s and leaves them again.
#[test]
fn a_leader_that_has_opened_nothing_is_no_news() {
    for (is_asked, lines) in [(false, 0), (true, 2)] {
        let (session, leader) = session(1);
        session.is_asked.store(is_asked, Ordering::SeqCst);
        let node = unbound();
        drop(leader);
        let logged = Arc::new(Logged::default());
        tracing::subscriber::with_default(Arc::clone(&logged), || {
            let ending = Ending { session: &session, node: &node };
            follow(&session, &*node.open);
            drop(ending);
        });
        assert_eq!(locked(&logged.0).len(), lines, "asked: {is_asked}");
    }
}

/// The system may have no files left for a long time.
#[test]
fn connections_that_cannot_be_accepted_are_logged_once_a_second() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    listener.set_nonblocking(true).expect("it can fail");
    let logged = Arc::new(Logged::default());
    let own = Arc::clone(&logged);
    std::thread::spawn(move || {
        tracing::subscriber::with_default(own, || {
            serve(&listener, Vec::new, here, |_| Err("it has none".into()), || ());
        });
    });
    let warnings = || -> Vec<Instant> {
        let all = locked(&logged.0);
        all.iter().filter(|(level, _)| *level == tracing::Level::WARN).map(|(_, at)| *at).collect()
    };
    let until = Instant::now() + Duration::from_secs(60);
    while warnings().len() < 3 {
        assert!(Instant::now() < until, "{} in a minute", warnings().len());
        std::thread::sleep(LOOK);
    }
    let are_apart = warnings().windows(2).all(|pair| pair[1] - pair[0] >= HEARTBEAT);
    assert!(are_apart, "{:?}", warnings());
}
