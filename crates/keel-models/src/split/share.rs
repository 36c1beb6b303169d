//! A device's share of every layer, where several devices split the layers of a model.
//!
//! A device loads its share from a checkpoint that looks smaller than it is:
//! [`ShareParameters`](crate::split::share_parameters::ShareParameters) shows the rows and columns of the share, under
//! a config with the share's numbers of heads and widths. The code that reads a model type does not know of it.
//!
//! ```text
//! q, k, v, z, a, b, convolution    rows of the device's heads         y_r = W[rows_r] x
//! gate, up                         rows of the device's columns
//! experts                          the same, or some of the experts whole
//! o, down, out                     the columns that read them         y = sum over r of W[:, cols_r] y_r
//! norms, router                    whole on every device
//! embedding, output head           rows of the device's tokens
//! ```

use std::ops::Range;

use keel_array::Peers;

use crate::{HybridConfig, MixerKind, MixtureConfig, ModelError, RecurrentConfig, Result};

/// How devices share a mixture of experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MixtureCut {
    /// Each has some columns of every expert. So all have the same work, whichever experts are chosen.
    #[default]
    Columns,
    /// Each has some of the experts whole; the first one also has the shared expert. A device computes something for
    /// each choice, also for those of other devices.
    Experts,
}

/// Which share of each layer a device holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The share's number.
    pub index: usize,
    /// How many shares there are.
    pub count: usize,
    /// Rank of the device with the first share. Those with the others follow.
    pub first: usize,
    /// How mixtures of experts are divided.
    pub mixture: MixtureCut,
}

/// The tokens whose rows of the embedding and of the output head a device has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VocabularyShare {
    /// The devices that share the vocabulary. `None` if each device has all of it: there is one, or the vocabulary does
    /// not divide evenly.
    pub peers: Option<Peers>,
    /// The tokens of this device.
    pub tokens: Range<usize>,
}

impl Default for Share {
    /// All of every layer.
    fn default() -> Share {
        Share { index: 0, count: 1, first: 0, mixture: MixtureCut::Columns }
    }
}

impl Share {
    /// The devices that hold the shares, if there are several.
    pub fn peers(self) -> Option<Peers> {
        (self.count > 1).then_some(Peers { first: self.first, count: self.count })
    }

    /// This share of a vocabulary of `vocab` tokens.
    pub fn vocabulary(self, vocab: usize) -> VocabularyShare {
        let peers = self.peers().filter(|peers| vocab.is_multiple_of(peers.count));
        VocabularyShare { peers, tokens: peers.map_or(0..vocab, |_| self.of(vocab)) }
    }

    /// This share of `total` things, which divide evenly.
    pub fn of(self, total: usize) -> Range<usize> {
        total / self.count * self.index..total / self.count * (self.index + 1)
    }

    /// The key-value heads of this share: some of the model's, or one that several shares repeat.
    pub(crate) fn kv_heads(self, total: usize) -> Range<usize> {
        if total.is_multiple_of(self.count) {
            return self.of(total);
        }
        let head = self.index * total / self.count;
        head..head + 1
    }

    /// The numbers of a share of this model.
    ///
    /// # Errors
    /// A number of it does not divide by the number of shares.
    pub fn config(self, whole: &HybridConfig) -> Result<HybridConfig> {
        let count = self.count;
        let share = |what: &str, total: usize| match total.is_multiple_of(count) {
            true => Ok(total / count),
            false => Err(ModelError::Part(format!(
                "{total} {what} cannot be split evenly over {count} devices: take a number of devices that divides them, or \
                 --split pipeline"
            ))),
        };
        let recurrent = |r: RecurrentConfig| {
            Ok::<_, ModelError>(RecurrentConfig {
                key_heads: share("key heads of recurrent layers", r.key_heads)?,
                value_heads: share("value heads of recurrent layers", r.value_heads)?,
                ..r
            })
        };
        let has_recurrent = whole.layers.contains(&MixerKind::GatedDelta);
        let heads = share("attention heads", whole.heads)?;
        if !whole.kv_heads.is_multiple_of(count) && !count.is_multiple_of(whole.kv_heads.max(1)) {
            return Err(ModelError::Part(format!(
                "{} key-value heads can neither be split over {count} devices nor repeated on them evenly: take a number of \
                 devices that divides them or is a multiple of them, or --split pipeline",
                whole.kv_heads
            )));
        }
        let moe = match (&whole.moe, self.mixture) {
            (None, _) => None,
            (Some(moe), MixtureCut::Experts) => Some(self.some_experts(moe)?),
            (Some(moe), MixtureCut::Columns) => Some(MixtureConfig {
                intermediate: share("columns of an expert", moe.intermediate)?,
                shared_intermediate: moe
                    .shared_intermediate
                    .map(|width| share("columns of the shared expert", width))
                    .transpose()?,
                ..moe.clone()
            }),
        };
        Ok(HybridConfig {
            heads,
            kv_heads: self.kv_heads(whole.kv_heads).len(),
            recurrent: whole.recurrent.filter(|_| has_recurrent).map(recurrent).transpose()?,
            intermediate: match &whole.moe {
                Some(moe) if moe.dense_layers.is_empty() => whole.intermediate,
                _ => whole
                    .intermediate
                    .map(|width| share("columns of the feed-forward half", width))
                    .transpose()?,
            },
            moe,
            ..whole.clone()
        })
    }

    /// The experts of this share, and on the first one the shared expert.
    fn some_experts(self, whole: &MixtureConfig) -> Result<MixtureConfig> {
        let (experts, count) = (whole.experts, self.count);
        let own = self.index * experts / count..(self.index + 1) * experts / count;
        if experts < count {
            return Err(ModelError::Part(format!(
                "{experts} experts cannot be shared by {count} devices: take {experts} devices or fewer, or --split pipeline"
            )));
        }
        let shared_intermediate = whole.shared_intermediate.filter(|_| self.index == 0);
        let shared_elsewhere = whole.shared_intermediate.is_some() && shared_intermediate.is_none();
        Ok(MixtureConfig { own, shared_intermediate, shared_elsewhere, ..whole.clone() })
    }
}
