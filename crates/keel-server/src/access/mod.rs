//! Who may ask: hosts and origins, keys, and the caller of a request.

pub(crate) mod caller;
pub(crate) mod host_check;
pub(crate) mod keys;
