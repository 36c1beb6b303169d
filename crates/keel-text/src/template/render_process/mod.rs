//! Renders templates in a separate process.
//!
//! A template is a program. Its steps are counted, but a single step can be expensive: it can double a string or a
//! list, compare lists that contain themselves a million times over, or fold a constant of gigabytes at compile time.
//! Only a separate process bounds the memory and time of such a step. The system refuses it memory beyond
//! [`MEMORY_BYTES`], and it is ended after [`TIME`]. Its end is reported as an error here.

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

/// Address space of the process. Published templates need a few MB, plus several times the conversation.
pub const MEMORY_BYTES: u64 = 448 << 20;
/// Time limit for one conversation. Published templates take milliseconds.
const TIME: Duration = Duration::from_secs(3);

/// The program that renders templates, and its arguments.
static RENDERER: OnceLock<(PathBuf, Vec<OsString>)> = OnceLock::new();

/// From now on another process compiles and renders the templates: `program`, called with `args`. It must only call
/// [`render_for_parent`], within [`MEMORY_BYTES`] of address space. Later calls have no effect.
///
/// Without this call templates run in this process. Then their steps and output are bounded, but not their memory.
pub fn render_in_process(program: PathBuf, args: Vec<OsString>) {
    let _ = RENDERER.set((program, args));
}

/// Whether another process renders templates.
pub(super) fn is_set() -> bool {
    RENDERER.get().is_some()
}

/// The templates of one checkpoint, and the processes that have compiled them: one per thread that renders
/// concurrently.
pub(super) struct RenderProcess {
    /// The templates as one line of JSON.
    setup: Vec<u8>,
    idle: Mutex<Vec<Process>>,
}

impl RenderProcess {
    /// Starts a process, which compiles the templates and renders a greeting. So templates that exceed their bounds for
    /// any conversation fail at once.
    pub(super) fn new(sources: Sources, special: SpecialTokens) -> Result<RenderProcess, TextError> {
        let setup = line(&Setup::new(sources, special))?;
        let apart = RenderProcess { setup, idle: Mutex::default() };
        let mut process = apart.start()?;
        let greeting = [Message::new("user", "Hello")];
        match process.ask(&line(&Ask::new(&ChatRequest::new(&greeting)))?) {
            // The template may refuse this conversation for reasons of its own.
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

/// A value as one line of JSON.
fn line(value: &impl serde::Serialize) -> Result<Vec<u8>, TextError> {
    let mut line = serde_json::to_vec(value).map_err(|error| failed(error.to_string()))?;
    line.push(b'\n');
    Ok(line)
}

/// An error of any of the templates.
fn failed(reason: String) -> TextError {
    TextError::Template { name: source::DEFAULT.to_string(), reason }
}
