//! Compiled kernels that are loaded on a device.

use super::{Architecture, Device, compile, driver};
use crate::error::Result;
use crate::kernels::KernelKey;
use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUmodule};
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex};

/// Dynamic shared memory that a block has without being asked for.
const SHARED_DEFAULT: usize = 48 << 10;

/// A kernel that can be launched. Lives as long as the [`Modules`] it came from.
#[derive(Clone, Copy)]
pub(crate) struct Function(pub CUfunction);

struct Module {
    module: CUmodule,
    function: CUfunction,
    /// Since the last [`Modules::take_names`].
    was_asked_for: bool,
}

/// Every kernel that was asked for so far.
pub(crate) struct Modules {
    device: Arc<Device>,
    loaded: Mutex<HashMap<KernelKey, Module>>,
}

// SAFETY: handles of the driver may be used from any thread with the context current.
unsafe impl Send for Modules {}
// SAFETY: as above; the map is behind a lock.
unsafe impl Sync for Modules {}

impl Modules {
    pub fn new(device: &Arc<Device>) -> Modules {
        Modules { device: Arc::clone(device), loaded: Mutex::default() }
    }

    /// File, entry point and constants of every kernel that was asked for since the last call.
    pub fn take_names(&self) -> Vec<String> {
        let mut loaded = self.loaded.lock().unwrap_or_else(|e| e.into_inner());
        let asked_for = |module: &mut Module| std::mem::take(&mut module.was_asked_for);
        loaded.iter_mut().filter_map(|(key, module)| asked_for(module).then(|| key.name())).collect()
    }

    /// The kernel, compiled and loaded if it is new. `shared_bytes` is the most dynamic shared memory that it is
    /// launched with.
    pub fn function(&self, key: &KernelKey, shared_bytes: usize) -> Result<Function> {
        let mut loaded = self.loaded.lock().unwrap_or_else(|e| e.into_inner());
        let function = match loaded.get_mut(key) {
            Some(module) => {
                module.was_asked_for = true;
                module.function
            }
            None => {
                let code = compile(key, Architecture { capability: self.device.capability })?;
                let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
                let entry = CString::new(key.entry).expect("names hold no zero byte");
                // SAFETY: the image is a cubin of the compiler; the context is current; pointers are to locals.
                unsafe {
                    driver!(cuModuleLoadData(&mut module, code.as_ptr().cast()))?;
                    driver!(cuModuleGetFunction(&mut function, module, entry.as_ptr()))?;
                }
                loaded.insert(key.clone(), Module { module, function, was_asked_for: true });
                function
            }
        };
        if shared_bytes > SHARED_DEFAULT {
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded.
            unsafe { driver!(cuFuncSetAttribute(function, attribute, shared_bytes as i32))? };
        }
        Ok(Function(function))
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
