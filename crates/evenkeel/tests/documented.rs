//! Every public item has an example, an example calls every public method, and every example asserts something.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

const KINDS: [&str; 6] = ["struct", "enum", "fn", "type", "trait", "const"];

/// A public item or method.
struct Item {
    /// `Model`, or `Model::open` for a method.
    name: String,
    /// The documentation, a line each, without slashes.
    docs: Vec<String>,
}

impl Item {
    /// The lines of its examples.
    fn example(&self) -> String {
        let mut is_code = false;
        let mut code = String::new();
        for line in &self.docs {
            if line.trim_start().starts_with("```") {
                is_code = !is_code;
            } else if is_code {
                code += line;
                code.push('\n');
            }
        }
        code
    }

    /// `Model::save`, if the documentation has the words ``the example of [`Model::save`]``.
    fn other_example(&self) -> Option<String> {
        let docs = self.docs.join("");
        let (_, after) = docs.split_once("the example of [`")?;
        Some(after.split_once('`')?.0.to_string())
    }
}

fn identifier(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// The type whose methods follow. Methods of a trait are documented there.
fn owner_of(line: &str) -> Option<String> {
    let rest = line.strip_prefix("impl").filter(|rest| !rest.contains(" for "))?;
    let rest = if rest.starts_with('<') { rest.split_once("> ")?.1 } else { rest.strip_prefix(' ')? };
    Some(identifier(rest))
}

/// The name of the public item or method that begins in this line. Items begin in the first column, methods after four
/// spaces.
fn name_of(line: &str, owner: Option<&str>) -> Option<String> {
    let indent = if owner.is_some() { "    pub " } else { "pub " };
    let rest = line.strip_prefix(indent)?.replacen("const fn ", "fn ", 1);
    let (kind, rest) = rest.split_once(' ')?;
    let name = KINDS.contains(&kind).then(|| identifier(rest))?;
    Some(owner.map_or_else(|| name.clone(), |owner| format!("{owner}::{name}")))
}

fn items(source: &str) -> Vec<Item> {
    let (mut items, mut docs, mut owner) = (Vec::new(), Vec::new(), None);
    for line in source.lines() {
        if let Some(text) = line.trim_start().strip_prefix("///") {
            docs.push(text.to_string());
            continue;
        }
        owner = owner_of(line).or(owner.filter(|_| line != "}"));
        if let Some(name) = name_of(line, owner.as_deref()) {
            items.push(Item { name, docs: std::mem::take(&mut docs) });
        } else if line.is_empty() || line.trim_start() == "}" {
            // Attributes between the documentation and its item may take several lines.
            docs.clear();
        }
    }
    items
}

/// Gaps in the documentation. One of three examples has to call a method: its own, that of its type, or that of the
/// item that its documentation names.
fn gaps(items: &[Item]) -> Vec<String> {
    let examples: HashMap<&str, String> =
        items.iter().map(|item| (item.name.as_str(), item.example())).collect();
    let mut gaps = Vec::new();
    for item in items {
        let own = &examples[item.name.as_str()];
        if let Some((owner, method)) = item.name.split_once("::") {
            let calls = [format!(".{method}("), format!("{owner}::{method}(")];
            let is_in = |example: &String| calls.iter().any(|call| example.contains(call));
            let other = item.other_example().and_then(|name| examples.get(name.as_str()));
            if ![Some(own), examples.get(owner), other].into_iter().flatten().any(is_in) {
                gaps.push(format!("{}: no example calls it", item.name));
            }
        } else if own.is_empty() {
            gaps.push(format!("{}: it has no example", item.name));
        }
        if !own.is_empty() && !own.contains("assert") {
            gaps.push(format!("{}: its example asserts nothing", item.name));
        }
    }
    gaps
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() { sources(&path, found) } else { found.push(path) }
    }
}

#[test]
fn every_item_and_method_is_shown() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    assert!(files.len() > 10, "{files:?}");
    // The built-in model is private; users reach it through `ModelFiles`.
    files.retain(|file| !file.ends_with("built_in.rs"));
    let read = |file: &PathBuf| items(&std::fs::read_to_string(file).expect("a source file"));
    let items: Vec<Item> = files.iter().flat_map(read).collect();
    let methods = items.iter().filter(|item| item.name.contains("::")).count();
    assert!(methods > 60, "only {methods} methods were found");
    assert_eq!(gaps(&items), [""; 0]);
}

/// The page of a crate or type that is re-exported is that of its own crate.
#[test]
fn every_re_export_is_shown() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |file: &str| std::fs::read_to_string(root.join(file)).expect("a source file");
    let lib = read("src/lib.rs");
    let crates = lib.lines().filter_map(|line| line.strip_prefix("pub use keel_")?.split_once(" as "));
    let mut crates: Vec<&str> = crates.map(|(name, _)| name).collect();
    assert_eq!(crates.len(), 8, "{crates:?}");
    crates.retain(|name| {
        let text = read(&format!("../keel-{name}/src/lib.rs"));
        let docs = text.lines().filter_map(|line| line.strip_prefix("//!")).map(str::to_string).collect();
        !Item { name: name.to_string(), docs }.example().contains(&format!("use keel_{name}::"))
    });
    assert_eq!(crates, [""; 0], "these have no example");
    let modes = items(&read("../keel-cuda/src/backend/mode.rs"));
    let determinism = modes.iter().find(|item| item.name == "Determinism").expect("it is public");
    assert!(determinism.example().contains("assert"));
}

fn gaps_of(source: &str) -> Vec<String> {
    gaps(&items(source))
}

#[test]
fn an_item_without_an_example_would_be_seen() {
    let source = "/// Text.\npub fn bare() {}\n/// ```\n/// assert!(shown());\n/// ```\n#[inline]\npub fn shown() {}\n\
                  pub struct Also;\n";
    assert_eq!(gaps_of(source), ["bare: it has no example", "Also: it has no example"]);
}

#[test]
fn an_example_without_an_assertion_would_be_seen() {
    let source = "/// ```\n/// shown();\n/// ```\npub fn shown() {}\n";
    assert_eq!(gaps_of(source), ["shown: its example asserts nothing"]);
}

#[test]
fn a_method_that_no_example_calls_would_be_seen() {
    let of_type = "/// ```\n/// assert!(T::new().is_new());\n/// ```\npub struct T;\n\nimpl<'a> T<'a> {\n";
    let methods = [
        "    pub fn new() {}\n",
        "    pub fn is_new(&self) {}\n",
        "    /// ```\n    /// assert!(t.own());\n    /// ```\n    pub const fn own(&self) {}\n",
        "    /// See the example of [`T::own`].\n    pub fn new_twin(&self) {}\n",
        "    fn private(&self) {}\n",
        "    pub fn bare(&self) {}\n",
    ];
    let source = format!("{of_type}{}}}\n", methods.concat());
    assert_eq!(gaps_of(&source), ["T::new_twin: no example calls it", "T::bare: no example calls it"]);
    let shown = source.replace("t.own()", "t.own() && t.new_twin()").replace("pub fn bare", "fn bare");
    assert_eq!(gaps_of(&shown), [""; 0]);
}
