//! Constants, progressions, random numbers.

use super::Call;
use crate::kernels::generic::create::{generate, random_normal, random_uniform};
use crate::kernels::generic::scalar::{Scalar, with_scalar};
use crate::pool::Worker;
use keel_array::random::random_bits;
use keel_array::{Op, RandomKind};

pub(super) fn run(call: &Call<'_>, worker: &Worker<'_>) {
    let y = &call.outputs[0];
    match call.kernel.op {
        Op::Fill(value) => with_scalar!(y.dtype, T => {
            let value = T::from_f32(value.get());
            generate(y.shared::<T>(), worker, |_| value);
        }),
        Op::Arange { start, step } => {
            let at = |i: usize| f64::from(start.get()) + f64::from(step.get()) * i as f64;
            with_scalar!(y.dtype, T => generate(y.shared::<T>(), worker, |i| match T::IS_FLOAT {
                true => T::from_f32(at(i) as f32),
                false => T::from_i64(at(i) as i64),
            }));
        }
        Op::Random { kind: RandomKind::Bits, seed } => {
            generate(y.shared::<u32>(), worker, |i| (random_bits(seed, i as u64) >> 32) as u32);
        }
        Op::Random { kind: RandomKind::Uniform, seed } => {
            generate(y.shared::<f32>(), worker, |i| random_uniform(seed, i as u64));
        }
        Op::Random { kind: RandomKind::Normal, seed } => {
            generate(y.shared::<f32>(), worker, |i| random_normal(seed, i as u64));
        }
        ref op => unreachable!("{} creates nothing", op.name()),
    }
}
