//! Every page of the documentation has an example.

use std::path::Path;

const KINDS: [&str; 6] = ["struct", "enum", "fn", "type", "trait", "const"];

/// The public items of a source file that have no example in their documentation. Items of a module begin in the first
/// column; methods are on the page of their type.
fn without_example(source: &str) -> Vec<String> {
    let mut has_example = false;
    let mut bare = Vec::new();
    for line in source.lines() {
        if line.starts_with("///") {
            has_example |= line.contains("```");
            continue;
        }
        let item =
            line.strip_prefix("pub ").filter(|rest| KINDS.contains(&rest.split(' ').next().unwrap_or("")));
        if let Some(item) = item.filter(|_| !has_example) {
            bare.push(item.to_string());
        }
        // Attributes between the documentation and the item may take several lines.
        has_example &= item.is_none() && !line.is_empty();
    }
    bare
}

fn sources(folder: &Path, found: &mut Vec<std::path::PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() { sources(&path, found) } else { found.push(path) }
    }
}

#[test]
fn every_page_has_an_example() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    assert!(files.len() > 10, "{files:?}");
    for file in files {
        let bare = without_example(&std::fs::read_to_string(&file).expect("a source file"));
        // The built-in model is private; its functions are behind `ModelFiles`.
        if !file.ends_with("built_in.rs") {
            assert_eq!(bare, [""; 0], "{}: public items without an example", file.display());
        }
    }
}

#[test]
fn a_page_without_an_example_would_be_seen() {
    let source =
        "/// Text.\npub fn bare() {}\n/// ```\n/// ```\n#[inline]\npub fn shown() {}\npub struct Also;\n";
    assert_eq!(without_example(source), ["fn bare() {}", "struct Also;"]);
}
