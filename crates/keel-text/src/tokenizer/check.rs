//! Refuses settings of the steps around the model that the library accepts and then panics on.

use serde_json::Value;
use tokenizers::normalizers::Precompiled;
use tokenizers::utils::SysRegex;

/// Checks that a decoder is an object, and that no step of it strips the end of a token.
///
/// The library panics on a decoder that is not an object. Its strip step panics on a token that is shorter than the
/// number of characters to strip from the end. No language model's tokenizer strips the end.
pub(super) fn decoder(json: Option<&Value>) -> Result<(), String> {
    let Some(json) = json else { return Ok(()) };
    check_growth("decoder", json)?;
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

/// Checks that a pre-tokenizer with pieces of fixed length has a valid length.
pub(super) fn pre_tokenizer(json: Option<&Value>) -> Result<(), String> {
    let Some(json) = json else { return Ok(()) };
    check_growth("pre_tokenizer", json)?;
    each_step(json, &mut |step| {
        if step.get("length").and_then(Value::as_u64) == Some(0) {
            return Err("pre_tokenizer: length is 0, expected at least 1".to_string());
        }
        Ok(())
    })
}

/// Largest growth of a text by the steps, in bytes per byte. Published tokenizers stay below 4.
const GROWTH_MAX: usize = 64;

/// Checks that a sequence of steps that replace text does not multiply it. Each step may be harmless alone, but 12
/// steps that write ten characters for one fill any memory. The library has no limit of its own.
fn check_growth(part: &str, json: &Value) -> Result<(), String> {
    let mut growth = 1usize;
    each_step(json, &mut |step| {
        let text = |key: &str| step.get(key).and_then(Value::as_str).unwrap_or("");
        let factor = if is_type(step, "Replace") {
            let (bytes, may_be_empty) = pattern_bytes(step);
            text("content").len().div_ceil(bytes) + usize::from(may_be_empty)
        } else {
            // A step may prepend text to each piece, and a piece may be one byte. Or it replaces one character by
            // another.
            1 + text("prepend").len().max(text("replacement").len().saturating_sub(1))
        };
        growth = growth.saturating_mul(factor.max(1));
        if growth > GROWTH_MAX {
            return Err(format!("{part}: its steps could make a text more than {GROWTH_MAX} times as long"));
        }
        Ok(())
    })
}

/// Returns the fewest bytes (at least 1) that a pattern matches, and whether it also matches an empty text. The latter
/// is found by trying the pattern.
fn pattern_bytes(step: &Value) -> (usize, bool) {
    let Some(regex) = step.pointer("/pattern/Regex").and_then(Value::as_str) else {
        let text = step.pointer("/pattern/String").and_then(Value::as_str).unwrap_or("");
        return (text.len().max(1), text.is_empty());
    };
    let is_empty = |text: &str| {
        SysRegex::new(regex).is_ok_and(|regex| regex.find_iter(text).any(|(start, end)| start == end))
    };
    (1, ["", "a", " a1.\n"].into_iter().any(is_empty))
}

/// Checks that the table of a precompiled normaliser decodes. The library panics if it does not.
pub(super) fn normalizer(json: Option<&Value>) -> Result<(), String> {
    let Some(json) = json else { return Ok(()) };
    check_growth("normalizer", json)?;
    each_step(json, &mut |step| {
        if is_type(step, "Precompiled") {
            let text = step.to_string();
            serde_json::from_str::<Precompiled>(&text)
                .map_err(|err| format!("normalizer: not valid: {err}"))?;
        }
        Ok(())
    })
}

/// Checks that the template for one sequence uses only that sequence and special tokens that it defines.
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

/// Whether `json`, or a step nested in it, has this type.
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

/// Calls `visit` on a step and on the steps nested in it. The JSON parser bounds the nesting.
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
    fn steps_that_multiply_a_text_are_refused() {
        let replace = |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        let tenfold = || replace(json!({"String": "a"}), "aaaaaaaaaa");
        let sequence = |steps: Vec<Value>| json!({"type": "Sequence", "normalizers": steps});
        assert_eq!(normalizer(Some(&sequence(vec![tenfold()]))), Ok(()));
        let error = normalizer(Some(&sequence(vec![tenfold(), tenfold()]))).unwrap_err();
        assert!(error.contains("64 times as long"), "{error}");
        let regex = replace(json!({"Regex": ""}), &"x".repeat(100));
        assert!(normalizer(Some(&regex)).is_err());
        let doubling = || replace(json!({"Regex": "x*"}), "y");
        assert!(normalizer(Some(&sequence((0..7).map(|_| doubling()).collect()))).is_err());
        let tidying = || replace(json!({"Regex": " {2,}"}), " ");
        assert_eq!(normalizer(Some(&sequence((0..30).map(|_| tidying()).collect()))), Ok(()));
        let usual = sequence(vec![
            json!({"type": "Prepend", "prepend": "\u{2581}"}),
            replace(json!({"String": " "}), "\u{2581}"),
        ]);
        assert_eq!(normalizer(Some(&usual)), Ok(()));
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
