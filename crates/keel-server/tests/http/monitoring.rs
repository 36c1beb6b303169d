//! The dashboard and the alert rules use only metrics and labels that the server exposes.

use std::collections::{BTreeMap, BTreeSet};

use crate::common::Running;
use serde_json::{Value, json};

const DASHBOARD: &str = include_str!("../../../../packaging/grafana/dashboard.json");
const ALERTS: &str = include_str!("../../../../packaging/grafana/alerts.yml");
const METRICS: &str = include_str!("../../src/metrics.rs");

/// Labels that Prometheus adds.
const OF_PROMETHEUS: [&str; 2] = ["job", "instance"];

/// This metric has no sample without a GPU. `metrics.rs` registers it under this name and label.
const OF_GPUS: (&str, &str) = ("keel_device_memory_bytes", "kind");

/// All metrics of an exposition, with their labels.
fn exposed(text: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut metrics: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let name_len = line.find(['{', ' ']).unwrap_or(line.len());
        let labels = metrics.entry(line[..name_len].to_string()).or_default();
        if let Some((inside, _)) = line[name_len..].strip_prefix('{').and_then(|rest| rest.split_once('}')) {
            labels.extend(inside.split(',').filter_map(|pair| Some(pair.split_once('=')?.0.to_string())));
        }
    }
    metrics
}

/// The words of an expression that begin with `keel_`, each with the labels in its braces.
fn named(expression: &str) -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    let mut rest = expression;
    while let Some(at) = rest.find("keel_") {
        rest = &rest[at..];
        let len = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (name, after) = rest.split_at(len);
        let inside =
            after.strip_prefix('{').and_then(|rest| rest.split_once('}')).map_or("", |(inside, _)| inside);
        let label = |part: &str| part.split(['=', '!']).next().unwrap_or_default().trim().to_string();
        let labels = inside.split(", ").map(label).filter(|label| !label.is_empty()).collect();
        found.push((name.to_string(), labels));
        rest = after;
    }
    found
}

fn expressions(value: &Value, into: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (key, field) in fields {
                match field {
                    Value::String(text) if key == "expr" || key == "query" => into.push(text.clone()),
                    _ => expressions(field, into),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| expressions(item, into)),
        _ => {}
    }
}

#[test]
fn the_dashboard_and_the_alerts_name_metrics_that_exist() {
    let server = Running::start();
    let ask = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4});
    server.ask("/v1/chat/completions", &ask);
    assert_eq!(server.post("/v1/chat/completions", &json!({"messages": 1})).status, 400);
    server.wait_until_idle();
    let mut metrics = exposed(&server.get("/metrics").body);
    let (name, label) = OF_GPUS;
    assert!(
        METRICS.contains(&format!("\"{}\"", name.trim_start_matches("keel_"))),
        "{name} is not registered"
    );
    metrics.entry(name.into()).or_default().insert(label.into());

    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("JSON");
    let mut all = vec![ALERTS.to_string()];
    expressions(&dashboard, &mut all);
    assert!(all.len() > 30, "the dashboard has panels");
    let named: Vec<_> = all.iter().flat_map(|expression| named(expression)).collect();
    assert!(named.len() >= 50, "{} names", named.len());
    for (name, labels) in &named {
        let known =
            metrics.get(name).unwrap_or_else(|| panic!("no metric {name}; there are {:?}", metrics.keys()));
        for label in labels {
            assert!(
                known.contains(label) || OF_PROMETHEUS.contains(&label.as_str()),
                "{name} has no label {label}"
            );
        }
    }
    // Every metric must be shown.
    let shown: BTreeSet<&str> = named.iter().map(|(name, _)| name.as_str()).collect();
    for name in metrics.keys().filter(|name| !name.ends_with("_sum") && !name.ends_with("_count")) {
        assert!(shown.contains(name.as_str()) || name == "# EOF", "{name} is in no panel and no rule");
    }
}

#[test]
fn reasons_that_the_alerts_select_are_codes_of_the_server() {
    const ERRORS: &str = include_str!("../../src/error.rs");
    let selected = ALERTS.split("reason=~\"").skip(1).filter_map(|rest| rest.split('"').next());
    let reasons: Vec<&str> = selected.flat_map(|list| list.split('|')).collect();
    assert!(reasons.len() >= 6, "{reasons:?}");
    for reason in reasons {
        assert!(ERRORS.contains(&format!("\"{reason}\"")), "no error has the code {reason}");
    }
}
