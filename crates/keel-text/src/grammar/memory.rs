//! The memory of compiled grammars, from counts of the library.
//!
//! The library counts lengths. Buffers that grow by doubling hold up to twice as much, and hash tables have free
//! places. So the factors here are upper bounds, which `keel-server/tests/request_memory` compares with the heap.

use std::collections::HashSet;

use llguidance::TokenParser;
use llguidance::earley::{CGrammar, ParserStats};

use super::refused;
use crate::TextError;

/// Bound on a grammar's lexemes: its literals and patterns. Each state of the lexer has a bit for each of them, so they
/// bound the memory that one mask can add.
const LEXEMES: usize = 8192;

/// A state at its start, whatever its grammar.
const STATE_BYTES_BASE: usize = 16 << 10;
/// Per byte of the source: literals and names, in the lexer and in the rules.
const PER_SOURCE_BYTE: usize = 8;
/// Of a lexeme, in the lexer and in the rules.
const LEXEME_BYTES: usize = 640;
/// Per byte that the library counts of the expressions as written. Lexer and rules each have a copy, with hashes and
/// weights that are not counted.
const PER_EXPRESSION_BYTE: usize = 6;
/// Of a symbol of the rules, and of a symbol's occurrence in a rule.
const SYMBOL_BYTES: usize = 512;
const ELEMENT_BYTES: usize = 64;

/// Per byte that the library counts of a lexer's tables.
const PER_TABLE_BYTE: usize = 2;
/// Of a lexer's state, in addition to the bytes that the library counts and to the bits of its lexemes.
const LEXER_STATE_BYTES: usize = 96;
/// Per unit of the lexer's work: classes of characters and symbolic derivatives, which the library does not count.
const FUEL_BYTES: usize = 8;
/// Masks that exist at once: the library's copy, the first one, the current one and the one that is being computed.
const MASKS: usize = 4;

/// Of an item in a row of the parser, with its argument and its part of the stack of grammars.
const ITEM_BYTES: usize = 32;
/// Of a row, and of a byte of the text.
const ROW_BYTES: usize = 256;
const TEXT_BYTE_BYTES: usize = 48;

/// Bytes that never change: those of the rules, of the lexer's lexemes and expressions, and of masks.
///
/// # Errors
/// [`TextError::Grammar`] if the grammar has too many lexemes, or a rule that captures its text.
pub(super) fn bytes_of_grammar(parser: &TokenParser, source_bytes: usize) -> Result<usize, TextError> {
    let lexemes = parser.parser.lexer_stats().num_regexps;
    if lexemes > LEXEMES {
        let reason = format!("it has {lexemes} literals and patterns, at most {LEXEMES} are accepted");
        return Err(refused(reason));
    }
    let grammar = parser.parser.grammar();
    let expressions = grammar.lexer_spec().regex_builder.exprset().num_bytes();
    Ok(STATE_BYTES_BASE
        + source_bytes * PER_SOURCE_BYTE
        + lexemes * LEXEME_BYTES
        + expressions * PER_EXPRESSION_BYTE
        + bytes_of_rules(grammar)?
        + parser.token_env.tok_trie().vocab_size() / 8 * MASKS)
}

/// Bytes of the rules. Refuses those that capture their text. Nothing reads captures, and they may take the square of
/// the answer's length.
fn bytes_of_rules(grammar: &CGrammar) -> Result<usize, TextError> {
    let (mut open, mut seen, mut elements) = (vec![grammar.start()], HashSet::new(), 0);
    while let Some(index) = open.pop() {
        if !seen.insert(index) {
            continue;
        }
        let symbol = grammar.sym_data(index);
        if symbol.sym_flags.capture() || symbol.sym_flags.stop_capture() {
            let reason = format!("its rule {:?} captures text; remove capture and stop_capture", symbol.name);
            return Err(refused(reason));
        }
        for &rule in &symbol.rules {
            let (right_side, _, _) = grammar.rule_rhs(rule);
            // Its end, and the gap before the next rule.
            elements += right_side.len() + 2;
            open.extend(right_side);
        }
    }
    Ok(seen.len() * SYMBOL_BYTES + elements * ELEMENT_BYTES)
}

/// Bytes of the lexer's tables, and of the largest mask's items. They grow with each mask.
pub(super) fn bytes_of_tables(parser: &TokenParser) -> usize {
    let lexer = parser.parser.lexer_stats();
    lexer.num_bytes * PER_TABLE_BYTE
        + lexer.num_states * (LEXER_STATE_BYTES + lexer.num_regexps / 8)
        + lexer.total_fuel_spent * FUEL_BYTES
        + parser.max_step_stats().all_items * ITEM_BYTES
}

/// Bytes that the parser keeps of accepted tokens. Rows that were only tried count, too.
pub(super) fn bytes_of_text(accepted: &ParserStats) -> usize {
    accepted.all_items * ITEM_BYTES + accepted.rows * ROW_BYTES + accepted.definitive_bytes * TEXT_BYTE_BYTES
}
