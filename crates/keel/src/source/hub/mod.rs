//! Models from the Hugging Face hub, kept in the folder of its other clients.
//!
//! What is there is used as it is, without a question to the hub: a run never changes the model under its user. `keel pull`
//! asks for the newest. A client of our own over ureq, because the one that there is (hf-hub 0.5) neither resumes nor checks
//! what it downloads, and knows no offline mode.

mod cache;
mod choice;
mod client;
mod download;
mod settings;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

pub use super::hub_name::HubName;
pub use cache::{Cache, Entry};
pub use settings::{Settings, cache_folder};

use crate::progress;
use crate::report::human_bytes;
use choice::Wanted;
use client::{Client, RemoteFile};
use download::{Origin, download};

/// Before a failed request is repeated; each further time longer.
const PAUSE: Duration = Duration::from_millis(500);

/// What a download came to.
pub struct Pulled {
    /// The folder, or the GGUF file.
    pub path: PathBuf,
    pub commit: String,
    /// Bytes that came over the network.
    pub new_bytes: u64,
}

/// The folder or file of a model, downloaded if it is not there.
///
/// # Errors
/// If it is not there and cannot be downloaded.
pub fn locate(text: &str) -> Result<PathBuf> {
    let name = HubName::parse(text)?;
    let settings = Settings::from_env()?;
    if let Some(path) = Cache::new(settings.cache.clone()).find(&name) {
        return Ok(path);
    }
    pull(&name, &settings).map(|pulled| pulled.path)
}

/// Downloads what is not there yet of a model's newest state, with a bar on standard error.
///
/// # Errors
/// If the hub may not or cannot be asked, does not have it, or gives what is not right; if there is no room.
pub fn pull(name: &HubName, settings: &Settings) -> Result<Pulled> {
    let cache = Cache::new(settings.cache.clone());
    if settings.offline {
        bail!("{name} is not in {}, and HF_HUB_OFFLINE forbids to download it", cache.root().display());
    }
    let failed = || format!("cannot download {name} from {}", settings.endpoint);
    let client = Client::new(settings);
    let listing = client.listing(name).with_context(failed)?;
    let wanted = Wanted::choose(name, &listing.files)?;
    let files = wanted.files();
    let commit = &listing.commit;
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
        cache.link(name, commit, &file.path, &blob)?;
    }
    bar.finish_and_clear();
    cache.note_revision(name, commit)?;
    let folder = cache.snapshot(name, commit);
    let path = if let Wanted::Gguf(file) = &wanted { folder.join(&file.path) } else { folder };
    Ok(Pulled { path, commit: commit.clone(), new_bytes })
}

/// What a file's contents are called on disk. A hub that names no hash has its files kept by commit and name.
fn blob_of(file: &RemoteFile, commit: &str) -> String {
    file.blob.clone().unwrap_or_else(|| format!("{commit}-{}", file.path.replace('/', "-")))
}

fn sum(files: &[&RemoteFile]) -> u64 {
    files.iter().filter_map(|file| file.size).sum()
}

/// Bytes that have to come yet, less those of interrupted downloads.
fn left(cache: &Cache, name: &HubName, commit: &str, missing: &[&RemoteFile]) -> u64 {
    let bytes = |file: &&RemoteFile| {
        let partial = cache.blob(name, &format!("{}.incomplete", blob_of(file, commit)));
        let have = std::fs::metadata(partial).map_or(0, |facts| facts.len());
        file.size.unwrap_or(0).saturating_sub(have)
    };
    missing.iter().map(bytes).sum()
}

/// Refuses what the disk has no room for, before a byte is downloaded.
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

/// Bytes that a file system has left, asked of the nearest folder that exists.
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
