//! Which requests may start, and how much each sequence runs: decisions over counts alone.

use crate::PREFILL_GRID;

/// The rest of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PromptRest {
    /// Tokens to run until its end.
    pub tokens: usize,
    /// Tokens to run until the next point where the state is saved; a multiple of 64 unless it is the end.
    pub until_save_point: usize,
}

/// How many rows of a sequence the next `steps` steps run at most: each up to `step_rows` rows of its prompt, or one
/// row of its answer. `prompt` rows of the prompt are left, and `answer` rows may follow them. The answer's first row
/// is in the step after the one that ends the prompt.
pub(super) fn rows_of_steps(prompt: usize, answer: usize, steps: usize, step_rows: usize) -> usize {
    let after_prompt = steps.saturating_sub(prompt.div_ceil(step_rows));
    prompt.min(steps * step_rows) + answer.min(after_prompt)
}

/// The least share, in tokens, of a prompt whose turn it is, if the budget has them. Each cut of a prompt costs another
/// start.
const SHARE_MIN: usize = 4 * PREFILL_GRID;

/// Divides `budget` tokens among prompts, of which at most `prompts_max` run. Returns how many tokens each of them runs
/// in this step.
///
/// - Shares are equal, on the 64-token grid, and at least 256 tokens if the budget has them.
/// - Tokens that a short prompt leaves over go to the next.
/// - `turn` says which prompt comes first. The caller increments it after each step, so that no prompt waits forever.
/// - At least one prompt advances.
pub(super) fn share_prefill(
    prompts: &[PromptRest],
    budget: usize,
    turn: usize,
    prompts_max: usize,
) -> Vec<usize> {
    let mut shares = vec![0; prompts.len()];
    let mut left = budget.max(PREFILL_GRID);
    let count = prompts.len().min(prompts_max);
    for i in 0..count {
        let at = (i + turn) % prompts.len();
        let prompt = prompts[at];
        let share = (left / (count - i)).max(SHARE_MIN.min(left));
        let wanted = prompt.until_save_point.min(prompt.tokens);
        let fits = if wanted <= share { wanted } else { share / PREFILL_GRID * PREFILL_GRID };
        shares[at] = fits;
        left -= fits;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rest(tokens: usize) -> PromptRest {
        PromptRest { tokens, until_save_point: tokens }
    }

    #[test]
    fn an_answer_begins_in_the_step_after_its_prompt_ends() {
        assert_eq!(rows_of_steps(256, 9, 2, 256), 257, "the prompt ends in the first step");
        assert_eq!(rows_of_steps(257, 9, 2, 256), 257, "it ends in the second");
        assert_eq!(rows_of_steps(256, 0, 2, 256), 256, "one token is drawn, and it is not run");
        assert_eq!(rows_of_steps(1000, 9, 2, 256), 512);
        assert_eq!((rows_of_steps(0, 9, 2, 256), rows_of_steps(0, 1, 2, 256)), (2, 1));
    }

    #[test]
    fn the_budget_is_shared_on_the_grid() {
        assert_eq!(share_prefill(&[rest(1000), rest(1000)], 512, 0, 99), [256, 256]);
        assert_eq!(share_prefill(&[rest(10), rest(1000)], 512, 0, 99), [10, 448]);
        assert_eq!(share_prefill(&[rest(1000), rest(10), rest(70)], 512, 1, 99), [384, 10, 70]);
        assert_eq!(share_prefill(&[rest(1000)], 10, 0, 99), [64], "something always advances");
        assert_eq!(share_prefill(&[], 512, 3, 99), [0; 0]);
    }

    #[test]
    fn a_step_ends_where_the_state_is_saved() {
        let prompt = PromptRest { tokens: 300, until_save_point: 128 };
        assert_eq!(share_prefill(&[prompt], 512, 0, 99), [128]);
        assert_eq!(share_prefill(&[prompt], 100, 0, 99), [64]);
    }

    #[test]
    fn every_sequence_gets_a_turn() {
        let prompts = [rest(640); 9];
        let mut sums = vec![0; prompts.len()];
        for turn in 0..9 {
            let shares = share_prefill(&prompts, 256, turn, 99);
            assert_eq!(shares.iter().sum::<usize>(), 256);
            sums.iter_mut().zip(shares).for_each(|(sum, share)| *sum += share);
        }
        assert_eq!(sums, [256; 9]);
    }

    #[test]
    fn shares_never_exceed_budget_or_prompt_and_stay_on_the_grid() {
        let mut seed = 7u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
            ((seed >> 33) % below) as usize
        };
        for _ in 0..5000 {
            let prompts: Vec<PromptRest> = (0..1 + random(8))
                .map(|_| {
                    let tokens = 1 + random(2000);
                    let stop = (1 + random(30)) * PREFILL_GRID;
                    PromptRest { tokens, until_save_point: if stop < tokens { stop } else { tokens } }
                })
                .collect();
            let (budget, turn) = (random(1024), random(20));
            let most = 1 + random(9);
            let shares = share_prefill(&prompts, budget, turn, most);
            assert!(shares.iter().filter(|&&share| share > 0).count() <= most);
            assert!(shares.iter().sum::<usize>() <= budget.max(PREFILL_GRID), "{prompts:?} {budget}");
            assert!(shares.iter().any(|&share| share > 0), "{prompts:?} {budget} {turn}");
            for (share, prompt) in shares.iter().zip(&prompts) {
                assert!(*share <= prompt.until_save_point, "{prompts:?} {shares:?}");
                assert!(
                    *share == prompt.tokens || share.is_multiple_of(PREFILL_GRID),
                    "{prompts:?} {shares:?}"
                );
            }
        }
    }
}
