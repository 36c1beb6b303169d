use super::row_starts;
use half::f16;
use keel_cpu::kernels::attention::{
    Attention, KvElement, KvPages, KvPagesMut, PAGE, PageTable, attention_decode, attention_prefill,
    decode_workspace_len, kv_write, prefill_workspace_len,
};
use keel_cpu::kernels::rows::{Batch, Rows, RowsMut};
use keel_cpu::pool::ThreadPool;
use keel_cpu::shared_slice::SharedMut;
use keel_testkit::cases::attention::{BATCHES, SHAPES};
use keel_testkit::compare::{assert_close, assert_same_bits};
use keel_testkit::naive;
use keel_testkit::naive::attention::Shape;
use keel_testkit::random::Random;

#[derive(Clone, Copy, Debug)]
enum Regime {
    Decode,
    Prefill,
}

/// Sequences with their keys and values in pages scattered over a pool that was NaN before.
struct Pool<E> {
    shape: Shape,
    keys: Vec<E>,
    values: Vec<E>,
    table: Vec<u32>,
    stride: usize,
}

impl<E: KvElement + From<f16>> Pool<E> {
    /// Pages of sequences with room for `capacity` tokens each.
    fn new(shape: Shape, sequences: usize, capacity: usize) -> Pool<E> {
        let stride = capacity.div_ceil(PAGE);
        let len = sequences * stride * shape.kv_heads * PAGE * shape.head_dim;
        // Pages in a shuffled order: 7 has no common factor with any number of pages used here.
        let pages = sequences * stride;
        let table = (0..pages).map(|i| (i * 7 % pages) as u32).collect::<Vec<_>>();
        assert!((0..pages as u32).all(|page| table.contains(&page)));
        Pool {
            shape,
            keys: vec![E::from(f16::NAN); len],
            values: vec![E::from(f16::NAN); len],
            table,
            stride,
        }
    }

    /// Writes rows `[T, KV, D]` of sequence `b` from position `first` on.
    fn write(&mut self, b: usize, first: usize, k: &[f32], v: &[f32], workers: usize) {
        let width = self.shape.kv_heads * self.shape.head_dim;
        let pages = KvPagesMut {
            keys: SharedMut::new(&mut self.keys),
            values: SharedMut::new(&mut self.values),
            kv_heads: self.shape.kv_heads,
            head_dim: self.shape.head_dim,
        };
        let table = PageTable { pages: &self.table[b * self.stride..], stride: self.stride };
        let (row_start, position) = ([0, (k.len() / width) as u32], [first as u32]);
        let batch = Batch { row_start: &row_start, position: &position };
        ThreadPool::new(workers).run(|worker| {
            kv_write(Rows::whole(k, width), Rows::whole(v, width), batch, table, pages, worker)
        });
    }

    /// Attention of rows `q` of sequences `from..` with (first position, rows) each.
    fn attend(
        &self,
        q: &[f32],
        from: usize,
        batch: &[(usize, usize)],
        regime: Regime,
        workers: usize,
    ) -> Vec<f32> {
        let Shape { heads, kv_heads, head_dim, scale, window } = self.shape;
        let row_start = row_starts(batch.iter().map(|&(_, rows)| rows));
        let position: Vec<u32> = batch.iter().map(|&(first, _)| first as u32).collect();
        let mut y = vec![f32::NAN; q.len()];
        let rows = q.len() / (heads * head_dim);
        let mut workspace = match regime {
            Regime::Decode => vec![f32::NAN; decode_workspace_len(rows, heads, head_dim, self.stride)],
            Regime::Prefill => vec![f32::NAN; prefill_workspace_len(workers, head_dim)],
        };
        let attention = Attention {
            q: Rows::whole(q, heads * head_dim),
            batch: Batch { row_start: &row_start, position: &position },
            table: PageTable { pages: &self.table[from * self.stride..], stride: self.stride },
            pages: KvPages { keys: &self.keys, values: &self.values, kv_heads, head_dim },
            scale,
            window,
            until: None,
            y: RowsMut::whole(SharedMut::new(&mut y), heads * head_dim),
        };
        let workspace = SharedMut::new(&mut workspace);
        ThreadPool::new(workers).run(|worker| match regime {
            Regime::Decode => attention_decode(&attention, workspace, worker),
            Regime::Prefill => attention_prefill(&attention, workspace, worker),
        });
        y
    }
}

/// Random values that f16 can hold, so that both page types have the same oracle.
fn halves(random: &mut Random, len: usize) -> Vec<f32> {
    (0..len).map(|_| f16::from_f32(random.uniform(-1.5, 1.5)).to_f32()).collect()
}

/// Queries of a batch, and the pool with all tokens that they may see.
fn filled<E: KvElement + From<f16>>(shape: Shape, batch: &[(usize, usize)]) -> (Pool<E>, Vec<f32>, Vec<f64>) {
    let mut random = Random::new(77);
    let capacity = batch.iter().map(|&(first, rows)| first + rows).max().unwrap();
    let mut pool = Pool::new(shape, batch.len(), capacity);
    let (mut queries, mut want) = (Vec::new(), Vec::new());
    for (b, &(first, rows)) in batch.iter().enumerate() {
        let len = (first + rows) * shape.kv_heads * shape.head_dim;
        let (k, v) = (halves(&mut random, len), halves(&mut random, len));
        let q = random.uniforms(rows * shape.heads * shape.head_dim, -1.0, 1.0);
        pool.write(b, 0, &k, &v, 2);
        want.extend(naive::attention::attention(shape, &q, first, &k, &v));
        queries.extend(q);
    }
    (pool, queries, want)
}

