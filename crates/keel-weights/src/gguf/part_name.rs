//! The names of the files that a model is split into: `NAME-00002-of-00003.gguf`.

/// The name or path of one part of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartName<'a> {
    /// The name before the numbers.
    pub stem: &'a str,
    /// Which part it is, from 1.
    pub number: u32,
    /// The number of parts.
    pub total: u32,
}

impl<'a> PartName<'a> {
    /// Reads a name or path. `None` if it is not that of a part.
    pub fn parse(name: &'a str) -> Option<PartName<'a>> {
        let (rest, total) = numbered(name.strip_suffix(".gguf")?)?;
        let (stem, number) = numbered(rest.strip_suffix("-of")?)?;
        (1..=total).contains(&number).then_some(PartName { stem, number, total })
    }

    /// The name of part `number` of the same model.
    pub fn of_part(self, number: u32) -> String {
        format!("{}-{number:05}-of-{:05}.gguf", self.stem, self.total)
    }

    /// The names of all parts.
    pub fn all(self) -> impl Iterator<Item = String> {
        (1..=self.total).map(move |number| self.of_part(number))
    }
}

/// Splits `NAME-00002` into its name and its number.
fn numbered(text: &str) -> Option<(&str, u32)> {
    let (name, digits) = text.rsplit_once('-')?;
    let is_number = digits.len() == 5 && digits.bytes().all(|byte| byte.is_ascii_digit());
    Some((name, digits.parse().ok().filter(|_| is_number)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts_are_read_and_others_are_not() {
        let part = PartName::parse("x/m-Q8_0-00002-of-00003.gguf").unwrap();
        assert_eq!(part, PartName { stem: "x/m-Q8_0", number: 2, total: 3 });
        let all: Vec<String> = part.all().collect();
        assert_eq!((all.len(), &*all[2]), (3, "x/m-Q8_0-00003-of-00003.gguf"));
        for other in [
            "m.gguf",
            "m-00001-of-00003",
            "m-1-of-3.gguf",
            "m-00004-of-00003.gguf",
            "m-00000-of-00003.gguf",
            "m-00001-00003.gguf",
            "m-+0001-of-00003.gguf",
            "00001-of-00003.gguf",
        ] {
            assert_eq!(PartName::parse(other), None, "{other}");
        }
    }
}
