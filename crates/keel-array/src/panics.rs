//! The message of a caught panic.

use std::any::Any;

/// The message of a caught panic, or `no message` if its payload is no text.
pub fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}
