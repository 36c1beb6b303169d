//! Names of models on the hub.

use std::fmt;

use anyhow::{Result, bail};

/// The default branch.
pub const MAIN: &str = "main";

/// `owner/name`, `owner/name@revision`, `owner/name:PICK` or `owner/name@revision:PICK`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubName {
    /// The model's owner.
    pub owner: String,
    /// The model's name.
    pub name: String,
    /// A branch, a tag or a commit; `None` is the branch `main`.
    pub revision: Option<String>,
    /// Selects one of several GGUF files: a coding such as `Q4_K_M`, or a file's name.
    pub pick: Option<String>,
}

impl HubName {
    /// Whether a text has the form of a name. Revision and pick are not checked.
    pub fn looks_like(text: &str) -> bool {
        let end = text.find(['@', ':']).unwrap_or(text.len());
        text[..end].split_once('/').is_some_and(|(owner, name)| is_part(owner) && is_part(name))
    }

    /// Parses a name.
    ///
    /// # Errors
    /// A part of the name is not allowed.
    pub fn parse(text: &str) -> Result<HubName> {
        if !HubName::looks_like(text) {
            bail!(
                "{text} is not the name of a model on the hub: these are owner/name, owner/name@revision or \
                 owner/name:PICK, such as Qwen/Qwen3.5-0.8B or owner/name-GGUF:Q4_K_M"
            );
        }
        let (text_before_pick, pick) = match text.split_once(':') {
            Some((before, pick)) => (before, Some(pick)),
            None => (text, None),
        };
        let (base, revision) = match text_before_pick.split_once('@') {
            Some((base, revision)) => (base, Some(revision)),
            None => (text_before_pick, None),
        };
        if let Some(revision) = revision.filter(|revision| !is_revision(revision)) {
            bail!("{text}: {revision:?} after the @ is not the name of a branch, a tag or a commit");
        }
        if let Some(pick) = pick.filter(|pick| !is_part(pick)) {
            bail!(
                "{text}: {pick:?} after the colon is not a coding such as Q4_K_M, nor the name of a GGUF file"
            );
        }
        let Some((owner, name)) = base.split_once('/') else { bail!("{text} has no owner") };
        Ok(HubName {
            owner: owner.into(),
            name: name.into(),
            revision: revision.map(str::to_string),
            pick: pick.map(str::to_string),
        })
    }

    /// `owner/name`.
    pub fn repository(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    /// The branch, tag or commit.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(MAIN)
    }

    /// The revision, if it is a commit.
    pub fn commit(&self) -> Option<&str> {
        self.revision.as_deref().filter(|revision| is_commit(revision))
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repository())?;
        self.revision.as_ref().map_or(Ok(()), |revision| write!(f, "@{revision}"))?;
        self.pick.as_ref().map_or(Ok(()), |pick| write!(f, ":{pick}"))
    }
}

fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || "-_.".contains(c)
}

/// Whether a text has no slash and is safe as a file name.
pub fn is_part(part: &str) -> bool {
    !part.is_empty() && part.len() <= 96 && !part.starts_with('.') && part.chars().all(is_plain)
}

/// Whether a text can be a revision. Branches may contain slashes: `refs/pr/1`.
fn is_revision(revision: &str) -> bool {
    revision.len() <= 200 && revision.split('/').all(is_part)
}

/// Whether a text is the full hash of a commit.
pub fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.chars().all(|c| c.is_ascii_digit() || ('a'..='f').contains(&c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_an_owner_and_a_name() {
        for name in ["Qwen/Qwen3.5-0.8B", "a/b", "o_1/x-y.z", "a/b@main", "a/b:Q4_K_M", "a/b@x:y"] {
            assert!(HubName::looks_like(name), "{name}");
        }
        for path in ["", "a", "a/", "/a", "a/b/c", "./a", "../a", "a/.b", "a b/c", "~/m", "a@b/c", "C:/m"] {
            assert!(!HubName::looks_like(path), "{path}");
        }
    }

    #[test]
    fn revision_and_pick_are_parts_of_a_name() {
        let parts = |text: &str| {
            let name = HubName::parse(text).expect(text);
            assert_eq!(name.to_string(), text);
            (name.repository(), name.revision().to_string(), name.pick)
        };
        let pick = Some("Q4_K_M".to_string());
        assert_eq!(parts("a/b"), ("a/b".into(), "main".into(), None));
        assert_eq!(parts("a/b@v1.0"), ("a/b".into(), "v1.0".into(), None));
        assert_eq!(parts("a/b@refs/pr/1"), ("a/b".into(), "refs/pr/1".into(), None));
        assert_eq!(parts("a/b:Q4_K_M"), ("a/b".into(), "main".into(), pick.clone()));
        assert_eq!(parts("a/b@v1:Q4_K_M"), ("a/b".into(), "v1".into(), pick));
        let commit = "0123456789abcdef0123456789abcdef01234567";
        assert_eq!(HubName::parse(&format!("a/b@{commit}")).expect("a name").commit(), Some(commit));
    }

    #[test]
    fn what_could_leave_the_cache_is_refused() {
        for text in
            ["a/b@", "a/b@../x", "a/b@x//y", "a/b:", "a/b:../x", "a/b:x/y", "a/b@x y", "a/b:Q4:K", "a"]
        {
            assert!(HubName::parse(text).is_err(), "{text}");
        }
    }
}
