//! Prefixes that a batch saves to a folder and another restores.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crate::common::batching::{
    self, Outcome, assert_all_is_back, batcher, finish, finish_from, options, prompt, run, step,
};
use crate::common::queueing::queueing;
use crate::common::{demo, engine, fixture};
use keel_array::{Backend, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::batch::{BatchOptions, BatchRequest, Batcher};
use keel_engine::{EngineError, EngineOptions, FinishReason};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};

const FIXTURES: [&str; 3] = ["qwen3_5", "qwen3_next", "qwen3_5_mlx_4bit"];

#[test]
fn prefixes_outlive_a_restart_and_damage_is_passed_over() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for name in FIXTURES {
        let mut first = batcher(name, BatchOptions::default());
        let folder = dir.path().join(name);
        let prompts: Vec<Vec<u32>> = (0..3).map(|i| prompt(name, i, 300 + i as usize * 60)).collect();
        let ask = |batcher: &mut Batcher, i: usize| {
            run(batcher, vec![BatchRequest::new(0, prompts[i].clone(), 20)]).remove(0)
        };
        let tokens: Vec<Vec<u32>> = (0..3).map(|i| ask(&mut first, i).tokens).collect();
        assert!(first.save_prefixes(name, &folder).expect("saves") >= 3);
        assert_all_is_back(&mut first);
        let mut second = batcher(name, BatchOptions::default());
        assert!(!second.restore_prefixes("another", &folder).problems.is_empty());
        let restored = second.restore_prefixes(name, &folder);
        assert!(restored.texts >= 3 && restored.problems.is_empty(), "{restored:?}");
        for i in 0..3 {
            let outcome = ask(&mut second, i);
            assert_eq!(outcome.cached, (prompts[i].len() - 1) / 64 * 64, "{name}");
            assert_eq!(outcome.tokens, tokens[i], "{name}");
        }
        assert_all_is_back(&mut second);
        let file = folder.join("0.safetensors");
        let mut bytes = std::fs::read(&file).expect("there");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&file, bytes).expect("written");
        std::fs::remove_file(folder.join("1.safetensors")).expect("there");
        let damaged = second.restore_prefixes(name, &folder);
        assert_eq!((damaged.texts, damaged.problems.len()), (restored.texts - 2, 2), "{damaged:?}");
        std::fs::write(folder.join("index.json"), "{").expect("written");
        assert_eq!(second.restore_prefixes(name, &folder).problems.len(), 1);
        assert_all_is_back(&mut second);
    }
}

/// A device of another kind computes other bits.
struct OtherKind;

impl Interceptor for OtherKind {
    fn name<'a>(&self, _: &'a dyn Backend) -> &'a str {
        "npu:1"
    }
}

/// Rows of answers were decoded, and a batch that reuses no answers promises the bits of a fresh run.
#[test]
fn prefixes_are_for_the_same_kind_of_device_and_of_reuse() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let name = FIXTURES[0];
    let exact = || BatchOptions { reuse_generated: false, ..BatchOptions::default() };
    let cpu = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() });
    let other = InterceptedBackend::new(Arc::new(cpu), Arc::new(OtherKind));
    let other = Runtime::new(other, RuntimeOptions::default());
    let mut saving = batcher(name, BatchOptions::default());
    run(&mut saving, vec![BatchRequest::new(0, prompt(name, 1, 300), 20)]);
    assert!(saving.save_prefixes("m", dir.path()).expect("saves") >= 1);
    let restored = |batcher: &mut Batcher| batcher.restore_prefixes("m", dir.path());
    for mut unlike in [
        batcher(name, exact()),
        Batcher::new(engine(&fixture(name), &other, options()), BatchOptions::default()),
    ] {
        let restored = restored(&mut unlike);
        assert!(restored.texts == 0 && !restored.problems.is_empty(), "{restored:?}");
    }
    assert!(restored(&mut batcher(name, BatchOptions::default())).texts >= 1);
}

