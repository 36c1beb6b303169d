use super::delta_steps::{Data, Element, Log, Regime, Slots, step};
use half::f16;
use keel_testkit::cases::gated_delta::{BATCHES, SHAPES};
use keel_testkit::compare::{assert_close, assert_same_bits};
use keel_testkit::naive::gated_delta::Shape;
use keel_testkit::random::Random;

/// Runs a law for states in f32 and in f16.
macro_rules! laws {
    ($($(#[$doc:meta])* $name:ident => $law:ident;)*) => { $(
        $(#[$doc])*
        #[test]
        fn $name() {
            $law::<f32>();
            $law::<f16>();
        }
    )* };
}

laws! {
    workers_and_neighbours_do_not_change_a_bit => workers_and_neighbours;
    any_cut_of_a_prefill_at_multiples_of_64_gives_the_same_bits => cuts_of_a_prefill;
    rows_of_a_partial_chunk_do_not_depend_on_those_that_follow => partial_chunks;
    a_decode_step_of_many_rows_is_that_many_steps => steps_of_many_rows;
    /// Two sequences speculate with random numbers of drafts and accept random numbers of them. Accepted rows and
    /// states must have the bits of plain decoding.
    accepted_rows_have_the_bits_of_plain_decoding => accepted_rows;
    a_committing_step_settles_the_log_first => committing_steps;
    an_open_step_leaves_the_state_alone => open_steps;
}

#[test]
fn both_regimes_follow_the_oracle() {
    for (n, &shape) in SHAPES.iter().enumerate() {
        for rows in BATCHES {
            let data = Data::random(shape, rows.iter().sum(), n as u64);
            let slot: Vec<u32> = (0..rows.len() as u32).rev().collect();
            let start = Slots::<f32>::random(&data.cpu_shape(), rows.len() + 1, 0);
            let (mut want, mut want_state) =
                (Vec::new(), start.state.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
            let (mut from, len) = (0, data.cpu_shape().state_len());
            for (&rows, &slot) in rows.iter().zip(&slot) {
                let state = &mut want_state[slot as usize * len..(slot as usize + 1) * len];
                want.extend(data.rows(from, from + rows).oracle(state));
                from += rows;
            }
            for (regime, name) in [(Regime::Decode, "decode"), (Regime::Prefill, "prefill")] {
                let mut slots = start.clone();
                let y = step(&data, rows, &slot, &mut slots, regime, None, 2);
                assert_close(&format!("{name} {shape:?} {rows:?}: y"), &y, &want, 1e-5);
                assert_close(&format!("{name} {shape:?} {rows:?}: state"), &slots.state, &want_state, 1e-5);
            }
        }
    }
}

fn workers_and_neighbours<E: Element>() {
    for &shape in SHAPES {
        let rows = [3, 70, 1];
        let data = Data::random(shape, 74, 5);
        for regime in [Regime::Decode, Regime::Prefill] {
            let start = Slots::<E>::random(&data.cpu_shape(), 3, 0);
            let mut together = start.clone();
            let y = step(&data, &rows, &[2, 0, 1], &mut together, regime, None, 1);
            for workers in [2, 5] {
                let mut slots = start.clone();
                let again = step(&data, &rows, &[2, 0, 1], &mut slots, regime, None, workers);
                assert_same_bits("y with more workers", &y, &again);
                assert_same_bits("state with more workers", &together.values(), &slots.values());
            }
            let (mut alone, mut y_alone) = (start.clone(), Vec::new());
            for (part, slot) in [(0..3, 2), (3..73, 0), (73..74, 1)] {
                let data = data.rows(part.start, part.end);
                y_alone.extend(step(&data, &[part.len()], &[slot], &mut alone, regime, None, 2));
            }
            assert_same_bits("y alone", &y, &y_alone);
            assert_same_bits("state alone", &together.values(), &alone.values());
        }
    }
}

fn cuts_of_a_prefill<E: Element>() {
    for &shape in SHAPES {
        let data = Data::random(shape, 300, 7);
        let start = Slots::<E>::random(&data.cpu_shape(), 1, 0);
        let mut whole = start.clone();
        let y = step(&data, &[300], &[0], &mut whole, Regime::Prefill, None, 2);
        for cut in [64, 128, 192] {
            let (mut slots, mut pieces) = (start.clone(), Vec::new());
            for from in (0..300).step_by(cut) {
                let to = (from + cut).min(300);
                pieces.extend(step(
                    &data.rows(from, to),
                    &[to - from],
                    &[0],
                    &mut slots,
                    Regime::Prefill,
                    None,
                    2,
                ));
            }
            assert_same_bits(&format!("y in steps of {cut}"), &y, &pieces);
            assert_same_bits(&format!("state in steps of {cut}"), &whole.values(), &slots.values());
        }
    }
}

fn partial_chunks<E: Element>() {
    for &shape in SHAPES {
        let data = Data::random(shape, 64, 8);
        let start = Slots::<E>::random(&data.cpu_shape(), 1, 0);
        let whole = step(&data, &[64], &[0], &mut start.clone(), Regime::Prefill, None, 1);
        for rows in [1, 7, 8, 9, 31, 33, 63] {
            let part = step(&data.rows(0, rows), &[rows], &[0], &mut start.clone(), Regime::Prefill, None, 1);
            assert_same_bits(&format!("{rows} rows"), &part, &whole[..part.len()]);
        }
    }
}

fn steps_of_many_rows<E: Element>() {
    for &shape in SHAPES {
        let data = Data::random(shape, 9, 9);
        let mut together = Slots::<E>::random(&data.cpu_shape(), 1, 0);
        let mut one_by_one = together.clone();
        let y = step(&data, &[9], &[0], &mut together, Regime::Decode, None, 2);
        let singles: Vec<f32> = (0..9)
            .flat_map(|t| step(&data.rows(t, t + 1), &[1], &[0], &mut one_by_one, Regime::Decode, None, 2))
            .collect();
        assert_same_bits("y", &y, &singles);
        assert_same_bits("state", &together.values(), &one_by_one.values());
    }
}

fn accepted_rows<E: Element>() {
    // Also more records than one sweep applies.
    for (n, (&shape, capacity)) in SHAPES.iter().flat_map(|shape| [(shape, 4), (shape, 9)]).enumerate() {
        let mut random = Random::new(40 + n as u64);
        let first = Data::random(shape, 60, 11);
        let second = Data {
            a_log: first.a_log.clone(),
            dt_bias: first.dt_bias.clone(),
            ..Data::random(shape, 60, 12)
        };
        let truth = [first, second];
        let start = Slots::<E>::random(&truth[0].cpu_shape(), 2, capacity);
        let mut plain = start.clone();
        let want: Vec<Vec<f32>> = truth
            .iter()
            .zip([1u32, 0])
            .map(|(data, slot)| step(data, &[60], &[slot], &mut plain, Regime::Decode, None, 2))
            .collect();
        let width = shape.value_heads * shape.value_size;

        let mut slots = start.clone();
        let (mut done, mut accepted) = ([0usize; 2], [0u32; 2]);
        let mut rounds = 0;
        while done.iter().any(|&done| done < 60) {
            // For each sequence: rows that will be accepted, then drafts that turn out wrong.
            let rows: Vec<usize> =
                done.iter().map(|&done| if done < 60 { 1 + random.below(capacity) } else { 0 }).collect();
            let right: Vec<usize> = (0..2)
                .map(|b| if rows[b] == 0 { 0 } else { (1 + random.below(rows[b])).min(60 - done[b]) })
                .collect();
            let mut data = truth[0].rows(0, 0);
            for b in 0..2 {
                let wrong = Data::random(shape, rows[b] - right[b], 1000 + rounds);
                for part in [truth[b].rows(done[b], done[b] + right[b]), wrong] {
                    data.qkv.extend(part.qkv);
                    data.a.extend(part.a);
                    data.b.extend(part.b);
                }
            }
            let log = Log { accepted: &accepted, keep_open: true };
            let y = step(&data, &rows, &[1, 0], &mut slots, Regime::Decode, Some(log), 2);
            let mut from = 0;
            for b in 0..2 {
                let got = &y[from * width..(from + right[b]) * width];
                let want = &want[b][done[b] * width..(done[b] + right[b]) * width];
                assert_same_bits(&format!("{shape:?} sequence {b} at {}", done[b]), got, want);
                from += rows[b];
                done[b] += right[b];
                accepted[b] = right[b] as u32;
            }
            rounds += 1;
        }
        assert!(rounds > 10);
        // A step without rows commits the rows that were accepted last.
        let nothing = truth[0].rows(0, 0);
        let log = Log { accepted: &accepted, keep_open: false };
        step(&nothing, &[0, 0], &[1, 0], &mut slots, Regime::Decode, Some(log), 2);
        assert_same_bits("settled state", &slots.values(), &plain.values());
    }
}

fn committing_steps<E: Element>() {
    let shape = SHAPES[1];
    let data = Data::random(shape, 7, 21);
    let mut plain = Slots::<E>::random(&data.cpu_shape(), 1, 3);
    let mut slots = plain.clone();
    let want = step(&data, &[7], &[0], &mut plain, Regime::Decode, None, 1);
    let open = Log { accepted: &[0], keep_open: true };
    let commit = Log { accepted: &[3], keep_open: false };
    let mut got = step(&data.rows(0, 3), &[3], &[0], &mut slots, Regime::Decode, Some(open), 2);
    got.extend(step(&data.rows(3, 7), &[4], &[0], &mut slots, Regime::Decode, Some(commit), 2));
    assert_same_bits("y", &got, &want);
    assert_same_bits("state", &slots.values(), &plain.values());
}

fn open_steps<E: Element>() {
    let data = Data::random(SHAPES[3], 4, 22);
    let start = Slots::<E>::random(&data.cpu_shape(), 1, 4);
    let mut slots = start.clone();
    step(&data, &[4], &[0], &mut slots, Regime::Decode, Some(Log { accepted: &[0], keep_open: true }), 2);
    assert_same_bits("state", &slots.values(), &start.values());
    assert!(slots.log.iter().all(|x| x.is_finite()), "every value of the four records is written");
}

/// An f16 state has the bits of an f32 state that is rounded to f16 after each row or chunk.
#[test]
fn a_state_in_f16_is_rounded_after_each_row_or_chunk() {
    for (n, &shape) in SHAPES.iter().enumerate() {
        let mut data = Data::random(shape, 200, 60 + n as u64);
        // One value beyond the range of f16, which is kept as its end.
        let value = 2 * shape.key_heads * shape.key_size;
        let row = 150 * data.qkv_len();
        data.qkv[row + value] = 3e6;
        for (regime, rows) in [(Regime::Decode, 1), (Regime::Prefill, 64)] {
            let mut narrow = Slots::<f16>::random(&data.cpu_shape(), 1, 0);
            let mut wide = Slots { state: narrow.values(), log: Vec::new(), capacity: 0 };
            let y = step(&data, &[200], &[0], &mut narrow, regime, None, 2);
            let mut want = Vec::new();
            for from in (0..200).step_by(rows) {
                let part = data.rows(from, (from + rows).min(200));
                let rows = part.a.len() / shape.value_heads;
                want.extend(step(&part, &[rows], &[0], &mut wide, regime, None, 2));
                wide.state.iter_mut().for_each(|x| *x = f16::of(*x).value());
            }
            assert_same_bits(&format!("{shape:?}: y"), &y, &want);
            assert_same_bits(&format!("{shape:?}: state"), &narrow.values(), &wide.state);
            assert!(narrow.values().iter().all(|x| x.is_finite()));
        }
    }
}

/// Rounding errors do not accumulate, because decays shrink them.
#[test]
fn drift_over_640_tokens_stays_at_rounding_level() {
    let shape = Shape { key_heads: 1, value_heads: 2, key_size: 128, value_size: 96 };
    let mut data = Data::random(shape, 640, 31);
    data.a.iter_mut().for_each(|a| *a -= 4.0);
    let mut state = vec![0.0; data.cpu_shape().state_len()];
    let want = data.oracle(&mut state);
    for regime in [Regime::Decode, Regime::Prefill] {
        let mut slots = Slots { state: vec![0.0; state.len()], log: Vec::new(), capacity: 0 };
        let y = step(&data, &[640], &[0], &mut slots, regime, None, 2);
        let last = want.len() - 2 * 96;
        assert_close("last row after 640 tokens", &y[last..], &want[last..], 5e-6);
        assert_close("state after 640 tokens", &slots.state, &state, 5e-6);
    }
}

/// One token that forgets everything, then slow decays: differences of the summed logarithms must keep their digits.
#[test]
fn a_chunk_survives_strong_decays() {
    let shape = Shape { key_heads: 1, value_heads: 2, key_size: 48, value_size: 32 };
    let mut data = Data::random(shape, 64, 32);
    data.a_log.fill(2.5);
    for (i, a) in data.a.iter_mut().enumerate() {
        *a = if i % 20 < 10 { 40.0 } else { -9.0 };
    }
    let mut state = vec![0.25; data.cpu_shape().state_len()];
    let mut slots = Slots { state: vec![0.25; state.len()], log: Vec::new(), capacity: 0 };
    let want = data.oracle(&mut state);
    let y = step(&data, &[64], &[0], &mut slots, Regime::Prefill, None, 1);
    assert_close("y", &y, &want, 1e-5);
    assert_close("state", &slots.state, &state, 1e-5);
}
