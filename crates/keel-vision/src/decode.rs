//! Decodes files to 8-bit RGB.
//!
//! - Alpha is dropped, not blended. The transparency of a palette is ignored.
//! - JPEG decoding equals libjpeg-turbo's to the bit.
//! - CMYK is converted to RGB as in Pillow.
//! - 16-bit values keep their upper 8 bits.
//! - The orientation in EXIF is applied.
//! - Only the first frame of a GIF is read.

use std::borrow::Cow;
use std::io::Cursor;

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageError, ImageFormat, ImageReader, Limits, RgbImage};

use crate::{Picture, Result, VisionError, jpeg, video_file, webp, work_limit};

/// Bounds on a picture and its file. They are checked before memory is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeLimits {
    /// Largest size of the file.
    pub file_bytes: usize,
    /// Largest number of pixels.
    pub pixels: u64,
}

impl Default for DecodeLimits {
    fn default() -> DecodeLimits {
        DecodeLimits { file_bytes: 64 << 20, pixels: 64 << 20 }
    }
}

/// Largest decoded pixel: RGBA with 16 bits each.
const PIXEL_BYTES_MAX: u64 = 8;

/// Memory of every decoder: tables and windows.
const DECODER_BYTES_MIN: u64 = 512 << 10;

/// Memory that decoders may use in addition to the picture itself.
const DECODER_BYTES: u64 = 64 << 20;

/// A file whose header was read and is within the limits.
struct Opened<'a> {
    format: ImageFormat,
    decoder: Box<dyn ImageDecoder + 'a>,
    /// Bytes of a copy of the file that the decoder has.
    copied_bytes: u64,
}

fn open(bytes: &[u8], limits: DecodeLimits) -> Result<Opened<'_>> {
    if bytes.len() > limits.file_bytes {
        return Err(VisionError::FileBytes { bytes: bytes.len(), limit: limits.file_bytes });
    }
    let format = image::guess_format(bytes).map_err(|_| VisionError::Format)?;
    if !matches!(format, ImageFormat::Png | ImageFormat::Jpeg | ImageFormat::WebP | ImageFormat::Gif) {
        return Err(VisionError::Format);
    }
    if format == ImageFormat::Jpeg && !jpeg_has_end(bytes) {
        return Err(VisionError::Decode("the file ends before the picture does".into()));
    }
    let read = if format == ImageFormat::Png { without_profile(bytes) } else { Cow::Borrowed(bytes) };
    let copied_bytes = if let Cow::Owned(copy) = &read { copy.capacity() as u64 } else { 0 };
    let mut reader = ImageReader::with_format(Cursor::new(read), format);
    let mut allowed = Limits::default();
    allowed.max_alloc = Some(limits.pixels.saturating_mul(PIXEL_BYTES_MAX).saturating_add(DECODER_BYTES));
    reader.limits(allowed);
    let decoder = reader.into_decoder().map_err(broken)?;
    let (width, height) = decoder.dimensions();
    if u64::from(width) * u64::from(height) > limits.pixels {
        return Err(VisionError::Pixels { width, height, pixels_max: limits.pixels });
    }
    if width == 0 || height == 0 || (width, height) == (1, 1) {
        return Err(VisionError::Empty { width: width as usize, height: height as usize });
    }
    Ok(Opened { format, decoder: Box::new(decoder), copied_bytes })
}

/// A PNG without its colour profile, which is not used. The decoder would unpack a profile of a few bytes to as much
/// memory as it may take.
fn without_profile(bytes: &[u8]) -> Cow<'_, [u8]> {
    const SIGNATURE_BYTES: usize = 8;
    // Length, kind and checksum of a chunk.
    const FRAME_BYTES: usize = 12;
    let (mut at, mut profiles) = (SIGNATURE_BYTES, Vec::new());
    while let Some(&[a, b, c, d, ref kind @ ..]) = bytes.get(at..at + 8) {
        let end = (u32::from_be_bytes([a, b, c, d]) as usize).saturating_add(at + FRAME_BYTES);
        if kind == b"iCCP" {
            profiles.push(at..end.min(bytes.len()));
        }
        at = end;
    }
    if profiles.is_empty() {
        return Cow::Borrowed(bytes);
    }
    let mut kept = Vec::with_capacity(bytes.len());
    let mut from = 0;
    for profile in profiles {
        kept.extend_from_slice(&bytes[from..profile.start]);
        from = profile.end;
    }
    kept.extend_from_slice(&bytes[from..]);
    Cow::Owned(kept)
}

