//! `keel embed`: embeddings of texts, as JSON lines.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, stdin};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use evenkeel::{ModelText, context_for};
use indicatif::ProgressBar;
use keel_engine::EngineOptions;
use keel_engine::batch::{
    BatchEvent, BatchOptions, BatchRequest, Batcher, Readout, SequenceEvent, direction,
};
use serde_json::json;

use crate::args::{DeviceArgs, EngineArgs, ModelArgs, Pooling};
use crate::failure::usage;
use crate::session::Session;
use crate::{input, output, pooling, progress};

/// Texts that run at once.
const SEQUENCES_MAX: usize = 16;
/// Largest number of bytes of all texts.
const BYTES_MAX: u64 = 1 << 30;

/// Print the embeddings of texts: one JSON object for each text, {"index": 0, "tokens": 5, "embedding": [...]}, in the
/// order of the texts.
///
/// An embedding has length one. Texts come from the command line, from files and from standard input. Each line of a
/// file is one text; empty lines are left out.
#[derive(Debug, Args)]
pub struct EmbedArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Texts. Without any, and without --file, standard input is read.
    #[arg(value_name = "TEXT")]
    texts: Vec<String>,
    /// File with one text in each line. Its texts come after those of the command line. - is standard input. May be
    /// repeated.
    #[arg(long, short = 'f', value_name = "FILE")]
    file: Vec<PathBuf>,
    /// How an embedding is computed: the hidden state of the last token, or the mean over all tokens. By default as the
    /// model's folder says (modules.json, 1_Pooling/config.json), else the last token.
    #[arg(long, value_name = "POOLING", value_enum)]
    pooling: Option<Pooling>,
    /// Number of values of each embedding. The first ones are kept and scaled to length one.
    #[arg(long, value_name = "N")]
    dimensions: Option<usize>,
    /// Put the text into each line, too.
    #[arg(long)]
    with_text: bool,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Runs the command.
pub fn run(args: &EmbedArgs) -> Result<()> {
    let texts = texts(args)?;
    let model = args.model.open()?;
    let width = model.config.hidden;
    let dimensions = args.dimensions.unwrap_or(width);
    if dimensions == 0 || dimensions > width {
        return Err(usage(format!("--dimensions {dimensions}: this model has 1 to {width}")));
    }
    let pooling = match args.pooling {
        Some(pooling) => pooling,
        None => pooling::of_model(&model).context("--pooling says what to do instead")?.unwrap_or_default(),
    };
    let text = ModelText::open(&model)?;
    let encode = |(i, one): (usize, &String)| {
        let ids = text.tokenizer.encode(one, true)?;
        if ids.is_empty() {
            bail!("text {i} has no tokens");
        }
        Ok(ids)
    };
    let prompts = texts.iter().enumerate().map(encode).collect::<Result<Vec<_>>>()?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(1);
    let options = EngineOptions {
        context: context_for(&model.config, longest).context("the longest text")?,
        sequences: prompts.len().clamp(1, SEQUENCES_MAX),
        row_hidden: pooling == Pooling::Mean,
        ..args.engine.options()
    };
    let session = Session::load(&args.device, &model, options)?;
    let readout = match pooling {
        Pooling::Last => Readout::LastHidden,
        Pooling::Mean => Readout::MeanHidden,
    };
    let tokens: Vec<usize> = prompts.iter().map(Vec::len).collect();
    let bar = progress::tokens("embedding", tokens.iter().sum());
    embed(session, prompts, &readout, &bar, &mut |i, values| {
        let embedding = direction(values, dimensions).with_context(|| format!("text {i}"))?;
        let mut line = json!({"index": i, "tokens": tokens[i], "embedding": embedding});
        if args.with_text {
            line["text"] = json!(texts[i]);
        }
        output::json(&line)
    })?;
    bar.finish_and_clear();
    Ok(())
}

/// Returns the non-empty lines. Subtracts the bytes read from `left`, the number still allowed.
fn lines_of(lines: &mut dyn BufRead, left: &mut u64) -> Result<Vec<String>> {
    // A line may have no end.
    let mut limited = lines.take(*left + 1);
    let mut texts = Vec::new();
    for line in limited.by_ref().lines() {
        texts.push(line?);
    }
    let Some(rest) = limited.limit().checked_sub(1) else {
        bail!("there are more than {BYTES_MAX} bytes of texts");
    };
    *left = rest;
    texts.retain(|line| !line.trim().is_empty());
    Ok(texts)
}