#[test]
fn prefixes_are_saved_while_answers_are_under_way_and_change_none() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for name in FIXTURES {
        let request = |id, salt| BatchRequest::new(id, prompt(name, salt, 300), 40);
        let alone = run(&mut batcher(name, BatchOptions::default()), vec![request(0, 2)]).remove(0);
        let mut busy = batcher(name, BatchOptions::default());
        run(&mut busy, vec![request(0, 1)]);
        busy.submit(request(0, 2), Instant::now()).expect("there is room");
        let mut outcomes = [Outcome::default()];
        for _ in 0..8 {
            step(&mut busy, Instant::now(), &mut outcomes);
        }
        assert!(!busy.is_idle(), "{name}");
        let folder = dir.path().join(name);
        assert!(busy.save_prefixes(name, &folder).expect("saves") >= 1, "{name}");
        while !busy.is_idle() {
            step(&mut busy, Instant::now(), &mut outcomes);
        }
        assert_eq!(outcomes[0].tokens, alone.tokens, "{name}");
        assert_all_is_back(&mut busy);
        let mut second = batcher(name, BatchOptions::default());
        assert!(second.restore_prefixes(name, &folder).problems.is_empty(), "{name}");
        assert_eq!(run(&mut second, vec![request(0, 1)]).remove(0).cached, 256, "{name}");
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error_and_no_harm() {
    let mut batcher = batcher("qwen3_5", BatchOptions::default());
    run(&mut batcher, vec![BatchRequest::new(0, prompt("qwen3_5", 1, 200), 5)]);
    let dir = tempfile::tempdir().expect("a temporary folder");
    let file = dir.path().join("file");
    std::fs::write(&file, "x").expect("written");
    let error = batcher.save_prefixes("m", &file.join("below")).expect_err("a file is no folder");
    assert!(error.to_string().contains("cannot be saved"), "{error}");
    assert_eq!(run(&mut batcher, vec![BatchRequest::new(0, prompt("qwen3_5", 1, 200), 5)])[0].cached, 192);
    assert_all_is_back(&mut batcher);
}

/// A request whose prefix ends within a page, in a pool so full that the copy of that page needs the memory of the
/// prefix.
#[test]
fn a_request_takes_the_room_of_the_prefix_that_it_goes_on_from() {
    for name in ["llama", "qwen3_5"] {
        let options = EngineOptions { pool_pages: Some(2), ..options() };
        let mut batcher = batching::batcher_with(name, options, BatchOptions::default());
        let text = prompt(name, 1, 200);
        let ask = |batcher: &mut Batcher, len: usize| {
            run(batcher, vec![BatchRequest::new(0, text[..len].to_vec(), 1)]).remove(0)
        };
        assert_eq!(ask(&mut batcher, 129).cached, 0);
        assert_eq!(ask(&mut batcher, 193).cached, 128, "{name}");
        let last = ask(&mut batcher, 200);
        assert!(last.error.is_none(), "{name}: {:?}", last.error);
        assert_eq!(last.cached, 192, "{name}");
        let mut anew = batching::batcher_with(name, options, BatchOptions::default());
        assert_eq!(last.tokens, ask(&mut anew, 200).tokens, "{name}");
        [batcher, anew].iter_mut().for_each(assert_all_is_back);
    }
}

/// Where every sequence runs, no text can be read.
#[test]
fn a_folder_keeps_its_texts_if_none_can_be_saved() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let options = EngineOptions { sequences: 1, ..options() };
    let mut busy = batching::batcher_with("qwen3_5", options, BatchOptions::default());
    let request = |salt, tokens| BatchRequest::new(0, prompt("qwen3_5", salt, 200), tokens);
    run(&mut busy, vec![request(1, 2)]);
    assert!(busy.save_prefixes("m", dir.path()).expect("saves") >= 1);
    busy.submit(request(2, 40), Instant::now()).expect("there is room");
    let mut outcomes = [Outcome::default()];
    step(&mut busy, Instant::now(), &mut outcomes);
    assert_eq!(busy.save_prefixes("m", dir.path()).expect("no error"), 0);
    let mut second = batcher("qwen3_5", BatchOptions::default());
    assert!(second.restore_prefixes("m", dir.path()).texts >= 1);
    assert_eq!(run(&mut second, vec![request(1, 2)])[0].cached, 192);
}

/// The names of the files of a folder.
fn names_in(folder: &Path) -> BTreeSet<String> {
    let files = std::fs::read_dir(folder).expect("a folder").map(|file| file.expect("it can be listed"));
    files.map(|file| file.file_name().into_string().expect("text")).collect()
}

