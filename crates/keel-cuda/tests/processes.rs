//! Exchanges between two processes, each with a GPU of its own. They need two GPUs and `KEEL_TEST_CUDA=1`.
//!
//! A test runs this program twice more, as the processes of a group, and passes their messages on:
//!
//! ```text
//! process 0, leads ── lines of its output ──▶ test ──▶ input of process 1, and the other way round
//! ```

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{Prepared, Rank};
use keel_array::{Array, DType, Runtime, RuntimeOptions};
use keel_cuda::{CudaBackend, CudaGroup, CudaOptions, GroupIds, PeerProcesses, Role};

/// Tell a process of the group its rank, and what it is to do.
const RANK: &str = "KEEL_TEST_PROCESS_RANK";
const PART: &str = "KEEL_TEST_PROCESS_PART";

/// Prefix of the lines that are for the other process. The harness may print something before it.
const MARK: &str = "to the other process: ";

/// The longest that a test takes, and a process waits for a message.
const TEST_MAX: Duration = Duration::from_secs(240);
const MESSAGE_MAX: Duration = Duration::from_secs(90);

/// The longest wait for a device that does not come.
const FAILURE_MAX: Duration = Duration::from_secs(10);

/// Lengths of arrays. If a stage is of one process, mailboxes add the first of them.
const LENS: [usize; 2] = [1000, 70_000];

// The test, which passes messages on.

/// A process that is killed if the test fails.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(rank: usize, part: &str, settings: &[(&str, &str)]) -> Process {
    let mut command = Command::new(std::env::current_exe().expect("its own path"));
    command.args(["one_process_of_a_group", "--exact", "--nocapture", "--test-threads=1"]);
    command.env(RANK, rank.to_string()).env(PART, part).envs(settings.iter().copied());
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    Process(child.expect("it starts"))
}

/// Passes the messages of process `from` on, and at their end tells that its device is absent.
fn pass_on(from: usize, lines: impl BufRead, mut to: ChildStdin) {
    for line in lines.lines().map_while(Result::ok) {
        if let Some((_, message)) = line.split_once(MARK) {
            // A process that has ended reads nothing.
            let _ = writeln!(to, "{message}");
        } else {
            println!("process {from}: {line}");
        }
    }
    let _ = writeln!(to, "absent {from}");
}

