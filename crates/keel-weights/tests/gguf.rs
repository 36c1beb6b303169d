//! Tests the GGUF reader with files and blocks made by the reference package (tests/data/make_gguf.py), and with broken
//! files.

use std::path::{Path, PathBuf};

use keel_array::{BlockFormat, DType};
use keel_weights::{
    HeaderProblem, LinearFormat, LinearTensor, SafetensorsFile, TensorSource, TensorView,
    gguf::{GgufFile, GgufHeader, GgufValue},
};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// Builds a file piece by piece.
#[derive(Clone)]
struct Builder(Vec<u8>);

impl Builder {
    fn new(version: u32, tensors: u64, pairs: u64) -> Builder {
        Builder(b"GGUF".to_vec()).u32(version).u64(tensors).u64(pairs)
    }

    fn u32(mut self, value: u32) -> Builder {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Builder {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn string(mut self, text: &str) -> Builder {
        self = self.u64(text.len() as u64);
        self.0.extend(text.as_bytes());
        self
    }

    /// A tensor's description. Dimensions are fastest first, as in the file.
    fn tensor(mut self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Builder {
        self = self.string(name).u32(dims.len() as u32);
        for &dim in dims {
            self = self.u64(dim);
        }
        self.u32(kind).u64(offset)
    }

    /// Pads to the alignment and appends `bytes` of data.
    fn data(mut self, alignment: usize, bytes: usize) -> Vec<u8> {
        self.0.resize(self.0.len().next_multiple_of(alignment) + bytes, 0);
        self.0
    }

    fn problem(self) -> HeaderProblem {
        GgufHeader::parse(&self.0).unwrap_err()
    }
}

#[test]
fn every_block_type_decodes_as_the_reference_does() {
    let blocks = SafetensorsFile::open(&data("gguf_blocks.safetensors")).unwrap();
    let types: [(&str, u32); 13] = [
        ("Q4_0", 2),
        ("Q4_1", 3),
        ("Q5_0", 6),
        ("Q5_1", 7),
        ("Q8_0", 8),
        ("Q2_K", 10),
        ("Q3_K", 11),
        ("Q4_K", 12),
        ("Q5_K", 13),
        ("Q6_K", 14),
        ("IQ4_NL", 20),
        ("IQ4_XS", 23),
        ("MXFP4", 39),
    ];
    let folder = tempfile::tempdir().unwrap();
    for (name, id) in types {
        let values = blocks.tensor(&format!("{name}.values")).unwrap();
        let bytes = blocks.tensor(&format!("{name}.bytes")).unwrap();
        let cols = values.cols();
        let builder = Builder::new(3, 1, 0).tensor("m.weight", &[cols as u64, 3], id, 0);
        let mut file = builder.data(32, 0);
        file.extend(bytes.bytes());
        let path = folder.path().join(name);
        std::fs::write(&path, file).unwrap();
        let file = GgufFile::open(&path).unwrap();
        let linear = file.linear("m").unwrap();
        let LinearTensor::Blocks(blocks) = linear else { panic!("{name}: {linear:?}") };
        assert_eq!(blocks.format().to_string(), name);
        assert_eq!((linear.info().rows, linear.info().cols), (3, cols));
        let values = values.to_f32().unwrap();
        let (mut first, mut others) = (vec![0.0; cols], vec![0.0; 2 * cols]);
        linear.rows_f32(0..1, &mut first).unwrap();
        linear.rows_f32(1..3, &mut others).unwrap();
        for (i, (ours, theirs)) in first.iter().chain(&others).zip(&values).enumerate() {
            // The scales may be multiplied in another order.
            assert!(
                (ours - theirs).abs() <= theirs.abs() * 1e-6 + 1e-4,
                "{name}, value {i}: {ours}, not {theirs}"
            );
        }
        if name == "MXFP4" {
            assert_eq!(first, values[..cols], "scales of 2^-127");
        }
        assert!(linear.rows_f32(2..4, &mut others).is_err());
    }
}

#[test]
fn a_reference_file_reads_whole() {
    let file = GgufFile::open(&data("reference.gguf")).unwrap();
    let get = |key: &str| &file.metadata()[key];
    assert_eq!(get("general.architecture").as_str(), Some("keel-test"));
    assert_eq!(get("t.u8").as_u64(), Some(200));
    assert_eq!(*get("t.i8"), GgufValue::Signed(-100));
    assert_eq!(get("t.u16").as_u64(), Some(60_000));
    assert_eq!(*get("t.i16"), GgufValue::Signed(-30_000));
    assert_eq!(get("t.u32").as_u64(), Some(4_000_000_000));
    assert_eq!(*get("t.i32"), GgufValue::Signed(-2_000_000_000));
    assert_eq!(get("t.f32").as_f64(), Some(0.5));
    assert_eq!(get("t.bool").as_bool(), Some(true));
    assert_eq!(get("t.string").as_str(), Some("snowman \u{2603}"));
    let strings: Vec<_> = get("t.strings").as_array().unwrap().iter().map(|value| value.as_str()).collect();
    assert_eq!(strings, [Some("a"), Some("bc"), Some("")]);
    let ints: Vec<_> = get("t.ints").as_array().unwrap().iter().map(|value| value.as_f64()).collect();
    assert_eq!(ints, [Some(1.0), Some(-2.0), Some(3.0)]);
    assert_eq!(get("t.u64").as_u64(), Some((1 << 63) + 1));
    assert_eq!(*get("t.i64"), GgufValue::Signed(-(1 << 62)));
    assert_eq!(get("t.f64").as_f64(), Some(0.1));

    let dense: Vec<f32> = (0..15).map(|i| (i as f32 - 7.0) / 4.0).collect();
    let tensor = file.tensor("dense.weight").unwrap().expect_shape(&[3, 5]).unwrap();
    assert_eq!((tensor.dtype(), tensor.to_f32().unwrap()), (DType::F32, dense.clone()));
    let tensor = file.tensor("half.weight").unwrap().expect_shape(&[5, 3]).unwrap();
    assert_eq!((tensor.dtype(), tensor.to_f32().unwrap()), (DType::F16, dense));
    assert_eq!(file.linear("half").unwrap().info(), file.linear_info("half").unwrap());

    let info = file.linear_info("experts").unwrap();
    assert_eq!((info.experts, info.rows, info.cols), (Some(2), 3, 64));
    assert_eq!(info.format, LinearFormat::Blocks(BlockFormat::Q8_0));
    let mut decoded = vec![0.0; 2 * 64];
    file.linear("experts").unwrap().rows_f32(4..6, &mut decoded).unwrap();
    file.release("experts.weight");
    file.release_rows("experts.weight", 0..9);
    for (i, value) in decoded.iter().enumerate() {
        let expected = ((4 * 64 + i) as f32).sin();
        assert!((value - expected).abs() < 0.005, "{i}: {value}, not {expected}");
    }
    let message = file.tensor("experts.weight").unwrap_err().to_string();
    assert!(message.contains("stored as Q8_0"), "{message}");
    assert!(file.tensor("nothing").unwrap_err().to_string().contains("holds 3 tensors"));
}

#[test]
fn types_that_are_not_read_stay_out_of_the_way() {
    let builder = Builder::new(3, 2, 0).tensor("a.weight", &[256], 16, 0).tensor("b.weight", &[8], 0, 96);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.gguf");
    std::fs::write(&path, builder.data(32, 128)).unwrap();
    let file = GgufFile::open(&path).unwrap();
    assert!(file.tensor("a.weight").unwrap_err().to_string().contains("stored as type 16"));
    for error in [file.linear("a").err(), file.linear_info("a").err()] {
        let message = error.expect("it is not read").to_string();
        assert!(
            message.starts_with("tensor 'a.weight' is stored as type 16 (IQ2_XXS), which keel"),
            "{message}"
        );
        assert!(message.contains("Q2_K to Q6_K") && message.contains("such as Q4_K_M"), "{message}");
    }
    assert_eq!(file.tensor("b.weight").unwrap().to_f32().unwrap(), [0.0; 8]);
}

#[test]
fn headers_that_lie() {
    let contains = |builder: Builder, part: &str| {
        let message = builder.problem().to_string();
        assert!(message.contains(part), "{message}");
    };
    assert_eq!(Builder(vec![]).problem(), HeaderProblem::Empty);
    contains(Builder(b"GGML".to_vec()), "not with GGUF");
    contains(Builder(b"GG".to_vec()), "ends after 2 bytes");
    contains(Builder::new(1, 0, 0), "version 1 is not read");
    contains(Builder::new(3 << 24, 0, 0), "big-endian");
    contains(Builder::new(3, 0, u64::MAX), "ends after 24 bytes");
    contains(Builder::new(3, u64::MAX, 0), "it claims 18446744073709551615 tensors");
    contains(Builder::new(3, 0, 1).u64(u64::MAX).u64(0), "ends after");
    contains(Builder::new(3, 0, 1).string("k").u32(13).u64(0), "13 is not the type");
    contains(Builder::new(3, 0, 1).string("k").u32(9).u32(0).u64(1 << 60), "ends after");
    let twice = Builder::new(3, 0, 2).string("k").u32(4).u32(1).string("k").u32(4).u32(1);
    contains(twice, "metadata key 'k' appears twice");
    let mut nested = Builder::new(3, 0, 1).string("k").u32(9);
    for _ in 0..100 {
        nested = nested.u32(9).u64(1);
    }
    contains(nested, "nest deeper");
    let aligned = |alignment| Builder::new(3, 0, 1).string("general.alignment").u32(4).u32(alignment);
    for alignment in [0, 24, 1 << 30] {
        contains(aligned(alignment), "general.alignment is");
    }
    assert!(GgufHeader::parse(&aligned(64).0).is_ok());
    let mut bytes = Builder::new(3, 0, 1).string("k").u32(8).u64(2).0;
    bytes.extend([b'a', 0xff]);
    contains(Builder(bytes), "not UTF-8");
}

#[test]
fn tensors_that_lie() {
    let one = |dims: &[u64], kind, offset, data| {
        let file = Builder::new(3, 1, 0).tensor("t", dims, kind, offset).data(32, data);
        GgufHeader::parse(&file).unwrap_err()
    };
    let syntax =
        |problem: HeaderProblem, part: &str| assert!(problem.to_string().contains(part), "{problem}");
    assert!(matches!(
        one(&[9], 0, 0, 32),
        HeaderProblem::OutOfRange { begin: 0, end: 36, available: 32, .. }
    ));
    assert!(matches!(one(&[1], 0, u64::MAX - 31, 32), HeaderProblem::OutOfRange { .. }));
    assert!(matches!(one(&[1 << 33, 1 << 33], 0, 0, 32), HeaderProblem::Overflow { .. }));
    assert!(matches!(one(&[0, 1 << 62], 0, 0, 32), HeaderProblem::Overflow { .. }));
    syntax(one(&[1, 1, 1, 1, 1], 0, 0, 32), "5 dimensions");
    syntax(one(&[40, 2], 2, 0, 64), "not whole blocks of Q4_0");
    syntax(one(&[4], 0, 8, 64), "not a multiple of 32");
    let two = |second: &str, offset| {
        let file =
            Builder::new(3, 2, 0).tensor("t", &[16], 0, 0).tensor(second, &[8], 0, offset).data(32, 96);
        GgufHeader::parse(&file)
    };
    assert_eq!(two("t", 64).unwrap_err(), HeaderProblem::Duplicate { name: "t".into() });
    assert_eq!(
        two("u", 32).unwrap_err(),
        HeaderProblem::NotContiguous { name: "u".into(), begin: 32, expected: 64 }
    );
    assert!(two("u", 64).is_ok());
    // A file truncated at any length is an error, never a panic.
    let whole = std::fs::read(data("reference.gguf")).unwrap();
    for length in 0..whole.len() - 32 {
        assert!(GgufHeader::parse(&whole[..length]).is_err(), "{length} bytes");
    }
}

/// Files with these names. Each has its part number, the number of parts, and one tensor of three zeros.
fn parts(files: &[(&str, u32, u32, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, number, total, tensor) in files {
        let header = Builder::new(3, 1, 2).string("split.no").u32(4).u32(*number);
        let header = header.string("split.count").u32(4).u32(*total).tensor(tensor, &[3], 0, 0);
        std::fs::write(folder.path().join(name), header.data(32, 12)).unwrap();
    }
    folder
}

#[test]
fn a_model_in_parts_is_read_as_one() {
    let [one, two, three] = ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"];
    let folder = parts(&[(one, 0, 3, "b"), (two, 1, 3, "a"), (three, 2, 3, "c"), ("whole.gguf", 0, 1, "d")]);
    for given in [one, two, three] {
        let file = GgufFile::open(&folder.path().join(given)).unwrap();
        assert_eq!(file.names().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(file.paths().map(|path| path.file_name().unwrap()).collect::<Vec<_>>(), [one, two, three]);
        assert_eq!(file.metadata()["split.no"].as_u64(), Some(0), "the metadata are those of the first part");
        assert!(file.names().all(|name| file.tensor(name).unwrap().bytes() == [0; 12]));
        file.release_rows("c", 0..1);
        file.check_intact().unwrap();
        assert!(file.tensor("d").unwrap_err().to_string().contains("which holds 3 tensors"));
    }
    let whole = GgufFile::open(&folder.path().join("whole.gguf")).unwrap();
    assert_eq!((whole.names().count(), whole.paths().count()), (1, 1));
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let [one, two] = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
    let refused = |files: &[(&str, u32, u32, &str)], reason: &str| {
        let folder = parts(files);
        for (name, ..) in files {
            let message = GgufFile::open(&folder.path().join(name)).unwrap_err().to_string();
            assert!(message.contains(reason) && message.contains("parts of a model: "), "{message}");
        }
    };
    refused(&[(one, 0, 2, "a")], "m-00002-of-00002.gguf is not in its folder");
    refused(&[(two, 1, 2, "a")], "m-00001-of-00002.gguf is not in its folder");
    refused(&[("m.gguf", 0, 2, "a")], "does not end in -00001-of-00002.gguf");
    refused(&[("m-00001-of-00004.gguf", 0, 2, "a")], "does not end in -00001-of-00002.gguf");
    refused(&[(one, 0, 2, "a"), (two, 0, 2, "b")], "do not say that it is part 2 of 2");
    refused(&[(one, 0, 2, "a"), (two, 1, 2, "a")], "tensor 'a' is in an earlier part, too");
    // The first part is that of another model.
    let folder = parts(&[(two, 1, 2, "b")]);
    let header = Builder::new(3, 1, 3).string("split.no").u32(4).u32(0).string("split.count").u32(4).u32(2);
    let header = header.string("split.tensors.count").u32(5).u32(7).tensor("a", &[3], 0, 0);
    std::fs::write(folder.path().join(one), header.data(32, 12)).unwrap();
    let message = GgufFile::open(&folder.path().join(two)).unwrap_err().to_string();
    assert!(message.contains("the parts have 2 tensors together, and by its metadata 7"), "{message}");
}

/// Each dtype that is stored element by element is kept.
#[test]
fn plain_types_keep_their_dtype() {
    let kinds = [(0, DType::F32), (1, DType::F16), (26, DType::I32), (27, DType::I64), (30, DType::BF16)];
    let folder = tempfile::tempdir().unwrap();
    for (id, dtype) in kinds {
        let path = folder.path().join(id.to_string());
        let file = Builder::new(2, 1, 0).tensor("t", &[3, 2], id, 0).data(32, 6 * dtype.size());
        std::fs::write(&path, file).unwrap();
        let file = GgufFile::open(&path).unwrap();
        let view: TensorView<'_> = file.tensor("t").unwrap();
        assert_eq!((view.dtype(), view.shape()), (dtype, &[2, 3][..]));
    }
}
