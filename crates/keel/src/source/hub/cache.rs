//! The folder of models. Its layout is that of the hub's other clients, so that they share their downloads:
//!
//! ```text
//! models--OWNER--NAME/blobs/HASH              the contents of a file; HASH.incomplete while it is on its way
//! models--OWNER--NAME/refs/REVISION           the commit that a branch or tag was when it was last asked for
//! models--OWNER--NAME/snapshots/COMMIT/FILE   a link to the contents
//! ```

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use keel_weights::gguf::PartName;
use keel_weights::{Checkpoint, read_regular};

use crate::input;

use super::choice::{USUAL_CODING, folder_of, is_gguf_model, is_gguf_tower, is_picked, stem_of};
use crate::source::hub_name::{HubName, MAIN, is_commit};

/// The folder of models.
pub struct Cache {
    root: PathBuf,
}

/// A downloaded model.
#[derive(Clone, Debug)]
pub struct Entry {
    /// `owner/name`.
    pub repository: String,
    /// The commit.
    pub commit: String,
    /// Branches and tags that point to this commit.
    pub revisions: Vec<String>,
    /// GGUF files. Empty for a checkpoint.
    pub gguf: Vec<String>,
    /// The files of vision towers next to them.
    pub towers: Vec<String>,
    /// Whether the files suffice to run the model.
    pub is_complete: bool,
    /// Total size of its files.
    pub bytes: u64,
    /// Time of the download.
    pub changed: Option<SystemTime>,
}

impl Cache {
    pub fn new(root: PathBuf) -> Cache {
        Cache { root }
    }

    /// The folder's path.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of a model.
    pub fn repository(&self, name: &HubName) -> PathBuf {
        self.root.join(format!("models--{}--{}", name.owner, name.name))
    }

    /// The path of a file's contents.
    pub fn blob(&self, name: &HubName, blob: &str) -> PathBuf {
        self.repository(name).join("blobs").join(blob)
    }

    /// The folder of a commit's files.
    pub fn snapshot(&self, name: &HubName, commit: &str) -> PathBuf {
        self.repository(name).join("snapshots").join(commit)
    }

    /// Finds a downloaded model: a folder, or the path of a GGUF file. A picked GGUF file may be of an earlier commit
    /// of the default branch, because the branch goes on with each download of another file.
    pub fn find(&self, name: &HubName) -> Option<PathBuf> {
        if let Some(commit) = name.commit() {
            return self.find_in(name, commit);
        }
        let commit = read_ref(&self.repository(name).join("refs").join(name.revision()))?;
        self.find_in(name, &commit).or_else(|| self.find_earlier(name))
    }

    /// Finds a picked GGUF file of the default branch in the newest commit that has it.
    fn find_earlier(&self, name: &HubName) -> Option<PathBuf> {
        let commits = self.unnamed_commits(name);
        commits.iter().filter_map(|commit| self.find_in(name, commit)).max_by_key(|path| linked_at(path))
    }

    /// The commits to which no branch or tag points, if a name picks a GGUF file of the default branch.
    fn unnamed_commits(&self, name: &HubName) -> Vec<String> {
        if name.pick.is_none() || name.revision() != MAIN {
            return Vec::new();
        }
        let repository = self.repository(name);
        let refs = revisions_of(&repository);
        let mut commits = names_in(&repository.join("snapshots"));
        commits.retain(|commit| is_commit(commit) && refs.iter().all(|revision| revision.commit != *commit));
        commits
    }

    /// Finds a picked GGUF model of which a part is here, by its first part. The choice is among whole models and
    /// interrupted downloads: `Q8_0` means an interrupted `Q8_0` rather than a whole `UD-Q8_0`. A branch points to the
    /// commit only after the last part.
    fn find_also_interrupted(&self, name: &HubName) -> Option<PathBuf> {
        let snapshots = self.repository(name).join("snapshots");
        let models_in = |commit: String| {
            let files = files_below(&snapshots.join(&commit), &format!("{commit}/"));
            files.into_iter().map(|file| parts_of(&file).swap_remove(0)).filter(|file| is_gguf_model(file))
        };
        let in_refs = || read_ref(&self.repository(name).join("refs").join(name.revision()));
        let named = name.commit().map(str::to_string).or_else(in_refs);
        let mut unnamed: Vec<String> = self.unnamed_commits(name).into_iter().flat_map(models_in).collect();
        unnamed.sort_by_key(|file| Reverse(linked_at(&snapshots.join(file))));
        if named.as_ref().is_some_and(|commit| self.find_in(name, commit).is_some()) {
            // As for `find`, the branch's own whole model comes before those of other commits.
            unnamed.retain(|file| !is_whole(&snapshots, file));
        }
        // Of equals the first is chosen.
        let models = named.into_iter().flat_map(models_in).chain(unnamed).collect();
        choose(name, models).map(|file| snapshots.join(file))
    }

