//! Videos that the program `ffmpeg` reads.
//!
//! ```text
//! open    the kind is read from the file's first bytes; ffmpeg lists the packets (`-c copy -f framecrc`), decoding
//!         none; where packets may not be frames, it also decodes and lists the frames
//! take    ffmpeg decodes and writes the chosen frames as PPM pictures, one after the other
//! ```
//!
//! The file comes from a stranger. `ffmpeg` gets the kind from here and guesses none, so the file cannot be a playlist
//! that names other files or hosts; it opens no protocol but `file`. Its output is read within limits, and it is ended
//! when its time is over, or when no client waits for its output.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::NamedTempFile;

use super::{Count, FrameSink, VideoFileLimits, failed};
use crate::{Picture, Result, WorkLimit};

/// The most memory of one allocation in `ffmpeg`.
const ALLOCATION_MAX: &str = "536870912";
/// The most bytes of its messages that are read.
const MESSAGE_BYTES_MAX: u64 = 2048;
/// How often its watcher asks whether its output is still wanted.
const ASK_TIME: Duration = Duration::from_millis(20);
/// The most bytes of a line of its list of packets.
const LINE_BYTES_MAX: u64 = 4096;
/// The most bytes of an argument. Linux starts no program with 128 KiB, which include the zero at the end.
const ARGUMENT_BYTES_MAX: usize = (128 << 10) - 1;

/// Codecs of which each packet is a frame. Others have packets that show nothing, or two frames.
const ONE_FRAME_A_PACKET: [&str; 5] = ["av1", "h264", "hevc", "mjpeg", "vp9"];
/// The advice to a user without an `ffmpeg` that knows all options.
const GET_FFMPEG: &str = "install ffmpeg 5.1 or later from your system's packages or from https://ffmpeg.org";

/// A coded video in a file of its own, which goes when this is dropped.
pub(super) struct FfmpegVideo {
    file: NamedTempFile,
    demuxer: &'static str,
    ffmpeg: PathBuf,
    limits: VideoFileLimits,
    frames: usize,
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

impl FfmpegVideo {
    pub fn open(bytes: &[u8], limits: VideoFileLimits, ffmpeg: &Path) -> Result<(FfmpegVideo, Count)> {
        let demuxer = demuxer(bytes).ok_or_else(|| {
            failed(
                "its file is no video that can be read; GIF, and with ffmpeg MP4, WebM, Matroska and AVI can"
                    .into(),
            )
        })?;
        let kept = |error: std::io::Error| failed(format!("its file cannot be kept for ffmpeg: {error}"));
        let mut file = NamedTempFile::new().map_err(kept)?;
        file.write_all(bytes).and_then(|()| file.flush()).map_err(kept)?;
        let ffmpeg = ffmpeg.to_path_buf();
        let mut coded = FfmpegVideo { file, demuxer, ffmpeg, limits, frames: 0, size: (0, 0) };
        let Listed { mut count, are_frames } = coded.list(["-c", "copy"])?;
        if !are_frames && (count.width as u64).saturating_mul(count.height as u64) <= limits.pixels {
            count.frames = coded.list(["-fps_mode", "passthrough"])?.count.frames;
        }
        (coded.frames, coded.size) = (count.frames, (count.width, count.height));
        Ok((coded, count))
    }

    fn list(&self, how: [&str; 2]) -> Result<Listed> {
        let args: Vec<String> = how.into_iter().chain(["-f", "framecrc", "-"]).map(String::from).collect();
        self.run(&args, |output| listed(output, self.limits.frames))
    }

    /// The arguments that let through the frames with these numbers. They are few if all frames are asked for.
    fn choice(&self, numbers: &[usize]) -> Result<[String; 2]> {
        let asked = numbers.len();
        if numbers.iter().copied().eq(0..self.frames) {
            return Ok(["-frames:v".into(), asked.to_string()]);
        }
        let filter = format!("select='{}'", selection(numbers));
        if filter.len() > ARGUMENT_BYTES_MAX {
            let most = asked * ARGUMENT_BYTES_MAX / filter.len();
            return Err(failed(format!(
                "{asked} of its {} frames are asked for, and ffmpeg takes the numbers of about {most}: sample fewer",
                self.frames
            )));
        }
        Ok(["-vf".into(), filter])
    }

