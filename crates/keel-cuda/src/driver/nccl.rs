//! NCCL, which exchanges arrays between GPUs. It is loaded at run time, and only for a model on several GPUs.
//!
//! `cudarc` opens this library by the name of its development package alone, `libnccl.so`. Other packages install
//! `libnccl.so.2` and nothing else. So it is opened here by that name, as NVML is.

mod settings;

pub(crate) use settings::{
    Extent, Messages, allows_peer_access, apply as apply_settings, communicator_bytes,
};

use super::Device;
use crate::error::Result;
use crate::nccl::{NAMES, missing, refusal};
use crate::{CudaError, Version};
use cudarc::driver::sys::CUstream;
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::sync::Arc;

/// `ncclFloat32`, `ncclSum` and results of the library.
const FLOAT32: c_int = 7;
const SUM: c_int = 0;
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;

/// Bytes of `ncclUniqueId`.
pub(crate) const ID_BYTES: usize = 128;

type Handle = *mut c_void;

/// `ncclUniqueId`: which devices become one communicator, and where they meet. The library takes it by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct Id([c_char; ID_BYTES]);

const _: () = assert!(size_of::<Id>() == ID_BYTES);

/// A device's place in a communicator that is to be made.
pub(crate) struct Membership<'a> {
    pub device: &'a Device,
    /// That of the communicator.
    pub id: [u8; ID_BYTES],
    /// The device's rank in the communicator, which has `size` devices.
    pub rank: usize,
    pub size: usize,
}

/// A sum over all devices.
type Sum = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, CUstream) -> c_int;

/// The functions, with their types of all versions 2.
struct Functions {
    version: unsafe extern "C" fn(*mut c_int) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    unique_id: unsafe extern "C" fn(*mut Id) -> c_int,
    init_rank: unsafe extern "C" fn(*mut Handle, c_int, Id, c_int) -> c_int,
    device_of: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    abort: unsafe extern "C" fn(Handle) -> c_int,
    async_error: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    all_reduce: Sum,
    reduce_scatter: Sum,
    all_gather: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Handle, CUstream) -> c_int,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Handle, CUstream) -> c_int,
    receive: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, CUstream) -> c_int,
}

/// The library.
pub(crate) struct Nccl {
    functions: Functions,
    /// Holds the functions. It is never unloaded: threads of the library, and a connection that no thread waits for any
    /// more, may still run its code.
    _library: ManuallyDrop<Library>,
}

impl Nccl {
    /// Loads the library, with its [settings](apply_settings).
    ///
    /// # Errors
    /// It is not there, or too old.
    pub fn load() -> Result<Arc<Nccl>> {
        apply_settings();
        Nccl::open(&NAMES)
    }

    /// Opens the library by the first of these names that exists.
    fn open(names: &[&str]) -> Result<Arc<Nccl>> {
        // SAFETY: a library of the driver's maker, whose loading runs nothing that depends on this process.
        let opened = names.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
        let library = opened.ok_or_else(missing)?;
        macro_rules! function {
            ($name:literal) => {{
                // SAFETY: the library's functions of these names have the types of their fields.
                let found = unsafe { library.get(concat!($name, "\0").as_bytes()) };
                let lacks = || CudaError::Driver { call: $name, reason: format!("{} lacks it", NAMES[0]) };
                *found.map_err(|_| lacks())?
            }};
        }
        let functions = Functions {
            version: function!("ncclGetVersion"),
            error_string: function!("ncclGetErrorString"),
            unique_id: function!("ncclGetUniqueId"),
            init_rank: function!("ncclCommInitRank"),
            device_of: function!("ncclCommCuDevice"),
            abort: function!("ncclCommAbort"),
            async_error: function!("ncclCommGetAsyncError"),
            group_start: function!("ncclGroupStart"),
            group_end: function!("ncclGroupEnd"),
            all_reduce: function!("ncclAllReduce"),
            reduce_scatter: function!("ncclReduceScatter"),
            all_gather: function!("ncclAllGather"),
            send: function!("ncclSend"),
            receive: function!("ncclRecv"),
        };
        let nccl = Nccl { functions, _library: ManuallyDrop::new(library) };
        match refusal(nccl.version()?) {
            Some(reason) => Err(CudaError::Driver { call: "ncclGetVersion", reason }),
            None => Ok(Arc::new(nccl)),
        }
    }

