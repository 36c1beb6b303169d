//! The spans and events of the server: one span per request and per step, without users' texts and secrets.

mod common;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use common::{Running, engine_options, request, wait_for};
use keel_server::{ApiKey, ServerOptions};
use serde_json::{Value, json};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

type Fields = BTreeMap<String, String>;

/// A recorded span or event.
#[derive(Clone, Debug)]
struct Told {
    name: String,
    level: Level,
    fields: Fields,
    /// Index of the span around an event.
    within: Option<usize>,
}

#[derive(Default)]
struct Everything {
    spans: Vec<Told>,
    events: Vec<Told>,
}

#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Everything>>);

/// Index of a span in the list.
struct Place(usize);

struct Reading<'a>(&'a mut Fields);

impl Visit for Reading<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().into(), format!("{value:?}"));
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Recorder {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::new();
        attributes.record(&mut Reading(&mut fields));
        let metadata = attributes.metadata();
        let mut all = self.0.lock().expect("no test thread has failed");
        context.span(id).expect("it is new").extensions_mut().insert(Place(all.spans.len()));
        all.spans.push(Told { name: metadata.name().into(), level: *metadata.level(), fields, within: None });
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let place = context.span(id).expect("it is open").extensions().get::<Place>().expect("as above").0;
        let mut all = self.0.lock().expect("no test thread has failed");
        values.record(&mut Reading(&mut all.spans[place].fields));
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::new();
        event.record(&mut Reading(&mut fields));
        let within = context.event_span(event).and_then(|span| Some(span.extensions().get::<Place>()?.0));
        let metadata = event.metadata();
        let told = Told { name: metadata.target().into(), level: *metadata.level(), fields, within };
        self.0.lock().expect("no test thread has failed").events.push(told);
    }
}

const KEY: &str = "key-quartz-39";

fn post(server: &Running, path: &str, body: &Value, status: u16) {
    let headers = [("authorization", &*format!("Bearer {KEY}"))];
    let reply = request(server.address, "POST", path, &headers, body.to_string().as_bytes());
    assert_eq!(reply.status, status, "{path}: {}", reply.body);
}

#[test]
fn requests_and_steps_have_spans_without_text_or_key() {
    let recorder = Recorder::default();
    let subscriber = tracing_subscriber::registry().with(recorder.clone());
    tracing::subscriber::set_global_default(subscriber).expect("the only one of this process");
    let keys = vec![ApiKey::new("somebody", KEY).expect("a key")];
    let options = ServerOptions { model_id: "demo".into(), keys, ..ServerOptions::default() };
    let server = Running::with(engine_options(), options);
    let messages = json!([{"role": "user", "content": "Tell me of zebrafish"}]);
    let asked = [
        ("/v1/completions", json!({"prompt": "Once a zebrafish", "max_tokens": 5, "ignore_eos": true})),
        ("/v1/chat/completions", json!({"messages": messages, "max_tokens": 4, "stream": true})),
        ("/v1/responses", json!({"input": "Tell me of zebrafish", "max_output_tokens": 4})),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 4})),
    ];
    for (path, body) in &asked {
        post(&server, path, body, 200);
    }
    post(&server, "/v1/completions", &json!({"prompt": {"zebrafish": 1}}), 400);
    post(&server, "/v1/completions", &json!({"prompt": "zebrafish ".repeat(5000)}), 400);
    server.wait_until_idle();
    let ended = |told: &Told| told.fields.get("message").is_some_and(|message| message == "ended");
    wait_for("all requests have ended", || {
        recorder.0.lock().expect("as above").events.iter().filter(|e| ended(e)).count() == asked.len()
    });
    server.assert_all_is_back();

    let all = recorder.0.lock().expect("as above");
    let requests: Vec<(usize, &Told)> =
        all.spans.iter().enumerate().filter(|(_, span)| span.name == "request").collect();
    assert_eq!(requests.len(), asked.len(), "{requests:?}");
    for ((place, span), (path, _)) in requests.iter().zip(&asked) {
        let field = |name: &str| span.fields.get(name).unwrap_or_else(|| panic!("no {name} in {span:?}"));
        let count = |name: &str| field(name).parse::<u64>().expect("a number");
        assert_eq!(span.level, Level::INFO);
        assert_eq!((field("endpoint"), field("model")), (&format!("{path:?}"), &"\"demo\"".to_string()));
        assert!(count("id") > 0 && count("prompt") > 0 && count("generated") > 0, "{span:?}");
        assert!(count("generated") <= count("max_tokens") && count("cached") < count("prompt"), "{span:?}");
        assert!(field("reason").contains("length") || field("reason").contains("stop"), "{span:?}");
        let lines = all.events.iter().filter(|event| ended(event) && event.within == Some(*place));
        let lines: Vec<&Told> = lines.collect();
        assert!(matches!(&lines[..], [line] if line.fields.contains_key("total_ms")), "{lines:?}");
    }
    let steps: Vec<&Told> = all.spans.iter().filter(|span| span.name == "step").collect();
    let tokens: u64 = steps.iter().filter_map(|step| step.fields.get("tokens")?.parse::<u64>().ok()).sum();
    let generated: u64 = requests.iter().filter_map(|(_, r)| r.fields["generated"].parse::<u64>().ok()).sum();
    assert!(steps.iter().all(|step| step.level == Level::DEBUG));
    assert!(tokens >= generated && generated > 0, "{tokens} tokens in steps, {generated} in requests");
    for told in all.spans.iter().chain(&all.events) {
        let text = format!("{told:?}");
        assert!(!text.contains("zebrafish") && !text.contains("quartz"), "{text}");
    }
}
