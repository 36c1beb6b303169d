//! Connections, requests and limits, whatever they ask for.

#[path = "../common/mod.rs"]
mod common;

mod access;
mod connections;
mod distorted_bodies;
mod faults;
mod half_open;
mod limits;
mod monitoring;
