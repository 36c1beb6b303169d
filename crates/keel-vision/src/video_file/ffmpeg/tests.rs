use super::super::VideoFile;
use super::*;

const MP4: &[u8] = b"\x00\x00\x00\x18ftypisom";

/// A program that stands in for `ffmpeg`: a link to the stand-in, which runs the script next to it. No program is
/// written here: a process that another thread starts at that time would inherit the file open for writing, and the
/// system starts no such file.
fn program(script: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("script"), script).expect("written");
    let program = folder.path().join("ffmpeg");
    let stand_in = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/stand_in.sh");
    std::os::unix::fs::symlink(stand_in, &program).expect("linked");
    (folder, program)
}

const LIST: &str = "printf '#tb 0: 1/100\\n#dimensions 0: 2x1\\n0, 0, 0, 50, 9, 0x1\\n0, 50, 100, 50, 9, 0x1\\n0, 50, 50, 50, 9, 0x1\\n'";

fn open(script: &str, limits: VideoFileLimits) -> Result<(usize, f64, Vec<u8>)> {
    let (_folder, program) = program(script);
    let video = VideoFile::open_with(MP4, limits, &program)?;
    let mut pixels = Vec::new();
    video.take(&[0, 2], &mut |frame| {
        pixels.extend(frame.rgb);
        Ok(())
    })?;
    Ok((video.frames(), video.fps(), pixels))
}

#[test]
fn packets_are_counted_and_frames_read() {
    let frames = "printf 'P6\\n2 1\\n255\\nabcdefP6\\n2 1\\n255\\nghijkl'";
    let script =
        format!("case \"$*\" in *framecrc*) {LIST};; *'eq(n,0)+eq(n,2)'*) {frames};; *) exit 3;; esac");
    let (count, fps, pixels) = open(&script, VideoFileLimits::default()).expect("sound");
    assert_eq!((count, fps, &pixels[..]), (3, 2.0, &b"abcdefghijkl"[..]));
}

/// An AVI file gives its frames no times.
#[test]
fn frames_without_times_follow_each_other_evenly() {
    for lasts in [0, 1] {
        let packet = |i: usize| format!("0, {i}, {}, {lasts}, 9, 0x1\\n", i64::MIN);
        let packets: String = (0..3).map(packet).collect();
        let script = format!("printf '#tb 0: 1/25\\n#codec_id 0: mjpeg\\n#dimensions 0: 2x1\\n{packets}'");
        let (_folder, program) = program(&script);
        let video = VideoFile::open_with(MP4, VideoFileLimits::default(), &program).expect("sound");
        assert_eq!(video.frames(), 3);
        assert!((video.fps() - 25.0).abs() < 1e-6, "{} frames a second", video.fps());
    }
}

#[test]
fn frames_are_counted_where_packets_are_not_frames() {
    let list = |codec: &str, packets: &[&str]| {
        let header = format!("#tb 0: 1/10\\n#codec_id 0: {codec}\\n#dimensions 0: 2x1\\n");
        let packet = |(i, of): (usize, &&str)| format!("0, {i}, {i}, 1, {of}\\n");
        let packets: String = packets.iter().enumerate().map(packet).collect();
        format!("printf '{header}{packets}'")
    };
    let frames = list("rawvideo", &["6, 0x1"; 3]);
    for (codec, packets, count) in [
        ("h264", &["9, 0x1", "9, 0x1, F=0x0", "9, 0x1, F=0x0", "9, 0x1, F=0x0"][..], 4),
        ("mjpeg", &["9, 0x1", "0, 0x1", "9, 0x1", "0, 0x1", "9, 0x1"], 3),
        // The rest has packets that are not shown, or begins with frames that are not there.
        ("vp8", &["9, 0x1", "9, 0x1, F=0x0", "9, 0x1, F=0x0", "9, 0x1, F=0x0"], 3),
        ("h264", &["9, 0x1, F=0x0", "9, 0x1, F=0x0", "9, 0x1", "9, 0x1, F=0x0"], 3),
    ] {
        let packets = list(codec, packets);
        let script =
            format!("case \"$*\" in *'-c copy'*) {packets};; *framecrc*) {frames};; *) exit 3;; esac");
        let (_folder, program) = program(&script);
        let video = VideoFile::open_with(MP4, VideoFileLimits::default(), &program).expect("sound");
        assert_eq!(video.frames(), count, "{codec}");
    }
}

#[test]
fn stand_ins_start_while_other_threads_start_theirs() {
    let message = || open("exit 0", VideoFileLimits::default()).expect_err("no frames").to_string();
    let many = || (0..50).map(|_| message()).find(|message| !message.contains("no frames"));
    let strange = thread::scope(|threads| {
        let started: Vec<_> = (0..16).map(|_| threads.spawn(many)).collect();
        started.into_iter().find_map(|thread| thread.join().expect("no panic"))
    });
    assert_eq!(strange, None);
}

#[test]
fn no_sum_of_chosen_frames_has_many_terms() {
    assert_eq!(selection(&[0, 2, 5]), "(eq(n,0)+(eq(n,2)+eq(n,5)))");
    let many = selection(&(0..768).collect::<Vec<_>>());
    assert_eq!(many.matches("eq(n,").count(), 768);
    let sums = |text: &str| text.chars().filter(|c| *c == '+').count();
    assert_eq!(sums(&many), many.matches('(').count() - 768, "each sum has parentheses of its own");
}

