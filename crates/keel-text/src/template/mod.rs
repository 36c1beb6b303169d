//! Turns conversations into prompts with the chat template of the checkpoint.

mod builtins;
mod engine;
mod format;
mod generic_tools;
mod limits;
mod python;
mod render_process;
mod request;
mod source;
mod time;
mod tojson;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::error::Error as _;
use std::fmt;
use std::path::Path;

use minijinja::{Environment, ErrorKind, Value};

use crate::panics::guarded_on_stack;
use crate::{SpecialTokens, TextError, TextFiles};

pub use render_process::{MEMORY_BYTES as TEMPLATE_MEMORY_BYTES, render_for_parent, render_in_process};
pub use request::{ChatRequest, Message};
pub use time::date_and_time;

/// The text of the template for plain conversations, if there is one.
pub(crate) fn source_text(files: &TextFiles<'_>) -> Result<Option<String>, TextError> {
    Ok(source::find(files)?.and_then(|sources| sources.default))
}

/// The chat template of a checkpoint, compiled.
///
/// The template can use:
///
/// - `messages`, `tools`, `documents` (always none) and `add_generation_prompt`;
/// - the special tokens as `bos_token`, `eos_token`, `pad_token` and `unk_token`;
/// - `raise_exception` and `strftime_now`;
/// - the variables of the request.
///
/// Blocks are trimmed as the reference implementation does. Two operators differ from it. `~` writes floats and the
/// strings inside lists and dictionaries differently; the filter `join` writes them as Python does. `%` is for numbers
/// alone; the filter `format` inserts values into a text.
///
/// A template is an untrusted program: its size, its steps, its depth and its output are bounded. After
/// [`render_in_process`] its memory and its time are bounded, too.
pub struct ChatTemplate(Renderer);

enum Renderer {
    Here(Box<Here>),
    Apart(render_process::RenderProcess),
}

/// The templates, rendered in this process.
struct Here {
    environment: Environment<'static>,
    has_tool_template: bool,
    /// Names of the templates that read `tools`.
    with_tools: Vec<&'static str>,
    special: BTreeMap<&'static str, String>,
    stack_bytes_max: usize,
}

impl ChatTemplate {
    /// Reads the template of a checkpoint folder; `None` if it has none.
    ///
    /// # Errors
    /// As [`TextFiles::read`] and [`ChatTemplate::new`].
    pub fn open(folder: &Path) -> Result<Option<Self>, TextError> {
        Self::new(&TextFiles::read(folder)?)
    }

    /// Compiles the template found in the files; `None` if there is none. `chat_template.jinja` takes precedence over
    /// `chat_template` in `tokenizer_config.json`, which may be one template or a list of named templates. Last comes
    /// `chat_template.json`.
    ///
    /// # Errors
    /// [`TextError::Template`] if it does not compile, [`TextError::Json`] and [`TextError::Field`] if
    /// `tokenizer_config.json` is malformed.
    pub fn new(files: &TextFiles<'_>) -> Result<Option<Self>, TextError> {
        match source::find(files)? {
            Some(sources) => Self::compile(sources, SpecialTokens::new(files)?).map(Some),
            None => Ok(None),
        }
    }

    /// Compiles a template given as text.
    ///
    /// # Errors
    /// [`TextError::Template`] if it does not compile or has more than 128 KiB.
    pub fn from_source(source: &str, special: SpecialTokens) -> Result<Self, TextError> {
        Self::compile(source::Sources::one(source.to_string()), special)
    }

    /// Renders a conversation. Encode the result with `add_special` false.
    ///
    /// A template named `tool_use`, if the checkpoint has one, renders requests with tools. If the template does not
    /// read `tools`, they become a part of the system message, and calls and their results become text.
    ///
    /// # Errors
    /// [`TextError::Refused`] if the template raises an exception of its own, [`TextError::Template`] if it
    /// fails or exceeds a limit.
    pub fn render(&self, request: &ChatRequest<'_>) -> Result<String, TextError> {
        match &self.0 {
            Renderer::Here(here) => here.render(request),
            Renderer::Apart(apart) => apart.render(request),
        }
    }

    fn compile(sources: source::Sources, special: SpecialTokens) -> Result<Self, TextError> {
        for (name, text) in sources.named() {
            limits::check_source(name, text)?;
        }
        if render_process::is_set() {
            return Ok(ChatTemplate(Renderer::Apart(render_process::RenderProcess::new(sources, special)?)));
        }
        Ok(ChatTemplate(Renderer::Here(Box::new(Here::compile(&sources, special, usize::MAX)?))))
    }
}

