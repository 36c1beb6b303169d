//! Model definitions, one file per model_type.