/// Runs both processes. Returns how they ended, by rank.
fn run_both(part: &str, settings: &[(&str, &str)]) -> Option<[ExitStatus; 2]> {
    /// Processes of two tests at a time would take turns on the GPUs.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    if common::gpus()? < 2 {
        keel_testkit::skipped!("needs two GPUs");
        return None;
    }
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let mut both = [0, 1].map(|rank| start(rank, part, settings));
    let [first, second] = &mut both;
    let ends = |process: &mut Process| {
        let lines = BufReader::new(process.0.stdout.take().expect("it is piped"));
        (lines, process.0.stdin.take().expect("it is piped"))
    };
    let ((from_first, to_first), (from_second, to_second)) = (ends(first), ends(second));
    std::thread::spawn(move || pass_on(0, from_first, to_second));
    std::thread::spawn(move || pass_on(1, from_second, to_first));
    let start = Instant::now();
    loop {
        if let [Some(first), Some(second)] =
            both.each_mut().map(|process| process.0.try_wait().expect("a child"))
        {
            return Some([first, second]);
        }
        assert!(start.elapsed() < TEST_MAX, "{part}: the processes do not end");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn expect_success(part: &str, settings: &[(&str, &str)]) {
    if let Some(ended) = run_both(part, settings) {
        assert!(ended.iter().all(ExitStatus::success), "{part}: {ended:?}");
    }
}

#[test]
fn processes_exchange_arrays_and_meet_again_after_a_failure() {
    expect_success("exchange", &[]);
}

/// As on two machines: neither process reaches the memory of the other one's GPU.
#[test]
fn processes_exchange_arrays_through_the_network() {
    expect_success("exchange", &[("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1")]);
}

#[test]
fn a_process_learns_that_the_other_one_has_died() {
    if let Some([first, second]) = run_both("die", &[]) {
        assert!(first.success() && !second.success(), "{first:?}, {second:?}");
    }
}

#[test]
fn a_process_stops_connecting_when_the_other_one_has_died() {
    if let Some([first, second]) = run_both("die before", &[]) {
        assert!(first.success() && !second.success(), "{first:?}, {second:?}");
    }
}

// A process of the group.

/// The messages of the other process.
struct Messages {
    received: Mutex<Receiver<String>>,
}

fn say(message: &str) {
    println!("{MARK}{message}");
}

impl Messages {
    /// Receives messages. Those of an absent device are for the group, at once.
    fn receive(group: &Arc<Mutex<Option<CudaGroup>>>) -> Arc<Messages> {
        let (sender, received) = channel();
        let group = Arc::clone(group);
        std::thread::spawn(move || {
            for line in std::io::stdin().lines().map_while(Result::ok) {
                match line.strip_prefix("absent ").map(|rank| rank.parse().expect("a rank")) {
                    None => _ = sender.send(line),
                    Some(rank) => {
                        let group = group.lock().expect("no panic").clone();
                        group.into_iter().for_each(|group| group.note_absent(rank));
                    }
                }
            }
        });
        Arc::new(Messages { received: Mutex::new(received) })
    }

    /// The rest of the next message, which begins with `start`.
    fn expect(&self, start: &str) -> Result<String, String> {
        let received = self.received.lock().expect("no panic");
        let message = received.recv_timeout(MESSAGE_MAX).map_err(|error| format!("{start}: {error}"))?;
        let rest = message.strip_prefix(start).map(str::to_owned);
        rest.ok_or_else(|| format!("{start}: {message} came"))
    }

    /// Waits until the other process has come here, too.
    fn meet(&self) {
        say("here");
        self.expect("here").expect("the other process comes");
    }
}

impl PeerProcesses for Messages {
    fn announce(&self, ids: &GroupIds) -> Result<(), String> {
        let digits: String = ids.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        say(&format!("ids {digits}"));
        Ok(())
    }

    fn finish(&self) -> Result<(), String> {
        self.expect("connected").map(|_| ())
    }

    fn abandon(&self, rank: usize) {
        say(&format!("absent {rank}"));
    }
}

/// This process, with its device.
struct Member {
    number: usize,
    messages: Arc<Messages>,
    group: CudaGroup,
    rank: Rank,
}

impl Member {
    fn open(number: usize, shares: usize, messages: &Arc<Messages>) -> Member {
        let others = Arc::clone(messages) as Arc<dyn PeerProcesses>;
        let role = if number == 0 { Role::Leads(others) } else { Role::Follows(others) };
        let group = CudaGroup::across(2, shares, number..number + 1, role).remove(0);
        let options = CudaOptions {
            ordinal: number,
            poison_freed: true,
            group: Some(group.clone()),
            ..CudaOptions::default()
        };
        let backend = Arc::new(CudaBackend::new(&options).expect("a GPU, and NCCL"));
        let runtime = Runtime::new(Arc::clone(&backend) as _, RuntimeOptions::default());
        Member { number, messages: Arc::clone(messages), group, rank: Rank { backend, runtime } }
    }

    fn connect(&self) {
        match self.number {
            0 => self.group.connect().expect("both connect"),
            _ => self.connect_as_told(),
        }
    }

    fn connect_as_told(&self) {
        let digits = self.messages.expect("ids ").expect("the first process announces them");
        let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).expect("digits");
        let bytes: Vec<u8> = (0..digits.len()).step_by(2).map(byte).collect();
        let ids = GroupIds::from_bytes(&bytes).expect("whole ids");
        self.group.connect_with(&ids).expect("both connect");
        say("connected");
    }

    /// Adds arrays of both devices, in a graph from the second time on.
    fn add(&self, sums: &[Prepared]) {
        for prepared in sums {
            prepared.run(3).expect("both come");
            let sum = &prepared.results()[0];
            assert!(sum.iter().all(|&y| y == 3.0), "{:?}", &sum[..4]);
        }
        let kernels = self.rank.backend.take_kernels();
        assert!(!kernels.iter().any(|name| name.contains("one_shot_all_reduce")), "{kernels:?}");
    }

    /// Sends arrays from the first stage to the second.
    fn send(&self) {
        for len in LENS {
            let prepared =
                Prepared::new(&self.rank, vec![self.rank.array(len, DType::F32)], |x| match self.number {
                    0 => vec![x[0].send(1).expect("f32")],
                    _ => vec![Array::receive(&self.rank.runtime, [len], 0).expect("a shape")],
                });
            prepared.fill(|i| (i % 977) as f32);
            prepared.run(3).expect("both come");
            if self.number == 1 {
                let got = &prepared.results()[0];
                assert!((0..len).all(|i| got[i] == (i % 977) as f32), "{:?}", &got[..4]);
            }
        }
    }

    /// The second device does not come to a sum. Both rejoin, and connect again.
    fn fail_and_meet_again(&self, sum: &Prepared) {
        let group = self.rank.group();
        if self.number == 1 {
            std::thread::sleep(Duration::from_millis(300));
            group.abandon();
            group.rejoin();
            say("rejoined");
            self.connect_as_told();
        } else {
            let start = Instant::now();
            let error = sum.run(1).expect_err("device 1 does not come");
            assert!(error.contains("device 1 of the group has failed"), "{error}");
            assert!(start.elapsed() < FAILURE_MAX, "{:?}", start.elapsed());
            group.rejoin();
            self.messages.expect("rejoined").expect("device 1 rejoins");
            self.group.note_rejoined(1);
        }
    }
}

