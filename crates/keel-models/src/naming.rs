//! Names of parameters that most model types share, and the variants of their storage.

use std::cell::OnceCell;

use keel_array::{Array, Weight};
use keel_weights::MTP_ROOTS;

use crate::blocks::{
    Activation, Attention, FeedForward, GatedLayer, HeadNorm, MixtureOfExperts, RmsNorm, Rotation,
};
use crate::config::MTP_LAYERS_MAX;
use crate::hybrid::Output;
use crate::loading::{Loader, Parameters, SourceRows};
use crate::{
    HybridConfig, MixerKind, MixtureConfig, MixtureCut, ModelError, Part, Result, Sums, VocabularyShare,
};

/// The names of the output head, alone and next to a vision tower in MLX's form.
pub(crate) const OUTPUT_HEADS: [&str; 2] = ["lm_head", "language_model.lm_head"];

/// The prefix of the multi-token-prediction head's parameters; `None` if there is no head: some converters drop it.
pub(crate) fn mtp_root(parameters: &dyn Parameters) -> Option<&'static str> {
    MTP_ROOTS.into_iter().find(|root| has_linear(parameters, &format!("{root}fc")))
}

/// The layers of the multi-token-prediction head among the parameters; 0 if there is no head.
pub(crate) fn mtp_layers(parameters: &dyn Parameters) -> usize {
    let Some(root) = mtp_root(parameters) else { return 0 };
    let has = |i: &usize| parameters.contains(&format!("{root}layers.{i}.input_layernorm.weight"));
    (0..MTP_LAYERS_MAX).take_while(has).count()
}

/// Whether there is a linear layer of this name. AWQ and GPTQ pack it as `qweight`.
pub(crate) fn has_linear(parameters: &dyn Parameters, module: &str) -> bool {
    ["weight", "qweight"].iter().any(|kind| parameters.contains(&format!("{module}.{kind}")))
}

/// Reads the blocks that the family's model types share.
pub(crate) struct FamilyReader<'a> {
    pub loader: &'a Loader<'a>,
    pub config: &'a HybridConfig,
    /// The prefix of `embed_tokens`, `layers` and `norm`.
    pub root: String,
    /// Norms are stored as offsets from one, as in Hugging Face checkpoints. MLX's converter stores the scale itself.
    pub norms_are_offsets: bool,
    /// The rotation of layers without a window, once one of them was read.
    rotation: OnceCell<Rotation>,
}

impl<'a> FamilyReader<'a> {
    /// Detects the checkpoint's layout.
    pub fn new(loader: &'a Loader<'a>, config: &'a HybridConfig) -> Result<FamilyReader<'a>> {
        // Embedding models are saved without the output head and the prefix that it needs.
        const ROOTS: [&str; 4] = ["model.language_model.", "language_model.model.", "model.", ""];
        let root =
            ROOTS.iter().find(|root| loader.parameters().contains(&format!("{root}embed_tokens.weight")));
        let root = root.ok_or_else(|| {
            let tried = ROOTS.map(|r| format!("{r}embed_tokens.weight")).join(", ");
            ModelError::Config(format!(
                "the checkpoint has no token embedding under any known name ({tried})"
            ))
        })?;
        // MLX's converter transposes the convolution and shifts the norms together, so the convolution's form implies
        // both.
        let recurrent = config.layers.iter().position(|k| *k == MixerKind::GatedDelta);
        let conv = recurrent
            .and_then(|i| loader.parameters().shape(&format!("{root}layers.{i}.linear_attn.conv1d.weight")));
        let scales = loader.parameters().norms_are_scales() || matches!(conv.as_deref(), Some([_, _, 1]));
        Ok(FamilyReader {
            loader,
            config,
            root: (*root).into(),
            norms_are_offsets: !scales,
            rotation: OnceCell::new(),
        })
    }

    /// The rotation of layers without a window. A part of a model that has none holds no frequencies.
    pub fn rotation(&self) -> Result<Rotation> {
        if let Some(rotation) = self.rotation.get() {
            return Ok(rotation.clone());
        }
        let rotation = rotation(self.loader, self.config, MixerKind::Attention)?;
        Ok(self.rotation.get_or_init(|| rotation).clone())
    }

    /// The output head's name.
    pub fn output_head_module(&self) -> &'static str {
        let [alone, nested] = OUTPUT_HEADS;
        if self.root == "language_model.model." { nested } else { alone }
    }

    /// The part of the model to read.
    pub fn part(&self) -> &Part {
        self.loader.part()
    }