/// The texts of the command line, then those of files.
fn texts(args: &EmbedArgs) -> Result<Vec<String>> {
    let mut texts = args.texts.clone();
    let mut left = BYTES_MAX;
    let mut read = |lines: &mut dyn BufRead, shown: &str| -> Result<()> {
        texts.extend(lines_of(lines, &mut left).with_context(|| format!("cannot read {shown}"))?);
        Ok(())
    };
    for path in &args.file {
        let shown = path.display().to_string();
        if shown == "-" {
            read(&mut stdin().lock(), "standard input")?;
            continue;
        }
        read(&mut BufReader::new(input::open(path)?), &shown)?;
    }
    if args.texts.is_empty() && args.file.is_empty() {
        read(&mut stdin().lock(), "standard input")?;
    }
    if texts.is_empty() {
        bail!(
            "there are no texts: give them as arguments, in files (--file), or on standard input, one a line"
        );
    }
    Ok(texts)
}

/// Runs the prompts in a batch, and gives the values of each to `sink`, in order. `bar` counts their tokens.
fn embed(
    session: Session,
    prompts: Vec<Vec<u32>>,
    readout: &Readout,
    bar: &ProgressBar,
    sink: &mut dyn FnMut(usize, Vec<f32>) -> Result<()>,
) -> Result<()> {
    let options = BatchOptions { queue_limit: usize::MAX, reuse_prefixes: false, ..BatchOptions::default() };
    let lengths: Vec<u64> = prompts.iter().map(|prompt| prompt.len() as u64).collect();
    let mut batcher = Batcher::new(session.engine, options);
    let now = Instant::now();
    for (i, prompt) in prompts.into_iter().enumerate() {
        batcher.submit(BatchRequest::to_read(i as u64, prompt, readout.clone()), now)?;
    }
    let (mut next, mut waiting) = (0, BTreeMap::new());
    while !batcher.is_idle() {
        for SequenceEvent { id, event } in batcher.step(now) {
            match event {
                BatchEvent::Read(values) => drop(waiting.insert(id as usize, values)),
                BatchEvent::Failed(error) => return Err(error).with_context(|| format!("text {id}")),
                _ => {}
            }
        }
        while let Some(values) = waiting.remove(&next) {
            sink(next, values)?;
            bar.inc(lengths[next]);
            next += 1;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use evenkeel::ModelFiles;

    use super::*;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        device: DeviceArgs,
    }

    #[test]
    fn the_bar_counts_the_tokens_of_each_text() {
        let Arguments { device } = Arguments::parse_from(["keel", "--device", "cpu"]);
        let model = ModelFiles::built_in().expect("it is in the program");
        let options = EngineOptions { context: 256, sequences: 2, ..EngineOptions::default() };
        let session = Session::load(&device, &model, options).expect("it loads");
        let (bar, mut seen) = (ProgressBar::hidden(), Vec::new());
        let prompts = vec![vec![1, 2, 3], vec![4, 5], vec![6]];
        embed(session, prompts, &Readout::LastHidden, &bar, &mut |_, _| {
            seen.push(bar.position());
            Ok(())
        })
        .expect("they run");
        assert_eq!((&seen[..], bar.position()), (&[0, 3, 5][..], 6));
    }

    #[test]
    fn more_bytes_than_may_come_are_refused_and_none_is_dropped() {
        let mut left = 8;
        assert_eq!(lines_of(&mut &b"ab\n\nc\n"[..], &mut left).expect("six bytes"), ["ab", "c"]);
        assert_eq!(left, 2);
        assert_eq!(lines_of(&mut &b"d\n"[..], &mut left).expect("two bytes"), ["d"]);
        // Line breaks count: three bytes, of which two are a text.
        for text in [&b"d"[..], b"\n", b"de\n"] {
            let error = lines_of(&mut &text[..], &mut left).expect_err("none is left").to_string();
            assert!(error.contains("more than"), "{error}");
        }
        assert_eq!(left, 0);
    }
}
