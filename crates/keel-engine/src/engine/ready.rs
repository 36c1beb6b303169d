//! Makes an engine ready. It traces each step of the list. If the backend compiles kernels, it also compiles each step
//! and runs it twice without a sequence.

use std::time::Instant;

use keel_array::{Executable, Regime, Runtime};

use super::Engine;
use crate::Result;
use crate::speculation::Costs;
use crate::step::{LOGITS_ROWS, Outcome, StepKind, StepList, StepShape, Stepper};
use crate::vision::VisionRunner;

/// Work other than running steps, for which a request may have to wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LateWork {
    /// Steps traced.
    pub trace: u64,
    /// Kernels compiled.
    pub compile: u64,
    /// Kernels loaded on the device.
    pub load: u64,
    /// Programs captured.
    pub capture: u64,
    /// Allocations.
    pub allocate: u64,
}

impl LateWork {
    /// The counts with their names.
    pub fn named(&self) -> [(&'static str, u64); 5] {
        let LateWork { trace, compile, load, capture, allocate } = *self;
        [("trace", trace), ("compile", compile), ("load", load), ("capture", capture), ("allocate", allocate)]
    }

    /// The sums of both.
    pub(crate) fn plus(self, other: LateWork) -> LateWork {
        self.with(other, |a, b| a + b)
    }

    /// The work added since it was `before`.
    fn since(self, before: LateWork) -> LateWork {
        self.with(before, |now, before| now - before)
    }

    fn with(self, other: LateWork, of: fn(u64, u64) -> u64) -> LateWork {
        LateWork {
            trace: of(self.trace, other.trace),
            compile: of(self.compile, other.compile),
            load: of(self.load, other.load),
            capture: of(self.capture, other.capture),
            allocate: of(self.allocate, other.allocate),
        }
    }
}

impl Engine {
    /// Traces every step that serving needs, and the largest of the others, so that the arena has its final size.
    pub(super) fn prepare_steps(&mut self) -> Result<()> {
        for shape in self.stepper.buckets().list() {
            self.prepare_step(shape, StepList::Listed)?;
            // Any step of a prompt may hold pictures.
            let is_of_prompts = shape.regime == Regime::Prefill && shape.outcome != Outcome::KeptLogits;
            if self.vision_runner.is_some() && is_of_prompts {
                self.prepare_step(StepShape { has_pictures: true, ..shape }, StepList::Listed)?;
            }
        }
        if !self.options.all_logits {
            return Ok(());
        }
        let rows = self.stepper.buckets().prefill_rows_max();
        let head = self.model().mtp.is_some().then_some(Outcome::MtpHidden);
        for outcome in [Outcome::Hidden].into_iter().chain(head) {
            let shape = StepKind::prefill(outcome).of(rows, 1);
            if self.vision_runner.is_some() {
                self.prepare_step(StepShape { has_pictures: true, ..shape }, StepList::Others)?;
            }
            self.prepare_step(shape, StepList::Others)?;
        }
        self.prepare_step(StepKind::prefill(Outcome::Logits).of(LOGITS_ROWS, 1), StepList::Others)
    }

    /// Traces a step on all devices that take part in it.
    fn prepare_step(&mut self, shape: StepShape, list: StepList) -> Result<()> {
        for peer in self.peers.iter_mut().filter(|peer| peer.takes_part(shape.outcome)) {
            peer.stepper.prepare(shape, list)?;
        }
        self.stepper.prepare(shape, list)
    }

