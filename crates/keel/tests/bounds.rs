//! Files and functions are short, and lines of comments and prose are narrow, in the whole repository.

use std::fs;
use std::path::{Path, PathBuf};

const FILE_LINES_MAX: usize = 450;
const FUNCTION_LINES_MAX: usize = 80;
const KERNEL_LINES_MAX: usize = 150;
const COMMENT_COLUMNS_MAX: usize = 120;
const PROSE_COLUMNS_MAX: usize = 150;

/// Folders with files of the repository, at its top.
const FOLDERS: [&str; 7] = ["", "crates", "docs", "models", "packaging", "tools", "web"];

/// Names of folders that tools write.
const WRITTEN: [&str; 5] = ["target", "node_modules", "corpus", "artifacts", "coverage"];

/// Adds the files of a folder, and if `below` those of the folders in it.
fn list(folder: &Path, below: bool, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let entry = entry.expect("the folder is listed");
        let (name, kind) = (entry.file_name(), entry.file_type().expect("it has a type"));
        let is_own =
            !name.to_string_lossy().starts_with('.') && WRITTEN.iter().all(|written| name != *written);
        if kind.is_dir() && below && is_own {
            list(&entry.path(), below, files);
        } else if kind.is_file() {
            files.push(entry.path());
        }
    }
}

/// The bytes of the comment or the literal at the beginning of `text`; 0 if there is none.
fn literal_len(text: &[u8]) -> usize {
    let until = |from: usize, end: &[u8]| {
        let found = text[from.min(text.len())..].windows(end.len()).position(|bytes| bytes == end);
        found.map_or(text.len(), |place| from + place + end.len())
    };
    let hashes = text.iter().skip(1).take_while(|byte| **byte == b'#').count();
    match text {
        [b'/', b'/', ..] => until(2, b"\n"),
        [b'/', b'*', ..] => until(2, b"*/"),
        [b'r', ..] if text.get(1 + hashes) == Some(&b'"') => {
            until(2 + hashes, &[&b"\""[..], &b"#".repeat(hashes)].concat())
        }
        [b'"', ..] => {
            let mut end = 1;
            while end < text.len() && text[end] != b'"' {
                end += if text[end] == b'\\' { 2 } else { 1 };
            }
            (end + 1).min(text.len())
        }
        [b'\'', b'\\', ..] => until(3, b"'"),
        // A lifetime has no second quote.
        [b'\'', _, b'\'', ..] => 3,
        [b'\'', 0x80..=0xff, ..] => until(2, b"'"),
        _ => 0,
    }
}

/// Rust or CUDA with spaces in place of comments, strings and characters. The braces that are left are those of code.
fn code_of(text: &str) -> Vec<u8> {
    let mut code = text.as_bytes().to_vec();
    let mut at = 0;
    while at < code.len() {
        let len = literal_len(&text.as_bytes()[at..]);
        code[at..at + len].iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
        at += len.max(1);
    }
    code
}

fn lines_of(code: &[u8]) -> usize {
    1 + code.iter().filter(|byte| **byte == b'\n').count()
}

/// The line and the number of lines of each function that begins with the word `start`.
fn functions(code: &[u8], start: &[u8]) -> Vec<(usize, usize)> {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let is_word = |at: usize| code[at..].starts_with(start) && (at == 0 || !is_part(code[at - 1]));
    let each = (0..code.len()).filter(|at| is_word(*at)).filter_map(|at| {
        // Extents of arrays in the signature have semicolons, too.
        let mut depth = 0;
        let open = code[at..].iter().position(|byte| {
            depth += i32::from(matches!(byte, b'(' | b'[')) - i32::from(matches!(byte, b')' | b']'));
            depth == 0 && matches!(byte, b'{' | b';')
        })?;
        let (body, mut depth) = (&code[at + open..], 0);
        let close = body.iter().position(|byte| {
            depth += i32::from(*byte == b'{') - i32::from(*byte == b'}');
            depth == 0
        });
        let end = at + open + close.unwrap_or(body.len() - 1);
        (body[0] == b'{').then(|| (lines_of(&code[..at]), lines_of(&code[at..=end])))
    });
    each.collect()
}

