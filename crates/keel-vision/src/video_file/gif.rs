//! The frames of a GIF.
//!
//! The blocks of the file are walked through first: they tell the number of frames and their times without decoding a
//! pixel.

use image::codecs::gif::GifDecoder;
use image::{AnimationDecoder, ImageDecoder, Limits};

use super::{Count, FrameSink, VideoFileLimits, failed};
use crate::metadata::Parts;
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

    /// The header of the file: the size of the screen, and the colours of all frames.
    fn header(&mut self) -> Result<&'a [u8]> {
        let screen = &self.take(13)?[6..];
        self.colours(screen[4])?;
        Ok(screen)
    }

    fn block(&mut self) -> Result<Block<'a>> {
        match self.byte()? {
            0x21 => {
                let label = self.byte()?;
                let rest = self.0;
                self.sub_blocks()?;
                Ok(match (label, rest) {
                    (0xf9, &[4, _, low, high, ..]) => {
                        Block::Control(u64::from(u16::from_le_bytes([low, high])))
                    }
                    _ => Block::Other,
                })
            }
            0x2c => {
                let frame = self.take(9)?;
                self.colours(frame[8])?;
                self.byte()?;
                self.sub_blocks()?;
                Ok(Block::Frame(frame))
            }
            0x3b => Ok(Block::End),
            other => Err(failed(format!("a block of its GIF has the unknown kind {other}"))),
        }
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

enum Block<'a> {
    /// How long the next frame stays, in hundredths of a second.
    Control(u64),
    /// Place, size and flags of a frame.
    Frame(&'a [u8]),
    /// Text, or data of an application.
    Other,
    End,
}

fn number(bytes: &[u8]) -> usize {
    usize::from(u16::from_le_bytes([bytes[0], bytes[1]]))
}

/// Counts the frames and their time.
pub(super) fn count(bytes: &[u8], limits: VideoFileLimits) -> Result<Count> {
    let mut walk = Walk(bytes);
    let screen = walk.header()?;
    let (mut frames, mut hundredths, mut delay) = (0, 0, 0);
    loop {
        match walk.block()? {
            Block::Control(time) => delay = time,
            Block::Other => {}
            Block::Frame(frame) => {
                // A decoder allocates a frame's own size, and the limits are on the screen's.
                let ends = [0, 2].map(|at| number(&frame[at..]) + number(&frame[at + 4..]));
                let [right, bottom] = ends;
                if right > number(screen) || bottom > number(&screen[2..]) {
                    return Err(failed(format!("frame {frames} of its GIF reaches beyond the picture")));
                }
                frames += 1;
                hundredths += if delay < 2 { DELAY_DEFAULT } else { delay };
                delay = 0;
                if frames > limits.frames {
                    return Err(failed(format!("it has more than {} frames", limits.frames)));
                }
            }
            Block::End => break,
        }
    }
    let seconds = hundredths as f64 / 100.0;
    Ok(Count { frames, seconds, width: number(screen), height: number(&screen[2..]) })
}

/// Pixels of the first frame, which need not be those of the screen. `None` if there is no such frame.
pub(crate) fn first_frame_pixels(bytes: &[u8]) -> Option<u64> {
    let mut walk = Walk(bytes);
    walk.header().ok()?;
    loop {
        // A frame that is cut short has a size, too.
        if let [0x2c, _, _, _, _, w0, w1, h0, h1, ..] = walk.0 {
            let [width, height] = [[*w0, *w1], [*h0, *h1]].map(u16::from_le_bytes);
            return Some(u64::from(width) * u64::from(height));
        }
        match walk.block().ok()? {
            Block::Control(_) | Block::Other => {}
            Block::Frame(_) | Block::End => return None,
        }
    }
}

/// The parts of a file without text and without data of applications, which a decoder would keep.
pub(crate) fn needed_parts(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut walk = Walk(bytes);
    let mut is_header = true;
    std::iter::from_fn(move || {
        loop {
            let from = walk.0;
            let block = match std::mem::take(&mut is_header) {
                true => walk.header().map(|_| Block::End),
                false => walk.block(),
            };
            match block {
                Ok(Block::Other) => {}
                Ok(_) => return Some(&from[..from.len() - walk.0.len()]),
                // The decoder says what is wrong with the rest, unless it would keep it.
                Err(_) => {
                    walk.0 = &[];
                    return Some(from).filter(|rest| !matches!(rest, [] | [0x21, ..]));
                }
            }
        }
    })
}

/// Decodes the frames with these numbers.
pub(super) fn take(
    bytes: &[u8],
    numbers: &[usize],
    limits: VideoFileLimits,
    sink: &mut FrameSink<'_>,
) -> Result<()> {
    let broken = |error: image::ImageError| failed(format!("a frame cannot be decoded: {error}"));
    let mut decoder = GifDecoder::new(Parts::new(needed_parts(bytes))).map_err(broken)?;
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

    /// A decoder would keep the data that applications have written to a file.
    #[test]
    fn a_decoder_gets_frames_and_their_times_alone() {
        let sound = video_of(&[25, 40]);
        let first = sound.windows(2).position(|at| at == [0x21, 0xf9]).expect("it has a time");
        let mut padded = sound.clone();
        let text =
            [&b"\x21\xff\x03XMP"[..], &[&[255][..], &[7; 255]].concat().repeat(1000), b"\0\x21\xfe\x02hi\0"]
                .concat();
        drop(padded.splice(first..first, text));
        let read = |file: &[u8]| needed_parts(file).flatten().copied().collect::<Vec<u8>>();
        assert_eq!(read(&padded), read(&sound));
        assert!(read(&sound).starts_with(&sound[..13]) && read(&sound).ends_with(b";"));
        // An extension that does not end is not kept either.
        assert_eq!(read(&padded[..first + 5000]), read(&sound[..first]));
        for file in [&sound, &padded] {
            let mut count = 0;
            let mut sink = |_: Picture| -> Result<()> {
                count += 1;
                Ok(())
            };
            VideoFile::open(file, VideoFileLimits::default())
                .and_then(|video| video.take(&[0, 1], &mut sink))
                .expect("sound");
            assert_eq!(count, 2);
        }
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
