//! NVRTC compiles kernels for the machine's own architecture, with shapes as constants. The code is kept on disk.

use crate::CudaError;
use crate::error::Result;
use crate::kernels::{HEADERS, KernelKey};
use crate::parameters::LISTS;
use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};
use std::ffi::{CStr, CString, c_char};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

use super::kernel_cache::{cache_folder, read, store};
use super::survey::Version;

/// The target of a compilation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Architecture {
    /// Compute capability: major, minor.
    pub capability: (u32, u32),
    /// Whether the code has no instruction of one generation alone.
    pub is_portable: bool,
}

impl Architecture {
    /// The compiler's name. Hopper and later get the instructions of their own generation alone (`a`), because the code
    /// is never carried to another machine.
    pub fn name(&self) -> String {
        let (major, minor) = self.capability;
        format!("sm_{major}{minor}{}", if major >= 9 && !self.is_portable { "a" } else { "" })
    }
}

struct Program(nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

/// Machine code of a kernel's program that was compiled before.
pub fn cached(key: &KernelKey, architecture: Architecture) -> Option<Vec<u8>> {
    // SAFETY: asks the loader whether the library can be opened. Its version is part of the path.
    if !unsafe { sys::is_culib_present() } {
        return None;
    }
    read(&path_of(key, architecture)?)
}

/// Machine code of a kernel's program, from the cache on disk or from the compiler.
///
/// # Errors
/// If the compiler is not there, or refuses the source.
pub fn compile(key: &KernelKey, architecture: Architecture) -> Result<Vec<u8>> {
    has_compiler()?;
    let path = path_of(key, architecture);
    if let Some(code) = path.as_deref().and_then(read) {
        return Ok(code);
    }
    let code = compile_source(key, architecture)?;
    if let Some(path) = path {
        store(&path, &code);
    }
    Ok(code)
}

/// An error if the compiler is missing.
pub(super) fn has_compiler() -> Result<()> {
    // SAFETY: asks the loader whether the library can be opened.
    if unsafe { sys::is_culib_present() } {
        return Ok(());
    }
    let advice = "it is part of the CUDA toolkit and of the package nvidia-cuda-nvrtc; install either, and name \
                  its folder in LD_LIBRARY_PATH";
    Err(CudaError::Missing { library: "libnvrtc", advice })
}

/// The compiler's version.
pub(super) fn version() -> Result<Version> {
    has_compiler()?;
    let (major, minor) = compiler_version();
    Ok((major as u32, minor as u32))
}

fn compile_source(key: &KernelKey, architecture: Architecture) -> Result<Vec<u8>> {
    let text = |s: &str| CString::new(s).expect("sources and options hold no zero byte");
    let (source, name) = (text(&key.source), text(key.file));
    let headers: Vec<(CString, CString)> = HEADERS.iter().map(|(n, s)| (text(n), text(s))).collect();
    let lists = LISTS.iter().map(|list| (text(list.file), text(&list.text())));
    let headers: Vec<(CString, CString)> = headers.into_iter().chain(lists).collect();
    let header_names: Vec<*const c_char> = headers.iter().map(|h| h.0.as_ptr()).collect();
    let header_sources: Vec<*const c_char> = headers.iter().map(|h| h.1.as_ptr()).collect();
    let mut handle = std::ptr::null_mut();
    // SAFETY: all strings outlive the call, which copies them.
    let code = unsafe {
        sys::nvrtcCreateProgram(
            &mut handle,
            source.as_ptr(),
            name.as_ptr(),
            headers.len() as i32,
            header_sources.as_ptr(),
            header_names.as_ptr(),
        )
    };
    let failed =
        |log: String| CudaError::Compile { kernel: key.name(), architecture: architecture.name(), log };
    if code != nvrtcResult::NVRTC_SUCCESS {
        return Err(failed(format!("{code:?}")));
    }
    let program = Program(handle);
    let mut options = vec![
        format!("--gpu-architecture={}", architecture.name()),
        "--std=c++17".to_owned(),
        "-default-device".into(),
    ];
    options.extend(key.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
    let options: Vec<CString> = options.iter().map(|o| text(o)).collect();
    let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
    // SAFETY: the program exists and the options outlive the call.
    let code = unsafe { sys::nvrtcCompileProgram(program.0, pointers.len() as i32, pointers.as_ptr()) };
    if code != nvrtcResult::NVRTC_SUCCESS {
        return Err(failed(log_of(&program)));
    }
    let mut size = 0;
    // SAFETY: the pointer is to a local.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &mut size) };
    let mut image = vec![0u8; size];
    // SAFETY: the compiler writes as many bytes as it has just reported.
    let code = unsafe { sys::nvrtcGetCUBIN(program.0, image.as_mut_ptr().cast()) };
    if code != nvrtcResult::NVRTC_SUCCESS {
        return Err(failed(format!("{code:?}")));
    }
    Ok(image)
}

fn log_of(program: &Program) -> String {
    let mut size = 0;
    // SAFETY: the pointer is to a local.
    unsafe { sys::nvrtcGetProgramLogSize(program.0, &mut size) };
    let mut log = vec![0u8; size.max(1)];
    // SAFETY: the compiler writes as many bytes as it has just reported, the last one a zero.
    unsafe { sys::nvrtcGetProgramLog(program.0, log.as_mut_ptr().cast()) };
    CStr::from_bytes_until_nul(&log).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default()
}

fn compiler_version() -> (i32, i32) {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the pointers are to locals.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    (major, minor)
}

/// Where the machine code of this kernel's program is kept.
fn path_of(key: &KernelKey, architecture: Architecture) -> Option<PathBuf> {
    let mut hasher = DefaultHasher::new();
    (key.program(), architecture, HEADERS, compiler_version()).hash(&mut hasher);
    LISTS.iter().for_each(|list| list.text().hash(&mut hasher));
    Some(cache_folder()?.join(format!("{}-{:016x}.cubin", key.file.trim_end_matches(".cu"), hasher.finish())))
}
