//! A checkpoint: config.json and one or more safetensors files.

mod files;

use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
};

use files::{SINGLE_FILE, Shards, has_weights, is_index, open_shards, weights_path};
use serde_json::Value;

use crate::{
    ColumnsTensor, LinearTensor, Quantization, RawTensor, Result, SafetensorsFile, TensorInfo, TensorSource,
    TensorView, WeightsError, json, linear, source::missing,
};

const CONFIG_BYTES_MAX: u64 = 16 << 20;
const CONFIG_FILE: &str = "config.json";

/// An opened checkpoint: its configuration, and the tensors of all shards by name.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    folder: PathBuf,
    config: Value,
    quantization: Option<Quantization>,
    files: Vec<SafetensorsFile>,
    /// The index in `files` of each tensor.
    owners: BTreeMap<String, usize>,
}

impl Checkpoint {
    /// Opens a folder with `model.safetensors` or `model.safetensors.index.json`, or either file directly,
    /// or any other `.safetensors` file. `config.json` is read from the same folder.
    ///
    /// Weights are mapped, not read. Opening takes time and memory only for the headers.
    ///
    /// # Errors
    /// [`WeightsError::NoWeights`] or [`WeightsError::NoConfig`] if a part is missing,
    /// [`WeightsError::Json`] or [`WeightsError::Header`] if one is broken.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        let weights = weights_path(path)?;
        let folder = weights.parent().unwrap_or(Path::new("")).to_path_buf();
        let config = read_config(&folder)?;
        let Shards { files, owners } = if is_index(&weights) {
            open_shards(&weights, &folder)?
        } else {
            let file = SafetensorsFile::open(&weights)?;
            let owners = file.names().map(|name| (name.to_string(), 0)).collect();
            Shards { files: vec![file], owners }
        };
        let quantization = Quantization::from_config(&config);
        Ok(Checkpoint { path: path.into(), folder, config, quantization, files, owners })
    }

    /// A checkpoint that is part of the program: the bytes of its config.json and of its one weights file. They are
    /// neither copied nor read here. `name` stands for it in errors and is its [`folder`](Self::folder), which need not
    /// exist.
    ///
    /// # Errors
    /// [`WeightsError::Json`] or [`WeightsError::Header`] if a part is broken.
    pub fn in_memory(name: &Path, config: &[u8], weights: &'static [u8]) -> Result<Checkpoint> {
        let config = check_config(json::parse(&name.join(CONFIG_FILE), config)?, name)?;
        let file = SafetensorsFile::in_memory(&name.join(SINGLE_FILE), weights)?;
        let owners = file.names().map(|tensor| (tensor.to_string(), 0)).collect();
        let quantization = Quantization::from_config(&config);
        Ok(Checkpoint {
            path: name.into(),
            folder: name.into(),
            config,
            quantization,
            files: vec![file],
            owners,
        })
    }

    /// Whether `folder` has a config.json and all weights files that [`open`](Self::open) would open there. Headers are
    /// not read.
    pub fn is_complete(folder: &Path) -> bool {
        folder.join(CONFIG_FILE).is_file() && has_weights(folder)
    }

    /// The parsed config.json.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// The folder of config.json. The tokenizer is searched here, too.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The weights files, in the order of their names.
    pub fn files(&self) -> &[SafetensorsFile] {
        &self.files
    }

    /// The free-form strings of the first file's header.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        // A checkpoint is never opened without a file.
        self.files[0].metadata()
    }

    /// Bytes of all tensors together.
    pub fn total_bytes(&self) -> u64 {
        let bytes =
            |(name, &file): (&String, &usize)| self.files[file].header().tensors()[name].range.len() as u64;
        self.owners.iter().map(bytes).sum()
    }

    fn file_of(&self, name: &str) -> Result<&SafetensorsFile> {
        let file = self.owners.get(name).ok_or_else(|| missing(self, name, &self.path))?;
        Ok(&self.files[*file])
    }
}

