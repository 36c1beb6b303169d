//! Videos that the program `ffmpeg` reads.
//!
//! ```text
//! open    the kind is read from the file's first bytes; ffmpeg lists the packets (`-c copy -f framecrc`), decoding none
//! take    ffmpeg decodes and writes the chosen frames as PPM pictures, one after the other
//! ```
//!
//! The file comes from a stranger. `ffmpeg` gets the kind from here and guesses none, so the file cannot be a playlist
//! that names other files or hosts; it opens no protocol but `file`. Its output is read within limits, and it is ended when its
//! time is over, or when no client waits for its output.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::NamedTempFile;

use super::{Count, FilmLimits, FrameSink, failed};
use crate::{Patience, Picture, Result};

/// The most memory of one allocation in `ffmpeg`.
const ALLOCATION_MAX: &str = "536870912";
/// The most bytes of its messages that are read.
const MESSAGE_BYTES_MAX: u64 = 2048;
/// How often its watcher asks whether its output is still wanted.
const ASK_TIME: Duration = Duration::from_millis(20);
/// The most bytes of a line of its list of packets.
const LINE_BYTES_MAX: u64 = 4096;

/// A coded video in a file of its own, which goes when this is dropped.
pub(super) struct Coded {
    file: NamedTempFile,
    demuxer: &'static str,
    ffmpeg: PathBuf,
    limits: FilmLimits,
    /// Width and height as the list of packets has them.
    size: (usize, usize),
}

/// An expression that is not 0 for frames with these numbers. A tree of sums, since the parser refuses a sum of more
/// than 100 terms.
fn selection(numbers: &[usize]) -> String {
    match numbers {
        [] => "0".into(),
        [number] => format!("eq(n,{number})"),
        _ => {
            let (left, right) = numbers.split_at(numbers.len() / 2);
            format!("({}+{})", selection(left), selection(right))
        }
    }
}

/// The name of the kind, as `ffmpeg` knows it.
fn demuxer(bytes: &[u8]) -> Option<&'static str> {
    match bytes {
        [_, _, _, _, b'f', b't', b'y', b'p', ..] => Some("mov"),
        [0x1a, 0x45, 0xdf, 0xa3, ..] => Some("matroska"),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'A', b'V', b'I', b' ', ..] => Some("avi"),
        _ => None,
    }
}

impl Coded {
    pub fn open(bytes: &[u8], limits: FilmLimits, ffmpeg: &Path) -> Result<(Coded, Count)> {
        let demuxer = demuxer(bytes).ok_or_else(|| {
            failed(
                "its file is no video that can be read; GIF, and with ffmpeg MP4, WebM, Matroska and AVI can"
                    .into(),
            )
        })?;
        let kept = |error: std::io::Error| failed(format!("its file cannot be kept for ffmpeg: {error}"));
        let mut file = NamedTempFile::new().map_err(kept)?;
        file.write_all(bytes).and_then(|()| file.flush()).map_err(kept)?;
        let mut coded = Coded { file, demuxer, ffmpeg: ffmpeg.to_path_buf(), limits, size: (0, 0) };
        let list = ["-c", "copy", "-f", "framecrc", "-"].map(String::from);
        let count = coded.run(&list, |output| packets(output, limits.frames))?;
        coded.size = (count.width, count.height);
        Ok((coded, count))
    }

    pub fn take(&self, numbers: &[usize], sink: &mut FrameSink<'_>) -> Result<()> {
        let filter = format!("select='{}'", selection(numbers));
        let how = ["-vf", &filter, "-fps_mode", "passthrough"];
        // Frames of more than 8 bits are rounded.
        let form = ["-pix_fmt", "rgb24", "-f", "image2pipe", "-c:v", "ppm", "-"];
        let args: Vec<String> = how.iter().chain(&form).map(ToString::to_string).collect();
        let (width, height) = self.size;
        let mut left = numbers.len();
        self.run(&args, |output| {
            while left > 0 {
                let Some(frame) = ppm(output, self.limits.pixels)? else { break };
                // A turned video has them the other way round. Memory was planned for this size.
                if ![(width, height), (height, width)].contains(&(frame.width, frame.height)) {
                    let got = format!("{} x {}", frame.width, frame.height);
                    return Err(failed(format!("its file says {width} x {height}, and a frame has {got}")));
                }
                left -= 1;
                sink(frame)?;
            }
            Ok(())
        })?;
        match left {
            0 => Ok(()),
            left => Err(failed(format!("its file ends before its last {left} frames"))),
        }
    }

