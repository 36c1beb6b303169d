//! Chooses the files of a model to download.

use std::cmp::Reverse;

use anyhow::{Result, bail};
use keel_weights::gguf::PartName;

use super::client::RemoteFile;
use crate::source::hub_name::HubName;

/// The GGUF coding to use if there are several and none is picked. It has 4.5 bits, the usual compromise.
pub const USUAL_CODING: &str = "Q4_K_M";

/// The files that are needed to run a model.
#[derive(Debug, PartialEq)]
pub enum Wanted<'a> {
    /// A checkpoint: config, weights and text files, in one folder.
    Checkpoint(Vec<&'a RemoteFile>),
    /// A GGUF model, and its vision tower if it has one.
    Gguf { model: GgufParts<'a>, tower: Option<GgufParts<'a>> },
}

/// One GGUF file, or all parts of one.
#[derive(Debug, PartialEq)]
pub struct GgufParts<'a> {
    /// The file, or its first part.
    pub first: &'a RemoteFile,
    others: Vec<&'a RemoteFile>,
}

impl<'a> GgufParts<'a> {
    /// The file, or the parts of which it is the first.
    ///
    /// # Errors
    /// A part is not among the files.
    fn of(first: &'a RemoteFile, files: &'a [RemoteFile]) -> Result<GgufParts<'a>> {
        let find = |path: String| match files.iter().find(|file| file.path == path) {
            Some(file) => Ok(file),
            None => bail!("{path} is not on the hub, and {} is nothing without it", first.path),
        };
        let others = PartName::parse(&first.path).into_iter().flat_map(|part| part.all().skip(1));
        Ok(GgufParts { first, others: others.map(find).collect::<Result<_>>()? })
    }

    /// All parts, the first one last: a download is complete once it is there.
    fn files(&self) -> impl Iterator<Item = &'a RemoteFile> + '_ {
        self.others.iter().copied().chain([self.first])
    }
}

impl<'a> Wanted<'a> {
    /// The files in the order to download them. The model is last: once it is there, a run asks for no other file.
    pub fn files(&self) -> Vec<&'a RemoteFile> {
        match self {
            Wanted::Checkpoint(files) => files.clone(),
            Wanted::Gguf { model, tower } => tower.iter().chain([model]).flat_map(GgufParts::files).collect(),
        }
    }

    /// The path of one of the files in the model's folder. A vision tower lies next to its model there.
    pub fn place_of(&self, file: &RemoteFile) -> String {
        match self {
            Wanted::Gguf { model, tower: Some(tower) }
                if tower.files().any(|part| part.path == file.path) =>
            {
                place_of(&file.path, &model.first.path)
            }
            _ => file.path.clone(),
        }
    }

    /// Chooses among the files of a model. `is_here` says whether a path of the model's folder is there already.
    ///
    /// # Errors
    /// No file can be run, or the choice is ambiguous. The message lists the files.
    pub fn choose(
        name: &HubName,
        files: &'a [RemoteFile],
        is_here: &dyn Fn(&str) -> bool,
    ) -> Result<Wanted<'a>> {
        let gguf: Vec<&RemoteFile> = files.iter().filter(|file| is_gguf_model(&file.path)).collect();
        let whole = |model: &'a RemoteFile| {
            let tower = tower_of(&model.path, files, is_here);
            Ok(Wanted::Gguf { model: GgufParts::of(model, files)?, tower })
        };
        if let Some(pick) = &name.pick {
            return whole(choose_gguf(name, &gguf, pick)?);
        }
        let checkpoint = checkpoint_files(files);
        if !checkpoint.is_empty() {
            return Ok(Wanted::Checkpoint(checkpoint));
        }
        match gguf[..] {
            [] => bail!(
                "{name} on the hub has neither config.json with safetensors nor a GGUF file: there is nothing that keel runs"
            ),
            [only] => whole(only),
            _ => whole(choose_gguf(name, &gguf, USUAL_CODING)?),
        }
    }
}