/// Files contain users' texts. So the files of forgotten texts are removed.
#[test]
fn a_folder_has_only_files_that_its_index_names() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let mut batcher = batcher("qwen3_5", BatchOptions::default());
    let ask = |batcher: &mut Batcher, salt| {
        run(batcher, vec![BatchRequest::new(0, prompt("qwen3_5", salt, 200), 2)]);
    };
    let saved = |batcher: &mut Batcher| {
        let texts = batcher.save_prefixes("m", dir.path()).expect("saves");
        let files = (0..texts).map(|i| format!("{i}.safetensors"));
        let named: BTreeSet<String> = files.chain(["index.json".to_string()]).collect();
        assert_eq!(names_in(dir.path()), named);
        texts
    };
    (1..=3).for_each(|salt| ask(&mut batcher, salt));
    let three = saved(&mut batcher);
    batcher.forget_prefixes();
    ask(&mut batcher, 4);
    let one = saved(&mut batcher);
    assert!(0 < one && one < three, "{one} and {three} texts");
    batcher.forget_prefixes();
    assert_eq!(saved(&mut batcher), 0);
    (1..=3).for_each(|salt| ask(&mut batcher, salt));
    assert_eq!(saved(&mut batcher), three);
    assert_all_is_back(&mut batcher);
}

/// A save that fails once a text is written leaves none of an earlier save: their index is gone.
#[cfg(unix)]
#[test]
fn a_save_that_fails_late_leaves_no_text() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let mut batcher = batcher("qwen3_5", BatchOptions::default());
    let request = |salt| BatchRequest::new(0, prompt("qwen3_5", salt, 200), 2);
    (1..=3).for_each(|salt| drop(run(&mut batcher, vec![request(salt)])));
    assert!(batcher.save_prefixes("m", dir.path()).expect("saves") >= 3);
    let pipe = dir.path().join("1.safetensors");
    std::fs::remove_file(&pipe).expect("there");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("it runs").success());
    batcher.save_prefixes("m", dir.path()).expect_err("a pipe is no file");
    assert_eq!(names_in(dir.path()), BTreeSet::from(["1.safetensors".to_string()]));
    assert_all_is_back(&mut batcher);
}

/// A file that not even root can remove, until this is dropped.
#[cfg(target_os = "linux")]
struct Immutable(std::path::PathBuf);

#[cfg(target_os = "linux")]
impl Immutable {
    /// `None` if the user or the file system does not allow it.
    fn new(path: std::path::PathBuf) -> Option<Immutable> {
        Immutable::set(&path, "+i").then_some(Immutable(path))
    }

    fn set(path: &Path, attribute: &str) -> bool {
        let outcome = std::process::Command::new("chattr").arg(attribute).arg(path).output();
        outcome.is_ok_and(|outcome| outcome.status.success())
    }
}

#[cfg(target_os = "linux")]
impl Drop for Immutable {
    fn drop(&mut self) {
        Immutable::set(&self.0, "-i");
    }
}

/// The index does not name such a file, so the texts that it names are saved all the same.
#[cfg(target_os = "linux")]
#[test]
fn a_file_that_cannot_be_removed_costs_no_text() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let stale = dir.path().join("200.safetensors");
    std::fs::write(&stale, "an earlier text").expect("written");
    let Some(kept) = Immutable::new(stale.clone()) else {
        keel_testkit::skipped!("needs a user and a file system with `chattr +i`");
        return;
    };
    let mut saving = batcher("qwen3_5", BatchOptions::default());
    run(&mut saving, vec![BatchRequest::new(0, prompt("qwen3_5", 1, 200), 2)]);
    let error = saving.save_prefixes("m", dir.path()).expect_err("a file stays");
    let EngineError::StalePrefix { path, texts, .. } = &error else { panic!("{error}") };
    assert!(*path == stale && *texts >= 1, "{error}");
    let restored = batcher("qwen3_5", BatchOptions::default()).restore_prefixes("m", dir.path());
    assert!(restored.texts == *texts && restored.problems.is_empty(), "{restored:?}");
    drop(kept);
    assert_eq!(saving.save_prefixes("m", dir.path()).expect("saves"), *texts);
    assert!(!stale.exists());
    assert_all_is_back(&mut saving);
}

/// A text of three pages, which leaves states at two marks and after 640 tokens.
fn three_pages(marks: [usize; 2]) -> BatchRequest {
    BatchRequest { marks: marks.to_vec(), ..BatchRequest::new(0, prompt("qwen3_5", 1, 700), 1) }
}

/// A batch of one sequence with memory for three states.
fn small_batcher(pages: usize) -> Batcher {
    let options = EngineOptions { sequences: 1, checkpoints: 3, pool_pages: Some(pages), ..options() };
    batching::batcher_with("qwen3_5", options, BatchOptions::default())
}

