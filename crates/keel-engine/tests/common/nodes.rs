//! Devices of other processes, which are threads of this one: they talk as processes do, and exchange arrays as devices
//! of one process do.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use keel_array::{Backend, Group, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuGroup, CpuOptions};
use keel_remote::{Cluster, DeviceFacts, Members, OpenDevices, RemoteError};
use serde_json::json;

/// The members of a group, which share a process after all.
struct SameProcess(Vec<CpuGroup>);

impl Members for SameProcess {
    fn note_absent(&self, rank: usize) {
        self.0[rank].abandon();
    }

    fn note_rejoined(&self, _rank: usize) {}

    fn connect(&self, _ids: &[u8]) -> Result<(), String> {
        Ok(())
    }
}

/// The same for a leader. It connects all again when the devices of the nodes have rejoined.
struct Leading {
    members: SameProcess,
    cluster: Weak<Cluster>,
    back: Mutex<BTreeSet<usize>>,
}

impl Members for Leading {
    fn note_absent(&self, rank: usize) {
        self.members.note_absent(rank);
    }

    fn note_rejoined(&self, rank: usize) {
        let mut back = self.back.lock().expect("no test panics here");
        back.insert(rank);
        if back.len() + 1 < self.members.0.len() {
            return;
        }
        back.clear();
        let cluster = self.cluster.upgrade().expect("it leads");
        // A lost node is the next step's error.
        let _ = cluster.announce(b"ids").and_then(|()| cluster.finish());
    }

    fn connect(&self, _ids: &[u8]) -> Result<(), String> {
        Err("a leader is told nothing".into())
    }
}

/// Nodes that are led, and the backends of all devices by rank.
pub struct Led {
    pub cluster: Arc<Cluster>,
    pub backends: Vec<Arc<dyn Backend>>,
}

/// Wraps the backend of a rank.
pub type Wrap = dyn Fn(usize, Arc<dyn Backend>) -> Arc<dyn Backend> + Send + Sync;

/// Nodes that wait for a leader, each with this many devices.
pub struct Nodes {
    pub addresses: Vec<String>,
    /// The present group: a leader sets it before it opens devices.
    groups: Arc<Mutex<Vec<CpuGroup>>>,
    /// Devices that are open in the nodes.
    open: Arc<AtomicUsize>,
}

fn options(group: CpuGroup, planning: bool) -> CpuOptions {
    CpuOptions { threads: Some(1), poison_freed: true, planning, group: Some(group), ..CpuOptions::default() }
}

/// Counts an open device until it is freed.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl keel_testkit::intercepted::Interceptor for Counted {
    fn launch(
        &self,
        backend: &dyn Backend,
        launch: &keel_array::Launch<'_>,
    ) -> Result<(), keel_array::ArrayError> {
        backend.launch(launch)
    }
}

impl Nodes {
    /// Starts nodes with these numbers of devices.
    pub fn start(counts: &[usize], wrap: Arc<Wrap>) -> Nodes {
        let groups: Arc<Mutex<Vec<CpuGroup>>> = Arc::default();
        let open: Arc<AtomicUsize> = Arc::default();
        let start = |&count: &usize| {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
            let address = listener.local_addr().expect("bound").to_string();
            let (groups, open, wrap) = (Arc::clone(&groups), Arc::clone(&open), Arc::clone(&wrap));
            let facts = |i| DeviceFacts { name: format!("cpu:{i}"), room: None };
            let devices = move || (0..count).map(facts).collect();
            let open_devices = move |opening: keel_remote::OpenRequest| {
                let groups = groups.lock().expect("no test panics here").clone();
                assert_eq!((opening.size, &opening.settings), (groups.len(), &json!({"kind": "test"})));
                let device = |rank: usize| {
                    open.fetch_add(1, Ordering::SeqCst);
                    let counted = Arc::new(Counted(Arc::clone(&open)));
                    let backend = Arc::new(CpuBackend::new(options(groups[rank].clone(), false)));
                    let backend =
                        wrap(rank, keel_testkit::intercepted::InterceptedBackend::new(backend, counted));
                    Runtime::new(backend, RuntimeOptions::default())
                };
                let runtimes = opening.ranks.map(device).collect();
                Ok(OpenDevices { runtimes, members: Arc::new(SameProcess(groups)) })
            };
            let leaders = || vec![Ipv4Addr::LOCALHOST.into()];
            let serve = move || keel_remote::serve(&listener, devices, leaders, open_devices, || ());
            std::thread::spawn(serve);
            address
        };
        Nodes { addresses: counts.iter().map(start).collect(), groups, open }
    }

