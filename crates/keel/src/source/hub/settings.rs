//! Settings for the hub, from the same environment variables as its other clients.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};
use keel_weights::read_regular;

use crate::input;

/// The hub's own address.
const ENDPOINT: &str = "https://huggingface.co";

/// Address of the hub, credentials, and the folder of models.
#[derive(Clone)]
pub struct Settings {
    /// Address of the hub, without a slash at the end: `HF_ENDPOINT`.
    pub endpoint: String,
    /// Access token: `HF_TOKEN`, or the file that other clients write at login.
    pub token: Option<String>,
    /// Whether network access is forbidden: `HF_HUB_OFFLINE`.
    pub offline: bool,
    /// The folder of models: `HF_HUB_CACHE`, `HF_HOME`, `XDG_CACHE_HOME` or the user's cache folder.
    pub cache: PathBuf,
}

impl Settings {
    /// Reads the environment of the process.
    ///
    /// # Errors
    /// A variable is invalid, or no variable determines the folder of models.
    pub fn from_env() -> Result<Settings> {
        // The token may be in a pipe, which can be read once.
        static SETTINGS: OnceLock<Settings> = OnceLock::new();
        if let Some(settings) = SETTINGS.get() {
            return Ok(settings.clone());
        }
        let read = Settings::read(&|name| std::env::var_os(name).and_then(|value| value.into_string().ok()))?;
        Ok(SETTINGS.get_or_init(|| read).clone())
    }

    fn read(variable: &dyn Fn(&str) -> Option<String>) -> Result<Settings> {
        let variable = |name: &str| variable(name).map(|v| v.trim().to_string()).filter(|v| !v.is_empty());
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into());
        if !endpoint.starts_with("http://") && !endpoint.starts_with("https://") {
            bail!("HF_ENDPOINT is {endpoint:?}; it must begin with https:// or http://");
        }
        let home = variable("HF_HOME").map(PathBuf::from).or_else(|| {
            let cache = variable("XDG_CACHE_HOME").map(PathBuf::from);
            let cache = cache.or_else(|| Some(PathBuf::from(variable("HOME")?).join(".cache")));
            cache.map(|cache| cache.join("huggingface"))
        });
        let cache =
            variable("HF_HUB_CACHE").map(PathBuf::from).or(home.as_ref().map(|home| home.join("hub")));
        let Some(cache) = cache else {
            bail!("no folder for models is known: set HF_HOME or HOME");
        };
        let token = match (variable("HF_TOKEN"), variable("HF_TOKEN_PATH"), home) {
            (Some(token), ..) => Some(token),
            (None, Some(path), _) => token_of(Path::new(&path))?,
            (None, None, Some(home)) => read_regular(&home.join("token"), input::SETTINGS_BYTES_MAX)
                .ok()
                .and_then(|token| String::from_utf8(token).ok()),
            (None, None, None) => None,
        };
        let token = token.map(|token| token.trim().to_string()).filter(|token| !token.is_empty());
        if token.as_ref().is_some_and(|token| !token.chars().all(|c| c.is_ascii_graphic())) {
            bail!("HF_TOKEN holds characters that no token has");
        }
        let offline = variable("HF_HUB_OFFLINE")
            .is_some_and(|value| ["1", "true", "yes", "on"].contains(&value.to_ascii_lowercase().as_str()));
        Ok(Settings { endpoint: endpoint.trim_end_matches('/').into(), token, offline, cache })
    }
}

/// The token in the file or pipe that `HF_TOKEN_PATH` names. There is none before the first login of another client.
fn token_of(path: &Path) -> Result<Option<String>> {
    if !path.exists() {
        return Ok(None);
    }
    input::text_of(path, input::SETTINGS_BYTES_MAX).context("HF_TOKEN_PATH").map(Some)
}

/// The folder of models, for reports.
///
/// # Errors
/// As [`Settings::from_env`].
pub fn cache_folder() -> Result<PathBuf> {
    Settings::from_env().map(|settings| settings.cache).context("the cache of models")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Settings> {
        let find = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
        Settings::read(&find)
    }

    #[test]
    fn the_cache_is_where_other_clients_have_it() {
        let cache = |variables: &[_]| read(variables).map(|s| s.cache.display().to_string()).ok();
        let all = [("HF_HUB_CACHE", "/c"), ("HF_HOME", "/h"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/u")];
        assert_eq!(cache(&all).as_deref(), Some("/c"));
        assert_eq!(cache(&all[1..]).as_deref(), Some("/h/hub"));
        assert_eq!(cache(&all[2..]).as_deref(), Some("/x/huggingface/hub"));
        assert_eq!(cache(&all[3..]).as_deref(), Some("/u/.cache/huggingface/hub"));
        assert_eq!(cache(&[]), None);
    }

    #[test]
    fn token_endpoint_and_offline() {
        let home = ("HOME", "/nowhere/at/all");
        let plain = read(&[home]).expect("enough");
        assert_eq!((plain.endpoint.as_str(), plain.token, plain.offline), (ENDPOINT, None, false));
        let set = [home, ("HF_TOKEN", " hf_x\n"), ("HF_ENDPOINT", "http://h:1/"), ("HF_HUB_OFFLINE", "YES")];
        let set = read(&set).expect("enough");
        assert_eq!(
            (set.endpoint.as_str(), set.token.as_deref(), set.offline),
            ("http://h:1", Some("hf_x"), true)
        );
        assert!(read(&[home, ("HF_TOKEN", "a\nb")]).is_err());
        assert!(read(&[home, ("HF_ENDPOINT", "ftp://h")]).is_err());
        assert!(!read(&[home, ("HF_HUB_OFFLINE", "0")]).expect("enough").offline);
    }

    #[test]
    fn a_login_of_another_client_is_found() {
        let home = tempfile::tempdir().expect("a temporary folder");
        std::fs::write(home.path().join("token"), "hf_of_login\n").expect("writable");
        let settings = read(&[("HF_HOME", home.path().to_str().expect("UTF-8"))]).expect("enough");
        assert_eq!(settings.token.as_deref(), Some("hf_of_login"));
    }

    #[cfg(unix)]
    #[test]
    fn a_token_comes_from_a_pipe_and_what_cannot_be_read_is_told() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_string();
        let settings = |path: &str| read(&[("HOME", "/nowhere/at/all"), ("HF_TOKEN_PATH", path)]);
        assert_eq!(settings(&path("none")).expect("not logged in").token, None);
        let pipe = path("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs").success());
        let writer = std::thread::spawn({
            let pipe = pipe.clone();
            move || std::fs::write(pipe, "hf_of_pipe\n")
        });
        assert_eq!(settings(&pipe).expect("it is written").token.as_deref(), Some("hf_of_pipe"));
        writer.join().expect("it ends").expect("it is read");
        for refused in ["/dev/zero", &path("")] {
            let error = format!("{:#}", settings(refused).err().expect("it cannot be read"));
            assert!(error.starts_with("HF_TOKEN_PATH: cannot read"), "{error}");
        }
    }
}
