//! How tokens are drawn in timed steps.

use std::collections::VecDeque;

use anyhow::Result;
use clap::ValueEnum;
use keel_array::sampling::Draw;
use keel_cache::SequenceCache;
use keel_engine::{Engine, HostReads, LogitsRow, Sampler, SamplerOptions, Work, WorkRows};

/// The drawing of tokens after a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Drawing {
    /// Nothing. Where an engine may draft and its plain steps run ahead, as with greedy.
    #[default]
    None,
    /// The device takes the greatest logit.
    Greedy,
    /// The device draws with temperature 0.7, top-k 20 and top-p 0.95.
    Sampled,
    /// The same by the host, which reads all logits.
    Host,
}

impl Drawing {
    /// For each of `ids`, runs a step of all sequences with this id and draws tokens. If the engine runs ahead, only
    /// the first step uses an id. Each further step runs the tokens drawn by the step before, and the host reads them
    /// one step later.
    ///
    /// # Errors
    /// Errors of the engine.
    pub fn steps(self, engine: &mut Engine, sequences: &mut [SequenceCache], ids: &[u32]) -> Result<()> {
        let mut all: Vec<&mut SequenceCache> = sequences.iter_mut().collect();
        let draws = vec![self.draw(engine); all.len()];
        if engine.microbatches(all.len()) > 1 {
            return self.steps_in_groups(engine, &mut all, ids);
        }
        match draws.iter().copied().collect::<Option<Vec<Draw>>>() {
            Some(draws) if engine.runs_ahead() => {
                let first = vec![ids.first().copied().unwrap_or_default(); draws.len()];
                run_ahead(engine, &mut all, &first, ids.len(), &draws, |_| ())
            }
            _ => ids.iter().try_for_each(|&id| {
                engine.decode_and_draw(&mut all, &vec![id; draws.len()], &draws)?;
                if self != Drawing::Host {
                    return Ok(());
                }
                draw_on_host(draws.len(), |row, logits| engine.logits(row, logits))
            }),
        }
    }

    /// The same in a pipeline, with a step of each group of sequences under way.
    fn steps_in_groups(
        self,
        engine: &mut Engine,
        sequences: &mut [&mut SequenceCache],
        ids: &[u32],
    ) -> Result<()> {
        let draw = self.draw(engine);
        let reads = if self == Drawing::Host { HostReads::Logits } else { HostReads::Nothing };
        let size = sequences.len().div_ceil(engine.microbatches(sequences.len()));
        let groups = sequences.len().div_ceil(size);
        let mut in_flight = VecDeque::new();
        let all = ids.iter().flat_map(|id| (0..groups).map(move |group| (*id, group)));
        // The steps of each group that are left at the end are only taken.
        for step in all.map(Some).chain(std::iter::repeat_n(None, groups)) {
            let (first, is_full) = (in_flight.front().copied(), in_flight.len() == groups);
            if let Some((ticket, group)) = first.filter(|_| is_full || step.is_none()) {
                in_flight.pop_front();
                engine.take(ticket)?;
                let taken = group_of(sequences, group, size);
                taken.iter_mut().for_each(|sequence| sequence.advance(1));
                if reads == HostReads::Logits {
                    draw_on_host(taken.len(), |row, logits| engine.kept_logits(row, logits))?;
                }
            }
            let Some((id, group)) = step else { continue };
            let work = group_of(sequences, group, size).iter_mut();
            let work =
                work.map(|sequence| Work { sequence, ahead: 0, rows: WorkRows::Token(id), draw, reads });
            in_flight.push_back((engine.submit(&mut work.collect::<Vec<_>>())?, group));
        }
        Ok(())
    }

    /// The drawing that the device executes, if any.
    fn draw(self, engine: &Engine) -> Option<Draw> {
        let SamplerOptions { temperature, top_k, top_p, min_p, .. } = sampled();
        match self {
            // A step that is waited for would leave its row open.
            Drawing::None if engine.runs_ahead() && engine.options().drafts > 0 => Some(Draw::GREATEST),
            Drawing::None | Drawing::Host => None,
            Drawing::Greedy => Some(Draw::GREATEST),
            Drawing::Sampled => Some(Draw { temperature, top_k, top_p, min_p, uniform: 0.5 }),
        }
    }

    /// The value of the option on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned())
    }
}

fn sampled() -> SamplerOptions {
    SamplerOptions { temperature: 0.7, top_k: 20, top_p: 0.95, seed: 1, ..SamplerOptions::default() }
}

/// Runs `steps` steps, the first with the tokens `first`. `take` gets the drawn tokens of each step.
///
/// # Errors
/// Errors of the engine.
pub fn run_ahead(
    engine: &mut Engine,
    sequences: &mut [&mut SequenceCache],
    first: &[u32],
    steps: usize,
    draws: &[Draw],
    mut take: impl FnMut(&[u32]),
) -> Result<()> {
    let mut in_flight = VecDeque::new();
    for step in 0..steps {
        let wanted = steps.min(step + 2);
        while step + in_flight.len() < wanted {
            let ahead = in_flight.len();
            let work = sequences.iter_mut().zip(draws).enumerate().map(|(i, (sequence, draw))| {
                let rows = if step + ahead == 0 { WorkRows::Token(first[i]) } else { WorkRows::Drawn(i) };
                Work { sequence, ahead, rows, draw: Some(*draw), reads: HostReads::Nothing }
            });
            in_flight.push_back(engine.submit(&mut work.collect::<Vec<_>>())?);
        }
        let Some(ticket) = in_flight.pop_front() else { break };
        let drawn = engine.take(ticket)?;
        sequences.iter_mut().for_each(|sequence| sequence.advance(1));
        take(&drawn.into_iter().flatten().collect::<Vec<u32>>());
    }
    Ok(())
}

/// The sequences of a group, the last of which may be smaller.
fn group_of<T>(all: &mut [T], group: usize, size: usize) -> &mut [T] {
    let end = all.len().min((group + 1) * size);
    &mut all[group * size..end]
}

/// Draws a token for each row. `read` gives its logits.
fn draw_on_host(
    rows: usize,
    mut read: impl FnMut(usize, &mut Vec<f32>) -> keel_engine::Result<()>,
) -> Result<()> {
    let (mut sampler, mut logits) = (Sampler::new(sampled(), &[])?, LogitsRow::default());
    for row in 0..rows {
        read(row, &mut logits.values)?;
        sampler.sample(&mut logits);
    }
    Ok(())
}