    /// The commit of a path that [`Cache::find`] has found.
    pub fn commit_of(&self, name: &HubName, path: &Path) -> String {
        let below = path.strip_prefix(self.repository(name).join("snapshots")).ok();
        let commit = below.and_then(|below| below.iter().next());
        commit.unwrap_or_default().to_string_lossy().into_owned()
    }

    fn find_in(&self, name: &HubName, commit: &str) -> Option<PathBuf> {
        let folder = self.snapshot(name, commit);
        if name.pick.is_none() && Checkpoint::is_complete(&folder) {
            return Some(folder);
        }
        choose(name, gguf_files(&folder, is_gguf_model)).map(|file| folder.join(file))
    }

    /// Records the commit of a branch or tag.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn note_revision(&self, name: &HubName, commit: &str) -> Result<()> {
        if name.commit().is_some() {
            return Ok(());
        }
        let path = self.repository(name).join("refs").join(name.revision());
        let written =
            path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::write(&path, commit));
        written.with_context(|| format!("cannot write {}", path.display()))
    }

    /// Links a file of a commit's folder to its contents.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn link(&self, name: &HubName, commit: &str, file: &str, blob: &str) -> Result<()> {
        let path = self.snapshot(name, commit).join(file);
        if path.exists() {
            return Ok(());
        }
        let up = "../".repeat(2 + file.matches('/').count());
        let link = || -> std::io::Result<()> {
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            // The path may be a link to contents that were deleted.
            let _ = fs::remove_file(&path);
            link_to(&Path::new(&up).join("blobs").join(blob), &self.blob(name, blob), &path)
        };
        link().with_context(|| format!("cannot write {}", path.display()))
    }

    /// All models, by name.
    ///
    /// # Errors
    /// The folder exists and cannot be read.
    pub fn entries(&self) -> Result<Vec<Entry>> {
        if !self.root.exists() {
            return Ok(Vec::new());
        }
        let folders =
            fs::read_dir(&self.root).with_context(|| format!("cannot read {}", self.root.display()))?;
        let mut entries = Vec::new();
        for folder in folders.flatten() {
            let file_name = folder.file_name();
            let Some(rest) = file_name.to_str().and_then(|name| name.strip_prefix("models--")) else {
                continue;
            };
            let repository = rest.replacen("--", "/", 1);
            let revisions = revisions_of(&folder.path());
            for snapshot in names_in(&folder.path().join("snapshots")) {
                if is_commit(&snapshot) {
                    entries.push(entry(&folder.path(), &repository, &snapshot, &revisions));
                }
            }
        }
        entries.sort_by(|a, b| (&a.repository, &a.commit).cmp(&(&b.repository, &b.commit)));
        Ok(entries)
    }

    /// Removes a GGUF model, also one of which some parts are here, a revision or a whole model, depending on the name.
    /// Contents without any link to them are removed, too. Returns the number of bytes freed.
    ///
    /// # Errors
    /// There is no such model, files of its repository are being downloaded, or it cannot be removed.
    pub fn remove(&self, name: &HubName) -> Result<u64> {
        let folder = self.repository(name);
        if !folder.is_dir() {
            bail!("{} is not in {}; keel list shows what is", name.repository(), self.root.display());
        }
        if is_downloaded_now(&folder.join("blobs")) {
            bail!(
                "files of {} are being downloaded: wait until that has ended, or end it, and try again",
                name.repository()
            );
        }
        let before = bytes_below(&folder);
        let cannot_remove = || format!("cannot remove {name} from {}", self.root.display());
        let not_there = || {
            let repository = name.repository();
            format!(
                "{name} is not in {}; keel list shows what is, and keel rm {repository} removes all of that model, also \
                 an interrupted download",
                self.root.display()
            )
        };
        match (&name.revision, &name.pick) {
            (None, None) => {
                fs::remove_dir_all(&folder).with_context(cannot_remove)?;
                return Ok(before);
            }
            (_, Some(_)) => {
                let path = self.find_also_interrupted(name).with_context(not_there)?;
                let snapshot = self.snapshot(name, &self.commit_of(name, &path));
                let removed = path.strip_prefix(&snapshot).unwrap_or(&path).to_string_lossy().into_owned();
                let parts = parts_of(&removed).into_iter().map(|part| snapshot.join(part));
                parts
                    .filter(|part| part.is_symlink() || part.exists())
                    .try_for_each(fs::remove_file)
                    .and_then(|()| forget_towers(&snapshot, &removed))
                    .with_context(cannot_remove)?;
            }
            (Some(revision), None) => {
                let in_refs = folder.join("refs").join(revision);
                let commit = name.commit().map(str::to_string).or_else(|| read_ref(&in_refs));
                let snapshot = commit.map(|commit| self.snapshot(name, &commit)).filter(|path| path.is_dir());
                fs::remove_dir_all(snapshot.with_context(not_there)?).with_context(cannot_remove)?;
                let _ = fs::remove_file(in_refs);
            }
        }
        sweep(&folder).with_context(cannot_remove)?;
        Ok(before.saturating_sub(bytes_below(&folder)))
    }
}

