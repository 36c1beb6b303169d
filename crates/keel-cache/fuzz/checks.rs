//! Checks that must hold for any bytes. The fuzz targets and `tests/fuzz_smoke.rs` share them.

#![allow(dead_code, reason = "each target uses some of these functions")]

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use keel_array::{AttentionSpec, DType, KvFormat, Runtime, RuntimeOptions};
use keel_cache::{CacheFormat, CacheSize, CacheSpec, LayerSpec, ModelCache, PrefixFolder};
use keel_cpu::{CpuBackend, CpuOptions};
use tempfile::TempDir;

const MODEL: &str = "a model";
const CONTEXT: usize = 600;
/// Most bytes that are put after a header.
const DATA_BYTES_MAX: u64 = 1 << 20;

/// A small cache with a layer of each kind, and a folder for files.
pub struct Bench {
    cache: ModelCache,
    folder: TempDir,
}

impl Bench {
    pub fn new() -> Bench {
        let backend = CpuBackend::new(CpuOptions { threads: Some(1), ..CpuOptions::default() });
        let runtime = Runtime::new(Arc::new(backend), RuntimeOptions::default());
        let layers = vec![
            LayerSpec::Attention { kv_heads: 1, head_dim: 8 },
            LayerSpec::Sliding { kv_heads: 1, head_dim: 8, window: 64 },
            LayerSpec::Recurrent {
                conv_width: 4,
                channels: 6,
                key_heads: 1,
                value_heads: 2,
                key_dim: 4,
                value_dim: 3,
            },
        ];
        let spec = CacheSpec { layers, format: CacheFormat { kv: KvFormat::F16, state: DType::F32 } };
        let size = CacheSize {
            sequences: 2,
            context: CONTEXT,
            checkpoints: 1,
            pool_pages: None,
            open_rows: 0,
            swap_bytes: 0,
        };
        let cache = ModelCache::allocate(&runtime, spec, size).expect("there is memory");
        Bench { cache, folder: tempfile::tempdir().expect("a folder") }
    }

