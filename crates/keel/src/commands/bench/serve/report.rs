//! The report of a load.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::client::Answer;
use evenkeel::human_bytes;

/// Quantiles of times in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Times {
    p50: f64,
    p90: f64,
    p99: f64,
    max: f64,
}

impl Times {
    fn of(mut seconds: Vec<f64>) -> Times {
        seconds.sort_unstable_by(f64::total_cmp);
        let at = |q: f64| {
            let index = ((seconds.len() as f64 * q).ceil() as usize).clamp(1, seconds.len().max(1)) - 1;
            seconds.get(index).copied().unwrap_or(0.0)
        };
        Times { p50: at(0.5), p90: at(0.9), p99: at(0.99), max: at(1.0) }
    }

    fn to_json(self) -> Value {
        json!({"p50": self.p50, "p90": self.p90, "p99": self.p99, "max": self.max})
    }

    fn to_text(self) -> String {
        let ms = |s: f64| format!("{:9.1}", s * 1e3);
        format!("{}{}{}{}", ms(self.p50), ms(self.p90), ms(self.p99), ms(self.max))
    }
}

/// The results of a run.
pub struct Report {
    answered: usize,
    failures: Vec<String>,
    wall_s: f64,
    prompt_tokens: usize,
    cached_tokens: usize,
    completion_tokens: usize,
    first: Times,
    between: Times,
    total: Times,
    memory: Option<Value>,
    differing: Option<usize>,
}

impl Report {
    /// Summarises the answers.
    pub fn new(
        answers: Vec<Result<Answer>>,
        wall: Duration,
        memory: Option<Value>,
        differing: Option<usize>,
    ) -> Report {
        let failures = answers.iter().filter_map(|a| a.as_ref().err()).map(|e| format!("{e:#}")).collect();
        let answers: Vec<Answer> = answers.into_iter().flatten().collect();
        let sum = |of: fn(&Answer) -> usize| answers.iter().map(of).sum();
        Report {
            answered: answers.len(),
            failures,
            wall_s: wall.as_secs_f64(),
            prompt_tokens: sum(|a| a.prompt_tokens),
            cached_tokens: sum(|a| a.cached_tokens),
            completion_tokens: sum(|a| a.completion_tokens),
            first: Times::of(answers.iter().map(|a| a.first_s).collect()),
            between: Times::of(answers.iter().flat_map(|a| a.gaps_s.iter().copied()).collect()),
            total: Times::of(answers.iter().map(|a| a.total_s).collect()),
            memory,
            differing,
        }
    }

    /// Fails if no request was answered: then the times say nothing.
    pub fn check(&self) -> Result<()> {
        ensure!(self.answered > 0, "none of {} requests was answered", self.failures.len());
        Ok(())
    }

    /// The report as one JSON object.
    pub fn to_json(&self) -> Value {
        json!({
            "answered": self.answered,
            "failed": self.failures.len(),
            "wall_s": self.wall_s,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "requests_per_second": self.answered as f64 / self.wall_s,
            "completion_tokens_per_second": self.completion_tokens as f64 / self.wall_s,
            "time_to_first_token_s": self.first.to_json(),
            "time_between_tokens_s": self.between.to_json(),
            "request_s": self.total.to_json(),
            "memory_peak": self.memory,
            "answers_that_differ_alone": self.differing,
        })
    }

    /// The report as a table.
    pub fn to_text(&self) -> String {
        let mut text = format!(
            "{} answered, {} failed in {:.1} s: {:.2} requests/s, {:.1} tokens/s\n\
             {} prompt tokens ({} of them reused), {} generated\n\n\
             ms                     p50      p90      p99      max\n\
             first token     {}\nbetween tokens  {}\nrequest         {}\n",
            self.answered,
            self.failures.len(),
            self.wall_s,
            self.answered as f64 / self.wall_s,
            self.completion_tokens as f64 / self.wall_s,
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
            self.first.to_text(),
            self.between.to_text(),
            self.total.to_text(),
        );
        if let Some(Value::Object(memory)) = &self.memory {
            let total: u64 = memory.values().filter_map(Value::as_u64).sum();
            text.push_str(&format!("\nthe server's peak: {}\n", human_bytes(total)));
        }
        match self.differing {
            Some(0) => text.push_str("every answer is the same alone\n"),
            Some(count) => text.push_str(&format!("{count} answers differ from those given alone\n")),
            None => {}
        }
        if let Some(first) = self.failures.first() {
            text.push_str(&format!("the first failure: {first}\n"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::{Report, Times};
    use anyhow::anyhow;
    use std::time::Duration;

    #[test]
    fn a_load_without_an_answer_fails() {
        let error = Report::new(vec![Err(anyhow!("refused"))], Duration::ZERO, None, None).check();
        assert!(error.expect_err("no answer").to_string().contains("none of 1 requests"));
    }

    #[test]
    fn quantiles_are_of_the_sorted_times() {
        let times = Times::of((1..=100).rev().map(f64::from).collect());
        assert_eq!(times, Times { p50: 50.0, p90: 90.0, p99: 99.0, max: 100.0 });
        assert_eq!(Times::of(vec![3.0]), Times { p50: 3.0, p90: 3.0, p99: 3.0, max: 3.0 });
        assert_eq!(Times::of(vec![]), Times::default());
    }
}
