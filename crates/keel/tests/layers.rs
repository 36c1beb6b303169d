//! Crates depend downwards only.

use std::process::Command;

use serde_json::Value;

/// Each crate with the crates that it may use, lowest first. Tests may also use all crates in the rows above, and the
/// oracles of keel-testkit.
const LAYERS: [(&str, &[&str]); 14] = [
    ("keel-array", &[]),
    ("keel-testkit", &["keel-array"]),
    ("keel-cpu", &["keel-array"]),
    ("keel-cuda", &["keel-array"]),
    ("keel-remote", &["keel-array"]),
    ("keel-weights", &["keel-array"]),
    ("keel-text", &[]),
    ("keel-vision", &[]),
    ("keel-cache", &["keel-array", "keel-weights"]),
    ("keel-models", &["keel-array", "keel-weights", "keel-cache"]),
    ("keel-engine", &["keel-array", "keel-cache", "keel-models"]),
    ("keel-server", &["keel-array", "keel-text", "keel-vision", "keel-models", "keel-engine"]),
    (
        "evenkeel",
        &[
            "keel-array",
            "keel-cpu",
            "keel-cuda",
            "keel-weights",
            "keel-text",
            "keel-cache",
            "keel-models",
            "keel-engine",
        ],
    ),
    (
        "keel",
        &[
            "evenkeel",
            "keel-array",
            "keel-cpu",
            "keel-cuda",
            "keel-remote",
            "keel-weights",
            "keel-text",
            "keel-vision",
            "keel-cache",
            "keel-models",
            "keel-engine",
            "keel-server",
        ],
    ),
];

fn row(name: &str) -> Option<usize> {
    LAYERS.iter().position(|(crate_name, _)| *crate_name == name)
}

/// Whether crate `user` may depend on `used` with this kind of dependency.
fn is_allowed(user: usize, used: &str, kind: Option<&str>) -> bool {
    let Some(used_row) = row(used) else { return true };
    let in_tests = kind == Some("dev") && (used == "keel-testkit" || used_row < user);
    LAYERS[user].1.contains(&used) || in_tests
}

#[test]
fn crates_depend_downwards_only() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline", "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .output()
        .expect("cargo runs");
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo describes the workspace");
    let packages = metadata["packages"].as_array().expect("a list");
    assert_eq!(packages.len(), LAYERS.len(), "every crate has a row here");
    for package in packages {
        let name = package["name"].as_str().expect("a name");
        let user = row(name).unwrap_or_else(|| panic!("{name} has no row here"));
        for dependency in package["dependencies"].as_array().expect("a list") {
            let used = dependency["name"].as_str().expect("a name");
            let kind = dependency["kind"].as_str();
            assert!(is_allowed(user, used, kind), "{name} must not depend on {used} ({kind:?})");
        }
    }
}

#[test]
fn an_upward_dependency_would_be_seen() {
    let user = |name| row(name).expect("listed");
    assert!(!is_allowed(user("keel-array"), "keel-cpu", None));
    assert!(!is_allowed(user("keel-cpu"), "keel-testkit", None));
    assert!(!is_allowed(user("keel-models"), "keel-engine", Some("dev")));
    assert!(!is_allowed(user("keel-server"), "keel-cpu", None), "the server takes any engine");
    assert!(!is_allowed(user("keel-engine"), "keel-server", None));
    assert!(!is_allowed(user("evenkeel"), "keel-server", None));
    assert!(is_allowed(user("keel-cpu"), "keel-testkit", Some("dev")));
    assert!(is_allowed(user("keel-engine"), "keel-cpu", Some("dev")));
}