    fn version(&self) -> Result<Version> {
        let mut version = 0;
        // SAFETY: the pointer is to a local.
        let code = unsafe { (self.functions.version)(&mut version) };
        self.check("ncclGetVersion", code)?;
        // 21805 is 2.18.5.
        let version = u32::try_from(version).unwrap_or(0);
        Ok((version / 10_000, version % 10_000 / 100))
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: the function returns a constant string for every number.
        let text = unsafe { CStr::from_ptr((self.functions.error_string)(code)) };
        Err(CudaError::Driver { call, reason: text.to_string_lossy().into_owned() })
    }

    /// An id for a communicator that is to be made. The devices find each other through this process.
    ///
    /// # Errors
    /// The library's reason.
    pub fn make_id(&self) -> Result<[u8; ID_BYTES]> {
        let mut id = Id([0; ID_BYTES]);
        // SAFETY: the pointer is to a local of the library's type.
        let code = unsafe { (self.functions.unique_id)(&mut id) };
        self.check("ncclGetUniqueId", code).map(|()| id.0.map(|byte| byte as u8))
    }

    /// Connects devices. Returns their communicators, in the same order. Waits until all ranks of the communicators
    /// have come, also those of other processes.
    ///
    /// # Errors
    /// The library's reason.
    pub fn connect(self: &Arc<Self>, places: &[Membership<'_>]) -> Result<Vec<Communicator>> {
        // A device that is lost must be seen here: within the group, the others would wait for its rank.
        places.iter().try_for_each(|place| place.device.bind())?;
        let mut handles: Vec<Handle> = vec![std::ptr::null_mut(); places.len()];
        let mut put = 0;
        let outcome = self.together(|| {
            for (place, handle) in places.iter().zip(&mut handles) {
                // The library takes the device whose context is current.
                place.device.bind()?;
                let (size, rank) = (place.size as c_int, place.rank as c_int);
                let id = Id(place.id.map(|byte| byte as c_char));
                // SAFETY: the handle's place stays where it is until the group of calls has ended.
                let code = unsafe { (self.functions.init_rank)(handle, size, id, rank) };
                self.check("ncclCommInitRank", code)?;
                put += 1;
            }
            Ok(())
        });
        // Only communicators whose connection was begun can be ended.
        handles.retain(|handle| put == places.len() && !handle.is_null());
        let communicators: Vec<Communicator> =
            handles.into_iter().map(|handle| Communicator { nccl: Arc::clone(self), handle }).collect();
        outcome?;
        for (communicator, place) in communicators.iter().zip(places) {
            communicator.expect_on(place.device)?;
        }
        Ok(communicators)
    }

    /// Makes the calls of `work`, which are for several devices, as one.
    ///
    /// # Errors
    /// Those of `work`, or the library's reason.
    pub fn together(&self, work: impl FnOnce() -> Result<()>) -> Result<()> {
        // SAFETY: ended below.
        let code = unsafe { (self.functions.group_start)() };
        self.check("ncclGroupStart", code)?;
        let outcome = work();
        // SAFETY: begun above, on this thread.
        let code = unsafe { (self.functions.group_end)() };
        outcome.and(self.check("ncclGroupEnd", code))
    }
}

/// A device's place among those that it exchanges arrays with.
///
/// Dropping it ends the exchanges of its device that are under way. The last drop among all devices waits until no
/// graph holds exchanges, on any of them.
pub(crate) struct Communicator {
    nccl: Arc<Nccl>,
    handle: Handle,
}

// SAFETY: a handle of the library, used by one thread at a time.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Refuses a communicator that was made for another device than this one.
    fn expect_on(&self, device: &Device) -> Result<()> {
        let mut found = 0;
        // SAFETY: the handle is alive, the pointer is to a local.
        let code = unsafe { (self.nccl.functions.device_of)(self.handle, &mut found) };
        self.nccl.check("ncclCommCuDevice", code)?;
        if found == device.ordinal() {
            return Ok(());
        }
        let reason = format!("it was made for device {found}, not for device {}", device.ordinal());
        Err(CudaError::Driver { call: "ncclCommInitRank", reason })
    }

