//! Decodes files to 8-bit RGB.
//!
//! - Alpha is dropped, not blended. The transparency of a palette is ignored.
//! - JPEG decoding equals libjpeg-turbo's to the bit.
//! - CMYK is converted to RGB as in Pillow.
//! - 16-bit values keep their upper 8 bits.
//! - The orientation in EXIF is applied.
//! - Only the first frame of a GIF is read.

use std::io::{BufRead, Cursor, Seek};

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageError, ImageFormat, ImageReader, Limits, RgbImage};

use crate::metadata::{JpegParts, Parts, jpeg_parts, png_exif, png_parts};
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
    /// Of a JPEG, it has the header alone.
    decoder: Box<dyn ImageDecoder + 'a>,
    orientation: Orientation,
}

fn open(bytes: &[u8], limits: DecodeLimits) -> Result<Opened<'_>> {
    if bytes.len() > limits.file_bytes {
        return Err(VisionError::FileBytes { bytes: bytes.len(), limit: limits.file_bytes });
    }
    let format = image::guess_format(bytes).map_err(|_| VisionError::Format)?;
    let (decoder, exif) = match format {
        ImageFormat::Png => (decoder_of(Parts::new(png_parts(bytes)), format, limits)?, png_exif(bytes)),
        ImageFormat::Jpeg => {
            let JpegParts { header, exif, .. } = jpeg_parts(bytes)?;
            (decoder_of(Cursor::new(header), format, limits)?, exif)
        }
        ImageFormat::WebP => (decoder_of(Cursor::new(bytes), format, limits)?, webp::exif(bytes)),
        ImageFormat::Gif => (decoder_of(Parts::new(video_file::gif_parts(bytes)), format, limits)?, None),
        _ => return Err(VisionError::Format),
    };
    let (width, height) = decoder.dimensions();
    if u64::from(width) * u64::from(height) > limits.pixels {
        return Err(VisionError::Pixels { width, height, pixels_max: limits.pixels });
    }
    if width == 0 || height == 0 || (width, height) == (1, 1) {
        return Err(VisionError::Empty { width: width as usize, height: height as usize });
    }
    let orientation = exif.and_then(Orientation::from_exif_chunk).unwrap_or(Orientation::NoTransforms);
    Ok(Opened { format, decoder, orientation })
}

fn decoder_of<'a>(
    read: impl BufRead + Seek + 'a,
    format: ImageFormat,
    limits: DecodeLimits,
) -> Result<Box<dyn ImageDecoder + 'a>> {
    let mut reader = ImageReader::with_format(read, format);
    let mut allowed = Limits::default();
    allowed.max_alloc = Some(limits.pixels.saturating_mul(PIXEL_BYTES_MAX).saturating_add(DECODER_BYTES));
    reader.limits(allowed);
    Ok(Box::new(reader.into_decoder().map_err(broken)?))
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

