//! Drives `keel chat` on a terminal as a person would: editing, completion, history, paste, several lines, Ctrl-C.

#![cfg(target_os = "linux")]

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::Value;

/// The editor writes this at the start of a line. It turns on the marking of pastes.
const ASKS: &str = "\u{1b}[?2004h";
const PATIENCE: Duration = Duration::from_secs(60);

/// `keel chat` on a terminal that the program `script` creates.
struct Terminal {
    child: Child,
    keys: ChildStdin,
    screen: Receiver<Vec<u8>>,
    /// All output so far.
    shown: String,
    /// Position in `shown` from which the next [`Terminal::wait_for`] searches.
    seen: usize,
}

impl Terminal {
    fn chat(home: &Path, flags: &str) -> Terminal {
        // The shell prints the exit status, because `script` itself does not always return it.
        let command =
            format!("trap : INT; {} chat {flags}; echo \"ended with $?\"", env!("CARGO_BIN_EXE_keel"));
        let mut child = Command::new("script")
            .args(["--quiet", "--command", &command, "/dev/null"])
            .env("SHELL", "/bin/sh")
            .env("XDG_STATE_HOME", home)
            .env("KEEL_DEVICE", "cpu")
            .env("TERM", "xterm")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("script (util-linux) runs");
        let keys = child.stdin.take().expect("piped");
        let mut output = child.stdout.take().expect("piped");
        let (sender, screen) = channel();
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut piece) {
                if sender.send(piece[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        Terminal { child, keys, screen, shown: String::new(), seen: 0 }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).and_then(|()| self.keys.flush()).expect("the terminal is there");
    }

    /// Waits until `text` is shown after the text of the previous wait.
    fn wait_for(&mut self, text: &str) {
        let start = Instant::now();
        loop {
            if let Some(at) = self.shown[self.seen..].find(text) {
                self.seen += at + text.len();
                return;
            }
            match self.screen.recv_timeout(PATIENCE.saturating_sub(start.elapsed())) {
                Ok(piece) => self.shown += &String::from_utf8_lossy(&piece),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    panic!("{text:?} was not shown; the screen: {:?}", self.shown)
                }
            }
        }
    }

    /// Waits until the editor asks for a line. Keys that are pressed while an answer is written are not for the next
    /// line.
    fn ready(&mut self) {
        self.wait_for(ASKS);
    }

    /// Types a command that prints nothing, and waits for the next line.
    fn command(&mut self, line: &str) {
        self.press(&format!("{line}\r"));
        self.ready();
    }

    fn end(mut self) {
        self.press("/exit\r");
        self.wait_for("ended with 0");
        self.child.wait().expect("it ends");
    }
}

fn messages(file: &Path) -> Vec<(String, String)> {
    let text = std::fs::read_to_string(file).expect("it was saved");
    let saved: Value = serde_json::from_str(&text).expect("JSON");
    let word = |message: &Value, key: &str| message[key].as_str().expect("text").to_string();
    let messages = saved["messages"].as_array().expect("messages").iter();
    messages.map(|message| (word(message, "role"), word(message, "content"))).collect()
}

