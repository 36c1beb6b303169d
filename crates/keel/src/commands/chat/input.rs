//! Parses the input: turns and commands.

/// Commands, their arguments, and their descriptions.
pub const COMMANDS: [(&str, &str, &str); 14] = [
    ("/help", "", "this list"),
    ("/system", "[TEXT]", "what the model is told before the first turn; without a text, shows it"),
    (
        "/set",
        "[NAME VALUE]",
        "temperature, top-p, top-k, min-p, seed, max-tokens, repetition-penalty; without, shows them",
    ),
    (
        "/image",
        "FILE",
        "shows the model a picture with the next turn; keel chat --images loads its vision tower",
    ),
    ("/retry", "", "answers the last turn anew, with another seed"),
    ("/undo", "", "forgets the last turn and its answer"),
    ("/reset", "", "forgets the conversation"),
    ("/save", "FILE", "writes the conversation as JSON"),
    ("/load", "FILE", "goes on with a conversation that was saved"),
    ("/memory", "", "planned, allocated and needed memory"),
    ("/speculation", "", "what drafts came to"),
    ("/exit", "", "ends, as Ctrl-D does"),
    ("/quit", "", "the same"),
    ("\"\"\"", "", "begins and ends a turn of several lines; a pasted text may have several, too"),
];

/// Begins and ends a turn of several lines.
const FENCE: &str = "\"\"\"";

/// The meaning of an input.
#[derive(Debug, PartialEq)]
pub enum Input<'a> {
    Nothing,
    Say(&'a str),
    Help,
    System(&'a str),
    Set(&'a str),
    Image(&'a str),
    Retry,
    Undo,
    Reset,
    Save(&'a str),
    Load(&'a str),
    Memory,
    Speculation,
    Exit,
    Unknown(&'a str),
}

impl Input<'_> {
    pub fn parse(line: &str) -> Input<'_> {
        let line = line.trim();
        if let Some(text) = line.strip_prefix(FENCE) {
            let text = text.strip_suffix(FENCE).unwrap_or(text).trim_matches('\n');
            return if text.trim().is_empty() { Input::Nothing } else { Input::Say(text) };
        }
        // A turn may begin with a path or a comment. So a command must be a single line whose first word has the form
        // of a name.
        let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        match (command, rest) {
            ("", _) => Input::Nothing,
            ("/help" | "/?", "") => Input::Help,
            ("/system", text) => Input::System(text),
            ("/set", text) => Input::Set(text),
            ("/image", file) => Input::Image(file),
            ("/retry", "") => Input::Retry,
            ("/undo", "") => Input::Undo,
            ("/reset" | "/clear", "") => Input::Reset,
            ("/save", file) => Input::Save(file),
            ("/load", file) => Input::Load(file),
            ("/memory", "") => Input::Memory,
            ("/speculation", "") => Input::Speculation,
            ("/exit" | "/quit" | "/bye", "") => Input::Exit,
            (name, _) if is_name(name) => Input::Unknown(line),
            _ => Input::Say(line),
        }
    }
}

/// Whether a word has the form of a command.
fn is_name(word: &str) -> bool {
    word.strip_prefix('/').is_some_and(|name| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c == '-' || c == '?')
    })
}

/// Whether a turn of several lines was begun and not ended.
pub fn is_open(text: &str) -> bool {
    let text = text.trim();
    text.strip_prefix(FENCE).is_some_and(|rest| rest.len() < FENCE.len() || !rest.ends_with(FENCE))
}

/// The help text, one command per line.
pub fn help() -> String {
    let line = |(name, what, does): &(&str, &str, &str)| format!("{:<22}{does}\n", format!("{name} {what}"));
    COMMANDS.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_commands_or_turns() {
        assert_eq!(Input::parse(" hi /reset\n"), Input::Say("hi /reset"));
        assert_eq!(Input::parse("/reset\r\n"), Input::Reset);
        assert_eq!(Input::parse("  \n"), Input::Nothing);
        assert_eq!(Input::parse("/set top-p 0.5"), Input::Set("top-p 0.5"));
        assert_eq!(Input::parse("/system  Be kind. "), Input::System("Be kind."));
        assert_eq!(Input::parse("/save a b.json"), Input::Save("a b.json"));
        assert_eq!(Input::parse("/sing"), Input::Unknown("/sing"));
        assert_eq!(Input::parse("/reset now"), Input::Unknown("/reset now"));
        assert_eq!(Input::parse("/usr/bin is what?"), Input::Say("/usr/bin is what?"));
    }

    #[test]
    fn a_fence_holds_several_lines() {
        assert!(is_open("\"\"\"") && is_open("\"\"\"a\nb") && is_open("\"\"\"a\"\""));
        assert!(!is_open("\"\"\"a\nb\"\"\"") && !is_open("a \"\"\"") && !is_open("\"\"\"\"\"\""));
        assert_eq!(Input::parse("\"\"\"\na\n/reset\n\"\"\"\n"), Input::Say("a\n/reset"));
        assert_eq!(Input::parse("\"\"\"\"\"\""), Input::Nothing);
    }

    #[test]
    fn every_command_of_the_help_is_understood() {
        for (name, _, _) in COMMANDS.iter().filter(|(name, ..)| name.starts_with('/')) {
            assert!(!matches!(Input::parse(name), Input::Unknown(_) | Input::Say(_)), "{name}");
            assert!(help().contains(name));
        }
    }
}