impl TensorSource for Checkpoint {
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.owners.keys().map(String::as_str))
    }

    fn contains(&self, name: &str) -> bool {
        self.owners.contains_key(name)
    }

    fn info(&self, name: &str) -> Result<TensorInfo<'_>> {
        self.file_of(name)?.info(name)
    }

    fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        self.file_of(name)?.tensor(name)
    }

    fn raw(&self, name: &str) -> Result<RawTensor<'_>> {
        self.file_of(name)?.raw(name)
    }

    fn quantization(&self) -> Option<&Quantization> {
        self.quantization.as_ref()
    }

    fn linear(&self, module: &str) -> Result<LinearTensor<'_>> {
        let columns = ColumnsTensor::find(self, module);
        columns.map_or_else(|| linear::open(self, module), |columns| Ok(LinearTensor::Columns(columns)))
    }

    fn check_intact(&self) -> Result<()> {
        self.files.iter().try_for_each(SafetensorsFile::check_intact)
    }

    fn release_rows(&self, name: &str, rows: Range<usize>) {
        if let Some(&file) = self.owners.get(name) {
            self.files[file].release_rows(name, rows);
        }
    }
}

fn read_config(folder: &Path) -> Result<Value> {
    let path = folder.join(CONFIG_FILE);
    if !path.exists() {
        return Err(WeightsError::NoConfig { path });
    }
    check_config(json::read(&path, CONFIG_BYTES_MAX)?, folder)
}

