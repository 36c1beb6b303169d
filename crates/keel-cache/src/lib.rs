//! What a sequence remembers: KV pages, recurrent slots, delta log, checkpoints.