/// Whether a process of keel downloads a file just now: it holds a lock meanwhile. An interrupted download leaves a
/// file without one. The moment between two files is not seen, and neither are clients that take no such lock.
fn is_downloaded_now(blobs: &Path) -> bool {
    let is_locked = |name: &String| {
        let file = fs::File::open(blobs.join(name));
        file.is_ok_and(|file| matches!(file.try_lock(), Err(fs::TryLockError::WouldBlock)))
    };
    names_in(blobs).iter().filter(|name| name.ends_with(".incomplete")).any(is_locked)
}

/// Removes the vision towers next to a model that was removed, if no other model is in their folder or below it.
fn forget_towers(snapshot: &Path, removed: &str) -> std::io::Result<()> {
    let files = files_below(snapshot, "");
    // The first part of a model is downloaded last, so an interrupted download lacks it.
    let is_of_model = |file: &str| is_gguf_model(&parts_of(file)[0]);
    let has_model = |tower: &str| {
        files.iter().any(|file| is_of_model(file) && folder_of(file).starts_with(folder_of(tower)))
    };
    let was_next_to_it = |tower: &str| folder_of(tower) == folder_of(removed);
    let is_left =
        |file: &&String| is_gguf_tower(&parts_of(file)[0]) && was_next_to_it(file) && !has_model(file);
    files.iter().filter(is_left).try_for_each(|tower| fs::remove_file(snapshot.join(tower)))
}

/// Removes empty snapshots and contents without a link. If no snapshot is left, removes the whole folder.
fn sweep(folder: &Path) -> std::io::Result<()> {
    let snapshots = folder.join("snapshots");
    let mut linked = BTreeSet::new();
    let mut left = 0;
    for snapshot in names_in(&snapshots) {
        let files = files_below(&snapshots.join(&snapshot), "");
        if files.is_empty() {
            fs::remove_dir_all(snapshots.join(&snapshot))?;
            continue;
        }
        left += 1;
        for file in files {
            let target = fs::read_link(snapshots.join(&snapshot).join(file)).unwrap_or_default();
            linked.extend(target.file_name().and_then(|name| name.to_str()).map(str::to_string));
        }
    }
    if left == 0 {
        return fs::remove_dir_all(folder);
    }
    let blobs = folder.join("blobs");
    for blob in names_in(&blobs).into_iter().filter(|blob| !linked.contains(blob)) {
        fs::remove_file(blobs.join(blob))?;
    }
    Ok(())
}

