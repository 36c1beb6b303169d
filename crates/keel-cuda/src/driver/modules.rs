//! Compiled kernels that are loaded on a device.

use super::{Device, cached, compile, driver, has_compiler};
use crate::error::Result;
use crate::kernels::KernelKey;
use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUmodule};
use std::collections::{HashMap, HashSet};
use std::ffi::CString;
use std::num::NonZero;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::available_parallelism;

/// Bytes of shared memory that a block may have by default, static and dynamic together.
const SHARED_DEFAULT: usize = 48 << 10;

/// A kernel that can be launched. Lives as long as the [`Modules`] it came from.
#[derive(Clone, Copy)]
pub(crate) struct Function {
    pub handle: CUfunction,
    /// Bytes of shared memory that a block has without those of its launch.
    static_bytes: usize,
}

/// A kernel, and the most dynamic shared memory that it is launched with, in bytes.
pub(crate) struct SizedKernel {
    pub key: KernelKey,
    pub shared_bytes: usize,
}

struct Loaded {
    function: Function,
    /// Whether it was requested since the last [`Modules::take_names`].
    was_asked_for: bool,
}

#[derive(Default)]
struct Tables {
    /// By [`KernelKey::program`]: entry points with the same text and constants are compiled and loaded together.
    programs: HashMap<KernelKey, CUmodule>,
    kernels: HashMap<KernelKey, Loaded>,
}

/// Every kernel that was requested so far.
pub(crate) struct Modules {
    device: Arc<Device>,
    tables: Mutex<Tables>,
    compiled: AtomicU64,
}

// SAFETY: handles of the driver may be used from any thread with the context current.
unsafe impl Send for Modules {}
// SAFETY: as above; a lock protects the tables.
unsafe impl Sync for Modules {}

impl Modules {
    /// No kernels yet.
    ///
    /// # Errors
    /// The compiler is missing. It is needed for kernels on disk, too: the compiler's version is part of their names.
    pub fn new(device: &Arc<Device>) -> Result<Modules> {
        has_compiler()?;
        Ok(Modules { device: Arc::clone(device), tables: Mutex::default(), compiled: AtomicU64::new(0) })
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Programs that were compiled because they were not on disk.
    pub fn compiled_count(&self) -> u64 {
        self.compiled.load(Ordering::Relaxed)
    }

    /// Kernels that are loaded. A program may have several.
    pub fn loaded_count(&self) -> u64 {
        self.tables().kernels.len() as u64
    }

    /// Machine code of a program, from the disk or from the compiler.
    fn code(&self, program: &KernelKey) -> Result<Vec<u8>> {
        let architecture = self.device.architecture;
        match cached(program, architecture) {
            Some(code) => Ok(code),
            None => {
                self.compiled.fetch_add(1, Ordering::Relaxed);
                compile(program, architecture)
            }
        }
    }

    /// Loads kernels. Programs that are not on disk are compiled on all of the host's cores. `progress` gets the number
    /// of compiled programs and the number of all of them.
    pub fn load_all(&self, kernels: &[SizedKernel], progress: &mut dyn FnMut(usize, usize)) -> Result<()> {
        let programs: HashSet<KernelKey> = kernels.iter().map(|kernel| kernel.key.program()).collect();
        let is_new = |program: &KernelKey| !self.tables().programs.contains_key(program);
        let missing: Vec<KernelKey> = programs.into_iter().filter(is_new).collect();
        self.load_programs(&missing, progress)?;
        kernels
            .iter()
            .try_for_each(|SizedKernel { key, shared_bytes }| self.function(key, *shared_bytes).map(drop))
    }

    fn load_programs(&self, missing: &[KernelKey], progress: &mut dyn FnMut(usize, usize)) -> Result<()> {
        let threads = available_parallelism().map_or(1, NonZero::get).min(missing.len());
        let next = AtomicUsize::new(0);
        let (sender, codes) = channel();
        let work = |sender: Sender<(usize, Result<Vec<u8>>)>| {
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(program) = missing.get(at) else { return };
                if sender.send((at, self.code(program))).is_err() {
                    return;
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..threads {
                let (work, sender) = (&work, sender.clone());
                scope.spawn(move || work(sender));
            }
            drop(sender);
            let mut outcome = Ok(());
            for (done, (at, code)) in codes.iter().enumerate() {
                progress(done + 1, missing.len());
                let loaded = code.and_then(|code| self.tables().load(&missing[at], &code));
                outcome = outcome.and(loaded.map(drop));
            }
            outcome
        })
    }

    /// File, entry point and constants of every kernel that was requested since the last call.
    pub fn take_names(&self) -> Vec<String> {
        let asked_for = |kernel: &mut Loaded| std::mem::take(&mut kernel.was_asked_for);
        let mut tables = self.tables();
        tables.kernels.iter_mut().filter_map(|(key, kernel)| asked_for(kernel).then(|| key.name())).collect()
    }

    /// The kernel, compiled and loaded if it is new. `shared_bytes` is the most dynamic shared memory that it is
    /// launched with.
    pub fn function(&self, key: &KernelKey, shared_bytes: usize) -> Result<Function> {
        let mut tables = self.tables();
        let function = match tables.kernels.get_mut(key) {
            Some(kernel) => {
                kernel.was_asked_for = true;
                kernel.function
            }
            None => {
                let program = key.program();
                let module = match tables.programs.get(&program) {
                    Some(module) => *module,
                    None => tables.load(&program, &self.code(&program)?)?,
                };
                let function = Function::of(module, key.entry)?;
                tables.kernels.insert(key.clone(), Loaded { function, was_asked_for: true });
                function
            }
        };
        function.allow_shared(shared_bytes)?;
        Ok(function)
    }
}

impl Tables {
    /// Loads a program, unless another thread has loaded it meanwhile.
    fn load(&mut self, program: &KernelKey, code: &[u8]) -> Result<CUmodule> {
        if let Some(module) = self.programs.get(program) {
            return Ok(*module);
        }
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is a cubin of the compiler; the context is current; the pointer is to a local.
        unsafe { driver!(cuModuleLoadData(&mut module, code.as_ptr().cast()))? };
        self.programs.insert(program.clone(), module);
        Ok(module)
    }
}

impl Function {
    /// An entry point of a loaded program.
    fn of(module: CUmodule, entry: &str) -> Result<Function> {
        let (mut handle, mut bytes) = (std::ptr::null_mut(), 0);
        let static_bytes = CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        let entry = CString::new(entry).expect("names hold no zero byte");
        // SAFETY: the module is loaded; the context is current; pointers are to locals.
        unsafe {
            driver!(cuModuleGetFunction(&mut handle, module, entry.as_ptr()))?;
            driver!(cuFuncGetAttribute(&mut bytes, static_bytes, handle))?;
        }
        Ok(Function { handle, static_bytes: bytes as usize })
    }

    /// Allows the kernel `bytes` bytes of dynamic shared memory.
    fn allow_shared(&self, bytes: usize) -> Result<()> {
        if self.static_bytes + bytes <= SHARED_DEFAULT {
            return Ok(());
        }
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded.
        unsafe { driver!(cuFuncSetAttribute(self.handle, attribute, bytes as i32)) }
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        let _ = self.device.bind();
        for &module in self.tables.get_mut().unwrap_or_else(|e| e.into_inner()).programs.values() {
            // SAFETY: loaded once, unloaded once; nothing runs any more.
            let _ = unsafe { driver!(cuModuleUnload(module)) };
        }
    }
}