    /// Runs `ffmpeg` over the file's first video stream, and reads its output.
    fn run<T>(&self, args: &[String], read: impl FnOnce(&mut Output) -> Result<T>) -> Result<T> {
        let mut command = Command::new(&self.ffmpeg);
        command.args(["-hide_banner", "-nostdin", "-loglevel", "error", "-max_alloc", ALLOCATION_MAX]);
        if self.demuxer == "mov" {
            // The list of packets has those that an edit list cuts off, so these are decoded, too.
            command.args(["-ignore_editlist", "1"]);
        }
        command.args(["-protocol_whitelist", "file", "-f", self.demuxer, "-i"]).arg(self.file.path());
        command.args(["-map", "0:v:0", "-an", "-sn", "-dn"]).args(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let started = command.spawn().map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => failed(
                "this kind of video is read by ffmpeg, which is not installed here: send a GIF or a list of frames".into(),
            ),
            _ => failed(format!("ffmpeg does not start: {error}")),
        })?;
        let patience = Patience::current();
        let mut child = Watched::new(started, self.limits.time, patience.clone());
        let (output, message) = child.pipes();
        let outcome = match output {
            Some(output) => read(&mut BufReader::new(output)),
            None => Err(failed("ffmpeg has no output".into())),
        };
        let ended = child.end(outcome.is_ok());
        let message = message.and_then(|message| message.join().ok()).unwrap_or_default();
        // Where files lie here is nobody's business.
        let message = message.replace(&*self.file.path().to_string_lossy(), "the file");
        match (outcome, ended) {
            (_, Ended::Impatient) => {
                patience.check()?;
                Err(failed("ffmpeg was ended".into()))
            }
            (_, Ended::Late) => {
                Err(failed(format!("ffmpeg took longer than {} s", self.limits.time.as_secs_f64())))
            }
            (Err(_), Ended::Refused) if !message.is_empty() => Err(failed(format!("ffmpeg says: {message}"))),
            (Ok(_), Ended::Refused) => Err(failed(format!("ffmpeg cannot read it: {message}"))),
            (outcome, _) => outcome,
        }
    }
}

type Output = BufReader<ChildStdout>;

/// How a process ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    Well,
    Refused,
    /// Its own time was over.
    Late,
    /// The patience of the thread that started it was over.
    Impatient,
}

/// A process that is killed when its time is over, or when this is dropped.
struct Watched {
    child: Arc<Mutex<Child>>,
    /// Dropped or sent to when the process need not be watched any more.
    done: Option<Sender<()>>,
    watcher: Option<thread::JoinHandle<Option<Ended>>>,
}

/// Waits until a process is done. Returns why it must be killed, if it must.
fn watch(done: &Receiver<()>, time: Duration, patience: &Patience) -> Option<Ended> {
    let start = Instant::now();
    loop {
        let left = time.saturating_sub(start.elapsed());
        if done.recv_timeout(left.min(ASK_TIME)) != Err(RecvTimeoutError::Timeout) {
            return None;
        }
        if patience.check().is_err() {
            return Some(Ended::Impatient);
        }
        if start.elapsed() >= time {
            return Some(Ended::Late);
        }
    }
}

impl Watched {
    fn new(child: Child, time: Duration, patience: Patience) -> Watched {
        let child = Arc::new(Mutex::new(child));
        let (done, waits) = mpsc::channel();
        let watched = Arc::clone(&child);
        let watcher = thread::spawn(move || {
            let reason = watch(&waits, time, &patience);
            if reason.is_some() {
                let _ = lock(&watched).kill();
            }
            reason
        });
        Watched { child, done: Some(done), watcher: Some(watcher) }
    }

    /// Standard output, and what the process says on standard error.
    fn pipes(&mut self) -> (Option<ChildStdout>, Option<thread::JoinHandle<String>>) {
        let mut child = lock(&self.child);
        drop(child.stdin.take());
        let message = child.stderr.take().map(|mut errors| {
            thread::spawn(move || {
                let mut message = Vec::new();
                let _ = errors.by_ref().take(MESSAGE_BYTES_MAX).read_to_end(&mut message);
                // The rest is read, so that the process does not wait for a reader.
                let _ = std::io::copy(&mut errors, &mut std::io::sink());
                String::from_utf8_lossy(&message).trim().replace('\n', "; ")
            })
        });
        (child.stdout.take(), message)
    }

