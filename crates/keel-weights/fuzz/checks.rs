//! What must hold for any bytes at all: shared by the fuzz targets and by `tests/fuzz_smoke.rs`.

use keel_weights::{SafetensorsHeader, StoredDType, TensorView};

/// Parses `file` as a safetensors file and uses what it declares. Returns whether it was accepted.
pub fn safetensors(file: &[u8]) -> bool {
    let header = match SafetensorsHeader::parse(file) {
        Ok(header) => header,
        Err(problem) => {
            assert!(!problem.to_string().is_empty());
            return false;
        }
    };
    let mut entries: Vec<_> = header.tensors().iter().collect();
    entries.sort_by_key(|(_, entry)| (entry.range.start, entry.range.end));
    for pair in entries.windows(2) {
        assert!(pair[0].1.range.end <= pair[1].1.range.start, "{:?} and {:?} overlap", pair[0], pair[1]);
    }
    for (name, entry) in entries {
        assert!(entry.range.start >= 8 && entry.range.end <= file.len(), "{name} lies outside the file");
        let bytes = &file[entry.range.clone()];
        let StoredDType::Known(dtype) = entry.dtype else { continue };
        let view = TensorView::new(name, dtype, &entry.shape, bytes).expect("the header was checked");
        if dtype.is_float() {
            assert_eq!(view.to_f32().unwrap().len() * dtype.size(), bytes.len());
            assert!(view.rows_f32(0..0, &mut []).is_ok());
            let mut row = vec![0.0; if bytes.is_empty() { 0 } else { view.cols() }];
            let decoded = view.rows_f32(0..1, &mut row);
            assert_eq!(decoded.is_ok(), view.rows() > 0 && view.cols() == row.len());
        }
    }
    true
}