    /// Leads the nodes with one device more, which is the last. Returns all backends by rank.
    pub fn lead(&self, shares: usize) -> Result<Led, RemoteError> {
        self.lead_at(&self.addresses, shares)
    }

    /// The same, with the nodes at other addresses.
    pub fn lead_at(&self, addresses: &[String], shares: usize) -> Result<Led, RemoteError> {
        let cluster = Cluster::connect(addresses, Duration::from_secs(20))?;
        let size = cluster.devices().len() + 1;
        let groups = CpuGroup::of(size);
        self.groups.lock().expect("no test panics here").clone_from(&groups);
        let planner =
            |group: &CpuGroup| Arc::new(CpuBackend::new(options(group.clone(), true))) as Arc<dyn Backend>;
        let planners = groups[..size - 1].iter().map(planner).collect();
        let members = Arc::new(Leading {
            members: SameProcess(groups.clone()),
            cluster: Arc::downgrade(&cluster),
            back: Mutex::default(),
        });
        let remote = cluster.open(size, shares, &json!({"kind": "test"}), planners, members)?;
        let own = Arc::new(CpuBackend::new(options(groups[size - 1].clone(), false))) as Arc<dyn Backend>;
        let all = remote.into_iter().map(|remote| Arc::new(remote) as Arc<dyn Backend>).chain([own]);
        Ok(Led { cluster, backends: all.collect() })
    }

    /// Waits until the nodes have freed all devices.
    pub fn expect_all_freed(&self) {
        for _ in 0..6000 {
            if self.open.load(Ordering::SeqCst) == 0 {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("{} devices of nodes are open", self.open.load(Ordering::SeqCst));
    }
}

/// The state of a cable that is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Connections end.
    Closed,
    /// Nothing comes any more, and nothing is said about it.
    Silent,
    /// The same for all connections but the first, which is the control connection.
    SilentDevices,
}

/// A cable between a leader and a node, which can be cut.
pub struct Cable {
    pub address: String,
    cut: Arc<Mutex<Option<Cut>>>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

impl Cable {
    /// Lays a cable to an address.
    pub fn to(address: &str) -> Cable {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let own = listener.local_addr().expect("bound").to_string();
        let (cut, streams) = (Arc::<Mutex<Option<Cut>>>::default(), Arc::<Mutex<Vec<TcpStream>>>::default());
        let (to, is_cut, all) = (address.to_owned(), Arc::clone(&cut), Arc::clone(&streams));
        std::thread::spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                let Ok(near) = stream else { return };
                let Ok(far) = TcpStream::connect(&to) else { continue };
                let clone = |stream: &TcpStream| stream.try_clone().expect("a handle");
                all.lock().expect("no test panics here").extend([clone(&near), clone(&far)]);
                for (from, to) in [(clone(&near), clone(&far)), (far, near)] {
                    let is_cut = Arc::clone(&is_cut);
                    std::thread::spawn(move || carry(number, from, to, &is_cut));
                }
            }
        });
        Cable { address: own, cut, streams }
    }

    /// Cuts it.
    pub fn cut(&self, how: Cut) {
        *self.cut.lock().expect("no test panics here") = Some(how);
        if how == Cut::Closed {
            for stream in self.streams.lock().expect("no test panics here").iter() {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }
}

fn carry(number: usize, mut from: TcpStream, mut to: TcpStream, cut: &Mutex<Option<Cut>>) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok(count) = from.read(&mut bytes) {
        if count == 0 {
            break;
        }
        let is_through = match *cut.lock().expect("no test panics here") {
            None => true,
            Some(Cut::SilentDevices) => number == 0,
            Some(Cut::Closed | Cut::Silent) => false,
        };
        if is_through && to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}
