//! The frames of a GIF.
//!
//! The blocks of the file are walked through first: they tell the number of frames and their times without decoding a
//! pixel.

use std::io::Cursor;

use image::codecs::gif::GifDecoder;
use image::{AnimationDecoder, ImageDecoder, Limits};

use super::{Count, FrameSink, VideoFileLimits, failed};
use crate::{Picture, Result, work_limit};

/// Hundredths of a second for a frame that states none, as browsers show it.
const DELAY_DEFAULT: u64 = 10;

/// Reads a file from its start to its end.
struct Walk<'a>(&'a [u8]);

impl<'a> Walk<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let (head, rest) = self
            .0
            .split_at_checked(count)
            .ok_or_else(|| failed("its file ends before the video does".into()))?;
        self.0 = rest;
        Ok(head)
    }

    fn byte(&mut self) -> Result<u8> {
        Ok(self.take(1)?[0])
    }

    fn sub_blocks(&mut self) -> Result<()> {
        loop {
            match self.byte()? {
                0 => return Ok(()),
                size => self.take(usize::from(size))?,
            };
        }
    }

    /// Skips the table of colours that a byte of flags announces.
    fn colours(&mut self, flags: u8) -> Result<()> {
        if flags & 0x80 != 0 {
            self.take(3 << ((flags & 7) + 1))?;
        }
        Ok(())
    }
}

fn number(bytes: &[u8]) -> usize {
    usize::from(u16::from_le_bytes([bytes[0], bytes[1]]))
}

/// Counts the frames and their time.
pub(super) fn count(bytes: &[u8], limits: VideoFileLimits) -> Result<Count> {
    let mut walk = Walk(bytes);
    walk.take(6)?;
    let screen = walk.take(7)?;
    walk.colours(screen[4])?;
    let (mut frames, mut hundredths, mut delay) = (0, 0, 0);
    loop {
        match walk.byte()? {
            0x21 => {
                // Graphic control: how long the next frame stays.
                if walk.byte()? == 0xf9 && walk.0.first() == Some(&4) {
                    delay = number(&walk.take(5)?[2..]) as u64;
                }
                walk.sub_blocks()?;
            }
            0x2c => {
                let frame = walk.take(9)?;
                // A decoder allocates a frame's own size, and the limits are on the screen's.
                let ends = [0, 2].map(|at| number(&frame[at..]) + number(&frame[at + 4..]));
                let [right, bottom] = ends;
                if right > number(screen) || bottom > number(&screen[2..]) {
                    return Err(failed(format!("frame {frames} of its GIF reaches beyond the picture")));
                }
                walk.colours(frame[8])?;
                walk.byte()?;
                walk.sub_blocks()?;
                frames += 1;
                hundredths += if delay < 2 { DELAY_DEFAULT } else { delay };
                delay = 0;
                if frames > limits.frames {
                    return Err(failed(format!("it has more than {} frames", limits.frames)));
                }
            }
            0x3b => break,
            other => return Err(failed(format!("a block of its GIF has the unknown kind {other}"))),
        }
    }
    let seconds = hundredths as f64 / 100.0;
    Ok(Count { frames, seconds, width: number(screen), height: number(&screen[2..]) })
}

/// Pixels of the first frame, which need not be those of the screen. `None` if there is no such frame.
pub(crate) fn first_frame_pixels(bytes: &[u8]) -> Option<u64> {
    let mut walk = Walk(bytes);
    walk.take(6).ok()?;
    walk.take(7).and_then(|screen| walk.colours(screen[4])).ok()?;
    loop {
        match walk.byte().ok()? {
            0x21 => walk.byte().and_then(|_| walk.sub_blocks()).ok()?,
            0x2c => {
                let frame = walk.take(9).ok()?;
                return Some(number(&frame[4..]) as u64 * number(&frame[6..]) as u64);
            }
            _ => return None,
        }
    }
}