    /// Runs `check` with the bench of this thread.
    pub fn of_this_thread<R>(check: impl FnOnce(&mut Bench) -> R) -> R {
        thread_local!(static BENCH: RefCell<Bench> = RefCell::new(Bench::new()));
        BENCH.with(|bench| check(&mut bench.borrow_mut()))
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The file of a sequence of `tokens` tokens, without its first `first_page` pages.
    pub fn saved(&mut self, first_page: usize, tokens: usize) -> Vec<u8> {
        let mut sequence = self.cache.open().expect("a slot is free");
        self.cache.reserve(&mut sequence, tokens).expect("pages are free");
        sequence.advance(tokens);
        let ids: Vec<u32> = (0..tokens as u32).collect();
        let path = self.at("saved");
        self.cache.save_from(first_page, &sequence, &ids, MODEL, &path).expect("it is written");
        let bytes = std::fs::read(path).expect("it is there");
        assert!(bytes.len() as u64 <= self.cache.saved_bytes_max());
        bytes
    }

    /// Loads a file of a sequence with this header. The header is followed by as many zeros as it declares. Returns
    /// whether it was accepted.
    pub fn sequence(&mut self, header: &[u8]) -> bool {
        self.file(&with_data(header))
    }

    /// Loads a file of a sequence with this header after pages of another sequence, as many as it asks for. There are
    /// two. Returns whether it was accepted.
    ///
    /// # Panics
    /// If a refusal holds memory or says nothing, or an accepted sequence does not share exactly these pages.
    pub fn continuation(&mut self, header: &[u8]) -> bool {
        let (path, again) = (self.at("continuation"), self.at("again"));
        std::fs::write(&path, with_data(header)).expect("written");
        let mut other = self.cache.open().expect("a slot is free");
        self.cache.reserve(&mut other, 2 * AttentionSpec::PAGE).expect("pages are free");
        other.advance(2 * AttentionSpec::PAGE);
        let free = self.cache.free_pages();
        let opened = self.cache.open_file(MODEL, &path);
        let loaded = opened.and_then(|file| {
            let first_pages = &other.pages()[..file.first_page.min(2)];
            Ok((self.cache.load_from(&file, first_pages)?, file))
        });
        let is_accepted = match loaded {
            Ok((sequence, file)) => {
                let (first, own) = sequence.pages().split_at(file.first_page);
                assert_eq!(first, &other.pages()[..file.first_page]);
                assert_eq!(self.cache.free_pages(), free - own.len());
                let alone = self.cache.load(MODEL, &path);
                assert!(file.first_page == 0 || alone.is_err(), "the pages before it are missing");
                let saved = self.cache.save_from(file.first_page, &sequence, &file.tokens, MODEL, &again);
                saved.expect("what was loaded can be saved");
                let same = self.cache.open_file(MODEL, &again).expect("what was saved can be opened");
                assert_eq!((same.tokens, same.first_page), (file.tokens, file.first_page));
                true
            }
            Err(problem) => {
                assert!(!problem.to_string().is_empty());
                false
            }
        };
        assert_eq!(self.cache.free_pages(), free, "its own pages come back, and only these");
        drop(other);
        assert!(self.cache.is_idle(), "the slots come back");
        is_accepted
    }

    /// Loads a file of a sequence. Returns whether it was accepted.
    ///
    /// # Panics
    /// If a refusal holds memory or says nothing, or an accepted sequence differs after it is saved and loaded again.
    pub fn file(&mut self, file: &[u8]) -> bool {
        let (path, again) = (self.at("sequence"), self.at("again"));
        std::fs::write(&path, file).expect("written");
        let (sequence, tokens) = match self.cache.load(MODEL, &path) {
            Ok(loaded) => loaded,
            Err(problem) => {
                assert!(!problem.to_string().is_empty());
                assert!(self.cache.is_idle(), "a refusal holds pages or a slot: {problem}");
                return false;
            }
        };
        assert!((1..=CONTEXT).contains(&tokens.len()) && sequence.len() == tokens.len());
        self.cache.save(&sequence, &tokens, MODEL, &again).expect("what was loaded can be saved");
        let (second, same) = self.cache.load(MODEL, &again).expect("what was saved can be loaded");
        assert_eq!((same, second.is_long()), (tokens, sequence.is_long()));
        drop((sequence, second));
        assert!(self.cache.is_idle(), "the pages and the slot come back");
        true
    }

    /// Why a file of a sequence is refused.
    pub fn refusal(&mut self, path: &Path) -> String {
        self.cache.load(MODEL, path).expect_err("it is refused").to_string()
    }

    /// Reads an index of prefixes, and looks for the files that it names. Returns whether it was accepted.
    ///
    /// # Panics
    /// If it exceeds a limit, leads out of its folder, or differs after it is written and read again.
    pub fn prefix_index(&mut self, index: &[u8]) -> bool {
        let folder = PrefixFolder::new(MODEL, self.folder.path());
        std::fs::write(self.at("index.json"), index).expect("written");
        std::fs::write(self.at("0.safetensors"), b"text").expect("written");
        let entries = match folder.read_index() {
            Ok(entries) => entries.expect("it is there"),
            Err(problem) => {
                assert!(!problem.is_empty());
                return false;
            }
        };
        assert!(entries.len() <= PrefixFolder::TEXTS_MAX);
        let texts: Vec<_> = entries.into_iter().flatten().collect();
        for text in &texts {
            assert!(text.pictures.len() <= PrefixFolder::PICTURES_MAX);
            if let Ok(path) = folder.intact(text, 1 << 10) {
                assert_eq!(path, self.at(text.name()), "one folder");
                assert!(std::fs::metadata(&path).expect("it is there").is_file());
            }
        }
        folder.write_index(&texts).expect("written");
        let again: Vec<_> =
            folder.read_index().expect("sound").expect("there").into_iter().flatten().collect();
        assert_eq!(again, texts);
        true
    }
}

/// A file with this header and as many zeros as it declares.
fn with_data(header: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header);
    file.resize(file.len() + declared(header), 0);
    file
}

/// Bytes of data that a header declares.
fn declared(header: &[u8]) -> usize {
    let Ok(serde_json::Value::Object(tensors)) = serde_json::from_slice(header) else { return 0 };
    let ends = tensors.values().filter_map(|tensor| tensor["data_offsets"][1].as_u64());
    ends.max().unwrap_or(0).min(DATA_BYTES_MAX) as usize
}
