//! Models with their names in the API.

use std::path::Path;

use evenkeel::ModelFiles;
use keel_weights::gguf::PartName;

/// A value of `--model`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// The model's name in the API, if given.
    pub name: Option<String>,
    /// A folder, a file or a hub name.
    pub model: String,
}

impl Named {
    /// Parses `NAME=MODEL`, or a model alone. An existing path is never split, even if it contains `=`.
    pub fn parse(text: &str) -> Named {
        match text.split_once('=') {
            Some((name, model))
                if !name.is_empty()
                    && !name.contains(std::path::MAIN_SEPARATOR)
                    && !Path::new(text).exists() =>
            {
                Named { name: Some(name.into()), model: model.into() }
            }
            _ => Named { name: None, model: text.into() },
        }
    }
}

/// Logs a line if `--model NAME=MODEL` gives a server's only model another name than `name`, the value of `--name`.
pub fn warn_of_two(models: &[String], name: Option<&str>) {
    let [model] = models else { return };
    let own = Named::parse(model).name.filter(|own| name.is_some_and(|name| name != own));
    if let (Some(own), Some(name)) = (own, name) {
        tracing::warn!("--name {name} is not used: --model {own}=... names the model");
    }
}

/// The default name of a model: that of its folder or file, and `OWNER/NAME` for a folder of the hub's. The file
/// `model.safetensors` has the name of its folder. Another weights file has its name without `.safetensors`. A GGUF
/// model in parts has the name that it would have in one file.
pub fn of(model: &ModelFiles) -> String {
    of_path(&model.path)
}

fn of_path(path: &Path) -> String {
    let name = path.file_name().and_then(|name| name.to_str());
    match name.and_then(|name| name.split_once(".safetensors")) {
        Some(("model", _)) => path.parent().map_or("keel".into(), of_path),
        Some((stem, _)) => stem.into(),
        None => hub_name(path).unwrap_or_else(|| {
            match name.and_then(PartName::parse).filter(|part| part.total > 1) {
                Some(part) => format!("{}.gguf", part.stem),
                None => name.unwrap_or("keel").to_string(),
            }
        }),
    }
}

/// The name of the repository whose snapshot a folder is: `models--OWNER--NAME/snapshots/COMMIT`.
fn hub_name(path: &Path) -> Option<String> {
    let repository = path.parent().filter(|parent| parent.ends_with("snapshots"))?.parent()?;
    let (owner, name) = repository.file_name()?.to_str()?.strip_prefix("models--")?.split_once("--")?;
    Some(format!("{owner}/{name}"))
}

#[cfg(test)]
mod tests {
    use super::{Named, of_path};

    #[test]
    fn a_model_is_named_as_its_user_knows_it() {
        let hub = "/home/a/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/0123abcd";
        assert_eq!(of_path(hub.as_ref()), "Qwen/Qwen3-0.6B");
        assert_eq!(of_path(format!("{hub}/q4.gguf").as_ref()), "q4.gguf");
        assert_eq!(of_path("models/q4-00001-of-00003.gguf".as_ref()), "q4.gguf");
        assert_eq!(of_path("models/snapshots/a".as_ref()), "a");
        assert_eq!(of_path(format!("{hub}/model.safetensors").as_ref()), "Qwen/Qwen3-0.6B");
        assert_eq!(of_path("models/two/model.safetensors.index.json".as_ref()), "two");
        assert_eq!(of_path("models/two/a.safetensors".as_ref()), "a", "its folder may hold another model");
        assert_eq!(of_path("model.safetensors".as_ref()), "keel");
    }

    #[test]
    fn a_name_stands_before_the_model() {
        let named = |text: &str| (Named::parse(text).name, Named::parse(text).model);
        assert_eq!(named("small=models/a"), (Some("small".into()), "models/a".into()));
        assert_eq!(named("small=owner/name:Q4_K_M"), (Some("small".into()), "owner/name:Q4_K_M".into()));
        assert_eq!(named("owner/name"), (None, "owner/name".into()));
        assert_eq!(named("./a=b/c"), (None, "./a=b/c".into()), "a path with an equals sign");
        assert_eq!(named("=b"), (None, "=b".into()));
    }
}
