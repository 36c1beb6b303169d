//! `/status`: memory and the running sequences. The page shows them.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use keel_array::{Category, MemoryReport};
use keel_engine::batch::SequenceStatus;
use serde_json::{Map, Value, json};

use crate::engine::view::DeviceReport;
use crate::loaded_model::LoadedModel;
use crate::model_manager::{ModelFacts, ModelManager};
use crate::shared::Shared;

/// Memory and the running sequences.
///
/// Of several models it shows the one used last; `models` lists all.
pub(crate) async fn status(State(manager): State<Arc<ModelManager>>) -> Json<Value> {
    let mut status = manager.loaded().first().map_or_else(|| nothing(&manager), |model| of_model(model));
    let listed =
        |facts: &ModelFacts| json!({"id": facts.id, "loaded": facts.is_loaded, "memory_bytes": facts.bytes});
    status["models"] = manager.all_facts().iter().map(listed).collect();
    Json(status)
}

/// Where no model is loaded.
fn nothing(manager: &ModelManager) -> Value {
    json!({
        "model": null, "now": {}, "planned": {}, "allocated": {}, "peak": {},
        "requests": requests(manager), "waiting": 0, "parked": {"sequences": 0, "bytes": 0}, "running": [],
        "pages": {"total": 0, "free": 0, "remembered": 0}, "remembered_states": 0,
    })
}

fn requests(shared: &Shared) -> Value {
    let memory = &shared.memory;
    json!({"planned": memory.limit(), "allocated": memory.used(), "peak": memory.peak()})
}

fn of_model(model: &LoadedModel) -> Value {
    let batch = model.engine.status();
    let devices = model.engine.devices();
    let allocated: MemoryReport = devices.iter().map(|device| device.allocated).sum();
    let peak: MemoryReport = devices.iter().map(|device| device.peak).sum();
    let kv_bytes = allocated.get(Category::Kv);
    let of_pages = |pages: usize| kv_bytes * pages as u64 / batch.pages.max(1) as u64;
    let (free, remembered) = (of_pages(batch.free_pages), of_pages(batch.idle_prefix_pages));
    let mut now = Map::new();
    for (category, bytes) in allocated.iter().filter(|(_, bytes)| *bytes > 0) {
        if category == Category::Kv {
            now.insert("kv, in use".into(), json!(bytes - free - remembered));
            now.insert("kv, remembered".into(), json!(remembered));
            now.insert("kv, free".into(), json!(free));
        } else {
            now.insert(category.name().into(), json!(bytes));
        }
    }
    let mut status = json!({
        "model": model.id,
        "now": now,
        "planned": bytes(&model.engine.planned()),
        "allocated": bytes(&allocated),
        "peak": bytes(&peak),
        "requests": requests(model),
        "waiting": batch.waiting,
        "parked": {"sequences": batch.parking.parked, "bytes": batch.parking.bytes},
        "running": batch.running.iter().map(sequence).collect::<Vec<_>>(),
        "pages": {"total": batch.pages, "free": batch.free_pages, "remembered": batch.prefix_pages},
        "remembered_states": batch.prefix_states,
    });
    if devices.len() > 1 {
        status["devices"] = devices.iter().map(device).collect();
    }
    status
}

fn device(memory: &DeviceReport) -> Value {
    json!({
        "device": memory.name,
        "planned": bytes(&memory.planned),
        "allocated": bytes(&memory.allocated),
        "peak": bytes(&memory.peak),
    })
}

fn bytes(report: &MemoryReport) -> Value {
    report.iter().map(|(category, bytes)| (category.name().to_string(), json!(bytes))).collect()
}

fn sequence(s: &SequenceStatus) -> Value {
    json!({
        "id": s.id,
        "prompt_tokens": s.prompt_tokens,
        "cached_tokens": s.cached_tokens,
        "prefilled_tokens": s.prefilled_tokens,
        "generated_tokens": s.generated_tokens,
        "pages": s.pages,
        "pages_promised": s.pages_promised,
        "slot": s.slot,
        "drafted": s.drafted,
        "accepted": s.accepted,
    })
}