/// Config, weights and text files in the root folder, and the files that say how embeddings are pooled. Empty if there
/// is no config, or if there are no weights.
fn checkpoint_files(files: &[RemoteFile]) -> Vec<&RemoteFile> {
    let in_root = || files.iter().filter(|file| !file.path.contains('/'));
    let weights: Vec<&RemoteFile> = in_root().filter(|file| file.path.ends_with(".safetensors")).collect();
    if weights.is_empty() || !in_root().any(|file| file.path == "config.json") {
        return Vec::new();
    }
    // The same weights may also exist under the names of another program. Other names are parts, such as an MTP head.
    let is_other =
        |file: &&&RemoteFile| ["consolidated", "adapter"].iter().any(|name| file.path.starts_with(name));
    let has_usual = weights.iter().any(|file| file.path.starts_with("model"));
    let weights = weights.iter().filter(|file| !has_usual || !is_other(file)).copied();
    let is_text = |file: &&RemoteFile| file.path.ends_with(".json") || file.path.ends_with(".jinja");
    let pooling = files.iter().filter(|file| file.path.ends_with("_Pooling/config.json"));
    in_root().filter(is_text).chain(pooling).chain(weights).collect()
}

/// Whether a file is a model or the first part of one, and not a vision part or a table for quantisation.
pub fn is_gguf_model(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
    name.ends_with(".gguf") && !name.contains("mmproj") && !name.contains("imatrix") && is_first(path)
}

/// Whether a file is by its name the vision tower of a GGUF model, or the first part of one.
pub fn is_gguf_tower(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
    name.ends_with(".gguf") && name.contains("mmproj") && is_first(path)
}

/// Whether a file is the first of its parts, or has none.
fn is_first(path: &str) -> bool {
    PartName::parse(path).is_none_or(|part| part.number == 1)
}

/// The folder of a path, with a slash at its end unless it is the root.
pub fn folder_of(path: &str) -> &str {
    &path[..path.rfind('/').map_or(0, |at| at + 1)]
}

/// Where the vision tower `tower` is found for the GGUF file `model`: next to it.
pub fn place_of(tower: &str, model: &str) -> String {
    format!("{}{}", folder_of(model), &tower[folder_of(tower).len()..])
}

/// The vision tower to download with a GGUF file, as llama.cpp chooses it: in the file's folder or the nearest one
/// above, the one with the nearest number of bits. One that is here already comes first, because a model with two
/// towers next to it would have no clear one. One that lacks a part is not taken.
fn tower_of<'a>(
    model: &str,
    files: &'a [RemoteFile],
    is_here: &dyn Fn(&str) -> bool,
) -> Option<GgufParts<'a>> {
    let is_above =
        |file: &&RemoteFile| is_gguf_tower(&file.path) && folder_of(model).starts_with(folder_of(&file.path));
    let bits = |path: &str| bits_of(path).unwrap_or(u32::MAX);
    let whole = files.iter().filter(is_above).filter_map(|first| GgufParts::of(first, files).ok());
    whole.min_by_key(|tower| {
        let path = &tower.first.path;
        let difference = bits(path).abs_diff(bits(model));
        (!is_here(&place_of(path, model)), Reverse(folder_of(path).len()), difference, path)
    })
}

/// A path without what says that it is a GGUF file, and which part of one.
pub fn stem_of(path: &str) -> &str {
    PartName::parse(path).map_or_else(|| path.strip_suffix(".gguf").unwrap_or(path), |part| part.stem)
}