/// Decodes the frames with these numbers.
pub(super) fn take(
    bytes: &[u8],
    numbers: &[usize],
    limits: VideoFileLimits,
    sink: &mut FrameSink<'_>,
) -> Result<()> {
    let broken = |error: image::ImageError| failed(format!("a frame cannot be decoded: {error}"));
    let mut decoder = GifDecoder::new(Cursor::new(bytes)).map_err(broken)?;
    let mut allowed = Limits::default();
    // Canvas, frame and their copies, four bytes a pixel.
    allowed.max_alloc = Some(limits.pixels.saturating_mul(16).saturating_add(16 << 20));
    decoder.set_limits(allowed).map_err(broken)?;
    let mut wanted = numbers.iter().copied().peekable();
    for (i, frame) in decoder.into_frames().enumerate() {
        if wanted.peek().is_none() {
            break;
        }
        work_limit::check()?;
        let frame = frame.map_err(broken)?.into_buffer();
        while wanted.next_if_eq(&i).is_some() {
            let (width, height) = (frame.width() as usize, frame.height() as usize);
            let rgb = frame.as_raw().as_chunks::<4>().0.iter().flat_map(|p| [p[0], p[1], p[2]]).collect();
            sink(Picture { width, height, rgb })?;
        }
    }
    match wanted.next() {
        None => Ok(()),
        Some(frame) => Err(failed(format!("its file ends before frame {frame}"))),
    }
}

#[cfg(test)]
mod tests {
    use image::codecs::gif::GifEncoder;
    use image::{Delay, Frame, Rgba, RgbaImage};

    use super::super::VideoFile;
    use super::*;

    /// A GIF whose frame `i` has the red value `10 i`, shown for the given hundredths of a second.
    fn video_of(delays: &[u32]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut encoder = GifEncoder::new(&mut bytes);
        for (i, &delay) in delays.iter().enumerate() {
            let image = RgbaImage::from_pixel(6, 4, Rgba([10 * i as u8, 0, 0, 255]));
            let frame = Frame::from_parts(image, 0, 0, Delay::from_numer_denom_ms(10 * delay, 1));
            encoder.encode_frame(frame).expect("coded");
        }
        drop(encoder);
        bytes
    }

    #[test]
    fn frames_are_counted_and_taken() {
        let bytes = video_of(&[25, 25, 0, 40]);
        let video = VideoFile::open(&bytes, VideoFileLimits::default()).expect("sound");
        assert_eq!((video.frames(), video.fps(), video.size()), (4, 4.0, (6, 4)));
        let mut reds = Vec::new();
        video
            .take(&[0, 2, 2, 3], &mut |frame| {
                assert_eq!((frame.width, frame.height, frame.rgb.len()), (6, 4, 72));
                reds.push(frame.rgb[3]);
                Ok(())
            })
            .expect("decodes");
        assert_eq!(reds, [0, 20, 20, 30]);
        assert!(
            video.take(&[4], &mut |_| Ok(())).expect_err("too few").to_string().contains("before frame 4")
        );
    }

    #[test]
    fn limits_come_before_pixels() {
        let bytes = video_of(&[5; 5]);
        let limits = VideoFileLimits::default();
        for (limits, part) in [
            (VideoFileLimits { frames: 4, ..limits }, "more than 4 frames"),
            (VideoFileLimits { pixels: 23, ..limits }, "at most 23 pixels"),
            (VideoFileLimits { drawn_pixels: 119, ..limits }, "5 frames of 6 x 4"),
        ] {
            let message = VideoFile::open(&bytes, limits).err().expect("refused").to_string();
            assert!(message.contains(part), "{message}");
        }
        // The first frame's width, after its separator and its place.
        let frame = bytes.windows(10).position(|at| at[0] == 0x2c && at[5..9] == [6, 0, 4, 0]);
        let mut wide = bytes.clone();
        wide[frame.expect("it has frames") + 6] = 0x1f;
        let message = VideoFile::open(&wide, limits).err().expect("refused").to_string();
        assert!(message.contains("frame 0 of its GIF reaches beyond"), "{message}");
        for end in 0..bytes.len() {
            assert!(VideoFile::open(&bytes[..end], limits).is_err(), "cut at {end}");
        }
    }
}
