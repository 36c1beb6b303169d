//! Reports speculation, as a line and as JSON.

use keel_engine::{SpeculationCounters, SpeculationOptions};
use serde_json::{Value, json};

/// Printed whenever drafts were accepted without a check.
const OPTIMISTIC_WARNING: &str =
    "drafts were accepted without verification: the text may differ from the model's own text";

/// The options and counters of a run.
#[derive(Clone, Debug)]
pub struct SpeculationReport {
    /// The options of the run.
    pub options: SpeculationOptions,
    /// The counters of the run.
    pub counters: SpeculationCounters,
}

impl SpeculationReport {
    /// The field `speculation` as JSON. Lists are indexed by position after the last token.
    pub fn to_json(&self) -> Value {
        let c = &self.counters;
        let mut object = json!({
            "optimistic": self.options.optimistic,
            "rounds": c.rounds,
            "plain_rounds": c.plain_rounds,
            "drafted": c.drafted_total(),
            "accepted": c.accepted_total(),
            "drafted_by_position": c.drafted,
            "accepted_by_position": c.accepted,
            "mean_accepted_length": c.mean_accepted_len(),
            "draft_s": c.draft_time.as_secs_f64(),
            "verify_s": c.verify_time.as_secs_f64(),
            "commit_s": c.commit_time.as_secs_f64(),
        });
        if self.options.optimistic {
            object["warning"] = OPTIMISTIC_WARNING.into();
        }
        object
    }

    /// One line for people.
    pub fn to_line(&self) -> String {
        let c = &self.counters;
        let used = c.drafted.iter().zip(&c.accepted).filter(|(drafted, _)| **drafted > 0);
        let shares: Vec<String> = used.map(|(drafted, accepted)| format!("{accepted}/{drafted}")).collect();
        let mut line = format!(
            "speculate {} rounds of {:.2} tokens, {} without drafts; accepted {} of {} drafts",
            c.rounds,
            c.mean_accepted_len(),
            c.plain_rounds,
            c.accepted_total(),
            c.drafted_total(),
        );
        if !shares.is_empty() {
            line += &format!(", by position {}", shares.join(" "));
        }
        line += &format!(
            "; draft {:.2} s, verify {:.2} s, commit {:.2} s",
            c.draft_time.as_secs_f64(),
            c.verify_time.as_secs_f64(),
            c.commit_time.as_secs_f64()
        );
        if self.options.optimistic {
            line += &format!("\nWARNING: {OPTIMISTIC_WARNING}");
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn optimism_is_named_in_both_forms() {
        let report = |optimistic| SpeculationReport {
            options: SpeculationOptions { optimistic, ..SpeculationOptions::default() },
            counters: SpeculationCounters::default(),
        };
        assert!(report(true).to_line().contains("WARNING") && !report(false).to_line().contains("WARNING"));
        assert!(report(true).to_json()["warning"].is_string());
        assert!(report(false).to_json()["warning"].is_null());
    }
}