impl Here {
    fn render(&self, request: &ChatRequest<'_>) -> Result<String, TextError> {
        let name = if self.has_tool_template && request.tools.is_some() {
            source::TOOL_USE
        } else {
            source::DEFAULT
        };
        let messages = match self.with_tools.contains(&name) {
            true => Cow::Borrowed(request.messages),
            false => generic_tools::as_text(request),
        };
        let request = &ChatRequest { messages: &messages, ..*request };
        let steps = limits::steps(request);
        let stack_bytes = limits::rendering_stack_bytes(steps).min(self.stack_bytes_max);
        guarded_on_stack("render the chat template", stack_bytes, || {
            let mut environment = self.environment.clone();
            environment.set_fuel(Some(steps));
            let mut output = limits::BoundedOutput::default();
            environment
                .get_template(name)
                .and_then(|template| {
                    template.render_captured_to(self.context(request), &mut output).map(drop)
                })
                .map_err(|err| failure(name, &err))?;
            output.into_string().ok_or_else(|| TextError::Template {
                name: name.to_string(),
                reason: "the output is not UTF-8".to_string(),
            })
        })
    }

    fn compile(
        sources: &source::Sources,
        special: SpecialTokens,
        stack_bytes_max: usize,
    ) -> Result<Here, TextError> {
        let mut environment = engine::environment();
        let mut with_tools = Vec::new();
        for (name, text) in sources.named() {
            let text = source::without_generation_blocks(&source::with_unix_lines(text));
            let stack_bytes = limits::compiling_stack_bytes(&text).min(stack_bytes_max);
            let reads_tools = guarded_on_stack("compile the chat template", stack_bytes, || {
                let resets_tools = resets_tools(&environment, &text);
                environment.add_template_owned(name, text).map_err(|err| failure(name, &err))?;
                let template = environment.get_template(name).map_err(|err| failure(name, &err))?;
                Ok(resets_tools || template.undeclared_variables(false).contains("tools"))
            })?;
            if reads_tools {
                with_tools.push(name);
            }
        }
        let names = [
            ("bos_token", special.bos),
            ("eos_token", special.eos),
            ("pad_token", special.pad),
            ("unk_token", special.unk),
        ];
        let special = names.into_iter().filter_map(|(name, token)| Some((name, token?))).collect();
        let has_tool_template = sources.tool_use.is_some();
        Ok(Here { environment, has_tool_template, with_tools, special, stack_bytes_max })
    }

    /// The variables of one rendering. The request's variables are inserted first, so none of them can replace the
    /// messages.
    fn context(&self, request: &ChatRequest<'_>) -> Value {
        let mut context: BTreeMap<&str, Value> = BTreeMap::new();
        for (name, value) in request.variables.into_iter().flatten() {
            context.insert(name, Value::from_serialize(value));
        }
        for (name, token) in &self.special {
            context.insert(name, Value::from(token.as_str()));
        }
        context.insert("messages", Value::from_serialize(request.messages));
        context.insert("tools", request.tools.map_or(Value::from(()), Value::from_serialize));
        context.insert("documents", Value::from(()));
        context.insert("add_generation_prompt", Value::from(request.add_generation_prompt));
        context.insert("strftime_now", engine::strftime_at(request.now));
        Value::from(
            context.into_iter().map(|(name, value)| (name.to_string(), value)).collect::<BTreeMap<_, _>>(),
        )
    }
}

/// Whether the first statement that sets `tools` reads them, as `{% set tools = tools or [] %}` does. The engine counts
/// a variable as the template's own from the begin of the statement that sets it.
fn resets_tools(environment: &Environment<'_>, template: &str) -> bool {
    let value_of = |block: &'_ str| {
        let statement = block.split("%}").next()?.trim_matches(['-', '+']).trim();
        let target = statement.strip_prefix("set")?.trim_start().strip_prefix("tools")?;
        Some(target.trim_start().strip_prefix('=')?.to_string())
    };
    template.split("{%").skip(1).find_map(value_of).is_some_and(|value| {
        let value = environment.compile_expression(&value);
        value.is_ok_and(|value| value.undeclared_variables(false).contains("tools"))
    })
}

/// Converts the engine's error: the template's own exception, or name, reason and line.
fn failure(name: &str, err: &minijinja::Error) -> TextError {
    if let Some(message) = engine::raised(err) {
        return TextError::Refused { message };
    }
    let mut reason = match err.kind() {
        ErrorKind::OutOfFuel => "it takes too many steps for a conversation of this length".to_string(),
        kind => kind.to_string(),
    };
    let detail = match err.kind() {
        // The source says which limit the output exceeds.
        ErrorKind::WriteFailure => err.source().map(ToString::to_string),
        _ => err.detail().map(str::to_string),
    };
    if let Some(detail) = detail {
        reason = format!("{reason}: {detail}");
    }
    if let Some(line) = err.line() {
        reason = format!("{reason} (line {line})");
    }
    TextError::Template { name: name.to_string(), reason }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("ChatTemplate");
        if let Renderer::Here(here) = &self.0 {
            text.field("has_tool_template", &here.has_tool_template).field("special", &here.special);
        }
        text.finish_non_exhaustive()
    }
}
