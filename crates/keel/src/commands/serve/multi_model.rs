//! Several models in one server.

use std::path::Path;

use anyhow::Result;
use keel_server::{LoadOutput, ModelManagerOptions, ServedModel, ServedText, Server};

use super::named::{self, Named};
use super::{
    ServeOptions, bind_port, device, prefix_store, run_server, runtime, server_options, warn_if_open,
    with_image_preprocessor,
};
use crate::args::Subject;
use crate::failure::usage;
use crate::server_plan::{self, Models, ServerPlan};
use crate::session::{self, Session};
use crate::source;
use evenkeel::{FreeMemory, human_bytes};

/// Serves models that are loaded on request.
///
/// # Errors
/// A model cannot be opened or does not fit alone, or two have the same name.
pub fn serve(args: &ServeOptions, models: &[Named], mmproj: Option<&Path>) -> Result<()> {
    if args.server.name.is_some() {
        return Err(usage("--name is for a single model; give each model its name with --model NAME=MODEL"));
    }
    // The models may be downloaded, which can take hours. Wrong keys and a port in use are reported before that.
    let options = server_options(args)?;
    let tasks = runtime()?;
    drop(tasks.block_on(bind_port(args))?);
    let offers = models.iter().map(|named| offer(args, named, mmproj)).collect::<Result<Vec<_>>>()?;
    let room = server_plan::room(&args.device, args.engine.options().compute);
    let memory_limit = room.as_ref().map_or(u64::MAX, |room| room.bytes);
    let tower_limit = FreeMemory::of_host().map_or(u64::MAX, |host| host.bytes);
    let (count, all) = (offers.len(), offers.iter().map(|offer| offer.bytes).sum::<u64>());
    tasks.block_on(async {
        let keep_alive = args.patience.keep_alive();
        let fleet =
            ModelManagerOptions { memory_limit, tower_limit, keep_alive, trim_allocator: session::forget };
        let listener = bind_port(args).await?;
        let address = listener.local_addr()?;
        warn_if_open(address, &options);
        let server = Server::of_several(offers, fleet, options)?;
        let all = human_bytes(all);
        match room {
            Some(room) => tracing::info!(
                "all models together need {all}; {} are available: {}",
                human_bytes(room.bytes),
                room.why
            ),
            None => tracing::info!("all of them hold {all}"),
        }
        tracing::info!("a choice of {count} models is served at http://{address}");
        run_server(server, listener, args).await
    })
}

/// A model that requests may name. It is opened and planned now, so that its errors are reported before the server
/// starts.
fn offer(args: &ServeOptions, named: &Named, mmproj: Option<&Path>) -> Result<ServedModel> {
    let model = source::open(Some(&named.model), mmproj)?;
    let text = ServedText::new(&model.text_files()?)?;
    let id = named.name.clone().unwrap_or_else(|| named::of(&model));
    let ServerPlan { options, plans } =
        server_plan::plan_server(args, &Subject::of(&model), Models::Several)?;
    let (bytes, tower_bytes) = (plans.model().total(), plans.tower.map_or(0, |tower| tower.total()));
    let tower = if tower_bytes > 0 {
        format!(", and {} on the CPU", human_bytes(tower_bytes))
    } else {
        String::new()
    };
    tracing::info!(
        "{id} holds {}{tower} for {} sequences of up to {} tokens",
        human_bytes(bytes),
        options.sequences,
        options.context
    );
    let pixels = args.memory.image_pixels();
    let takes = with_image_preprocessor(text, pixels, &model, options.vision)?.takes();
    let prefix_store = prefix_store(args, &model, Some(&id))?;
    session::close(model);
    let (device, path) = (device(args), named.model.clone());
    let mmproj = mmproj.map(Path::to_path_buf);
    let load = move || -> Result<LoadOutput> {
        let model = source::open(Some(&path), mmproj.as_deref())?;
        let text = ServedText::new(&model.text_files()?)?;
        let text = with_image_preprocessor(text, pixels, &model, options.vision)?;
        let mut session = Session::load(&device, &model, options)?;
        session::close(model);
        session.make_ready()?;
        Ok(LoadOutput { engine: session.engine, text, prefix_store: prefix_store.clone() })
    };
    let load = Box::new(move || load().map_err(|error| format!("{error:#}").into()));
    Ok(ServedModel { id, bytes, tower_bytes, context: options.context, takes, load })
}