    pub fn take(&self, numbers: &[usize], sink: &mut FrameSink<'_>) -> Result<()> {
        let how = self.choice(numbers)?;
        // Frames of more than 8 bits are rounded.
        let form = ["-fps_mode", "passthrough", "-pix_fmt", "rgb24", "-f", "image2pipe", "-c:v", "ppm", "-"];
        let args: Vec<String> = how.into_iter().chain(form.map(String::from)).collect();
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
            std::io::ErrorKind::NotFound => failed(format!(
                "this kind of video is read by ffmpeg, which is not installed here: {GET_FFMPEG}, or send a GIF \
                 or a list of frames"
            )),
            _ => failed(format!("ffmpeg does not start: {error}")),
        })?;
        let patience = WorkLimit::current();
        let mut child = Watched::new(started, self.limits.time, patience.clone());
        let (output, message) = child.pipes();
        let outcome = match output {
            Some(output) => read(&mut BufReader::new(output)),
            None => Err(failed("ffmpeg has no output".into())),
        };
        let ended = child.end(outcome.is_ok());
        let message = message.and_then(|message| message.join().ok()).unwrap_or_default();
        // The message must not tell a path of this machine.
        let mut message = message.replace(&*self.file.path().to_string_lossy(), "the file");
        if message.contains("Unrecognized option") {
            message = format!("{message}; it is too old: {GET_FFMPEG}");
        }
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
fn watch(done: &Receiver<()>, time: Duration, patience: &WorkLimit) -> Option<Ended> {
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
    fn new(child: Child, time: Duration, patience: WorkLimit) -> Watched {
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

    /// Standard output, and the text that the process writes to standard error.
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

/// A list of packets or frames.
struct Listed {
    count: Count,
    /// Whether each packet is a frame. A video that begins within a group of frames may lose some.
    are_frames: bool,
}

/// Reads a list: `#tb 0: 1/10240`, `#codec_id 0: h264`, `#dimensions 0: 96x64`, then for each packet or frame
/// `stream, dts, pts, duration, size, checksum`, and flags (`F=0x0`) if it needs others to be decoded.
fn listed(output: &mut impl BufRead, frames_max: usize) -> Result<Listed> {
    let mut tick = 0.0;
    let (mut frames, mut first, mut last) = (0, i64::MAX, i64::MIN);
    let (mut width, mut height) = (0, 0);
    let mut are_frames = false;
    let mut line = String::new();
    loop {
        line.clear();
        if output.by_ref().take(LINE_BYTES_MAX).read_line(&mut line).map_err(unreadable)? == 0 {
            break;
        }
        if let Some(base) = line.strip_prefix("#tb 0:") {
            let (above, below) = base.trim().split_once('/').unwrap_or_default();
            tick = above.parse::<f64>().unwrap_or(0.0) / below.parse::<f64>().unwrap_or(f64::INFINITY);
        } else if let Some(codec) = line.strip_prefix("#codec_id 0:") {
            are_frames = ONE_FRAME_A_PACKET.contains(&codec.trim());
        } else if let Some(size) = line.strip_prefix("#dimensions 0:") {
            let (w, h) = size.trim().split_once('x').unwrap_or_default();
            (width, height) = (w.parse().unwrap_or(0), h.parse().unwrap_or(0));
        } else if !line.starts_with('#') {
            // A time that is not known is the least number.
            let known = |field: &str| field.trim().parse::<i64>().ok().filter(|&number| number != i64::MIN);
            let mut fields = line.split(',').map(known);
            let (shown, lasts) = (fields.nth(2).flatten(), fields.next().flatten().unwrap_or(0));
            if fields.next() == Some(Some(0)) {
                // A packet without bytes: the frame before it stays.
                continue;
            }
            are_frames &= frames > 0 || !line.contains("F=0x");
            // Frames without times follow each other evenly.
            let (shown, lasts) = match shown {
                Some(shown) => (shown, lasts),
                None => (lasts.max(1).saturating_mul(frames as i64), lasts.max(1)),
            };
            (first, last) = (first.min(shown), last.max(shown.saturating_add(lasts)));
            frames += 1;
            if frames > frames_max {
                return Err(failed(format!("it has more than {frames_max} frames")));
            }
        }
    }
    let seconds = if frames > 0 { last.saturating_sub(first) as f64 * tick } else { 0.0 };
    Ok(Listed { count: Count { frames, seconds, width, height }, are_frames })
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
mod tests;
