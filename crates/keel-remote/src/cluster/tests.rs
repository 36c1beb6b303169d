use std::net::{Ipv4Addr, TcpListener};
use std::sync::mpsc::channel;

use super::*;
use crate::node::tests::Heard;

/// A cluster of one node with two devices, and the node's end of the control connection.
fn cluster() -> (Arc<Cluster>, MessageSender) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    let node = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("the leader connects");
        frame::read_first::<Hello>(&mut stream).expect("it says what it is");
        let devices = vec![DeviceFacts { name: "cpu:0".into(), room: None }; 2];
        frame::write(&mut stream, &HelloReply::Accepted { session: 1, devices }, &[]).expect("it listens");
        MessageSender::new(stream, ControlMessage::Here).expect("a thread")
    });
    let cluster = Cluster::connect(&[address], Duration::from_secs(20)).expect("the node answers");
    (cluster, node.join().expect("no panic"))
}

/// The news may come late: it takes another connection than the answers of the device.
#[test]
fn absences_of_a_round_are_old_news_once_all_devices_of_nodes_have_rejoined() {
    let (cluster, node) = cluster();
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
