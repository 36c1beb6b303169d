//! The report of a load.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use tokio::time::Instant;

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
    after_ramp: Times,
    total: Times,
    memory: Option<Value>,
    comparison: Option<Comparison>,
}

/// The answers that were requested again, alone.
#[derive(Debug, Default)]
pub struct Comparison {
    /// Answers that differ from the first ones.
    pub differing: usize,
    /// Why requests failed.
    pub failures: Vec<String>,
}

/// The end of the ramp: when `concurrency` requests, or all of them, have a first token. `None` without a token.
fn ramp_end(answers: &[Answer], concurrency: usize) -> Option<Instant> {
    let firsts = answers.iter().filter_map(|answer| answer.pieces.first().copied());
    let mut firsts: Vec<Instant> = firsts.collect();
    firsts.sort_unstable();
    firsts.truncate(concurrency);
    firsts.pop()
}

/// Seconds between pieces of text, of gaps that begin at `from` or later.
fn gaps_s(answers: &[Answer], from: Option<Instant>) -> Vec<f64> {
    let gaps = answers.iter().flat_map(|answer| answer.pieces.windows(2));
    gaps.filter(|gap| Some(gap[0]) >= from).map(|gap| (gap[1] - gap[0]).as_secs_f64()).collect()
}

impl Report {
    /// Summarises the answers to a load of `concurrency` requests at a time.
    pub fn new(
        answers: Vec<Result<Answer>>,
        concurrency: usize,
        wall: Duration,
        memory: Option<Value>,
        comparison: Option<Comparison>,
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
            between: Times::of(gaps_s(&answers, None)),
            after_ramp: Times::of(gaps_s(&answers, ramp_end(&answers, concurrency))),
            total: Times::of(answers.iter().map(|a| a.total_s).collect()),
            memory,
            comparison,
        }
    }

    /// Fails if no request was answered, because then the times say nothing. If answers were compared, also fails if
    /// one differs, or if a request of either kind failed.
    pub fn check(&self) -> Result<()> {
        let (answered, failed) = (self.answered, self.failures.len());
        ensure!(answered > 0, "none of {failed} requests was answered");
        let Some(Comparison { differing, failures }) = &self.comparison else { return Ok(()) };
        ensure!(failed == 0, "--check: {failed} of {} requests failed", answered + failed);
        ensure!(failures.is_empty(), "--check: {} of {answered} requests alone failed", failures.len());
        ensure!(*differing == 0, "--check: {differing} of {answered} answers differ from those given alone");
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
            "time_between_tokens_after_ramp_s": self.after_ramp.to_json(),
            "request_s": self.total.to_json(),
            "memory_peak": self.memory,
            "answers_that_differ_alone": self.comparison.as_ref().map(|comparison| comparison.differing),
            "failed_alone": self.comparison.as_ref().map(|comparison| comparison.failures.len()),
        })
    }

    /// The report as a table.
    pub fn to_text(&self) -> String {
        let mut text = format!(
            "{} answered, {} failed in {:.1} s: {:.2} requests/s, {:.1} tokens/s\n\
             {} prompt tokens ({} of them reused), {} generated\n\n\
             ms                     p50      p90      p99      max\n\
             first token     {}\nbetween tokens  {}\nafter the ramp  {}\nrequest         {}\n",
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
            self.after_ramp.to_text(),
            self.total.to_text(),
        );
        if let Some(Value::Object(memory)) = &self.memory {
            let total: u64 = memory.values().filter_map(Value::as_u64).sum();
            text.push_str(&format!("\nthe server's peak: {}\n", human_bytes(total)));
        }
        match &self.comparison {
            Some(Comparison { differing: 0, failures }) if failures.is_empty() => {
                text.push_str("every answer is the same alone\n");
            }
            Some(Comparison { differing, failures }) => text.push_str(&format!(
                "{differing} answers differ from those given alone; {} requests alone failed\n",
                failures.len()
            )),
            None => {}
        }
        let alone = self.comparison.iter().flat_map(|comparison| &comparison.failures);
        if let Some(first) = self.failures.iter().chain(alone).next() {
            text.push_str(&format!("the first failure: {first}\n"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::{Answer, Comparison, Report, Times};
    use anyhow::anyhow;
    use std::time::Duration;
    use tokio::time::Instant;

    #[test]
    fn a_load_without_an_answer_fails() {
        let error = Report::new(vec![Err(anyhow!("refused"))], 1, Duration::ZERO, None, None).check();
        assert!(error.expect_err("no answer").to_string().contains("none of 1 requests"));
    }

    #[test]
    fn a_comparison_fails_if_an_answer_differs_or_a_request_fails_and_is_reported() {
        let report = |failed: usize, comparison| {
            let answered = (0..3).map(|_| Ok(Answer::asked_at(Instant::now())));
            let failed = (0..failed).map(|_| Err(anyhow!("refused")));
            Report::new(answered.chain(failed).collect(), 3, Duration::from_secs(1), None, comparison)
        };
        let comparison = |differing, failures: &[&str]| {
            let failures = failures.iter().map(|failure| failure.to_string()).collect();
            Some(Comparison { differing, failures })
        };
        assert!(report(0, comparison(0, &[])).check().is_ok());
        assert!(report(1, None).check().is_ok(), "nothing was to be compared");
        for (report, reason) in [
            (report(0, comparison(2, &[])), "2 of 3 answers differ"),
            (report(1, comparison(0, &[])), "1 of 4 requests failed"),
            (report(0, comparison(0, &["lost"])), "1 of 3 requests alone failed"),
        ] {
            let error = report.check().expect_err("a failure").to_string();
            assert!(error.contains(reason), "{error}");
        }
        let report = report(0, comparison(1, &["lost"]));
        assert!(
            report.to_text().contains("1 answers differ from those given alone; 1 requests alone failed")
        );
        assert!(report.to_text().contains("the first failure: lost"));
        assert_eq!(report.to_json()["failed_alone"], 1);
    }

    #[test]
    fn gaps_of_the_ramp_count_only_among_all_gaps() {
        let start = Instant::now();
        let answer = |seconds: &[u64]| {
            let mut answer = Answer::asked_at(start);
            answer.pieces = seconds.iter().map(|&at| start + Duration::from_secs(at)).collect();
            Ok(answer)
        };
        let report = |concurrency| {
            let answers = vec![answer(&[1, 2, 9, 12]), answer(&[]), answer(&[8, 10, 11]), answer(&[20, 25])];
            Report::new(answers, concurrency, Duration::from_secs(30), None, None)
        };
        let after_ramp = |concurrency| report(concurrency).after_ramp;
        let p50_and_max = |concurrency| (after_ramp(concurrency).p50, after_ramp(concurrency).max);
        // The ramp ends after 1, 8 and 20 s. So the gap of 7 s that begins after 2 s counts for a single request alone.
        assert_eq!([1, 2, 9].map(p50_and_max), [(2.0, 7.0), (2.0, 5.0), (5.0, 5.0)]);
        let two = report(2);
        assert_eq!(two.between, after_ramp(1));
        let (text, json) = (two.to_text(), two.to_json());
        assert!(text.contains("\nafter the ramp     2000.0   5000.0   5000.0   5000.0\n"), "{text}");
        assert_eq!(json["time_between_tokens_after_ramp_s"]["max"], 5.0);
    }

    #[test]
    fn quantiles_are_of_the_sorted_times() {
        let times = Times::of((1..=100).rev().map(f64::from).collect());
        assert_eq!(times, Times { p50: 50.0, p90: 90.0, p99: 99.0, max: 100.0 });
        assert_eq!(Times::of(vec![3.0]), Times { p50: 3.0, p90: 3.0, p99: 3.0, max: 3.0 });
        assert_eq!(Times::of(vec![]), Times::default());
    }
}