/// A message for each bound that a file exceeds.
fn offences(name: &str, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut expect = |line: usize, what: &str, size: usize, most: usize| {
        if size > most {
            found.push(format!("{name}:{line}: {what} {size}, at most {most}"));
        }
    };
    let extension = name.rsplit('.').next().unwrap_or_default();
    if matches!(extension, "rs" | "cu" | "cuh" | "ts" | "tsx" | "mjs" | "py" | "sh") {
        expect(1, "lines of the file", text.lines().count(), FILE_LINES_MAX);
        for (i, line) in text.lines().enumerate().filter(|(_, line)| line.trim_start().starts_with("//")) {
            expect(i + 1, "columns of the comment", line.chars().count(), COMMENT_COLUMNS_MAX);
        }
    }
    let (start, most) = match extension {
        "rs" => (&b"fn "[..], FUNCTION_LINES_MAX),
        "cu" | "cuh" => (&b"__global__ "[..], KERNEL_LINES_MAX),
        "md" => {
            let mut in_code = false;
            for (i, line) in text.lines().enumerate() {
                let is_fence = line.trim_start().starts_with("```");
                in_code ^= is_fence;
                let is_prose =
                    !in_code && !is_fence && !line.trim_start().starts_with('|') && !line.contains("://");
                let columns = if is_prose { line.chars().count() } else { 0 };
                expect(i + 1, "columns of the line", columns, PROSE_COLUMNS_MAX);
            }
            return found;
        }
        _ => return found,
    };
    for (line, lines) in functions(&code_of(text), start) {
        expect(line, "lines of the function", lines, most);
    }
    found
}

#[test]
fn files_functions_and_lines_are_within_their_bounds() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let mut files = Vec::new();
    FOLDERS.iter().for_each(|folder| list(&root.join(folder), !folder.is_empty(), &mut files));
    let mut found = Vec::new();
    for extension in ["rs", "cu", "cuh", "ts", "tsx", "mjs", "py", "sh", "md"] {
        let of_kind = files.iter().filter(|file| file.extension().is_some_and(|own| own == extension));
        let texts: Vec<_> = of_kind.map(|file| (file, fs::read_to_string(file).expect("UTF-8"))).collect();
        assert!(!texts.is_empty(), "no file ends with .{extension}");
        for (file, text) in texts {
            let name = file.strip_prefix(root).unwrap_or(file).display().to_string();
            found.extend(offences(&name, &text));
        }
    }
    assert!(found.is_empty(), "{} bounds are exceeded:\n{}", found.len(), found.join("\n"));
}

#[test]
fn what_is_too_long_or_too_wide_is_found() {
    let file = |lines: usize| "x\n".repeat(lines);
    assert_eq!(offences("a.py", &file(450)), [""; 0]);
    assert_eq!(offences("a.py", &file(451)), ["a.py:1: lines of the file 451, at most 450"]);

    // None of these braces is one of code.
    let tricky = r##"'}'; '\''; b'{'; 'é'; "\"}"; r#""}"#; /* } */ // }"##;
    let function =
        |start: &str, lines: usize| format!("\n{start} {{ {tricky}\n{}}}\n", "g();\n".repeat(lines - 2));
    for start in ["fn f<'a, 'b>(x: &'a [u8; 4]) -> &'b str", "pub async fn f()"] {
        assert_eq!(offences("a.rs", &function(start, 80)), [""; 0]);
        assert_eq!(offences("a.rs", &function(start, 81)), ["a.rs:2: lines of the function 81, at most 80"]);
    }
    let declared = format!("trait T {{ fn f(x: [u8; 4]); {} }}", "\n".repeat(90));
    assert_eq!(offences("a.rs", &declared), [""; 0], "a declaration has no body");
    let kernel = |lines| function("extern \"C\" __global__ void f(\n#include \"f.params\"\n)", lines);
    assert_eq!(offences("a.cu", &kernel(148)), [""; 0]);
    assert_eq!(offences("a.cu", &kernel(149)), ["a.cu:2: lines of the function 151, at most 150"]);

    let comment = |columns: usize| format!("    //! {}é", "x".repeat(columns - 9));
    assert_eq!(offences("a.ts", &comment(120)), [""; 0]);
    assert_eq!(offences("a.ts", &comment(121)), ["a.ts:1: columns of the comment 121, at most 120"]);
    let wide = "x".repeat(151);
    assert_eq!(offences("a.md", &format!("| {wide} |\n```\n{wide}\n```\n<https://{wide}>\n")), [""; 0]);
    assert_eq!(offences("a.md", &format!("x\n{wide}")), ["a.md:2: columns of the line 151, at most 150"]);
}