/// Where all frames are asked for, none is named.
#[test]
fn all_frames_of_a_long_video_are_read() {
    const FRAMES: usize = 20_000;
    let list =
        format!("printf '#tb 0: 1/100\\n#dimensions 0: 1x1\\n'; yes '0, 0, 0, 1, 9, 0x1' | head -n {FRAMES}");
    let frames = format!("yes 'P6 1 1 255 abc' | head -n {FRAMES} | tr -d '\\n'");
    let script = format!(
        "case \"$*\" in *framecrc*) {list};; *select*) exit 3;; *'-frames:v {FRAMES} '*) {frames};; *) exit 4;; esac"
    );
    let (_folder, program) = program(&script);
    let video = VideoFile::open_with(MP4, VideoFileLimits::default(), &program).expect("sound");
    assert_eq!(video.frames(), FRAMES);
    let mut taken = 0;
    let mut sink = |frame: Picture| -> Result<()> {
        assert_eq!(frame.rgb, b"abc");
        taken += 1;
        Ok(())
    };
    video.take(&(0..FRAMES).collect::<Vec<_>>(), &mut sink).expect("they are there");
    assert_eq!(taken, FRAMES);
    // A list of 19,999 frame numbers is too long for an argument of the command line.
    let most: Vec<usize> = (1..FRAMES).collect();
    let message = video.take(&most, &mut |_| Ok(())).expect_err("too many").to_string();
    assert!(message.contains("19999 of its 20000 frames") && message.ends_with("sample fewer"), "{message}");
    let few: Vec<usize> = (0..FRAMES).step_by(4).collect();
    let message = video.take(&few, &mut |_| Ok(())).expect_err("the stand-in ends").to_string();
    assert!(message.contains("ffmpeg cannot read it") || message.contains("ends before"), "{message}");
}

#[test]
fn what_a_phone_has_cut_off_is_still_counted() {
    let script = format!("case \"$*\" in *'-ignore_editlist 1'*) ;; *) exit 3;; esac; {LIST}");
    let (_folder, program) = program(&script);
    assert_eq!(VideoFile::open_with(MP4, VideoFileLimits::default(), &program).expect("sound").frames(), 3);
}

#[test]
fn nobody_waits_for_what_is_not_wanted() {
    let left = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let asked = Arc::clone(&left);
    let is_wanted = move || !asked.load(std::sync::atomic::Ordering::Relaxed);
    let patience = WorkLimit::new(Duration::from_secs(3600), is_wanted);
    let leaves = thread::spawn(move || {
        thread::sleep(Duration::from_millis(100));
        left.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    let start = Instant::now();
    let outcome = patience.scope(|| open("exec sleep 20", VideoFileLimits::default()));
    assert!(matches!(outcome, Err(crate::VisionError::Unwanted)), "{outcome:?}");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    leaves.join().expect("it ends");
    let short = WorkLimit::new(Duration::from_millis(100), || true);
    let message =
        short.scope(|| open("exec sleep 20", VideoFileLimits::default())).expect_err("late").to_string();
    assert!(message.contains("longer than 0.1 s"), "{message}");
}

#[test]
fn whatever_ffmpeg_does_is_an_error_in_a_sentence() {
    let limits = VideoFileLimits::default();
    let short = VideoFileLimits { time: Duration::from_millis(400), ..limits };
    let then = |frames: &str| format!("case \"$*\" in *framecrc*) {LIST};; *) {frames};; esac");
    for (script, limits, part) in [
        ("echo 'moov atom not found' >&2; exit 1".into(), limits, "moov atom not found"),
        (
            "for f; do case \"$f\" in /*) echo \"no header in $f.\" >&2; exit 1;; esac; done".into(),
            limits,
            "no header in the file.",
        ),
        ("exit 0".into(), limits, "no frames"),
        ("exec sleep 20".into(), short, "longer than 0.4 s"),
        (
            then("exec sleep 20"),
            VideoFileLimits { time: Duration::from_secs(2), ..limits },
            "longer than 2 s",
        ),
        (then("true"), limits, "last 2 frames"),
        (
            then("echo \"Unrecognized option 'fps_mode'.\" >&2; exit 1"),
            limits,
            "it is too old: install ffmpeg 5.1 or later",
        ),
        (then("printf 'P6\\n2 1\\n255\\nabc'"), limits, "cannot be read"),
        (then("printf 'P6\\n9999999 9999999\\n255\\n'"), limits, "at most"),
        (then("printf 'P6\\n2 1\\n65535\\nabcdefghijkl'"), limits, "values up to 65535"),
        (then("printf 'P6\\n3 1\\n255\\nabcdefghi'"), limits, "says 2 x 1, and a frame has 3 x 1"),
        (then("printf 'P5 hello'"), limits, "no PPM"),
        (LIST.into(), VideoFileLimits { frames: 2, ..limits }, "more than 2 frames"),
    ] {
        let start = Instant::now();
        let message = open(&script, limits).expect_err(&script).to_string();
        assert!(message.contains(part), "{script}: {message}");
        assert!(start.elapsed() < Duration::from_secs(10), "{script}");
    }
}
