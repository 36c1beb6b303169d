//! Who may use a server, and from where.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use keel_server::{ApiKey, KeyLimits, PictureSources};

use crate::failure::usage;
use crate::{fetch, input};

/// Who may use a server, and from where.
#[derive(Clone, Debug, Args)]
pub struct AccessArgs {
    /// Key that every request must send. Prefer the environment variable: it does not show in the list of processes.
    #[arg(long, value_name = "KEY", env = "KEEL_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// File of keys. Each line is NAME KEY, optionally with limits for this key: per-minute=N and at-once=N. Every
    /// request must send one of these keys. Logs show the name.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Requests per minute with one key, unless the file sets another limit. Further requests are refused with 429.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    key_per_minute: Option<u32>,
    /// Requests at once with one key, unless the file sets another limit. Further requests are refused with 429.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    key_at_once: Option<u32>,
    /// Origin (scheme and host) whose pages may call the server. May be repeated. * allows every origin.
    #[arg(long, value_name = "ORIGIN", value_parser = parse_origin)]
    pub cors: Vec<String>,
    /// Host name under which clients may reach the server, in addition to localhost and IP addresses (of a server on
    /// loopback, loopback addresses alone). May be repeated. * allows every name. A server that listens beyond loopback
    /// and requires a key accepts every name.
    #[arg(long, value_name = "NAME")]
    allow_host: Vec<String>,
    /// Folder with pictures that requests may name by path. May be repeated. Links that lead out of the folder are not
    /// followed.
    #[arg(long, value_name = "FOLDER")]
    allow_image_files: Vec<PathBuf>,
    /// Hosts from which the server may fetch pictures for requests, separated by commas. May be repeated. Redirects are
    /// not followed. A name that resolves to a private address is refused; to allow such an address, give the address
    /// itself or localhost.
    #[arg(long, value_name = "HOSTS", value_delimiter = ',')]
    allow_image_urls: Vec<String>,
}

impl AccessArgs {
    /// Where pictures may come from, in addition to the request itself.
    ///
    /// # Errors
    /// A folder that is missing or none; hosts for a program that was built without downloads.
    pub fn pictures(&self) -> Result<PictureSources> {
        for path in &self.allow_image_files {
            // A missing folder may be mounted later, so it is no wrong usage: systemd then starts the server again.
            let facts = std::fs::metadata(path)
                .with_context(|| format!("--allow-image-files: cannot find the folder {}", path.display()))?;
            if !facts.is_dir() {
                return Err(usage(format!("--allow-image-files: {} is no folder", path.display())));
            }
        }
        let fetch = match self.allow_image_urls.is_empty() {
            true => None,
            false => Some(fetch::fetcher(&self.allow_image_urls)?),
        };
        Ok(PictureSources { folders: self.allow_image_files.clone(), fetch, ..PictureSources::default() })
    }

    /// The keys. With none, every request is accepted.
    pub fn keys(&self) -> Result<Vec<ApiKey>> {
        let limits = KeyLimits { per_minute: self.key_per_minute, at_once: self.key_at_once };
        let mut keys = Vec::new();
        if let Some(key) = &self.api_key {
            let key = ApiKey::new("default", key);
            keys.push(key.map_err(|e| usage(format!("--api-key or KEEL_API_KEY: {e}")))?.with_limits(limits));
        }
        if let Some(path) = &self.api_key_file {
            let text = read_keys(path)?;
            keys.extend(ApiKey::parse_list(&text, limits).with_context(|| path.display().to_string())?);
        }
        ApiKey::check_distinct(&keys).map_err(|e| usage(format!("--api-key and --api-key-file: {e}")))?;
        if keys.is_empty() && limits != KeyLimits::default() {
            return Err(usage(
                "--key-per-minute and --key-at-once limit keys, but there are no keys; give --api-key-file",
            ));
        }
        Ok(keys)
    }

    /// The names under which clients reach the server, including the name that it listens on.
    pub fn hosts(&self, listens: &str) -> Vec<String> {
        let named = listens.trim_matches(['[', ']']);
        let is_address = named.parse::<IpAddr>().is_ok();
        self.allow_host.iter().cloned().chain((!is_address).then(|| named.to_string())).collect()
    }
}

/// Parses an origin as browsers send it, or `*`. With anything else the option would allow nothing.
fn parse_origin(text: &str) -> Result<String, String> {
    let host = text.split_once("://").filter(|(scheme, _)| !scheme.is_empty()).map(|(_, rest)| rest);
    let is_host = |host: &str| !host.is_empty() && !host.contains(['/', '?', '#', ' ']);
    match host {
        Some(host) if is_host(host.trim_end_matches('/')) => Ok(text.into()),
        None if text == "*" => Ok(text.into()),
        _ => Err("expected * or scheme and host, such as https://example.org".into()),
    }
}

fn read_keys(path: &Path) -> Result<String> {
    let text = input::text_of(path, input::SETTINGS_BYTES_MAX)?;
    #[cfg(unix)]
    if std::fs::metadata(path).is_ok_and(|facts| std::os::unix::fs::MetadataExt::mode(&facts) & 0o077 != 0) {
        tracing::warn!("others may read the keys in {}: chmod 600 it", path.display());
    }
    Ok(text)
}
