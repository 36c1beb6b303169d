//! Parses answers and compiles grammars. The smoke tests and the fuzz targets share this module.

use std::sync::LazyLock;

use keel_text::{
    AnswerForm, AnswerParser, AnswerPart, GrammarFactory, GrammarSource, ReasoningMarkers, TextError,
    TextFiles, Tokenizer,
};
use serde_json::{Map, Value, json};

/// A tokenizer with a byte-level vocabulary.
const TOKENIZER: &[u8] = include_bytes!("../assets/byte_level/tokenizer.json");
const TOKENIZER_CONFIG: &[u8] = include_bytes!("../assets/byte_level/tokenizer_config.json");

/// The parts of an answer, which may be cut off. Adjacent parts of one kind are joined.
fn parts(form: &AnswerForm, pieces: &[&str], cut: bool) -> Vec<AnswerPart> {
    let mut parser = AnswerParser::new(form.clone());
    let mut parts = Vec::new();
    pieces.iter().for_each(|piece| parser.push(piece, &mut parts));
    if cut {
        parser.cut_off(&mut parts)
    } else {
        parser.finish(&mut parts)
    }
    let mut joined: Vec<AnswerPart> = Vec::new();
    for part in parts {
        match (joined.last_mut(), part) {
            (Some(AnswerPart::Text(all)), AnswerPart::Text(more))
            | (Some(AnswerPart::Reasoning(all)), AnswerPart::Reasoning(more)) => all.push_str(&more),
            (_, part) => joined.push(part),
        }
    }
    joined
}

/// Parses an answer, whole and in pieces. The first byte selects the parts that it may have. Returns whether it calls a
/// tool.
///
/// # Panics
/// - If the pieces give other parts than the whole.
/// - If a call names a tool that was not offered.
/// - If the parts have more text than the answer.
/// - If a JSON object that is no call becomes one where it is cut off.
#[allow(dead_code)] // each target uses its part
pub fn exercise_answer(data: &[u8]) -> bool {
    let Some((&kind, text)) = data.split_first() else { return false };
    let text = String::from_utf8_lossy(text);
    let string = json!({"name": "f", "parameters": {"properties": {"x": {"type": "string"}, "y": {"type": "integer"}}}});
    let tools =
        if kind & 1 == 0 { vec![] } else { vec![json!({"function": string}), json!({"name": "get"})] };
    let begun = if kind & 16 == 0 { "<think>" } else { "[THINK]" };
    let form = AnswerForm {
        reasoning: kind & 2 != 0,
        begins_in_reasoning: ReasoningMarkers::begun_at_end(begun).filter(|_| kind & 4 != 0),
        tools,
        marked_calls: kind & 8 != 0,
        joins_texts: kind & 32 != 0,
    };
    let whole = parts(&form, &[&text], false);
    let cut = parts(&form, &[&text], true);
    let step = 1 + usize::from(kind >> 3);
    let chars: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let cuts: Vec<usize> = chars.iter().copied().step_by(step).chain([text.len()]).collect();
    let pieces: Vec<&str> = cuts.windows(2).map(|cut| &text[cut[0]..cut[1]]).collect();
    assert_eq!(parts(&form, &pieces, false), whole, "pieces of {step} characters");
    assert_eq!(parts(&form, &pieces, true), cut, "cut off, in pieces of {step} characters");
    let calls = [&whole, &cut].map(|parts| count_calls(parts, &text, kind));
    // A string of a JSON object only mentions a call, also if it is cut off.
    let is_object = text.starts_with('{') && serde_json::from_str::<Map<String, Value>>(&text).is_ok();
    if is_object && calls[0] == 0 && kind & (4 | 8) == 0 {
        let begin = &text[..chars[usize::from(kind) * chars.len() / 256]];
        assert_eq!(count_calls(&parts(&form, &[begin], true), begin, kind), 0, "cut off after {begin}");
    }
    calls[0] > 0
}

/// Checks the parts of an answer and returns the number of calls.
fn count_calls(parts: &[AnswerPart], answer: &str, kind: u8) -> usize {
    let (mut bytes, mut calls) = (0, 0);
    for part in parts {
        match part {
            AnswerPart::Text(text) | AnswerPart::Reasoning(text) => bytes += text.len(),
            AnswerPart::ToolCall { name, arguments } => {
                assert!(kind & 1 == 1 && (name == "f" || name == "get"), "{name} was not offered");
                let arguments: Value = serde_json::from_str(arguments).expect("arguments are JSON");
                assert!(arguments.is_object());
                calls += 1;
            }
        }
    }
    assert!(bytes <= answer.len(), "{bytes} bytes of {}", answer.len());
    calls
}

static GRAMMARS: LazyLock<(GrammarFactory, usize)> = LazyLock::new(|| {
    let files = TextFiles::in_memory(TOKENIZER).with_tokenizer_config(TOKENIZER_CONFIG);
    let tokenizer = Tokenizer::new(&files).expect("it is right");
    (GrammarFactory::new(&files, &tokenizer).expect("its vocabulary is bytes"), tokenizer.vocab_size())
});

/// Compiles a grammar and follows it for some tokens. The first byte selects whether the rest is a schema, a Lark
/// grammar or a regular expression. Returns whether it compiles.
///
/// # Panics
/// If a panic of a library was caught, or a token that may come is refused.
#[allow(dead_code)] // each target uses its part
pub fn exercise_grammar(data: &[u8]) -> bool {
    let Some((&kind, text)) = data.split_first() else { return false };
    let text = String::from_utf8_lossy(text).into_owned();
    let source = match kind % 3 {
        0 => match serde_json::from_str(&text) {
            Ok(schema) => GrammarSource::JsonSchema(schema),
            Err(_) => return false,
        },
        1 => GrammarSource::Lark(text),
        _ => GrammarSource::Regex(text),
    };
    let (factory, vocab) = &*GRAMMARS;
    let mut state = match factory.start(&source) {
        Ok(state) => state,
        Err(TextError::Panicked { op, reason }) => panic!("{op}: caught a panic: {reason}"),
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return false;
        }
    };
    for step in 0..6 {
        let mut logits = vec![0.0f32; *vocab];
        if state.is_complete() || state.mask(&mut logits).is_err() {
            break;
        }
        let allowed: Vec<usize> = (0..*vocab).filter(|&id| logits[id] == 0.0).collect();
        let Some(&token) = allowed.get((step * 31 + usize::from(kind)) % allowed.len().max(1)) else { break };
        state.accept(token as u32).expect("the mask said that it may come");
    }
    true
}
