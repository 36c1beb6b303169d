use super::*;

const ONE: &str = "0123456789abcdef0123456789abcdef01234567";
const TWO: &str = "1123456789abcdef0123456789abcdef01234567";

fn name(text: &str) -> HubName {
    HubName::parse(text).expect("a name")
}

fn put(cache: &Cache, model: &str, commit: &str, files: &[(&str, &str)]) {
    put_interrupted(cache, model, commit, files);
    cache.note_revision(&name(model), commit).expect("noted");
}

/// Files of a download that did not end.
fn put_interrupted(cache: &Cache, model: &str, commit: &str, files: &[(&str, &str)]) {
    let name = name(model);
    for (file, blob) in files {
        let path = cache.blob(&name, blob);
        fs::create_dir_all(path.parent().expect("a folder")).expect("writable");
        fs::write(path, "12345").expect("writable");
        cache.link(&name, commit, file, blob).expect("linked");
    }
}

fn cache() -> (tempfile::TempDir, Cache) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let cache = Cache::new(folder.path().join("hub"));
    (folder, cache)
}

#[test]
fn a_model_is_found_once_it_is_complete() {
    let (_folder, cache) = cache();
    assert!(cache.find(&name("a/b")).is_none() && cache.entries().expect("none").is_empty());
    put(&cache, "a/b", ONE, &[("config.json", "aa")]);
    assert!(cache.find(&name("a/b")).is_none(), "without weights it is not there");
    put(&cache, "a/b", ONE, &[("model.safetensors", "bb")]);
    assert_eq!(cache.find(&name("a/b")), Some(cache.snapshot(&name("a/b"), ONE)));
    assert_eq!(cache.find(&name(&format!("a/b@{ONE}"))), cache.find(&name("a/b")));
    assert!(cache.find(&name("a/b@other")).is_none());
    let entries = cache.entries().expect("readable");
    assert_eq!((entries.len(), entries[0].bytes, entries[0].is_complete), (1, 10, true));
    assert_eq!(
        (entries[0].repository.as_str(), &entries[0].revisions[..]),
        ("a/b", &["main".to_string()][..])
    );
}

#[test]
fn gguf_files_are_found_by_pick() {
    let (_folder, cache) = cache();
    put(&cache, "a/b", ONE, &[("m-Q4_K_M.gguf", "aa")]);
    assert!(cache.find(&name("a/b")).expect("the only one").ends_with("m-Q4_K_M.gguf"));
    put(&cache, "a/b", ONE, &[("sub/m-Q8_0.gguf", "bb")]);
    assert!(cache.find(&name("a/b")).expect("the usual one").ends_with("m-Q4_K_M.gguf"));
    let found = cache.find(&name("a/b:q8_0")).expect("picked");
    assert_eq!(fs::read_to_string(found).expect("the link leads somewhere"), "12345");
}

#[test]
fn a_gguf_model_in_parts_is_there_with_its_last_part_and_removed_whole() {
    let (_folder, cache) = cache();
    let first = "m-Q4_K_M-00001-of-00002.gguf";
    put(&cache, "a/b", ONE, &[(first, "aa")]);
    assert!(cache.find(&name("a/b")).is_none());
    put(&cache, "a/b", ONE, &[("m-Q4_K_M-00002-of-00002.gguf", "bb")]);
    assert!(cache.find(&name("a/b:Q4_K_M")).expect("whole").ends_with(first));
    assert_eq!(cache.entries().expect("readable")[0].gguf, [first]);
    cache.remove(&name("a/b:Q4_K_M")).expect("there");
    assert!(!cache.repository(&name("a/b")).exists(), "nothing is left");
}