/// Bits of the coding at the end of a file's name: 4 of `Q4_K_M`, 16 of `BF16`.
fn bits_of(path: &str) -> Option<u32> {
    let coding = stem_of(path).rsplit(['-', '.', '/']).next()?;
    let digits = coding.trim_start_matches(|c: char| !c.is_ascii_digit());
    digits.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Whether a pick selects a GGUF file: by its whole name, or by a coding in its name.
pub fn is_picked(path: &str, pick: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
    let pick = pick.to_ascii_lowercase();
    if name == pick {
        return true;
    }
    let stem = name.strip_suffix(".gguf").unwrap_or(&name);
    stem.match_indices(&pick).any(|(at, _)| {
        // Q4_K does not match Q4_K_M, and 4_K does not match Q4_K. But Q4_K_XL matches UD-Q4_K_XL.
        let is_edge = |c: Option<char>| c.is_none_or(|c| !c.is_ascii_alphanumeric() && c != '_');
        is_edge(stem[..at].chars().next_back()) && is_edge(stem[at + pick.len()..].chars().next())
    })
}

fn choose_gguf<'a>(name: &HubName, gguf: &[&'a RemoteFile], pick: &str) -> Result<&'a RemoteFile> {
    let mut picked: Vec<&RemoteFile> =
        gguf.iter().filter(|file| is_picked(&file.path, pick)).copied().collect();
    // If both UD-Q4_K_M.gguf and Q4_K_M.gguf exist, the shorter name is meant.
    picked.sort_by_key(|file| (file.path.matches('/').count(), stem_of(&file.path).len()));
    let repository = name.repository();
    match picked.first() {
        Some(file) => Ok(file),
        None if gguf.is_empty() => bail!("{repository} on the hub has no GGUF file to pick {pick} from"),
        None => {
            let names: Vec<&str> = gguf.iter().map(|file| file.path.as_str()).collect();
            bail!(
                "{repository} has no GGUF file for {pick}; pick one with {repository}:CODING of {}",
                names.join(", ")
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(paths: &[&str]) -> Vec<RemoteFile> {
        let file = |path: &&str| RemoteFile { path: path.to_string(), size: None, sha256: None, blob: None };
        paths.iter().map(file).collect()
    }

    fn chosen(name: &str, paths: &[&str]) -> Result<Vec<String>> {
        let name = HubName::parse(name)?;
        let files = files(paths);
        let wanted = Wanted::choose(&name, &files, &|_| false)?;
        let mut paths: Vec<String> = wanted.files().iter().map(|file| file.path.clone()).collect();
        paths.sort();
        Ok(paths)
    }

    #[test]
    fn of_a_checkpoint_what_is_read_is_taken() {
        let paths = [
            "1_Pooling/config.json",
            "config.json",
            "consolidated.safetensors",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "mtp.safetensors",
            "onnx/config.json",
            "pytorch_model.bin",
            "tokenizer.json",
        ];
        let want = [paths[0], paths[1], paths[3], paths[4], paths[5], paths[6], paths[9]];
        assert_eq!(chosen("a/b", &paths).expect("a checkpoint"), want);
    }

    #[test]
    fn of_gguf_files_the_one_that_is_picked() {
        let paths = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-UD-Q4_K_M.gguf", "m-Q8_0.gguf", "README.md"];
        let of = |name: &str| chosen(name, &paths).map(|paths| paths.concat());
        assert_eq!(of("a/b:Q4_K_M").expect("there"), "m-Q4_K_M.gguf");
        assert_eq!(of("a/b:q8_0").expect("there"), "m-Q8_0.gguf");
        assert_eq!(of("a/b:m-Q4_K_S.gguf").expect("there"), "m-Q4_K_S.gguf");
        assert_eq!(of("a/b").expect("the usual one"), "m-Q4_K_M.gguf");
        let missing = of("a/b:Q6_K").expect_err("not there").to_string();
        assert!(missing.contains("no GGUF file for Q6_K") && missing.contains("m-Q8_0.gguf"), "{missing}");
        assert!(of("a/b:F16").is_err(), "what reads pictures is no model");
        assert!(of("a/b:Q4_K").is_err(), "a part of a coding's name is another coding");
    }

    #[test]
    fn a_gguf_file_comes_with_its_vision_tower() {
        let towers =
            ["m-Q4_K_M.gguf", "m-BF16.gguf", "mmproj-m-BF16.gguf", "mmproj-m-Q8_0.gguf", "x/m-Q6_K.gguf"];
        let of = |name: &str, paths: &[&str]| chosen(name, paths).expect("there");
        assert_eq!(of("a/b", &towers), ["m-Q4_K_M.gguf", "mmproj-m-Q8_0.gguf"], "8 bits are nearest to 4");
        assert_eq!(of("a/b:BF16", &towers), ["m-BF16.gguf", "mmproj-m-BF16.gguf"]);
        assert_eq!(of("a/b:Q6_K", &towers), ["mmproj-m-Q8_0.gguf", "x/m-Q6_K.gguf"], "from the folder above");
        let usual = ["m-Q4_K_M.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf", "y/mmproj-Q4_0.gguf"];
        assert_eq!(of("a/b", &usual), ["m-Q4_K_M.gguf", "mmproj-F16.gguf"], "that in y is of another model");
        let nearer = ["mmproj-Q8_0.gguf", "x/m-Q8_0.gguf", "x/mmproj-F32.gguf"];
        assert_eq!(of("a/b", &nearer), ["x/m-Q8_0.gguf", "x/mmproj-F32.gguf"]);
        assert_eq!(place_of("mmproj-Q8_0.gguf", "x/m-Q6_K.gguf"), "x/mmproj-Q8_0.gguf");
        let torn = ["m-Q8_0.gguf", "mmproj-F32.gguf", "mmproj-Q8_0-00001-of-00002.gguf"];
        assert_eq!(of("a/b", &torn), torn[..2], "a part of the nearer one is not on the hub");

        let (name, files) = (HubName::parse("a/b:Q4_K_M").expect("a name"), files(&towers));
        let here = Wanted::choose(&name, &files, &|path| path == "mmproj-m-BF16.gguf").expect("there");
        assert_eq!(here.files()[0].path, "mmproj-m-BF16.gguf", "one that is here is taken");
    }

    #[test]
    fn a_vision_tower_in_parts_comes_with_all_of_them() {
        let paths = ["mmproj-F16-00001-of-00002.gguf", "mmproj-F16-00002-of-00002.gguf", "x/m-Q8_0.gguf"];
        let (name, files) = (HubName::parse("a/b").expect("a name"), files(&paths));
        let wanted = Wanted::choose(&name, &files, &|_| false).expect("there");
        let places: Vec<String> = wanted.files().into_iter().map(|file| wanted.place_of(file)).collect();
        let tower = ["x/mmproj-F16-00002-of-00002.gguf", "x/mmproj-F16-00001-of-00002.gguf"];
        assert_eq!(places, [tower[0], tower[1], paths[2]], "all next to the model, which is last");
    }

    #[test]
    fn a_gguf_model_in_parts_comes_with_all_of_them() {
        let paths = [
            "BF16/m-BF16-00001-of-00002.gguf",
            "BF16/m-BF16-00002-of-00002.gguf",
            "Q8_0/m-Q8_0-00001-of-00003.gguf",
            "Q8_0/m-Q8_0-00002-of-00003.gguf",
            "Q8_0/m-Q8_0-00003-of-00003.gguf",
            "mmproj-BF16.gguf",
            "mmproj-Q8_0.gguf",
        ];
        assert_eq!(chosen("a/b:BF16", &paths).expect("there"), [paths[0], paths[1], paths[5]]);
        assert_eq!(chosen("a/b:Q8_0", &paths).expect("there"), [paths[2], paths[3], paths[4], paths[6]]);
        assert_eq!(chosen("a/b", &paths[..2]).expect("the only one"), paths[..2]);
        let (name, files) = (HubName::parse("a/b:Q8_0").expect("a name"), files(&paths));
        let wanted = Wanted::choose(&name, &files, &|_| false).expect("there");
        assert_eq!(
            wanted.files().last().expect("files").path,
            paths[2],
            "the first part is found when all are here"
        );
        let missing = chosen("a/b:Q4_0", &paths).expect_err("not there").to_string();
        assert!(
            missing.contains("m-Q8_0-00001-of-00003.gguf") && !missing.contains("-00002-of-00003"),
            "{missing}"
        );
        let both = ["m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf", "m-UD-Q4_K_M.gguf"];
        assert_eq!(chosen("a/b:Q4_K_M", &both).expect("there"), both[..2], "the numbers make no name longer");
    }

    #[test]
    fn what_cannot_be_run_is_said() {
        let error = |name: &str, paths: &[&str]| chosen(name, paths).expect_err("refused").to_string();
        assert!(error("a/b", &["pytorch_model.bin", "config.json"]).contains("nothing that keel runs"));
        assert!(error("a/b:Q8_0", &["config.json"]).contains("has no GGUF file"));
        let torn = ["m-Q8_0-00001-of-00002.gguf"];
        assert!(error("a/b:Q8_0", &torn).contains("m-Q8_0-00002-of-00002.gguf is not on the hub"));
        assert_eq!(chosen("a/b", &["only-Q2_K.gguf"]).expect("there"), ["only-Q2_K.gguf"]);
    }
}
