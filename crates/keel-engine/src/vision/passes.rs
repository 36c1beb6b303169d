//! The passes of a tower: numbers of patches from a short list, and the pieces of each pass.
//!
//! A picture may have any number of patches. A pass takes the next larger number of the list; its padding rows belong
//! to no sequence, so they write no keys and no row sees them. Rows are padded little where they cost much.
//!
//! A pass is cut between blocks, so that no piece costs more than a chunk of a prompt. Within a block all patches see
//! each other. So the bound is that of the chunk or that of one block, whichever is larger.

use std::ops::Range;

use keel_models::HybridConfig;
use keel_models::vision::{TowerKind, VisionConfig};

use super::VisionOptions;

/// Entries of the list in an octave, on a backend whose programs cost little and on one that compiles and captures
/// them.
const PER_OCTAVE: usize = 8;
const PER_OCTAVE_COARSE: usize = 4;
/// The least distance of two entries.
const STEP_MIN: usize = 16;

/// The numbers of patches that passes are prepared for, and where each is cut.
#[derive(Clone, Debug)]
pub(crate) struct Passes {
    /// Ascending.
    patches: Vec<usize>,
    /// Products of numbers that a piece may cost.
    products_max: u64,
    config: VisionConfig,
}

impl Passes {
    /// `is_coarse` says that a program costs much before its first run.
    pub fn new(
        config: &VisionConfig,
        text: &HybridConfig,
        options: VisionOptions,
        is_coarse: bool,
    ) -> Passes {
        let block = config.block_side().pow(2);
        let patches = match config.kind {
            // One size.
            TowerKind::Siglip { .. } => vec![config.grid_side().pow(2)],
            TowerKind::Qwen { .. } => {
                list(options.patches.next_multiple_of(block).max(block), block, is_coarse)
            }
        };
        let products_max = text.products_per_token().saturating_mul(options.piece_tokens as u64);
        Passes { patches, products_max, config: config.clone() }
    }

    /// The numbers of patches, ascending.
    pub fn patches(&self) -> &[usize] {
        &self.patches
    }

    /// Patches of the largest picture.
    pub fn patches_max(&self) -> usize {
        self.patches.last().copied().unwrap_or(0)
    }

    /// The number in the list for a picture of `patches`, if it is not too large.
    pub fn fit(&self, patches: usize) -> Option<usize> {
        self.patches.get(self.patches.partition_point(|&entry| entry < patches)).copied()
    }

    /// The blocks of each piece of a pass over `patches` patches.
    pub fn pieces(&self, patches: usize) -> Vec<Range<usize>> {
        let mut pieces: Vec<Range<usize>> = Vec::new();
        let mut sum = 0u64;
        for (i, products) in self.config.products_per_block(patches).into_iter().enumerate() {
            sum = sum.saturating_add(products);
            match pieces.last_mut() {
                Some(piece) if sum <= self.products_max => piece.end = i + 1,
                _ => {
                    pieces.push(i..i + 1);
                    sum = products;
                }
            }
        }
        pieces
    }

    /// Whether a pass has several pieces.
    pub fn are_cut(&self) -> bool {
        self.pieces(self.patches_max()).len() > 1
    }

    /// The list as text.
    pub fn lines(&self) -> Vec<String> {
        let numbers = self.patches.iter().map(|&patches| match self.pieces(patches).len() {
            1 => patches.to_string(),
            pieces => format!("{patches} ({pieces} pieces)"),
        });
        let programs: usize = self.patches.iter().map(|&patches| self.pieces(patches).len()).sum();
        vec![
            format!("patches of a picture: {}", numbers.collect::<Vec<_>>().join(" ")),
            format!("programs of the tower: {programs}"),
        ]
    }
}

/// The list up to `most`, in multiples of `block`.
fn list(most: usize, block: usize, is_coarse: bool) -> Vec<usize> {
    let per_octave = if is_coarse { PER_OCTAVE_COARSE } else { PER_OCTAVE };
    let next = |n: &usize| {
        let octave = 1usize << n.max(&1).ilog2();
        let step = (octave / per_octave).max(STEP_MIN).next_multiple_of(block);
        Some(n + step)
    };
    let mut list: Vec<usize> = std::iter::successors(next(&0), next).take_while(|&n| n < most).collect();
    list.push(most);
    list
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The tower of the published 4B model, and that model's text part, at the default size of a server's pictures.
    #[test]
    fn a_piece_costs_no_more_than_a_chunk_of_a_prompt_or_than_one_block() {
        let config = json!({"model_type": "qwen3_5", "image_token_id": 5, "video_token_id": 6,
            "vision_start_token_id": 7, "vision_end_token_id": 8, "num_hidden_layers": 32, "vocab_size": 1000,
            "hidden_size": 2560, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
            "intermediate_size": 9216, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
            "vision_config": {"depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096,
                "num_position_embeddings": 2304, "out_hidden_size": 2560, "patch_size": 16}});
        let text = keel_models::read_config(&config).expect("sound");
        let tower = keel_models::vision::read_vision(&config).expect("sound").expect("it sees");
        let of = |tokens: usize, patches: usize| {
            let options = VisionOptions { patches, pictures: 1, piece_tokens: tokens };
            Passes::new(&tower, &text, options, false)
        };
        // 3.6 billion products a token; 2.1 million million for a picture of 1,024 by 1,024.
        assert_eq!(text.products_per_token() / 100_000_000, 36);
        assert_eq!(of(512, 4096).pieces(4096).len(), 2);
        assert_eq!(of(VisionOptions::WHOLE, 4096).pieces(4096).len(), 1);
        for tokens in [1, 64, 512] {
            let passes = of(tokens, 16384);
            for &patches in passes.patches() {
                let blocks = tower.products_per_block(patches);
                let largest = blocks.iter().copied().max().expect("blocks");
                let pieces = passes.pieces(patches);
                let ends: Vec<usize> = pieces.iter().map(|piece| piece.end).collect();
                assert!(
                    pieces
                        .iter()
                        .map(|piece| piece.start)
                        .eq([0].into_iter().chain(ends.clone()).take(ends.len()))
                );
                assert_eq!(ends.last(), Some(&24));
                for piece in pieces {
                    let products: u64 = blocks[piece].iter().sum();
                    assert!(
                        products <= (text.products_per_token() * tokens as u64).max(largest),
                        "{patches}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_list_is_short_and_holds_every_picture() {
        for (is_coarse, length, waste) in [(false, 48, 8), (true, 28, 4)] {
            let list = list(4096, 4, is_coarse);
            assert!(list.is_sorted() && list.len() <= length, "{list:?}");
            for patches in (4..=4096).step_by(4) {
                let padded = list[list.partition_point(|&n| n < patches)];
                assert!(
                    padded >= patches && padded - patches < STEP_MIN.max(patches.div_ceil(waste)),
                    "{patches}: {padded}"
                );
            }
        }
        assert_eq!(list(10, 1, false), [10]);
        assert_eq!(list(63, 9, true), [18, 36, 54, 63]);
    }
}