/// Reads the header of a picture. Of lossless WebP, it reads all before the pixels, which tells the decoder's memory.
///
/// # Memory
/// At most 1 MiB of heap, whatever the file holds; for WebP, 4 bytes more for each block of 16 pixels. It is less than
/// [`Measured::decode_bytes`].
///
/// # Errors
/// As [`decode`], except for faults of the picture after its header.
pub fn measure(bytes: &[u8], limits: DecodeLimits) -> Result<Measured> {
    let Opened { format, decoder, orientation } = open(bytes, limits)?;
    let (width, height) = decoder.dimensions();
    let [pixels, pixel_bytes] =
        [u64::from(width) * u64::from(height), u64::from(decoder.color_type().bytes_per_pixel())];
    drop(decoder);
    let file_bytes = bytes.len() as u64;
    // The decoder's pixels, then these and the RGB values.
    let (own, converted) = (pixels * pixel_bytes, if pixel_bytes == 3 { 0 } else { 3 * pixels });
    let decoded = match format {
        // The library has two copies of the file, and may keep the segments between scans.
        ImageFormat::Jpeg => jpeg::decode_bytes(bytes).unwrap_or(8 * pixels + 3 * file_bytes),
        ImageFormat::WebP => {
            let decoded =
                webp_bytes(bytes, width, height, own, converted) + webp::table_bytes(bytes, pixels)?;
            decoded.max(2 * file_bytes)
        }
        ImageFormat::Gif => {
            let none = || VisionError::Decode("the GIF has no frame".into());
            own + converted.max(4 * video_file::gif_frame_pixels(bytes).ok_or_else(none)?)
        }
        // Some rows are kept as they were before they were filtered, in memory that grows by doubling.
        _ => own + converted + 3 * pixel_bytes * u64::from(width) * u64::from(height.min(6)),
    };
    let turned = if orientation == Orientation::NoTransforms { 0 } else { 2 * own };
    let (width, height) = match orientation {
        Orientation::Rotate90
        | Orientation::Rotate270
        | Orientation::Rotate90FlipH
        | Orientation::Rotate270FlipH => (height as usize, width as usize),
        _ => (width as usize, height as usize),
    };
    Ok(Measured { width, height, decode_bytes: decoded.max(turned) + DECODER_BYTES_MIN })
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
    let Opened { format, decoder, orientation } = open(bytes, limits)?;
    let (width, height) = decoder.dimensions();
    let mut decoded = match format {
        ImageFormat::Jpeg => {
            drop(decoder);
            match jpeg_of(bytes, limits)? {
                Some(decoded) => decoded,
                None => {
                    let JpegParts { header, data, .. } = jpeg_parts(bytes)?;
                    let decoder = decoder_of(Cursor::new([&header[..], data].concat()), format, limits)?;
                    DynamicImage::from_decoder(decoder).map_err(broken)?
                }
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

    /// Frames of Motion JPEG leave out the tables that all of them use.
    #[test]
    fn a_jpeg_without_huffman_tables_is_refused() {
        let (mut file, limits) = (jpeg(16), DecodeLimits::default());
        while let Some(at) = file.windows(2).position(|pair| pair == [0xff, 0xc4]) {
            let size = usize::from(u16::from_be_bytes([file[at + 2], file[at + 3]]));
            drop(file.drain(at..at + 2 + size));
        }
        assert_eq!(measure(&file, limits).map(|measured| measured.width).ok(), Some(16));
        let message = decode(&file, limits).expect_err("it has no codes").to_string();
        assert!(message.contains("Huffman table is missing"), "{message}");
    }

    #[test]
    fn a_frame_beyond_the_screen_of_a_gif_is_cut() {
        let mut file = Vec::new();
        let frame = image::RgbaImage::from_fn(40, 30, |x, _| image::Rgba([6 * x as u8, 0, 0, 255]));
        image::codecs::gif::GifEncoder::new(&mut file).encode_frame(image::Frame::new(frame)).expect("coded");
        let limits = DecodeLimits::default();
        let whole = measure(&file, limits).expect("it has a header");
        assert_eq!((whole.width, whole.height), (40, 30));
        // The size of the screen.
        file[6..10].copy_from_slice(&[16, 0, 8, 0]);
        let cut = measure(&file, limits).expect("it has a header");
        assert_eq!((cut.width, cut.height), (16, 8));
        assert!(cut.decode_bytes >= DECODER_BYTES_MIN + 4 * (40 * 30 + 16 * 8), "its frame is decoded whole");
        let picture = decode(&file, limits).expect("its frame is cut");
        assert_eq!((picture.width, picture.height, picture.rgb.len()), (16, 8, 16 * 8 * 3));
        assert_eq!(picture.rgb[15 * 3], 90);
        file.truncate(13);
        let message = measure(&file, limits).expect_err("there is no frame").to_string();
        assert!(message.contains("the picture cannot be decoded"), "{message}");
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
