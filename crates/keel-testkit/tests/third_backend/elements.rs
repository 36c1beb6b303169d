//! Memory, and elements of each type as numbers.

use half::{bf16, f16};
use keel_array::{DType, DeviceMemory, Launch, Operand, Place};
use keel_testkit::naive::tensor::{Tensor, index_of};
use std::any::Any;
use std::sync::{Mutex, MutexGuard};

/// Device memory: bytes of the host.
pub struct Bytes(Mutex<Vec<u8>>);

impl Bytes {
    pub fn zeroed(bytes: usize) -> Bytes {
        Bytes(Mutex::new(vec![0; bytes]))
    }

    /// The bytes of a memory that this backend allocated.
    pub fn of(memory: &dyn DeviceMemory) -> MutexGuard<'_, Vec<u8>> {
        let bytes = memory.as_any().downcast_ref::<Bytes>().expect("memory of this backend");
        bytes.0.lock().expect("nobody panics with the lock")
    }
}

impl DeviceMemory for Bytes {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The elements of an operand in row-major order, each as its bytes.
fn elements(launch: &Launch<'_>, operand: &Operand) -> Vec<Vec<u8>> {
    let Place { buffer, offset: start } = launch.resolve(operand.memory);
    let (bytes, layout, size) = (Bytes::of(buffer.memory()), &operand.layout, operand.dtype.size());
    let element = |i| {
        let index = index_of(&layout.shape, i);
        let at: usize = index.iter().zip(&layout.strides).map(|(i, stride)| i * stride).sum();
        let at = start + (layout.offset + at) * size;
        bytes[at..at + size].to_vec()
    };
    (0..layout.shape.elements()).map(element).collect()
}

/// The elements as f64: exact for all types but i64 beyond 2^53.
pub fn floats(launch: &Launch<'_>, operand: &Operand) -> Tensor {
    let values = elements(launch, operand).iter().map(|bytes| float(operand.dtype, bytes)).collect();
    Tensor { shape: operand.layout.shape.to_vec(), values }
}

/// The elements of an operand of integers.
pub fn integers(launch: &Launch<'_>, operand: &Operand) -> Vec<i64> {
    elements(launch, operand).iter().map(|bytes| integer(operand.dtype, bytes)).collect()
}

/// Stores integers, which wrap, in an output.
pub fn store_integers(launch: &Launch<'_>, operand: &Operand, values: &[i64]) {
    store(launch, operand, values, |dtype, &x| match dtype {
        DType::Bool => vec![u8::from(x != 0)],
        DType::U8 => vec![x as u8],
        DType::U32 => (x as u32).to_le_bytes().to_vec(),
        DType::I32 => (x as i32).to_le_bytes().to_vec(),
        DType::I64 => x.to_le_bytes().to_vec(),
        _ => of_float(dtype, x as f64),
    });
}

/// Stores floats in an output; integers are cut off and saturate.
pub fn store_floats(launch: &Launch<'_>, operand: &Operand, values: &[f64]) {
    store(launch, operand, values, |dtype, &x| of_float(dtype, x));
}

/// Outputs are row-major and gap-free.
fn store<T>(launch: &Launch<'_>, operand: &Operand, values: &[T], code: impl Fn(DType, &T) -> Vec<u8>) {
    assert_eq!(operand.layout.shape.elements(), values.len());
    let Place { buffer, offset: start } = launch.resolve(operand.memory);
    let start = start + operand.layout.offset * operand.dtype.size();
    let coded: Vec<u8> = values.iter().flat_map(|x| code(operand.dtype, x)).collect();
    Bytes::of(buffer.memory())[start..start + coded.len()].copy_from_slice(&coded);
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("an element of this type")
}

fn float(dtype: DType, bytes: &[u8]) -> f64 {
    match dtype {
        DType::F32 => f64::from(f32::from_le_bytes(array(bytes))),
        DType::F16 => f16::from_le_bytes(array(bytes)).to_f64(),
        DType::BF16 => bf16::from_le_bytes(array(bytes)).to_f64(),
        _ => integer(dtype, bytes) as f64,
    }
}

fn integer(dtype: DType, bytes: &[u8]) -> i64 {
    match dtype {
        DType::U32 => i64::from(u32::from_le_bytes(array(bytes))),
        DType::I32 => i64::from(i32::from_le_bytes(array(bytes))),
        DType::I64 => i64::from_le_bytes(array(bytes)),
        _ => i64::from(bytes[0]),
    }
}

/// The nearest f32 towards zero, with its last bit set if `x` lies beyond it. A second rounding then sees on which side
/// of a midpoint `x` is.
fn rounded_to_odd(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) == x || !near.is_finite() {
        return near;
    }
    let is_beyond = f64::from(near).abs() > x.abs();
    f32::from_bits((near.to_bits() - u32::from(is_beyond)) | 1)
}

fn of_float(dtype: DType, x: f64) -> Vec<u8> {
    match dtype {
        DType::F32 => (x as f32).to_le_bytes().to_vec(),
        DType::F16 => f16::from_f64(x).to_le_bytes().to_vec(),
        DType::BF16 => bf16::from_f32(rounded_to_odd(x)).to_le_bytes().to_vec(),
        DType::Bool => vec![u8::from(x != 0.0)],
        DType::U8 => vec![x as u8],
        DType::U32 => (x as u32).to_le_bytes().to_vec(),
        DType::I32 => (x as i32).to_le_bytes().to_vec(),
        DType::I64 => (x as i64).to_le_bytes().to_vec(),
    }
}
