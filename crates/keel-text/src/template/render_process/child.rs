//! The child process that renders templates.

use std::io::{self, BufRead, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, setrlimit};

use super::wire::{Ask, Reply, Setup};
use super::{MEMORY_BYTES, TIME, line};
use crate::TextError;
use crate::template::Here;

/// Largest stack, as part of the process's address space. A template that needs more ends the process.
const STACK_BYTES_MAX: usize = 96 << 20;
/// Exit code of a process that ended itself because a conversation took too long.
const TOO_LONG: i32 = 3;

/// Renders conversations for the parent process until the parent closes the pipe. `rest` is called after each
/// conversation; it may return memory to the system.
///
/// # Errors
/// The system does not bound memory, or the pipe breaks.
pub fn render_for_parent(rest: fn()) -> io::Result<()> {
    let bound = |bytes| Rlimit { current: Some(bytes), maximum: Some(bytes) };
    setrlimit(Resource::As, bound(MEMORY_BYTES))?;
    setrlimit(Resource::Core, bound(0))?;
    let watch = Watch::start()?;
    let mut lines = io::stdin().lock();
    let mut next = move || -> io::Result<Option<Vec<u8>>> {
        let mut line = Vec::new();
        Ok((lines.read_until(b'\n', &mut line)? > 0).then_some(line))
    };
    let Some(setup) = next()? else { return Ok(()) };
    let setup: Setup = serde_json::from_slice(&setup)?;
    let (sources, special) = setup.into_parts();
    let template = match watch.during(|| Here::compile(&sources, special, STACK_BYTES_MAX)) {
        Ok(template) => template,
        Err(error) => return say(&Reply::new(Err(error))),
    };
    say(&Reply::Text(String::new()))?;
    while let Some(ask) = next()? {
        let reply = watch.during(|| match serde_json::from_slice::<Ask<'_>>(&ask) {
            Ok(ask) => Reply::new(ask.with_request(|request| template.render(request))),
            Err(error) => {
                Reply::new(Err(super::failed(format!("the conversation cannot be passed on: {error}"))))
            }
        });
        drop(ask);
        say(&reply)?;
        drop(reply);
        rest();
    }
    Ok(())
}

fn say(reply: &Reply) -> io::Result<()> {
    let reply = line(reply).map_err(|error: TextError| io::Error::other(error.to_string()))?;
    let mut output = io::stdout().lock();
    output.write_all(&reply)?;
    output.flush()
}

/// Ends the process if a conversation takes too long, also if the parent is gone.
struct Watch(Arc<Mutex<Option<Instant>>>);

impl Watch {
    fn start() -> io::Result<Watch> {
        let since = Arc::new(Mutex::new(None::<Instant>));
        let seen = Arc::clone(&since);
        let watch = move || loop {
            thread::sleep(Duration::from_secs(1));
            let since = *seen.lock().unwrap_or_else(PoisonError::into_inner);
            if since.is_some_and(|since| since.elapsed() > TIME * 2) {
                std::process::exit(TOO_LONG);
            }
        };
        thread::Builder::new().name("watch".into()).stack_size(64 << 10).spawn(watch)?;
        Ok(Watch(since))
    }

    fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        let set = |since| *self.0.lock().unwrap_or_else(PoisonError::into_inner) = since;
        set(Some(Instant::now()));
        let done = work();
        set(None);
        done
    }
}
