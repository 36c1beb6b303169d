//! Models from the Hugging Face hub, in the folder that its other clients use, too.
//!
//! A downloaded model is used without a request to the hub, so a run never changes its model. `keel pull` gets the
//! newest version. This is a client of our own over ureq. The existing client (hf-hub 0.5) does not resume or check
//! downloads, and has no offline mode.

mod cache;
mod choice;
mod client;
mod download;
mod settings;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};

pub use super::hub_name::HubName;
pub use cache::{Cache, Entry};
pub use settings::{Settings, cache_folder};

use crate::progress;
use choice::Wanted;
use client::{Client, HubError, RemoteFile};
use download::{Origin, download};
use evenkeel::human_bytes;

/// Pause before a failed request is repeated. Each further pause is longer.
const PAUSE: Duration = Duration::from_millis(500);

/// The result of a download.
pub struct Pulled {
    /// The model's folder, or its GGUF file.
    pub path: PathBuf,
    pub commit: String,
    /// Bytes received over the network.
    pub new_bytes: u64,
}

/// Whether the vision tower of a GGUF model is downloaded with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Towers {
    /// With the model.
    Wanted,
    /// The model alone.
    Left,
}

/// Finds the folder or file of a model, and downloads the model if necessary.
///
/// # Errors
/// It is not in the folder of models and cannot be downloaded.
pub fn locate(text: &str, towers: Towers) -> Result<PathBuf> {
    let name = HubName::parse(text)?;
    let settings = Settings::from_env()?;
    if let Some(path) = Cache::new(settings.cache.clone()).find(&name) {
        return Ok(path);
    }
    pull(&name, &settings, towers).map(|pulled| pulled.path)
}

/// Downloads the missing files of a model's newest version, with a progress bar on standard error. If the program is
/// offline, a model that is there stays as it is.
///
/// # Errors
/// - The program is offline and the model is not there, or the hub cannot be reached.
/// - The hub does not have the model, or sends wrong data.
/// - The disk has too little space.
pub fn pull(name: &HubName, settings: &Settings, towers: Towers) -> Result<Pulled> {
    let cache = Cache::new(settings.cache.clone());
    if settings.offline {
        if let Some(path) = cache.find(name) {
            tracing::warn!("HF_HUB_OFFLINE: the hub is not asked for a newer version of {name}");
            return Ok(Pulled { commit: cache.commit_of(name, &path), path, new_bytes: 0 });
        }
        bail!("{name} is not in {}, and HF_HUB_OFFLINE forbids to download it", cache.root().display());
    }
    let failed = || format!("cannot download {name} from {}", settings.endpoint);
    let client = Client::new(settings);
    let listing = client.listing(name).map_err(advised).with_context(failed)?;
    let commit = &listing.commit;
    let folder = cache.snapshot(name, commit);
    let mut wanted = Wanted::choose(name, &listing.files, &|path| folder.join(path).is_file())?;
    if let Wanted::Gguf { tower, .. } = &mut wanted
        && towers == Towers::Left
    {
        *tower = None;
    }
    let files = wanted.files();
    let missing: Vec<&RemoteFile> =
        files.iter().filter(|file| !cache.blob(name, &blob_of(file, commit)).exists()).copied().collect();
    let (total, new_bytes) = (sum(&files), left(&cache, name, commit, &missing));
    check_room(cache.root(), new_bytes)?;
    if !missing.is_empty() {
        tracing::info!(
            "downloading {name}: {} files, {} of {}, to {}",
            missing.len(),
            human_bytes(new_bytes),
            human_bytes(total),
            cache.root().display()
        );
    }
    let bar = progress::bytes("downloading", sum(&missing));
    let origin = Origin { client: &client, name, commit, pause: PAUSE };
    for file in &files {
        let blob = blob_of(file, commit);
        let path = cache.blob(name, &blob);
        if !path.exists() {
            download(&origin, file, &path, &bar).with_context(failed)?;
        }
        cache.link(name, commit, &wanted.place_of(file), &blob)?;
    }
    bar.finish_and_clear();
    cache.note_revision(name, commit)?;
    let path = if let Wanted::Gguf { model, .. } = &wanted { folder.join(&model.first.path) } else { folder };
    Ok(Pulled { path, commit: commit.clone(), new_bytes })
}

/// The error, with the settings that matter if no connection was made.
fn advised(error: HubError) -> anyhow::Error {
    match error {
        HubError::Unreachable(_) => anyhow!(
            "{error}; HTTPS_PROXY names a proxy, HF_ENDPOINT another address of the hub, and with HF_HUB_OFFLINE=1 only models \
             that are here are used"
        ),
        error => error.into(),
    }
}

/// The name of a file's contents on disk. If the hub reports no hash, the name is made of commit and path.
fn blob_of(file: &RemoteFile, commit: &str) -> String {
    file.blob.clone().unwrap_or_else(|| format!("{commit}-{}", file.path.replace('/', "-")))
}

fn sum(files: &[&RemoteFile]) -> u64 {
    files.iter().filter_map(|file| file.size).sum()
}

/// Bytes still to download. Interrupted downloads are deducted.
fn left(cache: &Cache, name: &HubName, commit: &str, missing: &[&RemoteFile]) -> u64 {
    let bytes = |file: &&RemoteFile| {
        let partial = cache.blob(name, &format!("{}.incomplete", blob_of(file, commit)));
        let have = std::fs::metadata(partial).map_or(0, |facts| facts.len());
        file.size.unwrap_or(0).saturating_sub(have)
    };
    missing.iter().map(bytes).sum()
}

/// Refuses a download that does not fit on the disk, before it starts.
fn check_room(root: &Path, bytes: u64) -> Result<()> {
    let Some(free) = free_bytes(root) else { return Ok(()) };
    if bytes > free {
        bail!(
            "{bytes} bytes ({}) have to be downloaded, and {free} ({}) are free where {} lies: remove something (keel list, \
             keel rm), or name another folder with HF_HUB_CACHE",
            human_bytes(bytes),
            human_bytes(free),
            root.display()
        );
    }
    Ok(())
}

/// Free bytes of the file system of the nearest existing folder.
#[cfg(unix)]
fn free_bytes(folder: &Path) -> Option<u64> {
    let existing = folder.ancestors().find(|folder| folder.is_dir())?;
    let facts = rustix::fs::statvfs(existing).ok()?;
    Some(facts.f_bavail.saturating_mul(facts.f_frsize))
}

#[cfg(not(unix))]
fn free_bytes(_folder: &Path) -> Option<u64> {
    None
}