    /// The token embedding, where it is needed: before the first layer, and for the multi-token-prediction head after
    /// the last. Devices that share a layer share its rows, too.
    pub fn embedding(&self) -> Result<Option<Weight>> {
        let part = self.part();
        let drafts = part.is_last() && crate::has_mtp_head(self.config, self.loader.parameters());
        let load = || {
            let source = SourceRows::rows(
                format!("{}embed_tokens", self.root),
                self.config.vocab,
                vec![self.tokens().tokens],
            );
            self.loader.vocabulary(source, self.config.hidden)
        };
        (part.is_first() || drafts).then(load).transpose()
    }

    /// The tokens whose rows of the embedding and of the output head this device has, and the devices that have the
    /// others.
    fn tokens(&self) -> VocabularyShare {
        self.part().share.vocabulary(self.config.vocab)
    }

    /// The final norm and the output head, in the last part of the model. If the head is tied to the embedding and this
    /// part has the embedding, the two are one weight.
    pub fn output(&self, embedding: Option<&Weight>) -> Result<Option<Output>> {
        if !self.part().is_last() {
            return Ok(None);
        }
        let VocabularyShare { peers, tokens: rows } = self.tokens();
        let load = |module: String| {
            let source = SourceRows::rows(module, self.config.vocab, vec![rows.clone()]);
            self.loader.vocabulary(source, self.config.hidden)
        };
        let head = match embedding {
            Some(embedding) if self.config.tied => embedding.clone(),
            None if self.config.tied => load(format!("{}embed_tokens", self.root))?,
            _ => load(self.output_head_module().into())?,
        };
        Ok(Some(Output { norm: self.norm(&format!("{}norm", self.root), self.config.hidden)?, head, peers }))
    }

    /// A norm whose scale may be stored as an offset from one.
    pub fn norm(&self, name: &str, width: usize) -> Result<RmsNorm> {
        let offset = if self.norms_are_offsets { 1.0 } else { 0.0 };
        let scale = self.loader.vector(&format!("{name}.weight"), &[width], |w| w + offset)?;
        Ok(RmsNorm { scale, eps: self.config.eps })
    }

    /// A norm that is stored as its scale.
    pub fn plain_norm(&self, name: &str, width: usize) -> Result<RmsNorm> {
        let scale = self.loader.vector(&format!("{name}.weight"), &[width], |w| w)?;
        Ok(RmsNorm { scale, eps: self.config.eps })
    }

    /// The depthwise convolution as `[K, channels]`. Both stored forms, `(C, 1, K)` and `(C, K, 1)`, are its transpose.
    pub fn conv(&self, name: &str) -> Result<Array> {
        let recurrent = self.config.recurrent_layers();
        self.loader.transposed(name, recurrent.conv_channels(), recurrent.conv_width)
    }

    /// `self_attn` of a layer.
    pub fn attention(&self, prefix: &str) -> Result<Attention> {
        let c = self.config;
        let (d, kv_rows) = (c.head_dim, c.kv_heads * c.head_dim);
        let sources = vec![
            SourceRows::whole(format!("{prefix}q_proj"), 2 * c.heads * d),
            SourceRows::whole(format!("{prefix}k_proj"), kv_rows),
            SourceRows::whole(format!("{prefix}v_proj"), kv_rows),
        ];
        Ok(Attention {
            projection: self.loader.projection(sources, c.hidden)?,
            gated: c.gated,
            q_norm: Some(HeadNorm::Each(self.norm(&format!("{prefix}q_norm"), d)?)),
            k_norm: Some(HeadNorm::Each(self.norm(&format!("{prefix}k_norm"), d)?)),
            output: self.loader.row_parallel(
                SourceRows::whole(format!("{prefix}o_proj"), c.hidden),
                c.heads * d,
                self.loader.sums(),
            )?,
            heads: c.heads,
            kv_heads: c.kv_heads,
            head_dim: d,
            rotation: Some(self.rotation()?),
            scale: c.score_scale(MixerKind::Attention) as f32,
            window: None,
        })
    }

    /// `mlp` of a layer.
    pub fn feed_forward(&self, prefix: &str) -> Result<FeedForward> {
        match &self.config.moe {
            None => {
                Ok(FeedForward::Dense(self.swiglu(prefix, self.config.dense_width()?, self.loader.sums())?))
            }
            Some(moe) => Ok(FeedForward::Experts(Box::new(self.experts(prefix, moe)?))),
        }
    }

    /// A gated layer with SiLU.
    pub fn swiglu(&self, prefix: &str, width: usize, sums: Sums) -> Result<GatedLayer> {
        let hidden = self.config.hidden;
        let sources =
            ["gate_proj", "up_proj"].map(|name| SourceRows::whole(format!("{prefix}{name}"), width));
        Ok(GatedLayer {
            gate_up: self.loader.projection(sources.into(), hidden)?,
            down: self.loader.row_parallel(
                SourceRows::whole(format!("{prefix}down_proj"), hidden),
                width,
                sums,
            )?,
            activation: Activation::Silu,
        })
    }