    /// An error that has happened since the last call, such as a lost connection.
    pub fn failure(&self) -> Option<CudaError> {
        let mut code = SUCCESS;
        // SAFETY: the handle is alive, the pointer is to a local.
        let asked = unsafe { (self.nccl.functions.async_error)(self.handle, &mut code) };
        let code = if asked == SUCCESS { code } else { asked };
        (code != IN_PROGRESS).then(|| self.nccl.check("ncclCommGetAsyncError", code).err())?
    }

    /// Puts the sum of all devices' arrays of `count` floats on the stream.
    ///
    /// # Safety
    /// The arrays are on the device, whose context is current, until the stream has passed.
    pub unsafe fn all_reduce(&self, from: u64, to: u64, count: usize, device: &Device) -> Result<()> {
        let (from, to, call) = (from as *const c_void, to as *mut c_void, self.nccl.functions.all_reduce);
        // SAFETY: as the caller promises; the handle is alive.
        let code = unsafe { call(from, to, count, FLOAT32, SUM, self.handle, device.stream()) };
        self.nccl.check("ncclAllReduce", code)
    }

    /// Puts this device's part of the sum of all devices' arrays on the stream. A part has `count` floats.
    ///
    /// # Safety
    /// As [`Communicator::all_reduce`].
    pub unsafe fn reduce_scatter(&self, from: u64, to: u64, count: usize, device: &Device) -> Result<()> {
        let (from, to, call) = (from as *const c_void, to as *mut c_void, self.nccl.functions.reduce_scatter);
        // SAFETY: as the caller promises; the handle is alive.
        let code = unsafe { call(from, to, count, FLOAT32, SUM, self.handle, device.stream()) };
        self.nccl.check("ncclReduceScatter", code)
    }

    /// Puts the arrays of all devices, `count` floats each, one after the other, on the stream.
    ///
    /// # Safety
    /// As [`Communicator::all_reduce`].
    pub unsafe fn all_gather(&self, from: u64, to: u64, count: usize, device: &Device) -> Result<()> {
        let (from, to, call) = (from as *const c_void, to as *mut c_void, self.nccl.functions.all_gather);
        // SAFETY: as the caller promises; the handle is alive.
        let code = unsafe { call(from, to, count, FLOAT32, self.handle, device.stream()) };
        self.nccl.check("ncclAllGather", code)
    }

    /// Puts the sending of `count` floats to a peer on the stream.
    ///
    /// # Safety
    /// As [`Communicator::all_reduce`].
    pub unsafe fn send(&self, from: u64, count: usize, peer: usize, device: &Device) -> Result<()> {
        let call = self.nccl.functions.send;
        // SAFETY: as the caller promises; the handle is alive.
        let code = unsafe {
            call(from as *const c_void, count, FLOAT32, peer as c_int, self.handle, device.stream())
        };
        self.nccl.check("ncclSend", code)
    }

    /// Puts the receipt of `count` floats from a peer on the stream.
    ///
    /// # Safety
    /// As [`Communicator::all_reduce`].
    pub unsafe fn receive(&self, to: u64, count: usize, peer: usize, device: &Device) -> Result<()> {
        let call = self.nccl.functions.receive;
        // SAFETY: as the caller promises; the handle is alive.
        let code =
            unsafe { call(to as *mut c_void, count, FLOAT32, peer as c_int, self.handle, device.stream()) };
        self.nccl.check("ncclRecv", code)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // SAFETY: connected once, ended once.
        let code = unsafe { (self.nccl.functions.abort)(self.handle) };
        if let Err(error) = self.nccl.check("ncclCommAbort", code) {
            tracing::warn!("{error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nccl::VERSION_MIN;

    #[test]
    fn a_machine_without_the_library_gets_a_sentence() {
        let error = Nccl::open(&["libnccl.so.of-no-version"]).err().expect("there is no such library");
        let text = error.to_string();
        assert!(text.starts_with("libnccl.so.2 was not found: a model on several GPUs needs it"), "{text}");
        assert!(text.contains("LD_LIBRARY_PATH"), "{text}");
    }

    #[test]
    fn settings_are_made_before_the_library_is_asked_for() {
        let loaded = Nccl::load();
        assert_eq!(std::env::var("NCCL_NVLS_ENABLE").as_deref(), Ok("0"));
        if let Ok(nccl) = loaded {
            assert!(nccl.version().expect("a number") >= VERSION_MIN);
            let [first, second] = [(); 2].map(|()| nccl.make_id().expect("a network interface"));
            assert_ne!(first, second, "each id is for one communicator");
        }
    }
}
