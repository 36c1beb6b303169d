//! Checkpoint formats and quantisation codecs, memory-mapped.