fn check_config(config: Value, folder: &Path) -> Result<Value> {
    if config.is_object() {
        return Ok(config);
    }
    Err(WeightsError::Json { path: folder.join(CONFIG_FILE), problem: "it is not a JSON object".into() })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A file with one u8 tensor per name, `values` bytes each.
    fn weights(tensors: &[(&str, &[u8])]) -> Vec<u8> {
        let views = tensors.iter().map(|(name, values)| {
            let view =
                ::safetensors::tensor::TensorView::new(::safetensors::Dtype::U8, vec![values.len()], values);
            (*name, view.unwrap())
        });
        ::safetensors::serialize(views, None).unwrap()
    }

    fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            fs::write(folder.path().join(name), bytes).unwrap();
        }
        folder
    }

    fn error(path: &Path) -> String {
        Checkpoint::open(path).unwrap_err().to_string()
    }

    #[test]
    fn a_single_file_opens_by_folder_and_by_path() {
        let bytes = weights(&[("m.a", &[1, 2]), ("m.b", &[3])]);
        let folder = folder(&[("model.safetensors", &bytes), ("config.json", b"{\"x\": 7}")]);
        for path in [folder.path().to_path_buf(), folder.path().join("model.safetensors")] {
            let checkpoint = Checkpoint::open(&path).unwrap();
            assert_eq!(checkpoint.config()["x"], 7);
            assert_eq!(checkpoint.folder(), folder.path());
            assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["m.a", "m.b"]);
            assert_eq!(checkpoint.tensor("m.a").unwrap().bytes(), [1, 2]);
            assert_eq!(checkpoint.info("m.b").unwrap().shape, [1]);
            assert_eq!(checkpoint.total_bytes(), 3);
            checkpoint.release("m.a");
            checkpoint.release_rows("m.a", 0..100);
            assert_eq!(checkpoint.tensor("m.a").unwrap().bytes(), [1, 2]);
        }
    }

    /// As tools write it that leave an MTP head as it is.
    #[test]
    fn an_index_adds_files_to_a_single_one() {
        let index = |main: &str| {
            format!(r#"{{"weight_map": {{"a": "{main}", "mtp.a": "model_extra_tensors.safetensors"}}}}"#)
        };
        let (main, extra) = (weights(&[("a", &[1, 2])]), weights(&[("mtp.a", &[3])]));
        let whole = index("model.safetensors");
        let files: [(&str, &[u8]); 4] = [
            ("model.safetensors", &main),
            ("model_extra_tensors.safetensors", &extra),
            ("model.safetensors.index.json", whole.as_bytes()),
            ("config.json", b"{}"),
        ];
        let folder = folder(&files);
        let names = || Checkpoint::open(folder.path()).unwrap().names().map(String::from).collect::<Vec<_>>();
        assert_eq!(names(), ["a", "mtp.a"]);
        assert!(Checkpoint::is_complete(folder.path()));
        // The other file has not come yet.
        fs::remove_file(folder.path().join("model_extra_tensors.safetensors")).unwrap();
        assert!(!Checkpoint::is_complete(folder.path()));
        // An index that is left from shards that are gone.
        let left = index("model-00001-of-00002.safetensors");
        fs::write(folder.path().join("model.safetensors.index.json"), left).unwrap();
        assert_eq!(names(), ["a"]);
        assert!(Checkpoint::is_complete(folder.path()));
    }

    #[test]
    fn a_checkpoint_of_the_program_reads_as_one_on_disk() {
        let bytes: &'static [u8] = weights(&[("m.a", &[1, 2]), ("m.b", &[3])]).leak();
        let checkpoint = Checkpoint::in_memory("built-in".as_ref(), b"{\"x\": 7}", bytes).unwrap();
        assert_eq!((checkpoint.config()["x"].as_u64(), checkpoint.total_bytes()), (Some(7), 3));
        let tensor = checkpoint.tensor("m.a").unwrap();
        assert_eq!(tensor.bytes(), [1, 2]);
        assert!(bytes.as_ptr_range().contains(&tensor.bytes().as_ptr()), "lent, not copied");
        checkpoint.release("m.a");
        assert_eq!(checkpoint.tensor("m.a").unwrap().bytes(), [1, 2]);
        let error = |config: &[u8], weights| {
            Checkpoint::in_memory("built-in".as_ref(), config, weights).unwrap_err().to_string()
        };
        assert!(error(b"[]", bytes).contains("built-in/config.json is not usable: it is not a JSON object"));
        assert!(error(b"{", bytes).contains("built-in/config.json is not usable: EOF"));
        assert!(error(b"{}", b"").contains("built-in/model.safetensors"));
    }

    #[test]
    fn shards_read_as_one() {
        let index =
            br#"{"metadata":{"total_size":3},"weight_map":{"a":"2.safetensors","b":"1.safetensors"}}"#;
        let folder = folder(&[
            ("1.safetensors", &weights(&[("b", &[3])])),
            ("2.safetensors", &weights(&[("a", &[1, 2]), ("unlisted", &[9])])),
            ("model.safetensors.index.json", index),
            ("config.json", b"{}"),
        ]);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(checkpoint.tensor("a").unwrap().bytes(), [1, 2]);
        assert_eq!(checkpoint.tensor("b").unwrap().bytes(), [3]);
        assert_eq!(checkpoint.total_bytes(), 3);
        assert!(Checkpoint::open(&folder.path().join("model.safetensors.index.json")).is_ok());
        assert!(Checkpoint::is_complete(folder.path()));
        for file in ["1.safetensors", "config.json"] {
            let (path, aside) = (folder.path().join(file), folder.path().join("aside"));
            fs::rename(&path, &aside).unwrap();
            assert!(!Checkpoint::is_complete(folder.path()), "without {file}");
            fs::rename(&aside, &path).unwrap();
        }
        // A folder whose index cannot be read is not complete. A file outside the folder exists, but is not opened.
        let inner = folder.path().join("inner");
        fs::create_dir(&inner).unwrap();
        fs::write(inner.join("config.json"), "{}").unwrap();
        let outside = r#"{"weight_map":{"b":"../1.safetensors"}}"#;
        for index in [r#"{"weight_map":{}}"#, "{", outside] {
            fs::write(inner.join("model.safetensors.index.json"), index).unwrap();
            assert!(Checkpoint::open(&inner).is_err(), "{index}");
            assert!(!Checkpoint::is_complete(&inner), "{index}");
        }
    }

    #[test]
    fn a_missing_tensor_is_named_with_its_neighbours() {
        let bytes = weights(&[("l.0.k.weight", &[1]), ("l.1.q.weight", &[1]), ("l.0.q.qweight", &[1])]);
        let folder = folder(&[("model.safetensors", &bytes), ("config.json", b"{}")]);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let message = |name: &str| checkpoint.tensor(name).unwrap_err().to_string();
        assert_eq!(
            message("l.0.q.weight"),
            format!(
                "tensor 'l.0.q.weight' is not in {}, which holds 3 tensors, next to it 'l.0.q.qweight'",
                folder.path().display()
            )
        );
        assert!(message("l.0.v.weight").ends_with("next to it 'l.0.k.weight', 'l.0.q.qweight'"));
        assert!(message("x").ends_with("which holds 3 tensors"));
    }

    #[test]
    fn paths_without_a_checkpoint() {
        let bytes = weights(&[("a", &[1])]);
        let empty = folder(&[("config.json", b"{}"), ("notes.txt", b"")]);
        assert!(error(empty.path()).starts_with("no weights at "));
        assert!(error(&empty.path().join("notes.txt")).starts_with("no weights at "));
        assert!(error(&empty.path().join("nothing")).starts_with("cannot open "));
        let gguf = folder(&[("b.gguf", b""), ("a.GGUF", b""), ("mmproj-a.gguf", b"")]);
        let advice = "or the path of a .safetensors or .gguf file; the folder has a.GGUF, b.gguf: give the path of one";
        assert!(error(gguf.path()).ends_with(advice), "{}", error(gguf.path()));
        fs::remove_file(gguf.path().join("b.gguf")).unwrap();
        assert!(error(gguf.path()).ends_with("the folder has a.GGUF: give the path of that file"));
        for name in ["c.gguf", "d.gguf", "e.gguf", "f.gguf"] {
            fs::write(gguf.path().join(name), b"").unwrap();
        }
        let advice = "the folder has a.GGUF, c.gguf, d.gguf and 2 more: give the path of one";
        assert!(error(gguf.path()).ends_with(advice), "{}", error(gguf.path()));
        let no_config = folder(&[("model.safetensors", &bytes)]);
        assert!(error(no_config.path()).contains("config.json is missing"));
        let bad_config = folder(&[("model.safetensors", &bytes), ("config.json", b"{")]);
        assert!(error(bad_config.path()).contains("config.json is not usable: EOF"));
        let list_config = folder(&[("model.safetensors", &bytes), ("config.json", b"[]")]);
        assert!(error(list_config.path()).contains("not a JSON object"));
        let empty_file = folder(&[("model.safetensors", b""), ("config.json", b"{}")]);
        assert!(error(empty_file.path()).contains("the file is empty"));
    }

    #[test]
    fn an_index_that_lies() {
        let bytes = weights(&[("a", &[1])]);
        let open = |index: &str| {
            let folder = folder(&[
                ("1.safetensors", &bytes),
                ("model.safetensors.index.json", index.as_bytes()),
                ("config.json", b"{}"),
            ]);
            error(folder.path())
        };
        assert!(open(r#"{"weight_map":{}}"#).contains("weight_map is empty"));
        assert!(open(r#"{}"#).contains("missing field `weight_map`"));
        assert!(open(r#"{"weight_map":{"b":"1.safetensors"}}"#).contains("does not hold it"));
        assert!(open(r#"{"weight_map":{"a":"2.safetensors"}}"#).starts_with("cannot open "));
        for outside in ["../1.safetensors", "/etc/passwd", "x/1.safetensors", "..", ""] {
            let message = open(&format!(r#"{{"weight_map":{{"a":"{outside}"}}}}"#));
            assert!(message.contains("is not the name of a file"), "{message}");
        }
    }

    #[test]
    fn an_element_type_we_lack_fails_only_where_it_is_used() {
        let mut bytes = Vec::new();
        let text = r#"{"a":{"dtype":"I16","shape":[1],"data_offsets":[0,2]},
                       "b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}"#;
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
        bytes.extend([0, 0, 5]);
        let folder = folder(&[("model.safetensors", &bytes), ("config.json", b"{}")]);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        assert_eq!(checkpoint.tensor("b").unwrap().bytes(), [5]);
        assert!(checkpoint.contains("a"));
        let message = checkpoint.tensor("a").unwrap_err().to_string();
        assert!(message.starts_with("tensor 'a' is stored as I16; "), "{message}");
    }
}
