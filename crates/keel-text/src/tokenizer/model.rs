//! The step from words to tokens.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use tokenizers::models::TrainerWrapper;
use tokenizers::{Model, ModelWrapper, Token};

use super::bpe::Bpe;

/// The model of a `tokenizer.json`.
pub(super) enum TextModel {
    /// Byte pair encoding, which nearly all checkpoints have.
    Bpe(Box<Bpe>),
    /// Any other model.
    Library(Box<ModelWrapper>),
}

impl Model for TextModel {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, text: &str) -> tokenizers::Result<Vec<Token>> {
        match self {
            TextModel::Bpe(model) => model.tokenize(text),
            TextModel::Library(model) => model.tokenize(text),
        }
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        match self {
            TextModel::Bpe(model) => model.token_to_id(token),
            TextModel::Library(model) => model.token_to_id(token),
        }
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        match self {
            TextModel::Bpe(model) => model.id_to_token(id),
            TextModel::Library(model) => model.id_to_token(id),
        }
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        match self {
            TextModel::Bpe(model) => model.get_vocab(),
            TextModel::Library(model) => model.get_vocab(),
        }
    }

    fn get_vocab_size(&self) -> usize {
        match self {
            TextModel::Bpe(model) => model.get_vocab_size(),
            TextModel::Library(model) => model.get_vocab_size(),
        }
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        match self {
            TextModel::Bpe(model) => model.save(folder, prefix),
            TextModel::Library(model) => model.save(folder, prefix),
        }
    }

    fn get_trainer(&self) -> TrainerWrapper {
        match self {
            TextModel::Bpe(model) => model.get_trainer(),
            TextModel::Library(model) => model.get_trainer(),
        }
    }
}
