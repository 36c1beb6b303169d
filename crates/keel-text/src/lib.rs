//! Tokenizer, chat template and streaming detokenizer.
