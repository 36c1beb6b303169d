//! Checks that must hold for any bytes. The fuzz targets and `tests/fuzz_smoke.rs` share them.

#![allow(dead_code, reason = "each target uses one of these functions")]

use keel_weights::{
    ModuleQuantization, Quantization, SafetensorsHeader, StoredDType, TensorView, gguf::GgufHeader,
};

/// Parses `file` as a safetensors file and decodes the tensors that it declares. Returns whether it was accepted.
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

/// Parses `file` as a GGUF file and checks the tensors that it declares. Returns whether it was accepted.
pub fn gguf(file: &[u8]) -> bool {
    let header = match GgufHeader::parse(file) {
        Ok(header) => header,
        Err(problem) => {
            assert!(!problem.to_string().is_empty());
            return false;
        }
    };
    let mut end = 0;
    let mut entries: Vec<_> = header.tensors().iter().filter(|(_, entry)| !entry.range.is_empty()).collect();
    entries.sort_by_key(|(_, entry)| entry.range.start);
    for (name, entry) in entries {
        assert!(entry.range.start >= end && entry.range.end <= file.len(), "{name} overlaps or lies outside");
        end = entry.range.end;
        let kind = entry.kind.expect("only known types have a length");
        let values: usize = entry.shape.iter().product();
        assert_eq!(kind.row_bytes(values), Some(entry.range.len()), "{name}");
    }
    true
}

/// Reads the quantisation section of `file` as a config.json. Returns whether it has one.
pub fn config(file: &[u8]) -> bool {
    let Ok(config) = serde_json::from_slice(file) else { return false };
    let Some(quantization) = Quantization::from_config(&config) else { return false };
    for module in ["", "mode", "lm_head", "model.layers.0.mlp.gate"] {
        if let ModuleQuantization::Affine(format) = quantization.of_module(module) {
            assert!(format.groups(128).is_some() && format.packed_bytes(128) == 16 * format.bits());
        }
    }
    true
}
