//! Compares pictures of the repository with the reference's results.

use std::path::Path;

use keel_vision::{DecodeLimits, Picture, ProcessorFiles, decode};
use serde_json::{Map, json};

/// FNV-1a hashes of the decoded picture, and of the picture after resizing for a tower.
const HASHES: [(&str, u64, u64); 3] = [
    ("bilevel.png", 0x3d72_d76a_dc41_6cdc, 0xce84_db95_9f58_ec1d),
    ("progressive_420.jpg", 0x08fa_bbd4_505b_af37, 0xcf41_bd21_4969_e460),
    ("palette_trns.png", 0x8e0b_eddb_c2fc_8c17, 0x6426_0728_cb6b_befe),
];

/// FNV-1a of the bytes.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3))
}

/// The decoded picture, and the picture after resizing for a tower.
fn both(name: &str) -> (Picture, Picture) {
    let bytes = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name));
    let picture = decode(&bytes.expect("readable"), DecodeLimits::default()).expect("decodes");
    let file = json!({"patch_size": 16, "size": {"shortest_edge": 8192, "longest_edge": 24576}});
    let processor = ProcessorFiles::new(None, Some(file), None).image(&Map::new()).expect("sound");
    let resized = processor.process(&picture).expect("a sound size").swap_remove(0).resized;
    (picture, resized)
}

/// The hashes are from transformers 5.17 with its default (torchvision) processor.
#[test]
fn pictures_are_decoded_and_resized_as_by_the_reference() {
    for (name, decoded, resized) in HASHES {
        let (picture, small) = both(name);
        assert_eq!(hash(&picture.rgb), decoded, "{name}");
        assert_eq!(hash(&small.rgb), resized, "{name}");
    }
}