    /// Does everything that the first requests would wait for: compiles and loads kernels, and runs each step of the
    /// list without a sequence, on all devices that take part in it. [`Engine::late_work`] counts later work of this
    /// kind. `progress` gets the kind of work, how much is done, and how much there is.
    ///
    /// # Errors
    /// An error of the runtime.
    pub fn make_ready(&mut self, progress: &mut dyn FnMut(&'static str, usize, usize)) -> Result<()> {
        self.make_steps_ready(|_| true, progress)?;
        let tower = self.tower_runtime.as_ref().unwrap_or(self.runtime());
        if let Some(runner) = self.vision_runner.as_ref().filter(|_| tower.backend().is_compiling()) {
            if self.tower_runtime.is_some() {
                let passes: Vec<&Executable> = runner.listed().collect();
                tower.make_ready(&passes, &mut |done, all| progress("compiling", done, all))?;
            }
            runner.warm_up()?;
        }
        self.ready = Some(self.work_so_far());
        Ok(())
    }

    /// As [`Engine::make_ready`], for the steps of answers alone, in an engine that may draft. Otherwise the first
    /// rounds would wait for kernels, and drafts would seem to take that long.
    ///
    /// # Errors
    /// An error of the runtime.
    pub fn make_rounds_ready(&mut self, progress: &mut dyn FnMut(&'static str, usize, usize)) -> Result<()> {
        if self.options.drafts == 0 {
            return Ok(());
        }
        self.make_steps_ready(|shape| shape.regime == Regime::Decode, progress)
    }

    /// Compiles these steps, runs each of them twice, and times those of rounds.
    fn make_steps_ready(
        &mut self,
        of: fn(&StepShape) -> bool,
        progress: &mut dyn FnMut(&'static str, usize, usize),
    ) -> Result<()> {
        if !self.runtime().backend().is_compiling() {
            return Ok(());
        }
        self.compile_steps(of, &mut |done, all| progress("compiling", done, all))?;
        self.warm_up_steps(of, &mut |done, all| progress("starting", done, all))?;
        self.time_rounds(&mut |done, all| progress("timing", done, all))
    }

    /// Times each pass of a round without a sequence, so that the first rounds have as many drafts as pay.
    fn time_rounds(&mut self, progress: &mut dyn FnMut(usize, usize)) -> Result<()> {
        const RUNS: usize = 3;
        if self.options.drafts == 0 {
            return Ok(());
        }
        let mut shapes = self.stepper.listed_shapes();
        shapes.retain(Costs::wants_empty);
        for (i, shape) in shapes.iter().enumerate() {
            let mut seconds = [0.0; RUNS];
            for seconds in &mut seconds {
                let start = Instant::now();
                self.dummy_run(*shape)?;
                *seconds = start.elapsed().as_secs_f64();
            }
            seconds.sort_unstable_by(f64::total_cmp);
            self.costs.note_empty(shape, seconds[RUNS / 2]);
            progress(i + 1, shapes.len());
        }
        Ok(())
    }

    /// Compiles and loads the kernels of these steps of the list on all devices, and those of a vision tower on the
    /// lead.
    fn compile_steps(
        &self,
        of: fn(&StepShape) -> bool,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<()> {
        for (stepper, programs) in self.steppers().zip(self.listed(of)) {
            stepper.runtime().make_ready(&programs, progress)?;
        }
        Ok(())
    }

    /// The launches of a small step of either regime, as text.
    pub(crate) fn program_lines(&self) -> Vec<String> {
        self.stepper.program_lines()
    }

    fn work_so_far(&self) -> LateWork {
        let of = |runtime: &Runtime| {
            let done = runtime.backend().preparations();
            LateWork {
                trace: 0,
                compile: done.compiled,
                load: done.loaded,
                capture: done.captured,
                allocate: runtime.ledger().charges(),
            }
        };
        let trace = self.steppers().map(Stepper::traced).sum::<u64>()
            + self.vision_runner.as_ref().map_or(0, VisionRunner::traced);
        self.runtimes().map(of).fold(LateWork { trace, ..LateWork::default() }, LateWork::plus)
    }

    /// Whether [`Engine::make_ready`] was called.
    pub fn is_ready(&self) -> bool {
        self.ready.is_some()
    }

    /// The work done since [`Engine::make_ready`] that it should have done. There should be none.
    pub fn late_work(&self) -> LateWork {
        self.ready.map_or_else(LateWork::default, |ready| self.work_so_far().since(ready))
    }
}