    fn experts(&self, prefix: &str, moe: &MixtureConfig) -> Result<MixtureOfExperts> {
        let (hidden, sums) = (self.config.hidden, self.loader.sums());
        // How the columns of an expert are added.
        let of_columns = if sums.share.mixture == MixtureCut::Experts { sums.whole() } else { sums };
        let mut router = vec![SourceRows::whole(format!("{prefix}gate"), moe.experts)];
        // On devices that do not hold the shared expert, too: a product of other rows may add in another order, and at
        // a near tie two devices would choose different experts.
        if moe.shared_intermediate.is_some() || moe.shared_elsewhere {
            router.push(SourceRows::whole(format!("{prefix}shared_expert_gate"), 1));
        }
        let shared = moe
            .shared_intermediate
            .map(|width| self.swiglu(&format!("{prefix}shared_expert."), width, of_columns));
        let shared = shared.transpose()?;
        let layout = ExpertLayout::find(self.loader, prefix);
        let gate_up: Vec<_> = moe.own.clone().map(|e| layout.gate_up(prefix, moe, e)).collect();
        let down: Vec<_> = moe.own.clone().map(|e| layout.down(prefix, moe, hidden, e)).collect();
        let down_rotation = self.loader.experts_rotation(&format!("{prefix}experts.down_weight_"), &down)?;
        Ok(MixtureOfExperts {
            router: self.loader.projection(router, hidden)?,
            gate_up_rotation: self
                .loader
                .experts_rotation(&format!("{prefix}experts.gate_up_weight_"), &gate_up)?,
            gate_up: self.loader.experts(&gate_up, hidden)?,
            down: self.loader.row_parallel_experts(&down, moe.intermediate, of_columns)?,
            down_rotation,
            shared,
            shared_elsewhere: moe.shared_elsewhere,
            own: (moe.own.len() < moe.experts).then(|| moe.own.clone()),
            chosen: moe.chosen,
            normalise: moe.normalise,
            sums,
        })
    }
}

/// The rotation of a kind of layers.
pub(crate) fn rotation(loader: &Loader<'_>, config: &HybridConfig, kind: MixerKind) -> Result<Rotation> {
    let constant = |values: Vec<f32>| loader.constant(&values);
    Ok(Rotation {
        spec: config.rope(),
        frequencies: loader.constant(&config.frequencies_of(kind))?,
        long_frequencies: config.long_frequencies_of(kind).map(constant).transpose()?,
        query_scales: config.query_scales(kind).map(constant).transpose()?,
    })
}

/// The storage of a layer's experts.
#[derive(Clone, Copy)]
enum ExpertLayout {
    /// Three tensors for each expert.
    Separate,
    /// `experts.gate_up_proj` (gate rows, then up rows) and `experts.down_proj`, stacked.
    Fused,
    /// MLX: `switch_mlp.gate_proj`, `up_proj`, `down_proj`, stacked.
    Switch,
}

impl ExpertLayout {
    fn find(loader: &Loader<'_>, prefix: &str) -> ExpertLayout {
        let has = |name: &str| loader.parameters().contains(&format!("{prefix}{name}"));
        if has("switch_mlp.gate_proj.weight") {
            ExpertLayout::Switch
        } else if has("experts.0.gate_proj.weight") || has("experts.0.gate_proj.qweight") {
            ExpertLayout::Separate
        } else {
            ExpertLayout::Fused
        }
    }

    fn gate_up(self, prefix: &str, moe: &MixtureConfig, e: usize) -> Vec<SourceRows> {
        let f = moe.intermediate;
        let both = ["gate_proj", "up_proj"];
        match self {
            ExpertLayout::Separate => {
                both.map(|n| SourceRows::whole(format!("{prefix}experts.{e}.{n}"), f)).into()
            }
            ExpertLayout::Switch => {
                both.map(|n| SourceRows::expert(format!("{prefix}switch_mlp.{n}"), e, moe.experts, f)).into()
            }
            ExpertLayout::Fused => {
                vec![SourceRows::expert(format!("{prefix}experts.gate_up_proj"), e, moe.experts, 2 * f)]
            }
        }
    }

    fn down(self, prefix: &str, moe: &MixtureConfig, hidden: usize, e: usize) -> Vec<SourceRows> {
        let stacked = |name| SourceRows::expert(format!("{prefix}{name}"), e, moe.experts, hidden);
        vec![match self {
            ExpertLayout::Separate => SourceRows::whole(format!("{prefix}experts.{e}.down_proj"), hidden),
            ExpertLayout::Switch => stacked("switch_mlp.down_proj"),
            ExpertLayout::Fused => stacked("experts.down_proj"),
        }]
    }
}