fn exchange(number: usize, current: &Mutex<Option<CudaGroup>>, messages: &Arc<Messages>) {
    for shares in [2, 1] {
        let member = Member::open(number, shares, messages);
        *current.lock().expect("no panic") = Some(member.group.clone());
        messages.meet();
        member.connect();
        let sums = LENS.map(|len| Prepared::sums(&member.rank, len, 1));
        member.add(&sums);
        if shares == 1 {
            member.send();
        }
        for sum in &sums {
            messages.meet();
            member.fail_and_meet_again(sum);
            member.add(&sums);
        }
        // Messages of a process may still be on their way when its own work is done.
        messages.meet();
        *current.lock().expect("no panic") = None;
    }
}

/// The second process dies, with the first one in a sum, or while it connects.
fn die(number: usize, current: &Mutex<Option<CudaGroup>>, messages: &Arc<Messages>, before: bool) {
    let member = Member::open(number, 2, messages);
    *current.lock().expect("no panic") = Some(member.group.clone());
    messages.meet();
    if before && number == 1 {
        messages.expect("ids ").expect("the first process announces them");
        std::process::abort();
    }
    if before {
        let start = Instant::now();
        member.group.connect().expect_err("device 1 does not come");
        assert!(start.elapsed() < FAILURE_MAX, "{:?}", start.elapsed());
        return;
    }
    member.connect();
    let sums = LENS.map(|len| Prepared::sums(&member.rank, len, 1));
    member.add(&sums);
    messages.meet();
    if number == 1 {
        std::thread::sleep(Duration::from_millis(300));
        std::process::abort();
    }
    let start = Instant::now();
    sums[1].run(1).expect_err("device 1 does not come");
    drop((sums, member));
    assert!(start.elapsed() < FAILURE_MAX, "{:?}", start.elapsed());
}

/// Nothing, unless a test above has started it.
#[test]
fn one_process_of_a_group() {
    let (Ok(number), Ok(part)) = (std::env::var(RANK), std::env::var(PART)) else { return };
    let number: usize = number.parse().expect("a rank");
    let current = Arc::default();
    let messages = Messages::receive(&current);
    match part.as_str() {
        "exchange" => exchange(number, &current, &messages),
        _ => die(number, &current, &messages, part == "die before"),
    }
}
