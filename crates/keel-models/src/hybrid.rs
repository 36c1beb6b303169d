//! A complete model: embedding, layers, final norm, output head, and the multi-token-prediction head.

use keel_array::{AddedNorm, Array, ConvWindow, DType, DeltaState, Peers, Weight};
use keel_cache::{CacheFormat, CacheSpec, CommitProgress, LayerSpec, LayerStorage};

use crate::blocks::{Attention, FeedForward, GatedDeltaNet, RmsNorm, StepContext};
use crate::split::sums::of_their_device;
use crate::{HybridConfig, MixerKind, ModelError, Part, Result, VocabularyShare};

/// The first half of a block.
#[derive(Debug)]
pub enum Mixer {
    /// Full or sliding attention.
    Attention(Attention),
    /// Recurrent.
    GatedDelta(GatedDeltaNet),
}

/// One layer.
#[derive(Debug)]
pub struct Block {
    /// Norm before the mixer.
    pub mixer_norm: Option<RmsNorm>,
    /// First half.
    pub mixer: Mixer,
    /// Norm of the mixer's output, before it is added.
    pub mixer_out_norm: Option<RmsNorm>,
    /// Norm before the feed-forward half.
    pub ff_norm: Option<RmsNorm>,
    /// Second half.
    pub ff: FeedForward,
    /// Norm of the second half's output, before it is added.
    pub ff_out_norm: Option<RmsNorm>,
}

/// The norm of x; x itself if there is no norm.
fn normed(norm: Option<&RmsNorm>, x: &Array) -> Result<Array> {
    Ok(norm.map_or(Ok(x.clone()), |norm| norm.apply(x))?)
}

impl Block {
    fn apply(
        &self,
        x: &Array,
        growth: Option<&Array>,
        storage: &LayerStorage,
        step: &StepContext,
    ) -> Result<Array> {
        let h = normed(self.mixer_norm.as_ref(), x)?;
        if let (Some(mixer_norm), Some(ff_norm)) = (&self.mixer_out_norm, &self.ff_out_norm) {
            let attended = self.attend(&h, None, growth, storage, step)?;
            return self.add_normed(x, &attended, mixer_norm, ff_norm);
        }
        let x = match (&self.mixer, storage) {
            (Mixer::Attention(_), _) => self.attend(&h, Some(x), growth, storage, step)?,
            (Mixer::GatedDelta(mixer), LayerStorage::Recurrent { window, state }) => {
                mixer.apply(&h, x, window, state, step)?
            }
            _ => unreachable!("the cache was made for this model's layers"),
        };
        let h = normed(self.ff_norm.as_ref(), &x)?;
        Ok(self.ff.apply(&h, Some(&x))?)
    }

    /// Attention of rows, added to the residual, if there is one.
    fn attend(
        &self,
        normed: &Array,
        residual: Option<&Array>,
        growth: Option<&Array>,
        storage: &LayerStorage,
        step: &StepContext,
    ) -> Result<Array> {
        let (Mixer::Attention(mixer), LayerStorage::Attention(pool) | LayerStorage::Sliding(pool)) =
            (&self.mixer, storage)
        else {
            unreachable!(
                "the cache was made for this model's layers, of which no recurrent one is normed again"
            )
        };
        Ok(mixer.apply(normed, residual, growth, pool, step)?)
    }

    /// The rest of a block that norms the output of each half before it is added.
    fn add_normed(
        &self,
        x: &Array,
        attended: &Array,
        mixer_norm: &RmsNorm,
        ff_norm: &RmsNorm,
    ) -> Result<Array> {
        let mixed = mixer_norm.apply(attended)?;
        let AddedNorm { sum, norm } = match &self.ff_norm {
            Some(norm) => norm.add_and_apply(&mixed, x)?,
            None => {
                let sum = mixed.add(x)?;
                AddedNorm { norm: sum.clone(), sum }
            }
        };
        Ok(ff_norm.apply(&self.ff.apply(&norm, None)?)?.add(&sum)?)
    }
}

/// Factors on queries by position: `1 + beta ln(1 + floor(position / original))`.
#[derive(Debug)]
pub struct GrowingQueries {
    /// i32 `[1]`.
    pub original: Array,
    /// f32 `[1]`.
    pub beta: Array,
    /// f32 `[1]`.
    pub one: Array,
}

impl GrowingQueries {
    /// Factors of rows at these positions, f32 `[T, 1, 1]`.
    fn of(&self, positions: &Array) -> Result<Array> {
        // Integer division truncates, which is the floor for positions.
        let periods = positions.div(&self.original)?.cast(DType::F32)?;
        let factors = periods.add(&self.one)?.log()?.mul(&self.beta)?.add(&self.one)?;
        Ok(factors.reshape([positions.shape()[0], 1, 1])?)
    }
}

