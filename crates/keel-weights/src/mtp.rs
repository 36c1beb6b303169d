//! Names of the parameters of the multi-token-prediction head.

/// Prefixes of the head's parameters in checkpoints: Hugging Face's, and those of converters that move the head next to
/// or into the language model. Code that looks for the head in a checkpoint, or names it for another program, uses this
/// list. Parameters under the names of Hugging Face, such as those of a GGUF file, have the first prefix alone.
pub const MTP_ROOTS: [&str; 4] = ["mtp.", "language_model.mtp.", "model.mtp.", "model.language_model.mtp."];

/// A name without the prefix of the multi-token-prediction head; `None` if the parameter does not belong to the head.
pub fn part_of_mtp_head(name: &str) -> Option<&str> {
    MTP_ROOTS.iter().find_map(|root| name.strip_prefix(root))
}