/// The size of a picture by its header, and the memory to decode it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    /// Pixels in a row, after the picture is turned as EXIF says.
    pub width: usize,
    /// Rows, after that.
    pub height: usize,
    /// The most bytes of heap while it is decoded, the decoded picture included.
    pub decode_bytes: u64,
}

/// Reads the header of a picture.
///
/// # Errors
/// As [`decode`], except for faults of the picture after its header.
pub fn measure(bytes: &[u8], limits: DecodeLimits) -> Result<Measured> {
    let Opened { format, mut decoder, copied_bytes } = open(bytes, limits)?;
    let (width, height) = decoder.dimensions();
    let [pixels, pixel_bytes] =
        [u64::from(width) * u64::from(height), u64::from(decoder.color_type().bytes_per_pixel())];
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    drop(decoder);
    let file_bytes = bytes.len() as u64;
    // The decoder's pixels, then these and the RGB values.
    let (own, converted) = (pixels * pixel_bytes, if pixel_bytes == 3 { 0 } else { 3 * pixels });
    let decoded = match format {
        ImageFormat::Jpeg => jpeg::decode_bytes(bytes).unwrap_or(8 * pixels + 2 * file_bytes),
        ImageFormat::WebP => {
            webp_bytes(bytes, width, height, own, converted) + webp::table_bytes(bytes, pixels)?
        }
        ImageFormat::Gif => {
            let of_frame = video_file::gif_frame_pixels(bytes).filter(|&frame| frame != pixels).unwrap_or(0);
            own + converted.max(4 * of_frame)
        }
        _ => own + converted + copied_bytes,
    };
    let turned = if orientation == Orientation::NoTransforms { 0 } else { 2 * own };
    let (width, height) = match orientation {
        Orientation::Rotate90
        | Orientation::Rotate270
        | Orientation::Rotate90FlipH
        | Orientation::Rotate270FlipH => (height as usize, width as usize),
        _ => (width as usize, height as usize),
    };
    Ok(Measured { width, height, decode_bytes: decoded.max(turned).max(2 * file_bytes) + DECODER_BYTES_MIN })
}

/// The most bytes of heap while a WebP file is decoded, without the tables of lossless ones.
fn webp_bytes(bytes: &[u8], width: u32, height: u32, own: u64, converted: u64) -> u64 {
    let side = |n: u32| u64::from(n.next_multiple_of(16));
    let planes = side(width) * side(height) * 3 / 2;
    let rgba = 4 * u64::from(width) * u64::from(height);
    match bytes.get(12..16) {
        // Lossy: planes of samples, each part of the file, and the pixels.
        Some(b"VP8 ") => own + planes + bytes.len() as u64,
        // Lossless, without alpha: RGBA and the pixels.
        _ if converted == 0 => own + planes.max(rgba),
        // With alpha, which may be coded as a lossless picture of its own.
        Some(b"VP8L") => own + converted,
        _ => own + planes + rgba + rgba / 4,
    }
}

/// Decodes a picture.
///
/// # Errors
/// - The file or the picture exceeds the limits.
/// - The format is not supported.
/// - The file is broken or cut short.
/// - The picture has a single pixel, or none.
/// - The [`crate::WorkLimit`] of this thread is over.
pub fn decode(bytes: &[u8], limits: DecodeLimits) -> Result<Picture> {
    work_limit::check()?;
    let Opened { format, mut decoder, .. } = open(bytes, limits)?;
    let (width, height) = decoder.dimensions();
    let orientation = decoder.orientation().map_err(broken)?;
    let mut decoded = match format {
        ImageFormat::Jpeg => {
            // It has a copy of the file.
            drop(decoder);
            match jpeg_of(bytes, limits)? {
                Some(decoded) => decoded,
                None => DynamicImage::from_decoder(open(bytes, limits)?.decoder).map_err(broken)?,
            }
        }
        _ => DynamicImage::from_decoder(decoder).map_err(broken)?,
    };
    // A caller has planned for the size in the header. Two decoders may find two headers in a JPEG.
    if (decoded.width(), decoded.height()) != (width, height) {
        let got = format!("{} x {}", decoded.width(), decoded.height());
        return Err(VisionError::Decode(format!(
            "its header says {width} x {height}, and its pixels are {got}"
        )));
    }
    decoded.apply_orientation(orientation);
    Ok(picture_of(decoded))
}

