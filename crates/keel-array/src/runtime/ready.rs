//! Preparation of programs before their first run.

use super::Executable;
use crate::program::Launch;
use crate::{ArrayError, Result, Runtime};

impl Runtime {
    /// Does all preparation for the first run of these programs, without running them: see
    /// [`make_ready`](crate::Programs::make_ready). The arena is made large enough.
    ///
    /// # Errors
    /// As the first run would return; or if a program belongs to another runtime.
    pub fn make_ready(&self, programs: &[&Executable], progress: &mut dyn FnMut(usize, usize)) -> Result<()> {
        self.with_launches(programs, |launches| {
            self.exclusive(|backend| backend.make_ready(launches, progress))
        })
    }

    /// Compiles the kernels of these programs of `planner`, a runtime that plans for this one's device. The same
    /// programs of this runtime have the same kernels. Other threads may use this runtime meanwhile.
    ///
    /// # Errors
    /// As [`Runtime::make_ready`]; or if `planner` does not plan, or the backend does not [compile
    /// plans](crate::Programs::compiles_plans).
    pub fn compile_planned(
        &self,
        planner: &Runtime,
        programs: &[&Executable],
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<()> {
        if !planner.backend().is_planning() || !self.backend().compiles_plans() {
            return Err(refuse(format!("{self:?} does not compile programs of {planner:?}")));
        }
        planner.with_launches(programs, |launches| self.backend().make_ready(launches, progress))
    }

    /// Passes the launches of these programs on, with an arena that is large enough.
    fn with_launches(
        &self,
        programs: &[&Executable],
        pass: impl FnOnce(&[Launch<'_>]) -> Result<()>,
    ) -> Result<()> {
        if let Some(program) = programs.iter().find(|program| !self.is_same(program.runtime())) {
            let other = program.runtime();
            return Err(refuse(format!(
                "a program belongs to another runtime, {other:?}; make it ready with that one"
            )));
        }
        // `clear_cache` may have freed the arena that was reserved when the programs were prepared.
        let bytes = programs.iter().map(|program| program.program().arena_bytes()).max();
        let arena = self.arena(bytes.unwrap_or(0))?;
        let launches: Vec<Launch<'_>> =
            programs.iter().flat_map(|program| program.launches(arena.as_ref())).collect();
        pass(&launches)
    }
}

fn refuse(reason: String) -> ArrayError {
    ArrayError::Argument { op: "make_ready", reason }
}
