//! HTTP: connections, bodies, routes, the page, and the threads for slow work.

pub(crate) mod blocking_work;
pub(crate) mod body;
pub(crate) mod connections;
pub(crate) mod page;
pub(crate) mod response_body;
pub(crate) mod routes;
pub(crate) mod serve;
pub(crate) mod status;
