use std::net::{Ipv4Addr, TcpListener};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use keel_cpu::{CpuBackend, CpuGroup, CpuOptions};

use super::*;
use crate::message::{HelloReply, Refusal};
use crate::node::tests::Heard;

/// A cluster of one node with two devices, the node's end of the control connection, and where it listens.
fn cluster(patience: Duration) -> (Arc<Cluster>, MessageSender, TcpListener) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    let node = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("the leader connects");
        frame::read_first::<Hello>(&mut stream).expect("it says what it is");
        let devices = vec![DeviceFacts { name: "cpu:0".into(), room: None }; 2];
        let welcome = HelloReply::Accepted(Welcome { session: 1, devices });
        (MessageSender::new(stream, &welcome, ControlMessage::Here).expect("a thread"), listener)
    });
    let cluster = Cluster::connect(&[address], patience).expect("the node answers");
    let (control, listener) = node.join().expect("no panic");
    (cluster, control, listener)
}

/// Opens the devices of such a cluster, and one here. Returns how many backends there are.
fn open(cluster: &Arc<Cluster>, tell: Sender<String>) -> Result<usize> {
    let planner = |group: &CpuGroup| {
        let options = CpuOptions { group: Some(group.clone()), ..CpuOptions::default() };
        Arc::new(CpuBackend::planning(options)) as Arc<dyn Backend>
    };
    let planners = CpuGroup::of(3)[..2].iter().map(planner).collect();
    let backends = cluster.open(3, 1, &Value::Null, planners, Arc::new(Heard(tell)))?;
    Ok(backends.len())
}

/// Answers the connections of devices, and closes those without an answer. Gives the devices for which they were.
fn answer(
    listener: TcpListener,
    answers: Vec<Option<HelloReply<()>>>,
) -> JoinHandle<(Vec<usize>, Vec<TcpStream>)> {
    std::thread::spawn(move || {
        let (mut asked, mut streams) = (Vec::new(), Vec::new());
        for answer in answers {
            let (mut stream, _) = listener.accept().expect("the leader connects");
            match frame::read_first(&mut stream) {
                Ok(Hello::Device { session: 1, index }) => asked.push(index),
                other => panic!("{other:?}"),
            }
            if let Some(answer) = answer {
                frame::write(&mut stream, &answer, &[]).expect("it listens");
                streams.push(stream);
            }
        }
        (asked, streams)
    })
}

/// A node closes connections when it has no files left, for example.
#[test]
fn connections_of_devices_are_tried_again() {
    let (tell, _heard) = channel();
    let (cluster, node, listener) = cluster(Duration::from_secs(60));
    node.tell(&ControlMessage::Opened(Ok(())), &[]);
    let passing = HelloReply::Refused(Refusal::passing("it has no files left"));
    let accepted = || Some(HelloReply::Accepted(()));
    let answered = answer(listener, vec![None, Some(passing), accepted(), None, accepted()]);
    assert_eq!(open(&cluster, tell).expect("they are tried again"), 2);
    let (asked, _streams) = answered.join().expect("no panic");
    assert_eq!(asked, [0, 0, 0, 1, 1]);
    assert_eq!(cluster.lost(), None);
}

#[test]
fn the_reason_why_a_device_is_refused_is_told() {
    let (tell, _heard) = channel();
    let (cluster, node, listener) = cluster(Duration::from_secs(60));
    node.tell(&ControlMessage::Opened(Ok(())), &[]);
    let answered = answer(listener, vec![Some(HelloReply::Refused(Refusal::last("it has another leader")))]);
    let error = open(&cluster, tell).expect_err("it is refused");
    let text = error.to_string();
    assert!(matches!(error, RemoteError::Refused { node: 1, .. }), "{text}");
    assert!(text.ends_with("it has another leader"), "{text}");
    assert_eq!(answered.join().expect("no panic").0, [0], "it is not asked again");
    assert_eq!(cluster.lost(), None);
}

#[test]
fn a_node_that_does_not_answer_for_a_device_is_lost() {
    let (tell, _heard) = channel();
    let (cluster, node, listener) = cluster(Duration::ZERO);
    node.tell(&ControlMessage::Opened(Ok(())), &[]);
    let answered = answer(listener, vec![None]);
    let error = open(&cluster, tell).expect_err("there is no time for another attempt");
    assert!(matches!(error, RemoteError::Unreachable { node: 1, .. }), "{error}");
    let lost = cluster.lost().expect("it is lost");
    assert!(lost.ends_with("its connection has ended"), "{lost}");
    answered.join().expect("no panic");
}

#[test]
fn a_lost_node_is_not_asked_again_for_its_devices() {
    let (tell, _heard) = channel();
    let (cluster, node, listener) = cluster(Duration::from_secs(60));
    node.tell(&ControlMessage::Opened(Ok(())), &[]);
    let ended = std::thread::spawn(move || drop((listener.accept(), node, listener)));
    let start = Instant::now();
    let error = open(&cluster, tell).expect_err("the node has ended");
    assert!(matches!(error, RemoteError::Unreachable { node: 1, .. }), "{error}");
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    ended.join().expect("no panic");
}

/// The news may come late: it takes another connection than the answers of the device.
#[test]
fn absences_of_a_round_are_old_news_once_all_devices_of_nodes_have_rejoined() {
    let (cluster, node, _listener) = cluster(Duration::from_secs(20));
    let (tell, heard) = channel();
    assert!(cluster.members.set(Arc::new(Heard(tell))).is_ok());
    // The news of a node are read in order, so what was sent before this answer has been heard.
    let hear = |rank, round| {
        node.tell(&ControlMessage::Absent { rank, round }, &[]);
        node.tell(&ControlMessage::Connected { round, outcome: Ok(()) }, &[]);
        cluster.wait(&cluster.nodes[0], Some(round)).expect("it is there");
        heard.try_iter().collect::<Vec<_>>()
    };
    assert_eq!(hear(0, 0), ["absent 0"]);
    cluster.note_rejoined(1);
    assert_eq!(hear(0, 0), ["absent 0"], "a device has not ended the round");
    cluster.note_rejoined(1);
    cluster.note_rejoined(0);
    assert_eq!(hear(0, 0), [""; 0], "all have ended it");
    cluster.announce(b"ids").expect("the node is there");
    assert_eq!(hear(1, 0), [""; 0], "of the round before");
    assert_eq!(hear(1, 1), ["absent 1"]);
}