fn follows_the_oracle<E: KvElement + From<f16>>() {
    for &shape in SHAPES {
        for batch in BATCHES {
            let (pool, q, want) = filled::<E>(shape, batch);
            for regime in [Regime::Decode, Regime::Prefill] {
                let y = pool.attend(&q, 0, batch, regime, 2);
                assert_close(&format!("{regime:?} {shape:?} {batch:?}"), &y, &want, 1e-5);
            }
        }
    }
}

#[test]
fn both_regimes_follow_the_oracle_on_f32_pages() {
    follows_the_oracle::<f32>();
}

#[test]
fn both_regimes_follow_the_oracle_on_f16_pages() {
    follows_the_oracle::<f16>();
}

#[test]
fn workers_and_neighbours_do_not_change_a_bit() {
    for &shape in SHAPES {
        let batch = BATCHES[1];
        let (pool, q, _) = filled::<f16>(shape, batch);
        for regime in [Regime::Decode, Regime::Prefill] {
            let together = pool.attend(&q, 0, batch, regime, 1);
            for workers in [2, 3] {
                assert_same_bits("workers", &together, &pool.attend(&q, 0, batch, regime, workers));
            }
            let (mut alone, mut done) = (Vec::new(), 0);
            for (b, &(first, rows)) in batch.iter().enumerate() {
                let len = rows * shape.heads * shape.head_dim;
                alone.extend(pool.attend(&q[done..done + len], b, &[(first, rows)], regime, 2));
                done += len;
            }
            assert_same_bits("alone", &together, &alone);
        }
    }
}

#[test]
fn a_row_does_not_depend_on_the_rows_of_its_call() {
    for &shape in SHAPES {
        // Around the end of a page, where a row sees one page and the next row two.
        let (first, rows) = (193, 130);
        let (pool, q, _) = filled::<f16>(shape, &[(first, rows)]);
        let width = shape.heads * shape.head_dim;
        for regime in [Regime::Decode, Regime::Prefill] {
            let whole = pool.attend(&q, 0, &[(first, rows)], regime, 2);
            for cut in [1, 2, 5, 64] {
                let (mut pieces, mut from) = (Vec::new(), 0);
                while from < rows {
                    let part = cut.min(rows - from);
                    let q = &q[from * width..(from + part) * width];
                    pieces.extend(pool.attend(q, 0, &[(first + from, part)], regime, 2));
                    from += part;
                }
                assert_same_bits(&format!("{regime:?} {shape:?} in calls of {cut}"), &whole, &pieces);
            }
        }
    }
}

#[test]
fn what_lies_past_a_row_never_reaches_it() {
    for &shape in SHAPES {
        let batch = [(100, 30)];
        let (mut pool, q, _) = filled::<f32>(shape, &batch);
        let before = [Regime::Decode, Regime::Prefill].map(|regime| pool.attend(&q, 0, &batch, regime, 2));
        // Tokens 130.. were never written and are NaN; now they are written.
        let next = vec![3.5; 100 * shape.kv_heads * shape.head_dim];
        pool.write(0, 130, &next, &next, 1);
        let after = [Regime::Decode, Regime::Prefill].map(|regime| pool.attend(&q, 0, &batch, regime, 2));
        for (before, after) in before.iter().zip(&after) {
            assert!(before.iter().all(|x| x.is_finite()));
            assert_same_bits("later tokens", before, after);
        }
    }
}

#[test]
fn pages_that_left_the_window_are_not_looked_up() {
    let shape = Shape { window: Some(70), ..SHAPES[1] };
    let batch = [(600, 3)];
    let (mut pool, q, want) = filled::<f32>(shape, &batch);
    // Rows 600.. see positions 531..: pages 0 and 1 have been given back.
    pool.table[..2].fill(u32::MAX);
    for regime in [Regime::Decode, Regime::Prefill] {
        assert_close("windowed", &pool.attend(&q, 0, &batch, regime, 2), &want, 1e-5);
    }
}

/// A narrow window: some rows of a call no longer see the first page, and others do not see the second page yet.
#[test]
fn rows_far_apart_share_a_call_under_a_narrow_window() {
    let shape = Shape { window: Some(3), ..SHAPES[1] };
    let batch = [(100, 300)];
    let (pool, q, want) = filled::<f32>(shape, &batch);
    for regime in [Regime::Decode, Regime::Prefill] {
        assert_close("narrow", &pool.attend(&q, 0, &batch, regime, 2), &want, 1e-5);
    }
}

#[test]
fn writing_token_by_token_leaves_the_same_pages_as_all_at_once() {
    let shape = SHAPES[2];
    let width = shape.kv_heads * shape.head_dim;
    let mut random = Random::new(5);
    let (k, v) = (random.uniforms(300 * width, -1.0, 1.0), random.uniforms(300 * width, -1.0, 1.0));
    let (mut whole, mut single) = (Pool::<f16>::new(shape, 1, 300), Pool::<f16>::new(shape, 1, 300));
    whole.write(0, 0, &k, &v, 3);
    for t in 0..300 {
        single.write(0, t, &k[t * width..(t + 1) * width], &v[t * width..(t + 1) * width], 2);
    }
    let bits = |x: &[f16]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(bits(&whole.keys) == bits(&single.keys) && bits(&whole.values) == bits(&single.values));
}
