//! Checks on the steps around the model, for settings that the library accepts and then panics on.

use serde_json::Value;
use tokenizers::normalizers::Precompiled;

/// A decoder must be an object, and no step of it may strip the end of a token.
///
/// The library panics on a decoder that is no object. Its strip step panics on a token shorter than the
/// number of characters to strip from the end; no language model's tokenizer uses that.
pub(super) fn decoder(json: Option<&Value>) -> Result<(), String> {
    let Some(json) = json else { return Ok(()) };
    each_step(json, &mut |step| {
        if !step.is_object() {
            return Err(format!("decoder: {step} is not an object"));
        }
        if is_type(step, "Strip") && step.get("stop").and_then(Value::as_u64) != Some(0) {
            return Err("decoder: a Strip step with stop other than 0 is not supported".to_string());
        }
        Ok(())
    })
}

/// A pre-tokenizer that cuts into pieces of fixed length needs a length.
pub(super) fn pre_tokenizer(json: Option<&Value>) -> Result<(), String> {
    let Some(json) = json else { return Ok(()) };
    each_step(json, &mut |step| {
        if step.get("length").and_then(Value::as_u64) == Some(0) {
            return Err("pre_tokenizer: length is 0, expected at least 1".to_string());
        }
        Ok(())
    })
}

/// A precompiled normaliser's table must decode; the library panics on one that does not.
pub(super) fn normalizer(json: Option<&Value>) -> Result<(), String> {
    let Some(json) = json else { return Ok(()) };
    each_step(json, &mut |step| {
        if is_type(step, "Precompiled") {
            let text = step.to_string();
            serde_json::from_str::<Precompiled>(&text)
                .map_err(|err| format!("normalizer: not valid: {err}"))?;
        }
        Ok(())
    })
}

/// The template for one sequence must use only that sequence, and special tokens that it defines.
pub(super) fn post_processor(json: Option<&Value>) -> Result<(), String> {
    let Some(json) = json else { return Ok(()) };
    each_step(json, &mut |step| {
        let pieces = step.get("single").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        for piece in pieces {
            if piece.pointer("/Sequence/id").is_some_and(|id| id != "A") {
                return Err(format!("post_processor: single uses {piece}, but there is only sequence A"));
            }
            if let Some(id) = piece.pointer("/SpecialToken/id").and_then(Value::as_str)
                && step.get("special_tokens").and_then(|tokens| tokens.get(id)).is_none()
            {
                return Err(format!(
                    "post_processor: single uses {id:?}, which special_tokens does not define"
                ));
            }
        }
        Ok(())
    })
}

/// Whether `json` or a step nested in it has this type.
pub(super) fn contains_type(json: &Value, kind: &str) -> bool {
    let mut found = false;
    let walked = each_step(json, &mut |step| {
        found |= is_type(step, kind);
        Ok(())
    });
    walked.is_ok() && found
}

fn is_type(step: &Value, kind: &str) -> bool {
    step.get("type").is_some_and(|found| found == kind)
}

/// Calls `visit` on a step and on the steps of sequences inside it. The JSON parser bounds the nesting.
fn each_step(step: &Value, visit: &mut dyn FnMut(&Value) -> Result<(), String>) -> Result<(), String> {
    visit(step)?;
    for list in ["normalizers", "pretokenizers", "processors", "decoders"] {
        for inner in step.get(list).and_then(Value::as_array).into_iter().flatten() {
            each_step(inner, visit)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn decoders_that_would_panic_are_refused() {
        assert!(decoder(Some(&json!(5))).is_err());
        let strip = |stop: u64| json!({"type": "Strip", "content": " ", "start": 1, "stop": stop});
        let nested = |stop| json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, strip(stop)]});
        assert_eq!(decoder(Some(&nested(0))), Ok(()));
        assert!(decoder(Some(&nested(1))).unwrap_err().contains("Strip"));
    }

    #[test]
    fn a_fixed_length_of_zero_is_refused() {
        let fixed =
            |n: u64| json!({"type": "Sequence", "pretokenizers": [{"type": "FixedLength", "length": n}]});
        assert_eq!(pre_tokenizer(Some(&fixed(3))), Ok(()));
        assert_eq!(
            pre_tokenizer(Some(&fixed(0))).unwrap_err(),
            "pre_tokenizer: length is 0, expected at least 1"
        );
    }

    #[test]
    fn a_broken_precompiled_table_is_refused() {
        let table = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"});
        assert!(normalizer(Some(&table)).unwrap_err().starts_with("normalizer: not valid"));
    }

    #[test]
    fn templates_may_use_only_what_is_there() {
        let template = |id: &str, special: &str| {
            json!({"type": "TemplateProcessing", "pair": [],
                   "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": id, "type_id": 0}}],
                   "special_tokens": {special: {"id": special, "ids": [1], "tokens": [special]}}})
        };
        assert_eq!(post_processor(Some(&template("A", "<s>"))), Ok(()));
        assert!(post_processor(Some(&template("B", "<s>"))).unwrap_err().contains("only sequence A"));
        assert!(post_processor(Some(&template("A", "</s>"))).unwrap_err().contains(r#""<s>", which"#));
    }

    #[test]
    fn types_are_found_at_any_depth() {
        let decoder = json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]});
        assert!(contains_type(&decoder, "ByteFallback"));
        assert!(!contains_type(&decoder, "ByteLevel"));
    }
}
