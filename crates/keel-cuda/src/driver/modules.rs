//! Compiled kernels that are loaded on a device.

use super::{Device, cached, compile, driver, has_compiler};
use crate::error::Result;
use crate::kernels::KernelKey;
use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUmodule};
use std::collections::HashMap;
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

struct Module {
    module: CUmodule,
    function: Function,
    /// Whether it was requested since the last [`Modules::take_names`].
    was_asked_for: bool,
}

/// Every kernel that was requested so far.
pub(crate) struct Modules {
    device: Arc<Device>,
    loaded: Mutex<HashMap<KernelKey, Module>>,
    compiled: AtomicU64,
}

// SAFETY: handles of the driver may be used from any thread with the context current.
unsafe impl Send for Modules {}
// SAFETY: as above; a lock protects the map.
unsafe impl Sync for Modules {}

impl Modules {
    /// No kernels yet.
    ///
    /// # Errors
    /// The compiler is missing. It is needed for kernels on disk, too: the compiler's version is part of their names.
    pub fn new(device: &Arc<Device>) -> Result<Modules> {
        has_compiler()?;
        Ok(Modules { device: Arc::clone(device), loaded: Mutex::default(), compiled: AtomicU64::new(0) })
    }

    fn loaded(&self) -> MutexGuard<'_, HashMap<KernelKey, Module>> {
        self.loaded.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Kernels that were compiled because they were not on disk.
    pub fn compiled_count(&self) -> u64 {
        self.compiled.load(Ordering::Relaxed)
    }

    /// Kernels that are loaded.
    pub fn loaded_count(&self) -> u64 {
        self.loaded().len() as u64
    }

    /// Machine code of a kernel, from the disk or from the compiler.
    fn code(&self, key: &KernelKey) -> Result<Vec<u8>> {
        let architecture = self.device.architecture;
        match cached(key, architecture) {
            Some(code) => Ok(code),
            None => {
                self.compiled.fetch_add(1, Ordering::Relaxed);
                compile(key, architecture)
            }
        }
    }

    /// Loads kernels. Those that are not on disk are compiled on all of the host's cores. `progress` gets the number of
    /// compiled kernels and the number of all of them.
    pub fn load_all(&self, kernels: &[SizedKernel], progress: &mut dyn FnMut(usize, usize)) -> Result<()> {
        let is_new = |kernel: &&SizedKernel| !self.loaded().contains_key(&kernel.key);
        let missing: Vec<&SizedKernel> = kernels.iter().filter(is_new).collect();
        let threads = available_parallelism().map_or(1, NonZero::get).min(missing.len());
        let next = AtomicUsize::new(0);
        let (sender, codes) = channel();
        let work = |sender: Sender<(usize, Result<Vec<u8>>)>| {
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(SizedKernel { key, .. }) = missing.get(at) else { return };
                if sender.send((at, self.code(key))).is_err() {
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
                let SizedKernel { key, shared_bytes } = missing[at];
                let loaded = code.and_then(|code| self.load(&mut self.loaded(), key, &code));
                let set = loaded.and_then(|function| function.allow_shared(*shared_bytes));
                outcome = outcome.and(set);
            }
            outcome
        })
    }

    fn load(
        &self,
        loaded: &mut HashMap<KernelKey, Module>,
        key: &KernelKey,
        code: &[u8],
    ) -> Result<Function> {
        let (mut module, mut handle, mut bytes) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
        let static_bytes = CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        let entry = CString::new(key.entry).expect("names hold no zero byte");
        // SAFETY: the image is a cubin of the compiler; the context is current; pointers are to locals.
        unsafe {
            driver!(cuModuleLoadData(&mut module, code.as_ptr().cast()))?;
            driver!(cuModuleGetFunction(&mut handle, module, entry.as_ptr()))?;
            driver!(cuFuncGetAttribute(&mut bytes, static_bytes, handle))?;
        }
        let function = Function { handle, static_bytes: bytes as usize };
        loaded.insert(key.clone(), Module { module, function, was_asked_for: true });
        Ok(function)
    }

    /// File, entry point and constants of every kernel that was requested since the last call.
    pub fn take_names(&self) -> Vec<String> {
        let mut loaded = self.loaded();
        let asked_for = |module: &mut Module| std::mem::take(&mut module.was_asked_for);
        loaded.iter_mut().filter_map(|(key, module)| asked_for(module).then(|| key.name())).collect()
    }

    /// The kernel, compiled and loaded if it is new. `shared_bytes` is the most dynamic shared memory that it is
    /// launched with.
    pub fn function(&self, key: &KernelKey, shared_bytes: usize) -> Result<Function> {
        let mut loaded = self.loaded();
        let function = match loaded.get_mut(key) {
            Some(module) => {
                module.was_asked_for = true;
                module.function
            }
            None => {
                let code = self.code(key)?;
                self.load(&mut loaded, key, &code)?
            }
        };
        function.allow_shared(shared_bytes)?;
        Ok(function)
    }
}

impl Function {
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
        for module in self.loaded.get_mut().unwrap_or_else(|e| e.into_inner()).values() {
            // SAFETY: loaded once, unloaded once; nothing runs any more.
            let _ = unsafe { driver!(cuModuleUnload(module.module)) };
        }
    }
}