#[test]
fn an_interrupted_download_in_parts_is_removed_by_its_coding() {
    let (_folder, cache) = cache();
    let second = |coding: &str| format!("m-{coding}-00002-of-00003.gguf");
    let tower = ("mmproj-F16.gguf", "aa");
    put_interrupted(&cache, "a/b", ONE, &[tower, (&*second("Q8_0"), "bb")]);
    assert!(cache.find(&name("a/b:Q8_0")).is_none());
    let error = cache.remove(&name("a/b:Q6_K")).expect_err("not there").to_string();
    assert!(error.contains("keel rm a/b removes"), "{error}");
    assert!(cache.remove(&name("a/b:Q8_0")).expect("there") >= 10, "with its tower");
    assert!(!cache.repository(&name("a/b")).exists(), "nothing is left");
    // The branch points to the commit after a first download of another file, which stays.
    put(&cache, "a/b", ONE, &[("m-Q4_K_M.gguf", "aa")]);
    put_interrupted(&cache, "a/b", ONE, &[(&*second("Q8_0"), "bb"), (&*second("Q6_K"), "cc")]);
    put_interrupted(&cache, "a/b", TWO, &[(&*second("Q5_K_M"), "dd")]);
    let is_there = |blob: &str| cache.blob(&name("a/b"), blob).exists();
    cache.remove(&name(&format!("a/b@{ONE}:Q8_0"))).expect("there");
    assert!(is_there("aa") && !is_there("bb") && is_there("cc") && is_there("dd"));
    cache.remove(&name("a/b:m-Q6_K-00001-of-00003.gguf")).expect("there");
    cache.remove(&name("a/b:Q5_K_M")).expect("there");
    assert!(is_there("aa") && !is_there("cc") && !is_there("dd"));
    assert!(cache.find(&name("a/b:Q4_K_M")).is_some());
}

#[test]
fn a_coding_means_the_shortest_name_whether_or_not_its_download_ended() {
    let part = ("m-Q8_0-00002-of-00003.gguf", "bb");
    for commit in [ONE, TWO] {
        let (_folder, cache) = cache();
        let is_there = |blob: &str| cache.blob(&name("a/b"), blob).exists();
        put(&cache, "a/b", ONE, &[("m-UD-Q8_0.gguf", "aa")]);
        put_interrupted(&cache, "a/b", commit, &[part]);
        cache.remove(&name("a/b:Q8_0")).expect("there");
        assert!(is_there("aa") && !is_there("bb"), "{commit}");
        cache.remove(&name("a/b:Q8_0")).expect("the only one");
        assert!(!cache.repository(&name("a/b")).exists(), "nothing is left");
    }
}

/// The hub moved the file into a folder between two downloads.
#[test]
fn the_model_that_runs_is_the_one_that_is_removed() {
    for old in ["m-Q8_0.gguf", "Q8_0.gguf"] {
        let (_folder, cache) = cache();
        put(&cache, "a/b", ONE, &[(old, "aa")]);
        put(&cache, "a/b", TWO, &[("Q8_0/m-UD-Q8_0.gguf", "bb")]);
        let found = cache.find(&name("a/b:Q8_0")).expect("there");
        assert!(found.ends_with("Q8_0/m-UD-Q8_0.gguf"), "{found:?}");
        cache.remove(&name("a/b:Q8_0")).expect("there");
        assert!(!found.exists() && cache.blob(&name("a/b"), "aa").exists(), "{old}");
    }
}

#[test]
fn what_is_removed_frees_its_bytes_and_no_others() {
    let (_folder, cache) = cache();
    put(&cache, "a/b", ONE, &[("m-Q4_K_M.gguf", "aa"), ("m-Q8_0.gguf", "bb")]);
    put(&cache, "a/b@new", TWO, &[("m-Q4_K_M.gguf", "aa"), ("m-Q8_0.gguf", "cc")]);
    assert!(cache.remove(&name("a/b:Q2_K")).is_err() && cache.remove(&name("a/c")).is_err());
    assert!(cache.remove(&name("a/b:Q8_0")).expect("there") >= 5);
    assert!(!cache.blob(&name("a/b"), "bb").exists() && cache.blob(&name("a/b"), "aa").exists());
    cache.remove(&name("a/b@new")).expect("there");
    assert!(cache.blob(&name("a/b"), "aa").exists(), "another revision has it, too");
    assert!(!cache.blob(&name("a/b"), "cc").exists());
    cache.remove(&name("a/b:Q4_K_M")).expect("there");
    assert!(!cache.repository(&name("a/b")).exists(), "nothing is left");
}

