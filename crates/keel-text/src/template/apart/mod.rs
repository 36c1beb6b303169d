//! Templates in a process of their own.
//!
//! A template is a program. Steps are counted, but one step can double a string or a list, compare two lists that hold themselves a
//! million times over, or fold a constant of gigabytes at compile time. Memory and time of that are bounded for a process
//! alone: the system refuses it memory beyond [`MEMORY_BYTES`], and it is ended after [`TIME`]. What it does to itself is an
//! error here.

mod child;
mod process;
mod wire;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::source::{self, Sources};
use super::{ChatRequest, Message};
use crate::{SpecialTokens, TextError};

pub use child::render_for_parent;
use process::Process;
use wire::{Ask, Reply, Setup};

/// Address space of the process. Published templates need a few MB and the conversation some times over.
pub const MEMORY_BYTES: u64 = 448 << 20;
/// Time for one conversation. Published templates take milliseconds.
const TIME: Duration = Duration::from_secs(3);

/// The program that renders templates, and how it is called.
static RENDERER: OnceLock<(PathBuf, Vec<OsString>)> = OnceLock::new();

/// From now on templates of this process are compiled and rendered by another: `program`, called with `args`, which does nothing but
/// [`render_for_parent`] within [`MEMORY_BYTES`] of address space. Later calls change nothing.
///
/// Without it templates run here, with their steps and their output bounded, but not their memory.
pub fn render_apart(program: PathBuf, args: Vec<OsString>) {
    let _ = RENDERER.set((program, args));
}

/// Whether templates are rendered apart.
pub(super) fn is_set() -> bool {
    RENDERER.get().is_some()
}

/// Templates of one checkpoint, and the processes that have them compiled: one for each thread that renders at once.
pub(super) struct Apart {
    /// The templates as a line.
    setup: Vec<u8>,
    idle: Mutex<Vec<Process>>,
}

impl Apart {
    /// Starts a process, has it compile the templates and render a greeting, so that templates that exceed their bounds on any
    /// conversation are known at once.
    pub(super) fn new(sources: Sources, special: SpecialTokens) -> Result<Apart, TextError> {
        let setup = line(&Setup::new(sources, special))?;
        let apart = Apart { setup, idle: Mutex::default() };
        let mut process = apart.start()?;
        let greeting = [Message::new("user", "Hello")];
        match process.ask(&line(&Ask::new(&ChatRequest::new(&greeting)))?) {
            // The template may want another conversation, for reasons of its own.
            Ok(_) => apart.idle().push(process),
            Err(error) => return Err(error),
        }
        Ok(apart)
    }

    pub(super) fn render(&self, request: &ChatRequest<'_>) -> Result<String, TextError> {
        let ask = line(&Ask::new(request))?;
        let waiting = self.idle().pop().filter(Process::is_alive);
        let mut process = match waiting {
            Some(process) => process,
            None => self.start()?,
        };
        let reply = process.ask(&ask)?;
        self.idle().push(process);
        reply.into_result()
    }

    fn start(&self) -> Result<Process, TextError> {
        let (program, args) = RENDERER.get().expect("there is a renderer");
        let mut process = Process::start(program, args)?;
        process.ask(&self.setup)?.into_result()?;
        Ok(process)
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Process>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A value as a line of JSON.
fn line(value: &impl serde::Serialize) -> Result<Vec<u8>, TextError> {
    let mut line = serde_json::to_vec(value).map_err(|error| failed(error.to_string()))?;
    line.push(b'\n');
    Ok(line)
}

/// An error of the template, whichever of them it was.
fn failed(reason: String) -> TextError {
    TextError::Template { name: source::DEFAULT.to_string(), reason }
}
