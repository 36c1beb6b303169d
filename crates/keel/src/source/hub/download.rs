//! Downloads files. Interrupted downloads are resumed, and files are checked before use.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use indicatif::ProgressBar;
use ring::digest::{Context as Hasher, SHA256};

use super::client::{Client, HubError, RemoteFile};
use crate::source::hub_name::HubName;

/// Number of failures in a row, without a byte in between, after which a download is given up.
const TRIES: u32 = 5;
const BUFFER_BYTES: usize = 1 << 20;

/// The source of a file.
pub struct Origin<'a> {
    pub client: &'a Client,
    pub name: &'a HubName,
    pub commit: &'a str,
    /// Unit of the pause between tries. The pause grows with the number of failures.
    pub pause: Duration,
}

/// Downloads one file to `blob` and checks its size and hash. It resumes an earlier partial download.
///
/// # Errors
/// The hub does not deliver the file, the file does not match the hub's size or hash, or it cannot be written. The
/// bytes read so far stay for the next try, unless they are wrong.
pub fn download(origin: &Origin<'_>, file: &RemoteFile, blob: &Path, bar: &ProgressBar) -> Result<()> {
    let cannot_write = || format!("cannot write {}", blob.display());
    let folder = blob.parent().context("a file lies in a folder")?;
    std::fs::create_dir_all(folder).with_context(cannot_write)?;
    let partial = PathBuf::from(format!("{}.incomplete", blob.display()));
    let mut target = OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(&partial)
        .with_context(cannot_write)?;
    if target.try_lock().is_err() {
        tracing::info!("another process is downloading {}: waiting for it", file.path);
        target.lock().with_context(cannot_write)?;
    }
    if blob.exists() {
        bar.inc(file.size.unwrap_or(0));
        let _ = std::fs::remove_file(&partial);
        return Ok(());
    }
    fetch(origin, file, &mut target, bar)?;
    if let Err(problem) = check(file, &mut target) {
        drop(target);
        let _ = std::fs::remove_file(&partial);
        return Err(problem);
    }
    target.sync_all().and_then(|()| std::fs::rename(&partial, blob)).with_context(cannot_write)
}

/// Requests the file until it is complete. Retries as long as there is progress.
fn fetch(origin: &Origin<'_>, file: &RemoteFile, target: &mut File, bar: &ProgressBar) -> Result<()> {
    let mut have = target.metadata()?.len();
    if file.size.is_some_and(|size| have > size) {
        have = 0;
    }
    bar.inc(have);
    let mut failures = 0;
    loop {
        if have > 0 && file.size == Some(have) {
            return Ok(());
        }
        let before = have;
        let outcome = read_on(origin, file, target, &mut have, bar);
        let problem = match outcome {
            Ok(()) if file.size.is_none_or(|size| size == have) => return Ok(()),
            Ok(()) => HubError::Unreachable(format!("it ended {have} bytes into {}", file.path)),
            Err(Failure::Hub(error)) if error.is_passing() => error,
            Err(Failure::Hub(error)) => return Err(anyhow!("{}: {error}", file.path)),
            Err(Failure::Disk(error)) => {
                return Err(error).with_context(|| format!("cannot keep {}", file.path));
            }
        };
        failures = if have > before { 1 } else { failures + 1 };
        if failures >= TRIES {
            bail!(
                "{}: {problem}; {have} bytes are kept, and the same command continues from there",
                file.path
            );
        }
        tracing::debug!("{}: {problem}; trying again", file.path);
        thread::sleep(origin.pause * failures);
    }
}

enum Failure {
    Hub(HubError),
    Disk(std::io::Error),
}

/// Makes one request for the bytes from `have` on. `have` counts the bytes that are written.
fn read_on(
    origin: &Origin<'_>,
    file: &RemoteFile,
    target: &mut File,
    have: &mut u64,
    bar: &ProgressBar,
) -> Result<(), Failure> {
    let mut tail = origin.client.file(origin.name, origin.commit, &file.path, *have).map_err(Failure::Hub)?;
    if tail.start != *have {
        if tail.start != 0 {
            let problem = format!("bytes from {} on instead of {have}", tail.start);
            return Err(Failure::Hub(HubError::Nonsense(problem)));
        }
        bar.set_position(bar.position().saturating_sub(*have));
        *have = 0;
    }
    target.set_len(*have).map_err(Failure::Disk)?;
    target.seek(SeekFrom::Start(*have)).map_err(Failure::Disk)?;
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let count = match tail.body.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(Failure::Hub(HubError::Unreachable(error.to_string()))),
        };
        if file.size.is_some_and(|size| *have + count as u64 > size) {
            let problem = format!("more than the {} bytes that it says the file has", file.size.unwrap_or(0));
            return Err(Failure::Hub(HubError::Nonsense(problem)));
        }
        target.write_all(&buffer[..count]).map_err(Failure::Disk)?;
        *have += count as u64;
        bar.inc(count as u64);
    }
}

/// Compares the file on disk with the size and hash from the hub.
fn check(file: &RemoteFile, contents: &mut File) -> Result<()> {
    let bytes = contents.metadata()?.len();
    if let Some(size) = file.size.filter(|&size| size != bytes) {
        bail!("{} has {bytes} bytes, but the hub expects {size}: the file was removed; try again", file.path);
    }
    let Some(want) = &file.sha256 else { return Ok(()) };
    contents.seek(SeekFrom::Start(0))?;
    let mut hasher = Hasher::new(&SHA256);
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match contents.read(&mut buffer)? {
            0 => break,
            count => hasher.update(&buffer[..count]),
        }
    }
    let found: String = hasher.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    if found != *want {
        bail!(
            "{} has the SHA-256 {found}, but the hub expects {want}: the file was removed; try again",
            file.path
        );
    }
    Ok(())
}
