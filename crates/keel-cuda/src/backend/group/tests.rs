use super::*;

/// Other processes that only note the calls.
pub struct Told {
    abandoned: Mutex<Vec<usize>>,
    announced: AtomicUsize,
}

impl Told {
    pub fn new() -> Arc<Told> {
        Arc::new(Told { abandoned: Mutex::default(), announced: AtomicUsize::new(0) })
    }

    fn take_abandoned(&self) -> Vec<usize> {
        std::mem::take(&mut *self.abandoned.lock().expect("no panic"))
    }
}

impl PeerProcesses for Told {
    fn announce(&self, _: &GroupIds) -> Result<(), String> {
        self.announced.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn finish(&self) -> Result<(), String> {
        Ok(())
    }

    fn abandon(&self, rank: usize) {
        self.abandoned.lock().expect("no panic").push(rank);
    }
}

/// The error of an exchange of a device that is not connected.
fn refusal(group: &CudaGroup) -> String {
    group.with(None, |_| Ok(())).expect_err("no device is connected").to_string()
}

#[test]
fn gpus_exchange_with_their_stage_or_with_all() {
    let groups = CudaGroup::of(4, 2);
    let sum = |first, count| Op::AllReduce { peers: Peers { first, count } };
    for (rank, first) in [(0, 0), (1, 0), (2, 2), (3, 2)] {
        assert_eq!(groups[rank].supports(&sum(first, 2)), Ok(()));
        assert_eq!(groups[rank].supports(&sum(0, 4)), Ok(()));
        assert_eq!(groups[rank].supports(&Op::Send { to: 0 }), Ok(()));
    }
    let peers = Peers { first: 0, count: 3 };
    for op in [Op::AllReduce { peers }, Op::AllGather { peers }, Op::ReduceScatter { peers }] {
        let refusal = groups[1].supports(&op).expect_err("three are no stage");
        assert!(refusal.contains("devices 0..3 cannot add arrays") && refusal.contains("0..2"), "{refusal}");
    }
}

#[test]
fn a_group_counts_what_nccl_takes_of_each_device() {
    let bytes = |size, shares| -> Vec<u64> {
        CudaGroup::of(size, shares).iter().map(CudaGroup::buffer_bytes).collect()
    };
    assert_eq!(bytes(1, 1), [0]);
    let [tensor, other] = bytes(2, 2)[..] else { unreachable!("two devices") };
    assert!(tensor == other && tensor > 0);
    let [first, last] = bytes(2, 1)[..] else { unreachable!("two devices") };
    assert!(tensor < first && first < last, "a receiver has the buffers of messages: {first}, {last}");
    assert!(bytes(4, 2)[0] > bytes(4, 1)[0], "a stage of several devices has a communicator of its own");
}

#[test]
fn settings_are_made_with_the_first_group() {
    let _group = CudaGroup::of(2, 2);
    assert_eq!(std::env::var("NCCL_NVLS_ENABLE").as_deref(), Ok("0"));
    assert_eq!(std::env::var("NCCL_MAX_NCHANNELS").as_deref(), Ok("16"));
}

#[test]
fn a_device_that_waits_learns_of_one_that_failed() {
    let groups = CudaGroup::of(3, 3);
    assert!(groups.iter().all(|group| group.check().is_ok()));
    groups[1].abandon();
    groups[2].abandon();
    let error = groups[0].check().expect_err("device 1 has failed").to_string();
    assert!(error.contains("device 1 of the group has failed, and device 0 waited for it"), "{error}");
    // Its queue may hold exchanges to which no peer comes after its failure.
    let error = groups[1].check().expect_err("device 1 has failed itself").to_string();
    assert!(error.contains("device 1 of the group has failed, and its peers no longer wait"), "{error}");
    assert!(refusal(&groups[0]).contains("the devices are not connected"));
}

#[test]
fn a_process_has_the_memberships_of_its_own_ranks() {
    let groups = CudaGroup::across(6, 2, 2..5, Role::Follows(Told::new()));
    assert_eq!(groups.iter().map(|group| group.rank).collect::<Vec<_>>(), [2, 3, 4]);
    assert!(groups.iter().all(|group| group.size() == 6));
    let sum = |first, count| Op::AllReduce { peers: Peers { first, count } };
    assert_eq!(groups[2].supports(&sum(4, 2)), Ok(()), "also with a device of another process");
    assert_eq!(CudaGroup::planned(6, 2).len(), 6);
}

#[test]
fn a_plan_of_several_processes_counts_buffers_of_the_network() {
    let planned = CudaGroup::planned(4, 2);
    let [leading, led] = [(0..1, Role::Leads(Told::new())), (1..4, Role::Follows(Told::new()))];
    let real = [leading, led].map(|(local, role)| CudaGroup::across(4, 2, local, role)).concat();
    for ((real, planned), alone) in real.iter().zip(&planned).zip(CudaGroup::of(4, 2)) {
        assert_eq!(real.buffer_bytes(), planned.buffer_bytes());
        assert!(alone.buffer_bytes() < planned.buffer_bytes());
    }
}

#[test]
fn a_failure_is_told_to_other_processes_and_learnt_from_them() {
    let told = Told::new();
    let groups = CudaGroup::across(4, 2, 0..2, Role::Leads(Arc::clone(&told) as _));
    groups[0].note_absent(3);
    assert!(told.take_abandoned().is_empty(), "the others know");
    let error = groups[1].check().expect_err("device 3 has failed").to_string();
    assert!(error.contains("device 3 of the group has failed, and device 1 waited for it"), "{error}");
    groups[1].abandon();
    assert_eq!(told.take_abandoned(), [1]);
    assert_eq!(groups[0].absent(), Some(3), "the first one stays");
}

/// The devices are closed, so a connection that is tried fails, which the others are told.
#[test]
fn the_process_that_leads_connects_again_when_all_devices_have_rejoined() {
    let told = Told::new();
    let groups = CudaGroup::across(4, 2, 0..2, Role::Leads(Arc::clone(&told) as _));
    groups[0].note_rejoined(2);
    assert!(groups[0].members().back.is_empty(), "there was no failure");
    for order in [[2, 0, 3, 1], [1, 0, 0, 3]] {
        groups[0].note_absent(3);
        for rank in order {
            assert!(groups[0].has_failed() && told.take_abandoned().is_empty(), "rank {rank} has to come");
            groups[0].note_back(rank);
        }
        if order.contains(&2) {
            assert_eq!(told.take_abandoned(), [0]);
            assert!(refusal(&groups[1]).contains("a device of the group is closed"));
        }
    }
    groups[1].note_rejoined(2);
    assert_eq!((told.take_abandoned(), told.announced.load(Ordering::Relaxed)), (vec![1], 0));
}

#[test]
fn a_process_that_is_led_waits_for_ids_when_its_own_devices_have_rejoined() {
    let told = Told::new();
    let groups = CudaGroup::across(4, 1, 1..3, Role::Follows(Arc::clone(&told) as _));
    groups[0].note_absent(0);
    groups[0].note_back(1);
    assert!(groups[1].has_failed(), "device 2 has to come");
    groups[1].note_back(2);
    assert!(!groups[1].has_failed() && told.take_abandoned().is_empty());
    assert!(refusal(&groups[1]).contains("the devices are not connected"));
    let error = groups[1].connect().expect_err("it is led").to_string();
    assert!(error.contains("the first process of the group connects it"), "{error}");
    let ids = GroupIds::from_bytes(&[0; crate::driver::ID_BYTES]).expect("one id");
    let error = groups[1].connect_with(&ids).expect_err("the devices are closed").to_string();
    assert!(error.contains("a device of the group is closed"), "{error}");
    assert_eq!((groups[0].absent(), told.take_abandoned()), (Some(2), vec![2]));
}

#[test]
#[should_panic(expected = "0..2 of 4 devices have no others")]
fn a_process_with_a_part_of_the_devices_is_not_alone() {
    CudaGroup::across(4, 2, 0..2, Role::Alone);
}