/// The second download moved the branch to a commit of which only that file was fetched.
#[test]
fn a_gguf_file_of_an_earlier_commit_is_found_and_removed() {
    const OTHER: &str = "2123456789abcdef0123456789abcdef01234567";
    let (_folder, cache) = cache();
    put(&cache, "a/b", ONE, &[("m-Q4_K_M.gguf", "aa"), ("m-Q2_K.gguf", "bb")]);
    put(&cache, "a/b@other", OTHER, &[("m-Q6_K.gguf", "cc")]);
    put(&cache, "a/b", TWO, &[("m-Q8_0.gguf", "dd")]);
    let found = |text: &str| cache.find(&name(text)).map(|path| cache.commit_of(&name(text), &path));
    assert_eq!(found("a/b:Q8_0").as_deref(), Some(TWO));
    assert_eq!(found("a/b:Q4_K_M").as_deref(), Some(ONE));
    assert_eq!(found("a/b:Q6_K"), None, "another branch has it");
    assert_eq!(found("a/b@other:Q4_K_M"), None, "a branch that is named is not another one");
    assert_eq!(found(&format!("a/b@{TWO}:Q4_K_M")), None, "a commit is that commit");
    // Of several the newest, also if its commit comes first in the alphabet.
    std::thread::sleep(std::time::Duration::from_millis(20));
    let newer = "0023456789abcdef0123456789abcdef01234567";
    put(&cache, "a/b", newer, &[("m-Q4_K_M.gguf", "ee")]);
    put(&cache, "a/b", TWO, &[]);
    assert_eq!(found("a/b:Q4_K_M").as_deref(), Some(newer));
    cache.remove(&name("a/b:Q4_K_M")).expect("there");
    assert_eq!(found("a/b:Q4_K_M").as_deref(), Some(ONE));
    cache.remove(&name("a/b:Q4_K_M")).expect("there");
    assert!(cache.remove(&name("a/b:Q4_K_M")).is_err() && found("a/b:Q8_0").is_some());
}

#[test]
fn a_vision_tower_goes_with_the_last_model_next_to_it() {
    let (_folder, cache) = cache();
    let files = [("m-Q4_K_M.gguf", "aa"), ("m-Q8_0.gguf", "bb"), ("mmproj-F16.gguf", "cc")];
    put(&cache, "a/b", ONE, &files);
    put(&cache, "a/b", ONE, &[("x/m-Q2_K.gguf", "dd"), ("x/mmproj-F16.gguf", "ee")]);
    let entry = cache.entries().expect("readable").swap_remove(0);
    assert_eq!(entry.gguf, ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "x/m-Q2_K.gguf"]);
    assert_eq!(entry.towers, ["mmproj-F16.gguf", "x/mmproj-F16.gguf"]);
    let is_there = |blob: &str| cache.blob(&name("a/b"), blob).exists();
    cache.remove(&name("a/b:Q2_K")).expect("there");
    assert!(!is_there("ee") && is_there("cc"));
    cache.remove(&name("a/b:Q8_0")).expect("there");
    assert!(is_there("cc"), "another model sees with it");
    put_interrupted(&cache, "a/b", ONE, &[("m-Q6_K-00002-of-00002.gguf", "ff")]);
    cache.remove(&name("a/b:Q4_K_M")).expect("there");
    assert!(is_there("cc"), "a model whose download goes on later sees with it");
    cache.remove(&name("a/b:Q6_K")).expect("there");
    assert!(!cache.repository(&name("a/b")).exists(), "nothing is left");
}

#[test]
fn a_vision_tower_in_parts_is_listed_once_and_removed_whole() {
    let (_folder, cache) = cache();
    let first = "mmproj-F16-00001-of-00002.gguf";
    put(&cache, "a/b", ONE, &[("m-Q8_0.gguf", "aa"), (first, "bb")]);
    let towers = || cache.entries().expect("readable").swap_remove(0).towers;
    assert_eq!(towers(), [""; 0], "a part is missing");
    put(&cache, "a/b", ONE, &[("mmproj-F16-00002-of-00002.gguf", "cc")]);
    assert_eq!(towers(), [first]);
    cache.remove(&name("a/b:Q8_0")).expect("there");
    assert!(!cache.repository(&name("a/b")).exists(), "nothing is left");
}