#[test]
fn lines_are_edited_completed_remembered_and_pasted() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let saved = home.path().join("talk.json");
    let mut chat = Terminal::chat(home.path(), "--temp 0 -n 24");
    chat.ready();
    // Moves two places left, deletes a wrong letter, and inserts the right one.
    chat.press("/hxlp\x1b[D\x1b[D\x7fe\r");
    chat.wait_for("answers the last turn anew");
    chat.ready();
    chat.press("/mem\t\r");
    chat.wait_for("checkpoints");
    chat.ready();
    chat.press("\x1b[A\r");
    chat.wait_for("checkpoints");
    chat.ready();
    chat.press("\x1b[200~Tell me a story\nabout a dog.\x1b[201~\r");
    chat.wait_for("about a dog.");
    chat.ready();
    chat.press("\"\"\"What did\r");
    chat.press("the cat do?\"\"\"\r");
    chat.wait_for("the cat do?");
    chat.ready();
    chat.press(&format!("/save {}\r", saved.display()));
    chat.wait_for("saved as");
    let talk = messages(&saved);
    let said: Vec<&str> =
        talk.iter().filter(|(role, _)| role == "user").map(|(_, text)| text.as_str()).collect();
    assert_eq!(said, ["Tell me a story\nabout a dog.", "What did\nthe cat do?"]);
    assert_eq!(talk.len(), 4);
    chat.ready();
    chat.command("/undo");
    chat.command("/system Be a cat.");
    chat.press(&format!("/save {}\r", saved.display()));
    chat.wait_for("saved as");
    chat.ready();
    let undone = messages(&saved);
    assert_eq!(undone[0], ("system".into(), "Be a cat.".into()));
    assert_eq!(undone[1..], talk[..2]);
    chat.command("/reset");
    chat.press(&format!("/load {}\r", saved.display()));
    chat.wait_for("3 messages of");
    chat.ready();
    chat.end();

    let history = std::fs::read_to_string(home.path().join("keel/chat_history")).expect("it is kept");
    assert!(history.contains("/memory") && history.contains("about a dog."), "{history}");
    let mut next = Terminal::chat(home.path(), "--temp 0 -n 24");
    next.ready();
    next.press("\x1b[A\x1b[A\r");
    next.wait_for("messages of");
    next.ready();
    next.end();
}

#[test]
fn ctrl_c_stops_the_answer_and_keeps_the_chat() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let saved = home.path().join("talk.json");
    let mut chat = Terminal::chat(home.path(), "--temp 0 -n 3500 --ignore-eos");
    chat.ready();
    chat.press("Tell me a story about a dog.\r");
    chat.wait_for("about a dog.");
    chat.wait_for("dog");
    chat.press("\x03");
    chat.wait_for("(stopped");
    chat.ready();
    // Ctrl-C while a line is edited drops that line.
    chat.press("half a line\x03");
    chat.wait_for("/exit ends");
    chat.ready();
    chat.command("/set max-tokens 8");
    chat.press("And then?\r");
    chat.wait_for("And then?");
    chat.ready();
    chat.press(&format!("/save {}\r", saved.display()));
    chat.wait_for("saved as");
    chat.ready();
    let talk = messages(&saved);
    let roles: Vec<&str> = talk.iter().map(|(role, _)| role.as_str()).collect();
    assert_eq!(roles, ["user", "assistant", "user", "assistant"]);
    assert!(!talk[1].1.is_empty() && talk[1].1.len() < 8000, "it was stopped: {}", talk[1].1);
    // The prompt's progress bar was erased.
    let last_bar = chat.shown.rfind("tokens");
    assert!(last_bar.is_none_or(|at| at < chat.shown.len() - 40), "{:?}", chat.shown);
    chat.end();
}

#[test]
fn the_last_turn_is_answered_anew() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let saved = home.path().join("talk.json");
    let mut chat = Terminal::chat(home.path(), "--temp 1.5 --seed 1 -n 16");
    chat.ready();
    let mut keep = |line: &str, what: &str| {
        chat.press(&format!("{line}\r"));
        chat.wait_for(what);
        chat.ready();
        chat.press(&format!("/save {}\r", saved.display()));
        chat.wait_for("saved as");
        chat.ready();
        messages(&saved)
    };
    let first = keep("Tell me a story about a dog.", "about a dog.");
    let again = [keep("/retry", "/retry"), keep("/retry", "/retry")];
    for anew in &again {
        assert_eq!((anew.len(), &anew[0]), (2, &first[0]), "the last answer alone is another");
    }
    assert!(again.iter().any(|anew| anew[1] != first[1]), "each has a seed of its own: {first:?}");
    chat.end();
}
