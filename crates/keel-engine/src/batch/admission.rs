//! Which requests start, and which have waited too long.

use std::ops::RangeInclusive;
use std::time::Instant;

use keel_array::AttentionSpec;
use keel_cache::{PageId, PrefixHit};

use super::overcommit::PageDemand;
use super::pictures::Pictures;
use super::prefixes;
use super::sequence::{Running, pages_at_full_length, rows_at_full_length};
use super::{BatchEvent, BatchRequest, Batcher, SequenceEvent, Waiting};
use crate::{EngineError, Result};

impl Batcher {
    /// Ends requests whose time is over.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.next_expiry.is_some_and(|expiry| now >= expiry) {
            self.expire_waiting(now);
        }
        let is_late = |r: &Running| r.deadline.is_some_and(|deadline| now >= deadline);
        while let Some(at) = self.running.iter().position(is_late) {
            self.fail(at, EngineError::Deadline);
        }
        self.expire_parked(is_late);
    }

    fn expire_waiting(&mut self, now: Instant) {
        let timeout = self.options.queue_timeout;
        let events = &mut self.events;
        self.waiting.retain(|w| {
            let error = if w.request.deadline.is_some_and(|deadline| now >= deadline) {
                EngineError::Deadline
            } else if now.saturating_duration_since(w.since) >= timeout {
                EngineError::QueueTimeout { seconds: timeout.as_secs_f64() }
            } else {
                return true;
            };
            events.push(SequenceEvent { id: w.request.id, event: BatchEvent::Failed(error) });
            false
        });
        self.next_expiry = self.waiting.iter().filter_map(|waiting| waiting.expiry(timeout)).min();
    }

    /// Starts requests in the order of arrival as long as the next one fits. A request whose prompt another sequence is
    /// just running keeps its place and lets later requests pass. No request starts while a sequence is parked.
    pub(super) fn let_in(&mut self, now: Instant) {
        let mut at = 0;
        while self.parked.is_empty() && self.running.len() < self.engine.options().sequences {
            let Some(next) = self.waiting.get(at) else { return };
            let is_long = self.engine.is_long(next.request.prompt.len());
            let shares = next.request.shares_prefixes();
            let key = next.key.as_ref().unwrap_or(&next.request.prompt);
            let hit = match shares {
                true => self.prefixes.find(key, is_long),
                false => prefixes::nothing(0),
            };
            let turns_alike = |r: &&Running| r.cache.is_long() == is_long;
            let running = &mut self.running.iter().filter(turns_alike);
            if shares && running.any(|r| r.will_leave(key, hit.len)) {
                at += 1;
                continue;
            }
            let Some(hit) = self.promise(&next.request, hit) else { return };
            let Some(waiting) = self.waiting.remove(at) else { return };
            let id = waiting.request.id;
            let queued = now.saturating_duration_since(waiting.since);
            match self.start(waiting, &hit) {
                Ok(()) => self.emit(id, BatchEvent::Started { cached_tokens: hit.len, queued }),
                Err(error) => self.emit(id, BatchEvent::Failed(error)),
            }
        }
    }

    /// The part of a hit that can be used without breaking a promise; `None` if the request has to wait.
    fn promise(&self, request: &BatchRequest, hit: PrefixHit) -> Option<PrefixHit> {
        if self.can_see(request, hit.len) && self.can_start(request, &hit) {
            return Some(hit);
        }
        // The pages that it would share may take the room that it needs, so try without them.
        let anew = prefixes::nothing(hit.known_len);
        (self.can_see(request, 0) && self.can_start(request, &anew)).then_some(anew)
    }

    /// Whether there is room for a request that begins with this hit.
    fn can_start(&self, request: &BatchRequest, hit: &PrefixHit) -> bool {
        let shared = &hit.pages[..hit.len / AttentionSpec::PAGE];
        let pinned = self.prefixes.evictable_of(self.engine.cache(), &hit.pages);
        let all = pages_at_full_length(request.prompt.len(), request.max_tokens);
        if let Some(crowd) = self.overcommit_policy() {
            let newcomer = PageDemand::new(0, request.prompt.len().div_ceil(AttentionSpec::PAGE), all);
            let running = self.running_holdings();
            return crowd.can_start(self.available_pages(), &running, newcomer, shared.len(), pinned);
        }
        // Promises are kept by free pages and by those of prefixes. Shared pages are there already, but can no longer
        // be evicted.
        let promised: usize = self.running.iter().map(|running| self.pages_missing(running)).sum();
        let twice = self.pages_needed_twice(request, shared);
        self.available_pages() >= promised + (all - shared.len()) + pinned + twice
    }

    /// Pages that were promised to a sequence and that it does not have yet. A sequence that outgrows its rotary
    /// frequencies runs again in pages of its own, and those that other sequences hold are not given back then.
    fn pages_missing(&self, running: &Running) -> usize {
        let missing = running.pages_missing();
        if !self.outgrows(running) {
            return missing;
        }
        let cache = self.engine.cache();
        missing + running.cache.pages().iter().filter(|&&page| cache.page_sequences(page) > 1).count()
    }

    /// Whether a sequence will outgrow its rotary frequencies if it reaches its full length.
    fn outgrows(&self, running: &Running) -> bool {
        !self.engine.can_grow(&running.cache, running.rows_at_full_length())
    }

    /// How many of the pages that a request would share are needed twice if it, or a sequence that holds them, outgrows
    /// its rotary frequencies.
    fn pages_needed_twice(&self, request: &BatchRequest, shared: &[PageId]) -> usize {
        let (cache, prompt) = (self.engine.cache(), request.prompt.len());
        let held = |count: RangeInclusive<u32>| {
            shared.iter().filter(|&&page| count.contains(&cache.page_sequences(page))).count()
        };
        let grows = !self.engine.is_long(prompt)
            && self.engine.is_long(rows_at_full_length(prompt, request.max_tokens));
        let own = if grows { held(1..=u32::MAX) } else { 0 };
        // Pages with more holders are missing to these already.
        let others = if self.running.iter().any(|running| self.outgrows(running)) { held(1..=1) } else { 0 };
        own + others
    }

    fn start(&mut self, waiting: Waiting, hit: &PrefixHit) -> Result<()> {
        let mut sequence = self.engine.cache_mut().resume(hit.len, &hit.pages, hit.state)?;
        // The sequence holds the pages that it shares, so making room may forget the prefix.
        let copies = usize::from(!hit.len.is_multiple_of(AttentionSpec::PAGE));
        self.prefixes.make_room(self.engine.cache(), copies);
        self.engine.cache_mut().own_last_page(&mut sequence)?;
        let Waiting { mut request, key, sampler, .. } = waiting;
        sequence.set_long(self.engine.is_long(request.prompt.len()));
        let save_points = if self.prefixes.keeps_states(self.engine.cache()) && request.shares_prefixes() {
            prefixes::save_points(request.prompt.len(), hit.len, hit.known_len, &request.marks)
        } else {
            Vec::new()
        };
        let pictures = Pictures::new(request.vision.take(), key);
        let mut running = Running::new(request, sequence, save_points, sampler, self.engine.runs_ahead());
        running.pictures = pictures;
        running.last_turn = self.turn;
        self.hold_pictures(&mut running, hit.len);
        self.running.push(running);
        Ok(())
    }
}