/// The multi-token-prediction head. It reads the model's hidden state and the next token, and predicts the token after
/// it.
#[derive(Debug)]
pub struct MtpHead {
    /// Norm of the next token's embedding.
    pub embedding_norm: RmsNorm,
    /// Norm of the hidden state.
    pub hidden_norm: RmsNorm,
    /// `[hidden, 2 hidden]`: embedding first.
    pub fc: Weight,
    /// Attention layers with separate caches.
    pub blocks: Vec<Block>,
    /// Final norm.
    pub norm: RmsNorm,
}

/// The parts of the model after its last layer.
#[derive(Debug)]
pub struct Output {
    /// Final norm.
    pub norm: RmsNorm,
    /// Output head `[V, hidden]`; the embedding's weight if the two are tied.
    pub head: Weight,
    /// The devices that share the rows of the head, if they do.
    pub peers: Option<Peers>,
}

/// A text model, or the part of it that one of several devices holds.
#[derive(Debug)]
pub struct HybridModel {
    /// The numbers of the whole model.
    pub config: HybridConfig,
    /// Which part this is.
    pub part: Part,
    /// `[V, hidden]`, in the first part, and in the last one if the model has a multi-token-prediction head. Devices
    /// that share the layers each have some of its rows.
    pub embedding: Option<Weight>,
    /// Factor on embeddings, f32 `[1]`.
    pub embedding_scale: Option<Array>,
    /// Factors on queries.
    pub growing_queries: Option<GrowingQueries>,
    /// The layers.
    pub blocks: Vec<Block>,
    /// Norm and output head, in the last part.
    pub output: Option<Output>,
    /// Multi-token prediction, in the last part.
    pub mtp: Option<MtpHead>,
}

impl HybridModel {
    /// The memory of a sequence in this part: the model's layers, then those of the multi-token-prediction head.
    pub fn cache_spec(&self, format: CacheFormat) -> CacheSpec {
        let c = &self.config;
        let attention = LayerSpec::Attention { kv_heads: c.kv_heads, head_dim: c.head_dim };
        let window =
            || c.window.unwrap_or_else(|| unreachable!("sliding layers without a window are refused"));
        let sliding = || LayerSpec::Sliding { kv_heads: c.kv_heads, head_dim: c.head_dim, window: window() };
        let recurrent = || {
            let r = c.recurrent_layers();
            LayerSpec::Recurrent {
                conv_width: r.conv_width,
                channels: r.conv_channels(),
                key_heads: r.key_heads,
                value_heads: r.value_heads,
                key_dim: r.key_dim,
                value_dim: r.value_dim,
            }
        };
        let of_kind = |kind: &MixerKind| match kind {
            MixerKind::Attention => attention,
            MixerKind::SlidingAttention => sliding(),
            MixerKind::GatedDelta => recurrent(),
        };
        let head = self.mtp.iter().flat_map(|mtp| mtp.blocks.iter().map(|_| attention));
        CacheSpec {
            layers: self.part.of(&c.layers).map(|(_, kind)| of_kind(kind)).chain(head).collect(),
            format,
        }
    }