fn broken(error: ImageError) -> VisionError {
    match error {
        ImageError::Unsupported(_) => VisionError::Format,
        other => VisionError::Decode(other.to_string()),
    }
}

/// Whether the end marker follows the start of a scan. Without this check the library would fill missing parts with
/// grey.
fn jpeg_has_end(bytes: &[u8]) -> bool {
    let mut at = 2;
    while let Some(&[0xff, marker, high, low]) = bytes.get(at..at + 4) {
        if marker == 0xff {
            at += 1;
        } else if marker == 0xda {
            // Within a scan, the byte after 0xff is 0 or a restart marker, so 0xff 0xd9 is the end marker.
            return bytes[at + 4..].windows(2).any(|pair| pair == [0xff, 0xd9]);
        } else {
            at += 2 + usize::from(u16::from_be_bytes([high, low]));
        }
    }
    false
}

/// Decodes a JPEG to the same bits as the references. Returns `None` for a kind of JPEG that only the library reads.
fn jpeg_of(bytes: &[u8], limits: DecodeLimits) -> Result<Option<DynamicImage>> {
    match jpeg::decode(bytes, limits.pixels) {
        Ok(jpeg::Pixels { width, height, rgb }) => {
            Ok(RgbImage::from_raw(width as u32, height as u32, rgb).map(DynamicImage::ImageRgb8))
        }
        Err(jpeg::Stop::Unsupported) => Ok(None),
        Err(jpeg::Stop::Impatient(error)) => Err(error),
        Err(jpeg::Stop::Broken(reason)) => Err(VisionError::Decode(format!("of the JPEG, {reason}"))),
    }
}

fn picture_of(decoded: DynamicImage) -> Picture {
    let (width, height) = (decoded.width() as usize, decoded.height() as usize);
    let high = |value: &u16| (value >> 8) as u8;
    let rgb = match decoded {
        DynamicImage::ImageRgb8(buffer) => buffer.into_raw(),
        DynamicImage::ImageLuma8(buffer) => buffer.iter().flat_map(|&v| [v; 3]).collect(),
        DynamicImage::ImageLumaA8(buffer) => {
            buffer.as_chunks::<2>().0.iter().flat_map(|p| [p[0]; 3]).collect()
        }
        DynamicImage::ImageRgba8(buffer) => {
            buffer.as_chunks::<4>().0.iter().flat_map(|p| [p[0], p[1], p[2]]).collect()
        }
        DynamicImage::ImageLuma16(buffer) => buffer.iter().flat_map(|v| [high(v); 3]).collect(),
        DynamicImage::ImageLumaA16(buffer) => {
            buffer.as_chunks::<2>().0.iter().flat_map(|p| [high(&p[0]); 3]).collect()
        }
        DynamicImage::ImageRgb16(buffer) => buffer.iter().map(high).collect(),
        DynamicImage::ImageRgba16(buffer) => {
            buffer.as_chunks::<4>().0.iter().flat_map(|p| [high(&p[0]), high(&p[1]), high(&p[2])]).collect()
        }
        other => other.into_rgb8().into_raw(),
    };
    Picture { width, height, rgb }
}

#[cfg(test)]
mod tests {
    use image::codecs::jpeg::JpegEncoder;

    use super::*;

    fn jpeg(side: u32) -> Vec<u8> {
        let mut file = Vec::new();
        JpegEncoder::new(&mut file).encode_image(&RgbImage::new(side, side)).expect("coded");
        file
    }

    /// By the standard the marker FF01 has no length. The library skips one, and with it a whole picture here.
    #[test]
    fn a_jpeg_with_two_sizes_is_refused() {
        let (skipped, seen) = (jpeg(256), jpeg(16));
        let mut file = vec![0xff, 0xd8, 0xff, 0x01];
        file.extend(u16::try_from(skipped.len()).expect("it is short").to_be_bytes());
        file.extend(&skipped[2..]);
        file.extend(&seen[2..]);
        let limits = DecodeLimits::default();
        let Measured { width, height, .. } = measure(&file, limits).expect("it has a header");
        assert_eq!((width, height), (16, 16));
        let message = decode(&file, limits).expect_err("it has two sizes").to_string();
        assert!(message.contains("16 x 16") && message.contains("256 x 256"), "{message}");
    }
}