/// The pool has room for the pages of the text, and not for its beginnings as texts with pages of their own. The states
/// after 576 and 640 tokens lie in one page. A smaller pool has room for some texts, or for none.
#[test]
fn a_long_text_is_restored_to_its_end() {
    for (marks, pages, fitting) in [([256, 512], 2, 2), ([512, 576], 1, 0)] {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let restore = |pages| {
            let mut batcher = small_batcher(pages);
            let restored = batcher.restore_prefixes("m", dir.path());
            (batcher, restored)
        };
        let mut first = small_batcher(4);
        run(&mut first, vec![three_pages(marks)]);
        assert_eq!(first.save_prefixes("m", dir.path()).expect("saves"), 3);
        let (mut second, restored) = restore(4);
        assert!(restored.texts == 3 && restored.problems.is_empty(), "{restored:?}");
        assert_eq!((first.status().prefix_pages, second.status().prefix_pages), (3, 3));
        assert_eq!(run(&mut second, vec![three_pages(marks)])[0].cached, 640);
        let (small, restored) = restore(pages);
        let missing =
            format!("no room for {} of 3 texts: too few pages or saved states are free", 3 - fitting);
        assert_eq!((restored.texts, restored.problems), (fitting, vec![missing]));
        [first, second, small].iter_mut().for_each(assert_all_is_back);
    }
}

/// The next turn of a chat continues from the deepest state.
#[test]
fn the_deepest_state_of_a_text_is_forgotten_last() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (mut first, mut second) = (small_batcher(8), small_batcher(8));
    run(&mut first, vec![three_pages([256, 512])]);
    assert_eq!(first.save_prefixes("m", dir.path()).expect("saves"), 3);
    assert_eq!(second.restore_prefixes("m", dir.path()).texts, 3);
    // Another prompt takes the memory of one state.
    run(&mut second, vec![BatchRequest::new(0, prompt("qwen3_5", 2, 100), 1)]);
    assert_eq!(run(&mut second, vec![three_pages([256, 512])])[0].cached, 640);
    [first, second].iter_mut().for_each(assert_all_is_back);
}

/// A text continues from pages of the texts before it.
#[test]
fn texts_whose_first_pages_are_missing_are_passed_over() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let mut first = batcher("qwen3_5", BatchOptions::default());
    run(&mut first, vec![three_pages([256, 512])]);
    assert_eq!(first.save_prefixes("m", dir.path()).expect("saves"), 3);
    let path = dir.path().join("index.json");
    let sound = std::fs::read_to_string(&path).expect("there");
    let mut index: serde_json::Value = serde_json::from_str(&sound).expect("JSON");
    index["files"].as_array_mut().expect("a list").reverse();
    let expect = |texts: usize, cached: usize| {
        let mut second = batcher("qwen3_5", BatchOptions::default());
        let restored = second.restore_prefixes("m", dir.path());
        let missing = |problem: &&String| problem.contains("the text that it continues");
        let passed_over = restored.problems.iter().filter(missing).count();
        assert_eq!((restored.texts, passed_over), (texts, 2), "{restored:?}");
        assert_eq!(run(&mut second, vec![three_pages([256, 512])])[0].cached, cached);
        assert_all_is_back(&mut second);
    };
    // Each text comes before those that it continues.
    std::fs::write(&path, index.to_string()).expect("written");
    expect(1, 256);
    std::fs::write(&path, sound).expect("written");
    std::fs::remove_file(dir.path().join("0.safetensors")).expect("there");
    expect(0, 0);
    assert_all_is_back(&mut first);
}