    /// Hidden states after the final norm, f32 `[T, hidden]`, of token ids u32 `[T]`.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn hidden(&self, tokens: &Array, layers: &[LayerStorage], step: &StepContext) -> Result<Array> {
        let x = self.through_layers(tokens, layers, step)?;
        Ok(self.output()?.norm.apply(&x)?)
    }

    /// Runs the layers of a part that is not the last, and hands the hidden states to the next device. Returns the
    /// number of values that were sent, u32 `[1]`.
    ///
    /// # Errors
    /// If the operands do not fit, or this is the last part.
    pub fn hand_on(&self, tokens: &Array, layers: &[LayerStorage], step: &StepContext) -> Result<Array> {
        let Some(next) = self.part.next else {
            return Err(ModelError::Part("the last part of a model hands nothing on".into()));
        };
        Ok(self.through_layers(tokens, layers, step)?.send(next)?)
    }

    /// Hidden states after the last layer of this part.
    fn through_layers(&self, tokens: &Array, layers: &[LayerStorage], step: &StepContext) -> Result<Array> {
        let mut x = match self.part.previous {
            Some(previous) => {
                Array::receive(tokens.runtime(), [tokens.shape()[0], self.config.hidden], previous)?
            }
            None => self.embed(tokens, step)?,
        };
        let growth = self.growing_queries.as_ref().map(|queries| queries.of(&step.positions)).transpose()?;
        for (i, (block, storage)) in (self.part.layers.start..).zip(self.blocks.iter().zip(layers)) {
            x = block.apply(&x, growth.as_ref(), storage, step)?;
            if let Some(vision) = &step.vision {
                x = vision.deepen(i, x)?;
            }
        }
        Ok(x)
    }

    /// The input of the first layer.
    fn embed(&self, tokens: &Array, step: &StepContext) -> Result<Array> {
        let mut x = self.look_up(tokens)?;
        if let Some(scale) = &self.embedding_scale {
            x = x.mul(scale)?;
        }
        if let Some(vision) = &step.vision {
            x = vision.embed(&x)?;
        }
        Ok(x)
    }

    /// The embeddings of tokens. A device that shares the embedding looks up its own tokens, and the others those of
    /// theirs.
    fn look_up(&self, tokens: &Array) -> Result<Array> {
        let weight = self.embedding()?;
        let VocabularyShare { peers, tokens: own } = self.part.share.vocabulary(self.config.vocab);
        let Some(peers) = peers else { return Ok(tokens.embedding(weight)?) };
        let number = |n: usize| Array::full(tokens.runtime(), [1], DType::I32, n as f32);
        let at = tokens.cast(DType::I32)?.sub(&number(own.start)?)?;
        let row = at.maximum(&number(0)?)?.minimum(&number(own.len() - 1)?)?;
        let is_own = at.equal(&row)?.reshape([tokens.shape()[0], 1])?;
        Ok(of_their_device(&is_own, &row.embedding(weight)?, peers)?)
    }

    fn embedding(&self) -> Result<&Weight> {
        let missing = || ModelError::Part("this part of the model has no embedding".into());
        self.embedding.as_ref().ok_or_else(missing)
    }

    fn output(&self) -> Result<&Output> {
        let missing = || ModelError::Part("this part of the model has no output head".into());
        self.output.as_ref().ok_or_else(missing)
    }

    /// Commits the accepted open rows of the recurrent layers without running a row. Those of `settled` are committed
    /// already. Returns one result for each committed layer; their values are undefined.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn commit(
        &self,
        layers: &[LayerStorage],
        step: &StepContext,
        settled: CommitProgress,
    ) -> Result<Vec<Array>> {
        let recurrent =
            self.blocks.iter().zip(layers).filter_map(|(block, storage)| match (&block.mixer, storage) {
                (Mixer::GatedDelta(mixer), LayerStorage::Recurrent { window, state }) => {
                    Some((mixer, window, state))
                }
                _ => None,
            });
        let left = recurrent.enumerate().skip(settled.states);
        let commit = |(i, (mixer, window, state)): (usize, (&GatedDeltaNet, &ConvWindow, &DeltaState))| {
            mixer.commit((i >= settled.windows).then_some(window), state, step)
        };
        Ok(left.map(commit).collect::<std::result::Result<_, _>>()?)
    }

    /// Logits f32 `[R, V]` of hidden states `[R, hidden]`.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn logits(&self, hidden: &Array) -> Result<Array> {
        let Output { head, peers, .. } = self.output()?;
        let own = hidden.linear(head)?;
        let Some(peers) = *peers else { return Ok(own) };
        let (rows, vocab) = (own.shape()[0], own.shape()[1] * peers.count);
        Ok(own.all_gather(peers)?.transpose(&[1, 0, 2])?.reshape([rows, vocab])?)
    }

    /// Hidden states of the multi-token-prediction head, `[T, hidden]`. Row t predicts token t + 2 from the model's
    /// hidden state of token t and the id of token t + 1. `layers` is the storage of the head's layers.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn mtp_hidden(
        &self,
        head: &MtpHead,
        hidden: &Array,
        next_tokens: &Array,
        layers: &[LayerStorage],
        step: &StepContext,
    ) -> Result<Array> {
        let mut x = self.mtp_input(head, hidden, next_tokens, step)?;
        for (block, storage) in head.blocks.iter().zip(layers) {
            x = block.apply(&x, None, storage, step)?;
        }
        Ok(head.norm.apply(&x)?)
    }

    /// As [`HybridModel::mtp_hidden`], but writes only the head's keys and values: the rest of its last layer is not
    /// run. The result, f32 `[T, KV D]`, is undefined.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn mtp_write_kv(
        &self,
        head: &MtpHead,
        hidden: &Array,
        next_tokens: &Array,
        layers: &[LayerStorage],
        step: &StepContext,
    ) -> Result<Array> {
        let mut x = self.mtp_input(head, hidden, next_tokens, step)?;
        let (Some((last, blocks)), Some((storage, before))) = (head.blocks.split_last(), layers.split_last())
        else {
            unreachable!("a head has a layer")
        };
        for (block, storage) in blocks.iter().zip(before) {
            x = block.apply(&x, None, storage, step)?;
        }
        let (Mixer::Attention(mixer), LayerStorage::Attention(pool)) = (&last.mixer, storage) else {
            unreachable!("the layers of a head attend to everything before")
        };
        Ok(mixer.write_kv(&normed(last.mixer_norm.as_ref(), &x)?, pool, step)?)
    }

    fn mtp_input(
        &self,
        head: &MtpHead,
        hidden: &Array,
        next_tokens: &Array,
        step: &StepContext,
    ) -> Result<Array> {
        let mut embedded = self.look_up(next_tokens)?;
        if let Some(vision) = &step.vision {
            embedded = vision.embed_next(&embedded)?;
        }
        let embedded = head.embedding_norm.apply(&embedded)?;
        let hidden = head.hidden_norm.apply(hidden)?;
        Ok(Array::concatenate(&[&embedded, &hidden], -1)?.linear(&head.fc)?)
    }
}