fn entry(folder: &Path, repository: &str, commit: &str, revisions: &[Revision]) -> Entry {
    let snapshot = folder.join("snapshots").join(commit);
    let files = files_below(&snapshot, "");
    let facts = |file: &String| fs::metadata(snapshot.join(file)).ok();
    let is_whole = Checkpoint::is_complete(&snapshot);
    let gguf = gguf_files(&snapshot, is_gguf_model);
    Entry {
        towers: if is_whole { Vec::new() } else { gguf_files(&snapshot, is_gguf_tower) },
        repository: repository.into(),
        commit: commit.into(),
        revisions: revisions.iter().filter(|of| of.commit == commit).map(|of| of.name.clone()).collect(),
        is_complete: is_whole || !gguf.is_empty(),
        gguf: if is_whole { Vec::new() } else { gguf },
        bytes: files.iter().filter_map(facts).map(|facts| facts.len()).sum(),
        changed: files.iter().filter_map(facts).filter_map(|facts| facts.modified().ok()).max(),
    }
}

/// When the link to a file was made: when the file was downloaded for that commit.
fn linked_at(path: &Path) -> Option<SystemTime> {
    fs::symlink_metadata(path).and_then(|facts| facts.modified()).ok()
}

/// The GGUF model that a name means among these.
fn choose(name: &HubName, mut models: Vec<String>) -> Option<String> {
    match &name.pick {
        Some(pick) => models.retain(|file| is_picked(file, pick)),
        None if models.len() > 1 => models.retain(|file| is_picked(file, USUAL_CODING)),
        None => {}
    }
    models.into_iter().min_by_key(|file| (file.matches('/').count(), stem_of(file).len()))
}

/// GGUF files of this kind of which every part is there, each by its first part.
fn gguf_files(folder: &Path, is_kind: fn(&str) -> bool) -> Vec<String> {
    let mut files = files_below(folder, "");
    files.retain(|file| is_kind(file) && is_whole(folder, file));
    files
}

/// Whether every part of a GGUF model is there. The contents of a link may have been deleted.
fn is_whole(folder: &Path, file: &str) -> bool {
    parts_of(file).iter().all(|part| folder.join(part).is_file())
}

/// The files of a GGUF model, of which this is the first.
fn parts_of(file: &str) -> Vec<String> {
    PartName::parse(file).map_or_else(|| vec![file.into()], |first| first.all().collect())
}

fn read_ref(path: &Path) -> Option<String> {
    let text = String::from_utf8(read_regular(path, input::SETTINGS_BYTES_MAX).ok()?).ok()?;
    Some(text.trim().to_string()).filter(|commit| is_commit(commit))
}

/// A branch or tag, and the commit that it points to.
struct Revision {
    name: String,
    commit: String,
}

fn revisions_of(folder: &Path) -> Vec<Revision> {
    let refs = folder.join("refs");
    let names = files_below(&refs, "");
    let revision = |name: String| read_ref(&refs.join(&name)).map(|commit| Revision { name, commit });
    names.into_iter().filter_map(revision).collect()
}

fn names_in(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> = entries.flatten().filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Files below a folder, with paths relative to it. Links count as files.
fn files_below(folder: &Path, prefix: &str) -> Vec<String> {
    let mut files = Vec::new();
    for name in names_in(folder) {
        let path = folder.join(&name);
        let full = format!("{prefix}{name}");
        if path.is_dir() && !path.is_symlink() {
            files.extend(files_below(&path, &format!("{full}/")));
        } else {
            files.push(full);
        }
    }
    files
}

/// Bytes of all files below a folder. Links are not followed.
fn bytes_below(folder: &Path) -> u64 {
    let bytes = |file: String| fs::symlink_metadata(folder.join(file)).map_or(0, |facts| facts.len());
    files_below(folder, "").into_iter().map(bytes).sum()
}

#[cfg(unix)]
fn link_to(relative: &Path, _contents: &Path, path: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(relative, path)
}

/// On systems where links need special rights, the contents get a second name.
#[cfg(not(unix))]
fn link_to(_relative: &Path, contents: &Path, path: &Path) -> std::io::Result<()> {
    fs::hard_link(contents, path).or_else(|_| fs::copy(contents, path).map(|_| ()))
}

#[cfg(test)]
mod tests;
