//! A decoded picture.

use crate::Size;

/// 8-bit RGB, row by row, three bytes per pixel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Pixels per row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// `height * width * 3` bytes.
    pub rgb: Vec<u8>,
}

impl Picture {
    /// Its sides.
    pub fn size(&self) -> Size {
        Size { height: self.height, width: self.width }
    }

    /// Copies the part that begins at `(left, top)`. It is clipped to the picture.
    pub fn crop(&self, left: usize, top: usize, width: usize, height: usize) -> Picture {
        let (left, top) = (left.min(self.width), top.min(self.height));
        let (width, height) = (width.min(self.width - left), height.min(self.height - top));
        let mut rgb = Vec::with_capacity(width * height * 3);
        for y in top..top + height {
            let start = (y * self.width + left) * 3;
            rgb.extend_from_slice(&self.rgb[start..start + width * 3]);
        }
        Picture { width, height, rgb }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crop_ends_where_the_picture_does() {
        let picture = Picture { width: 3, height: 2, rgb: (0..18).collect() };
        assert_eq!(picture.crop(1, 1, 1, 1).rgb, [12, 13, 14]);
        let corner = picture.crop(2, 0, 5, 5);
        assert_eq!((corner.width, corner.height), (1, 2));
        assert_eq!(corner.rgb, [6, 7, 8, 15, 16, 17]);
    }
}
