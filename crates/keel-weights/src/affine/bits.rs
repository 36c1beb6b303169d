//! Codes to bits and back: eight codes are `bits` bytes, for every width.

/// Splits `packed` into codes of `BITS` bits. `codes.len()` is 8/BITS times `packed.len()`.
pub(super) fn unpack<const BITS: usize>(packed: &[u8], codes: &mut [u8]) {
    let mask = (1u64 << BITS) - 1;
    for (codes, packed) in codes.as_chunks_mut::<8>().0.iter_mut().zip(packed.as_chunks::<BITS>().0) {
        let mut word = [0; 8];
        word[..BITS].copy_from_slice(packed);
        let word = u64::from_le_bytes(word);
        for (i, code) in codes.iter_mut().enumerate() {
            *code = (word >> (i * BITS) & mask) as u8;
        }
    }
}

/// The inverse of [`unpack`]. Codes must fit `BITS` bits.
pub(super) fn pack<const BITS: usize>(codes: &[u8], packed: &mut [u8]) {
    for (packed, codes) in packed.as_chunks_mut::<BITS>().0.iter_mut().zip(codes.as_chunks::<8>().0) {
        let mut word = 0;
        for (i, &code) in codes.iter().enumerate() {
            word |= u64::from(code) << (i * BITS);
        }
        packed.copy_from_slice(&word.to_le_bytes()[..BITS]);
    }
}

/// Calls a function with the code's width as a constant.
macro_rules! with_bits {
    ($format:expr, $function:ident($($argument:expr),*)) => {
        match $format.bits() {
            2 => $function::<2>($($argument),*),
            3 => $function::<3>($($argument),*),
            4 => $function::<4>($($argument),*),
            5 => $function::<5>($($argument),*),
            6 => $function::<6>($($argument),*),
            8 => $function::<8>($($argument),*),
            bits => unreachable!("AffineFormat never has {bits} bits"),
        }
    };
}
pub(super) use with_bits;
