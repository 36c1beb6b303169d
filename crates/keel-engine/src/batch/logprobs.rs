//! Log probabilities of drawn tokens.

/// Log probabilities at one position, before penalties, temperature and constraints.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Log probability of the token drawn.
    pub drawn: f32,
    /// The most probable tokens, most probable first.
    pub top: Vec<(u32, f32)>,
}