    /// Waits for the end; a process whose output is not wanted any more is killed.
    fn end(&mut self, is_wanted: bool) -> Ended {
        if !is_wanted {
            let _ = lock(&self.child).kill();
        }
        // The output was read to its end, so the process ends by itself or is killed by its watcher.
        let status = loop {
            match lock(&self.child).try_wait() {
                Ok(None) => {}
                Ok(Some(status)) => break Some(status),
                Err(_) => break None,
            }
            thread::sleep(Duration::from_millis(2));
        };
        drop(self.done.take());
        let killed = self.watcher.take().and_then(|watcher| watcher.join().unwrap_or(None));
        match (killed, status) {
            (Some(reason), _) => reason,
            (None, Some(status)) if status.success() => Ended::Well,
            _ => Ended::Refused,
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let mut child = lock(&self.child);
        let _ = child.kill();
        let _ = child.wait();
    }
}

fn lock(child: &Mutex<Child>) -> std::sync::MutexGuard<'_, Child> {
    child.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unreadable(error: std::io::Error) -> crate::VisionError {
    failed(format!("the output of ffmpeg cannot be read: {error}"))
}

/// Reads the list of packets: `#tb 0: 1/10240`, `#dimensions 0: 96x64`, then `stream, dts, pts, duration, ...` for each.
fn packets(output: &mut impl BufRead, frames_max: usize) -> Result<Count> {
    let mut tick = 0.0;
    let (mut frames, mut first, mut last) = (0, i64::MAX, i64::MIN);
    let (mut width, mut height) = (0, 0);
    let mut line = String::new();
    loop {
        line.clear();
        if output.by_ref().take(LINE_BYTES_MAX).read_line(&mut line).map_err(unreadable)? == 0 {
            break;
        }
        if let Some(base) = line.strip_prefix("#tb 0:") {
            let (above, below) = base.trim().split_once('/').unwrap_or_default();
            tick = above.parse::<f64>().unwrap_or(0.0) / below.parse::<f64>().unwrap_or(f64::INFINITY);
        } else if let Some(size) = line.strip_prefix("#dimensions 0:") {
            let (w, h) = size.trim().split_once('x').unwrap_or_default();
            (width, height) = (w.parse().unwrap_or(0), h.parse().unwrap_or(0));
        } else if !line.starts_with('#') {
            let mut fields = line.split(',').map(|field| field.trim().parse::<i64>().unwrap_or(0));
            let (shown, lasts) = (fields.nth(2).unwrap_or(0), fields.next().unwrap_or(0));
            (first, last) = (first.min(shown), last.max(shown.saturating_add(lasts)));
            frames += 1;
            if frames > frames_max {
                return Err(failed(format!("it has more than {frames_max} frames")));
            }
        }
    }
    let seconds = if frames > 0 { last.saturating_sub(first) as f64 * tick } else { 0.0 };
    Ok(Count { frames, seconds, width, height })
}

/// Reads one picture `P6 width height 255`; `None` at the end of the output.
fn ppm(output: &mut impl BufRead, pixels_max: u64) -> Result<Option<Picture>> {
    let mut header = [0usize; 3];
    let mut magic = [0; 2];
    if output.fill_buf().map_err(unreadable)?.is_empty() {
        return Ok(None);
    }
    output.read_exact(&mut magic).map_err(unreadable)?;
    let strange = || failed("the output of ffmpeg is no PPM".into());
    if &magic != b"P6" {
        return Err(strange());
    }
    // One byte of white space ends each number; the first also has one before it.
    let mut byte = [0];
    output.read_exact(&mut byte).map_err(unreadable)?;
    for number in &mut header {
        loop {
            output.read_exact(&mut byte).map_err(unreadable)?;
            match byte[0] {
                digit @ b'0'..=b'9' if *number < 1 << 24 => {
                    *number = *number * 10 + usize::from(digit - b'0')
                }
                b' ' | b'\n' => break,
                _ => return Err(strange()),
            }
        }
    }
    let [width, height, largest] = header;
    if largest != 255 {
        return Err(failed(format!("the output of ffmpeg has values up to {largest}, expected 255")));
    }
    if width == 0 || height == 0 || (width as u64).saturating_mul(height as u64) > pixels_max {
        return Err(failed(format!(
            "a frame of {width} x {height}, at most {pixels_max} pixels are decoded"
        )));
    }
    let mut rgb = vec![0; width * height * 3];
    output.read_exact(&mut rgb).map_err(unreadable)?;
    Ok(Some(Picture { width, height, rgb }))
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::super::Film;
    use super::*;

    const MP4: &[u8] = b"\x00\x00\x00\x18ftypisom";

    /// A program that stands in for `ffmpeg`.
    fn program(script: &str) -> tempfile::TempPath {
        let mut file = NamedTempFile::new().expect("a file");
        write!(file, "#!/bin/sh\n{script}\n").expect("written");
        file.as_file().set_permissions(std::fs::Permissions::from_mode(0o700)).expect("runnable");
        file.into_temp_path()
    }

    const LIST: &str = "printf '#tb 0: 1/100\\n#dimensions 0: 2x1\\n0, 0, 0, 50, 9, 0x1\\n0, 50, 100, 50, 9, 0x1\\n0, 50, 50, 50, 9, 0x1\\n'";

    fn open(script: &str, limits: FilmLimits) -> Result<(usize, f64, Vec<u8>)> {
        let program = program(script);
        let film = Film::open_with(MP4, limits, &program)?;
        let mut pixels = Vec::new();
        film.take(&[0, 2], &mut |frame| {
            pixels.extend(frame.rgb);
            Ok(())
        })?;
        Ok((film.frames(), film.fps(), pixels))
    }

    #[test]
    fn packets_are_counted_and_frames_read() {
        let frames = "printf 'P6\\n2 1\\n255\\nabcdefP6\\n2 1\\n255\\nghijkl'";
        let script =
            format!("case \"$*\" in *framecrc*) {LIST};; *'eq(n,0)+eq(n,2)'*) {frames};; *) exit 3;; esac");
        let (count, fps, pixels) = open(&script, FilmLimits::default()).expect("sound");
        assert_eq!((count, fps, &pixels[..]), (3, 2.0, &b"abcdefghijkl"[..]));
    }

    #[test]
    fn no_sum_of_chosen_frames_has_many_terms() {
        assert_eq!(selection(&[0, 2, 5]), "(eq(n,0)+(eq(n,2)+eq(n,5)))");
        let many = selection(&(0..768).collect::<Vec<_>>());
        assert_eq!(many.matches("eq(n,").count(), 768);
        let sums = |text: &str| text.chars().filter(|c| *c == '+').count();
        assert_eq!(sums(&many), many.matches('(').count() - 768, "each sum has parentheses of its own");
    }

    #[test]
    fn what_a_phone_has_cut_off_is_still_counted() {
        let script = format!("case \"$*\" in *'-ignore_editlist 1'*) ;; *) exit 3;; esac; {LIST}");
        let program = program(&script);
        assert_eq!(Film::open_with(MP4, FilmLimits::default(), &program).expect("sound").frames(), 3);
    }

    #[test]
    fn nobody_waits_for_what_is_not_wanted() {
        let left = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let asked = Arc::clone(&left);
        let is_wanted = move || !asked.load(std::sync::atomic::Ordering::Relaxed);
        let patience = Patience::new(Duration::from_secs(3600), is_wanted);
        let leaves = thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            left.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        let start = Instant::now();
        let outcome = patience.scope(|| open("exec sleep 20", FilmLimits::default()));
        assert!(matches!(outcome, Err(crate::VisionError::Unwanted)), "{outcome:?}");
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        leaves.join().expect("it ends");
        let short = Patience::new(Duration::from_millis(100), || true);
        let message =
            short.scope(|| open("exec sleep 20", FilmLimits::default())).expect_err("late").to_string();
        assert!(message.contains("longer than 0.1 s"), "{message}");
    }

    #[test]
    fn whatever_ffmpeg_does_is_an_error_in_a_sentence() {
        let limits = FilmLimits { time: Duration::from_millis(400), ..FilmLimits::default() };
        let then = |frames: &str| format!("case \"$*\" in *framecrc*) {LIST};; *) {frames};; esac");
        for (script, limits, part) in [
            ("echo 'moov atom not found' >&2; exit 1".into(), limits, "moov atom not found"),
            (
                "for f; do case \"$f\" in /*) echo \"no header in $f.\" >&2; exit 1;; esac; done".into(),
                limits,
                "no header in the file.",
            ),
            ("exit 0".into(), limits, "no frames"),
            ("exec sleep 20".into(), limits, "longer than 0.4 s"),
            (then("exec sleep 20"), limits, "longer than 0.4 s"),
            (then("true"), limits, "last 2 frames"),
            (then("printf 'P6\\n2 1\\n255\\nabc'"), limits, "cannot be read"),
            (then("printf 'P6\\n9999999 9999999\\n255\\n'"), limits, "at most"),
            (then("printf 'P6\\n2 1\\n65535\\nabcdefghijkl'"), limits, "values up to 65535"),
            (then("printf 'P6\\n3 1\\n255\\nabcdefghi'"), limits, "says 2 x 1, and a frame has 3 x 1"),
            (then("printf 'P5 hello'"), limits, "no PPM"),
            (LIST.into(), FilmLimits { frames: 2, ..limits }, "more than 2 frames"),
        ] {
            let start = Instant::now();
            let message = open(&script, limits).expect_err(&script).to_string();
            assert!(message.contains(part), "{script}: {message}");
            assert!(start.elapsed() < Duration::from_secs(10), "{script}");
        }
    }
}
