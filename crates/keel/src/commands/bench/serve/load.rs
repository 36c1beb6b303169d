//! The requests of a load, and when they are sent.

use std::str::FromStr;

use anyhow::{Context, Error, Result, bail};
use keel_array::random::SplitMix64;
use serde::Deserialize;

/// A number, or a range to draw from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    min: usize,
    max: usize,
}

impl FromStr for Lengths {
    type Err = Error;

    fn from_str(text: &str) -> Result<Lengths> {
        let (min, max) = text.split_once('-').unwrap_or((text, text));
        let number = |text: &str| text.parse::<usize>().context("expected N or MIN-MAX, for example 100-300");
        let (min, max) = (number(min)?, number(max)?);
        if min == 0 || max < min || max > 1 << 20 {
            bail!("expected 1 to {} and MIN not above MAX", 1 << 20);
        }
        Ok(Lengths { min, max })
    }
}

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// Arrival in seconds after the start.
    pub at_s: f64,
    pub prompt: String,
    pub max_tokens: usize,
}

/// All requests, in order of arrival.
#[derive(Debug, PartialEq)]
pub struct Load {
    pub requests: Vec<Planned>,
}

/// A line of a file: a request without its arrival.
#[derive(Deserialize)]
struct Line {
    prompt: String,
    max_tokens: usize,
}

const WORDS: [&str; 32] = [
    "the", "dog", "ran", "over", "a", "hill", "and", "saw", "little", "bird", "that", "sang", "in", "tree",
    "then", "went", "home", "with", "mother", "who", "made", "soup", "for", "all", "friends", "sun", "was",
    "warm", "they", "played", "until", "night",
];

/// Random lengths, words and times.
struct Random(SplitMix64);

impl Random {
    fn within(&mut self, lengths: Lengths) -> usize {
        lengths.min + (self.0.bits() % (lengths.max - lengths.min + 1) as u64) as usize
    }

    fn words(&mut self, count: usize) -> String {
        let words: Vec<&str> =
            (0..count).map(|_| WORDS[(self.0.bits() % WORDS.len() as u64) as usize]).collect();
        words.join(" ")
    }

    /// Draws the seconds to the next arrival of a Poisson process with `rate` arrivals per second.
    fn gap(&mut self, rate: f64) -> f64 {
        let uniform = (self.0.bits() >> 11) as f64 / (1u64 << 53) as f64;
        -(1.0 - uniform).ln() / rate
    }
}

impl Load {
    /// Random prompts and answers with these lengths.
    pub fn random(
        count: usize,
        prompt: Lengths,
        answer: Lengths,
        shared: usize,
        rate: f64,
        seed: u64,
    ) -> Load {
        let mut random = Random(SplitMix64(seed));
        let prefix = random.words(shared);
        let requests = (0..count).map(|_| {
            let own = random.within(prompt);
            let prompt = format!("{prefix} {}", random.words(own)).trim_start().to_string();
            Line { prompt, max_tokens: random.within(answer) }
        });
        let requests: Vec<_> = requests.collect();
        Load::arriving(requests, rate, random)
    }

    /// Reads the requests of a file.
    ///
    /// # Errors
    /// A line is not valid. The message has its number.
    pub fn parse(text: &str, rate: f64, seed: u64) -> Result<Load> {
        let line = |(i, text): (usize, &str)| {
            serde_json::from_str::<Line>(text).with_context(|| format!("line {}", i + 1))
        };
        let lines = text.lines().enumerate().filter(|(_, text)| !text.trim().is_empty());
        let requests = lines.map(line).collect::<Result<Vec<_>>>()?;
        if requests.is_empty() {
            bail!("the file has no requests");
        }
        Ok(Load::arriving(requests, rate, Random(SplitMix64(seed))))
    }

    fn arriving(requests: Vec<Line>, rate: f64, mut random: Random) -> Load {
        let mut at_s = 0.0;
        let planned = requests.into_iter().map(|Line { prompt, max_tokens }| {
            if rate > 0.0 {
                at_s += random.gap(rate);
            }
            Planned { at_s, prompt, max_tokens }
        });
        Load { requests: planned.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(text: &str) -> Lengths {
        text.parse().expect("right")
    }

    #[test]
    fn lengths_are_numbers_or_ranges() {
        assert_eq!(lengths("7"), Lengths { min: 7, max: 7 });
        assert_eq!(lengths("7-9"), Lengths { min: 7, max: 9 });
        for wrong in ["", "0", "9-7", "a", "-3", "99999999"] {
            assert!(wrong.parse::<Lengths>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_seed_makes_a_load_that_arrives_at_its_rate() {
        let load = |seed| Load::random(2000, lengths("5-9"), lengths("3"), 4, 50.0, seed);
        assert_eq!(load(1), load(1));
        assert_ne!(load(1), load(2));
        let requests = load(1).requests;
        let end_s = requests.last().expect("some").at_s;
        assert!((35.0..45.0).contains(&end_s), "2000 at 50 a second: {end_s}");
        let first: Vec<&str> = requests[0].prompt.split(' ').collect();
        assert!((9..=13).contains(&first.len()) && requests[1].prompt.starts_with(&first[..4].join(" ")));
    }

    #[test]
    fn damaged_files_are_errors_and_never_panics() {
        const FILE: &str = "{\"prompt\": \"a \\u00e9\", \"max_tokens\": 3}\n{\"max_tokens\": 40, \"prompt\": \"b\", \"x\": [1]}\n";
        const WORDS: [&str; 8] =
            ["null", "-1", "1e99", "18446744073709551616", "\n", "{}", "[[", "\"prompt\""];
        let mut read = 0;
        for case in 0..5000 {
            let mut random = keel_testkit::random::Random::new(case);
            let mut file: Vec<char> = FILE.chars().collect();
            for _ in 0..=random.below(3) {
                let at = random.below(file.len());
                let end = (at + random.below(9)).min(file.len());
                let word = WORDS[random.below(WORDS.len())];
                drop(file.splice(at..end, word.chars().take(random.below(2) * word.len())));
            }
            let file: String = file.into_iter().collect();
            if let Ok(load) = Load::parse(&file, 5.0, case) {
                assert!(load.requests.len() <= file.lines().count());
                assert!(load.requests.iter().map(|r| r.prompt.len()).sum::<usize>() <= file.len());
                read += 1;
            }
        }
        assert!((100..4500).contains(&read), "{read} were read");
    }

    #[test]
    fn a_file_names_its_wrong_line() {
        let good = "{\"prompt\": \"a\", \"max_tokens\": 3}\n\n";
        assert_eq!(Load::parse(good, 0.0, 1).expect("right").requests.len(), 1);
        let error = Load::parse(&format!("{good}{{}}"), 0.0, 1).expect_err("wrong");
        assert!(format!("{error:#}").contains("line 3"), "{error:#}");
        assert!(Load::parse("", 0.0, 1).is_err());
    }
}