/// Many chats with one system prompt.
#[test]
fn texts_with_one_beginning_take_no_more_of_the_disk_than_of_the_pool() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let ask = |batcher: &mut Batcher, salt| {
        let text = [prompt("llama", 0, 512), prompt("llama", salt, 65)].concat();
        run(batcher, vec![BatchRequest::new(0, text, 3)]).remove(0)
    };
    let mut first = batcher("llama", BatchOptions::default());
    let answers: Vec<Outcome> = (1..=20).map(|salt| ask(&mut first, salt)).collect();
    assert_eq!(first.save_prefixes("m", dir.path()).expect("saves"), 20);
    let files = names_in(dir.path());
    let sizes = files.iter().map(|name| std::fs::metadata(dir.path().join(name)).expect("there").len());
    let (saved_bytes, cache) = (sizes.sum::<u64>(), first.engine().cache());
    let pool_bytes = (cache.size().pages() * 256 * cache.spec().token_bytes()) as u64;
    assert!(saved_bytes < pool_bytes, "{saved_bytes} bytes of a pool of {pool_bytes}");
    let mut second = batcher("llama", BatchOptions::default());
    let restored = second.restore_prefixes("m", dir.path());
    assert!(restored.texts == 20 && restored.problems.is_empty(), "{restored:?}");
    assert_eq!(second.status().prefix_pages, first.status().prefix_pages);
    for (salt, answer) in (1..).zip(&answers) {
        let again = ask(&mut second, salt);
        assert_eq!((again.cached, &again.tokens), (576, &answer.tokens));
    }
    [first, second].iter_mut().for_each(assert_all_is_back);
}

/// Windows are overwritten, and without checkpoints there is no state to go on from.
#[test]
fn nobody_waits_for_a_prefix_that_is_not_kept() {
    for (name, checkpoints) in [("gemma3_text", 24), ("qwen3_5", 0), ("qwen3_5", 24)] {
        let options = EngineOptions { checkpoints, ..options() };
        let mut batcher = batching::batcher_with(name, options, BatchOptions::default());
        for id in 0..3 {
            let request = BatchRequest::new(id, prompt(name, 1, 300), 4);
            batcher.submit(request, Instant::now()).expect("there is room");
        }
        batcher.step(Instant::now());
        let waits = name == "qwen3_5" && checkpoints > 0;
        assert_eq!(batcher.status().running.len(), if waits { 1 } else { 3 }, "{name}, {checkpoints}");
        finish(&mut batcher, 3);
        assert_all_is_back(&mut batcher);
    }
}

/// A pipe in place of a file stays, and no thread waits for its other end.
#[cfg(unix)]
#[test]
fn pipes_in_a_folder_of_prefixes_stay() {
    let mut batcher = batcher("qwen3_5", BatchOptions::default());
    run(&mut batcher, vec![BatchRequest::new(0, prompt("qwen3_5", 1, 200), 5)]);
    for name in ["index.json", "0.safetensors"] {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let pipe = dir.path().join(name);
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("it runs").success());
        for _ in 0..2 {
            let error = batcher.save_prefixes("m", dir.path()).expect_err("a pipe is no file").to_string();
            assert!(error.contains(name) && error.contains("not a regular file"), "{error}");
            let there = std::fs::metadata(&pipe).expect("it is there");
            assert!(!there.is_file(), "{name} was replaced");
        }
        assert_eq!(
            std::fs::read_dir(dir.path()).expect("a folder").count(),
            1,
            "nothing is left next to {name}"
        );
    }
    assert_all_is_back(&mut batcher);
}

/// Saving takes the steps under way, and an answer may end with one of them.
#[test]
fn events_of_steps_that_saving_takes_are_not_lost() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let now = Instant::now();
    let request = || BatchRequest::new(0, vec![5, 9, 3], 2);
    let options = EngineOptions { drafts: 0, context: 512, sequences: 2, ..EngineOptions::default() };
    let mut batcher = Batcher::new(engine(&demo(), &queueing(512).0, options), BatchOptions::default());
    let begun = |batcher: &mut Batcher| {
        let mut outcomes = vec![Outcome::default()];
        batcher.submit(request(), now).expect("accepted");
        step(batcher, now, &mut outcomes);
        assert_eq!(outcomes[0].tokens.len(), 1);
        batcher.save_prefixes("model", dir.path()).expect("the folder is writable");
        outcomes
    };
    let outcomes = begun(&mut batcher);
    assert!(!batcher.is_idle());
    let taken = batcher.submit(request(), now).expect_err("its end was not handed out");
    assert!(matches!(taken, EngineError::SequenceId { id: 0 }), "{taken}");
    let want = finish_from(&mut batcher, outcomes).remove(0);
    assert_eq!((want.tokens.len(), want.finish), (2, Some(FinishReason::Length)));

    begun(&mut batcher);
    batcher.cancel(0);
    assert!(batcher.is_idle());
    let anew = run(&mut batcher, vec![request()]).remove(0);
    assert_eq!((anew.tokens, anew.finish), (want.tokens, want.finish));
    assert_all_is_back(&mut batcher);
}
