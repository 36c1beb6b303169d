//! The parameter lists of the kernels.

use super::{Described, Parameter, ParameterList, Parameters, Wide};
use crate::driver::Arguments;

parameters! {
    /// Target, source (0: zeros) and number of words of each move.
    MoveWords = "move_words.params" of ["move_words"] { moves: [u64; 144] = "Moves" }

    /// One value everywhere.
    Fill = "fill.params" of ["fill", "initial"] { y: u64 = "ELEM*", n: Wide = "u64", value: f32 = "float" }

    /// A progression.
    Arange = "arange.params" of ["arange"] {
        y: u64 = "ELEM*", n: Wide = "u64", start: f64 = "double", step: f64 = "double",
    }

    /// Random numbers: u32 for `bits`, f32 for the others.
    Random = "random.params" of ["bits", "uniform", "normal"] {
        y: u64 = "void*", n: Wide = "u64", seed: Wide = "u64",
    }

    /// A copy of strided elements.
    CopyStrided = "copy.params" of ["copy"] {
        x: u64 = "const ELEM*", from: [u64; 17] = "Strides", y: u64 = "ELEM*", n: Wide = "u64",
    }

    /// One operand of a concatenation.
    Join = "join.params" of ["join"] {
        x: u64 = "const ELEM*", from: [u64; 17] = "Strides", y: u64 = "ELEM*", n: Wide = "u64",
        run: Wide = "u64", width: Wide = "u64", at: Wide = "u64",
    }

    /// The replacement of a block.
    Scatter = "scatter.params" of ["scatter"] {
        x: u64 = "const ELEM*", from: [u64; 17] = "Strides", y: u64 = "ELEM*", n: Wide = "u64",
        to: [u64; 17] = "Strides", first: Wide = "u64",
    }

    /// A change of the element type.
    Cast = "cast.params" of ["cast"] {
        x: u64 = "const FROM*", from: [u64; 17] = "Strides", y: u64 = "TO*", n: Wide = "u64",
    }

    /// An expression of two operands.
    TwoOperands = "two_operands.params" of ["integer", "compare"] {
        x: u64 = "const ELEM*", sx: [u64; 17] = "Strides", z: u64 = "const ELEM*", sz: [u64; 17] = "Strides",
        y: u64 = "RESULT*", n: Wide = "u64",
    }

    /// A choice between two operands.
    Select = "select.params" of ["select"] {
        c: u64 = "const flag*", sc: [u64; 17] = "Strides", a: u64 = "const ELEM*", sa: [u64; 17] = "Strides",
        b: u64 = "const ELEM*", sb: [u64; 17] = "Strides", y: u64 = "ELEM*", n: Wide = "u64",
    }

    /// Rows that become one element each, or rows of the same width.
    Reduce = "reduce.params" of ["reduce", "arg_reduce", "softmax", "cumsum"] {
        x: u64 = "const ELEM*", y: u64 = "RESULT*", width: Wide = "u64",
    }

    /// A layer norm of rows of any type.
    LayerNorm = "layer_norm.params" of ["layer_norm"] {
        x: u64 = "const ELEM*", weight: u64 = "const ELEM*", bias: u64 = "const ELEM*", y: u64 = "ELEM*",
        width: Wide = "u64", eps: f32 = "float",
    }

    /// The order of each row before it is sorted.
    SortNumber = "sort_number.params" of ["number"] {
        order: u64 = "u32*", total: Wide = "u64", padded: Wide = "u64",
    }

    /// One stage of the sorting network.
    SortStage = "sort_stage.params" of ["stage"] {
        x: u64 = "const ELEM*", order: u64 = "u32*", total: Wide = "u64", width: Wide = "u64",
        padded: Wide = "u64", run: Wide = "u64", step: Wide = "u64",
    }

    /// The elements in their order.
    SortGather = "sort_gather.params" of ["gather"] {
        x: u64 = "const ELEM*", order: u64 = "const u32*", values: u64 = "ELEM*", indices: u64 = "u32*",
        total: Wide = "u64", width: Wide = "u64", padded: Wide = "u64",
    }

    /// The k largest elements of each row.
    TopK = "top_k.params" of ["top_k"] {
        x: u64 = "const ELEM*", values: u64 = "ELEM*", indices: u64 = "u32*", width: Wide = "u64",
        k: usize = "u32",
    }

    /// Elements by index. y has rows of `width`; an index is less than `entries`.
    Take = "take.params" of ["take", "take_along"] {
        x: u64 = "const ELEM*", indices: u64 = "const INDEX*", y: u64 = "ELEM*", n: Wide = "u64",
        width: Wide = "u64", entries: usize = "u32", fault: u64 = "Fault*", kernel: usize = "u32",
    }

    /// A product of arrays of any strides.
    Matmul = "matmul.params" of ["matmul"] {
        a: u64 = "const ELEM*", sa: [u64; 17] = "Strides", b: u64 = "const ELEM*", sb: [u64; 17] = "Strides",
        y: u64 = "ELEM*", m: Wide = "u64", n: Wide = "u64", k: Wide = "u64",
    }

    /// An RMS norm of rows: f32, or 16 bits for `rms_norm_half`.
    RmsNorm = "rms_norm.params" of ["rms_norm", "rms_norm_half"] {
        x: u64 = "const float*", stride: Wide = "u64", w: u64 = "const float*", y: u64 = "void*",
        width: usize = "u32", eps: f32 = "float",
    }

    /// A layer norm of rows in 16 bits.
    LayerNormHalf = "layer_norm_half.params" of ["layer_norm_half"] {
        x: u64 = "const float*", stride: Wide = "u64", w: u64 = "const float*", bias: u64 = "const float*",
        y: u64 = "u16*", width: usize = "u32", eps: f32 = "float",
    }

    /// Heads with a gate in 16 bits. Without a norm, `w` is null.
    GatedHeadsHalf = "gated_heads_half.params" of ["gated_heads_half"] {
        x: u64 = "const float*", gate: u64 = "const float*", gate_row: Wide = "u64", gate_head: Wide = "u64",
        w: u64 = "const float*", y: u64 = "u16*", rows: usize = "u32", heads: usize = "u32", d: usize = "u32",
        eps: f32 = "float",
    }

    /// A sum and its RMS norm.
    AddRmsNorm = "add_rms_norm.params" of ["add_rms_norm"] {
        x: u64 = "const float*", residual: u64 = "const float*", w: u64 = "const float*", sum: u64 = "float*",
        y: u64 = "float*", width: usize = "u32", eps: f32 = "float",
    }

    /// An RMS norm of heads with a gate.
    GatedRmsNorm = "gated_rms_norm.params" of ["gated_rms_norm"] {
        x: u64 = "const float*", x_stride: Wide = "u64", w: u64 = "const float*", z: u64 = "const float*",
        z_stride: Wide = "u64", heads: usize = "u32", y: u64 = "float*", width: usize = "u32",
        eps: f32 = "float",
    }

    /// A rotary embedding. Without a norm, `w` is null.
    Rope = "rope.params" of ["rope"] {
        x: u64 = "const float*", stride: Wide = "u64", head_stride: Wide = "u64",
        positions: u64 = "const i32*", inverse: u64 = "const float*", w: u64 = "const float*",
        eps: f32 = "float", y: u64 = "float*", tokens: usize = "u32", heads: usize = "u32",
    }

    /// A rotation of pairs of columns.
    RotatePairs = "rotate_pairs.params" of ["rotate_pairs"] {
        x: u64 = "const float*", stride: Wide = "u64", scales: u64 = "const float*",
        pairs: u64 = "const u32*", cos_sin: u64 = "const float2*", y: u64 = "float*", width: usize = "u32",
        rounds: usize = "u32", fault: u64 = "Fault*", kernel: usize = "u32",
    }

    /// SwiGLU: f32, or 16 bits for `swiglu_half`.
    SwiGlu = "swiglu.params" of ["swiglu", "swiglu_half"] {
        x: u64 = "const float*", stride: Wide = "u64", y: u64 = "void*", rows: Wide = "u64",
        width: usize = "u32",
    }

    /// SwiGLU in 16 bits of values in 16 bits.
    SwiGluOfHalf = "swiglu_of_half.params" of ["swiglu_of_half"] {
        x: u64 = "const uint4*", y: u64 = "u16*", rows: Wide = "u64", width: usize = "u32",
    }

    /// Values with a sigmoid gate.
    SigmoidGate = "sigmoid_gate.params" of ["sigmoid_gate"] {
        x: u64 = "const float*", sx: [u64; 17] = "Strides", gate: u64 = "const float*",
        sg: [u64; 17] = "Strides", y: u64 = "float*", n: Wide = "u64",
    }

    /// A weight in 16 bits.
    Dequantize = "dequantize.params" of ["dequantize"] {
        weight: u64 = "const STORED*", pairs: Option<u64> = "const u8*" if "defined(BITS)", out: u64 = "u16*",
        experts: usize = "u32",
    }

    /// Rows of an embedding.
    EmbeddingRows = "embedding_rows.params" of ["embedding_rows"] {
        weight: u64 = "const STORED*", pairs: Option<u64> = "const u8*" if "defined(BITS)",
        ids: u64 = "const INDEX*", y: u64 = "float*", fault: u64 = "Fault*", kernel: usize = "u32",
    }

    /// x in 16 bits.
    ToHalf = "to_half.params" of ["to_half"] {
        x: u64 = "const float2*", y: u64 = "u32*", pairs: Wide = "i64",
    }

    /// x as the sum of two bf16.
    ToTwoBf16 = "to_two_bf16.params" of ["to_two_bf16"] {
        x: u64 = "const float2*", hi: u64 = "bf16x2*", lo: u64 = "bf16x2*", pairs: Wide = "i64",
    }

    /// Rows without their padding.
    LeavePadding = "leave_padding.params" of ["leave_padding"] {
        padded: u64 = "const float*", y: u64 = "float*",
    }

    /// x in 8 bits. Without a norm, `w` is null.
    QuantizeFp8 = "quantize_fp8.params" of ["quantize_fp8"] {
        x: u64 = "const void*", stride: Wide = "u64", w: u64 = "const float*", eps: f32 = "float", y: u64 = "u32*",
        scales: u64 = "float*",
    }

    /// A weight in 8 bits.
    DequantizeToFp8 = "dequantize_to_fp8.params" of ["dequantize_to_fp8"] {
        weight: u64 = "const STORED*", pairs: Option<u64> = "const u8*" if "defined(BITS)", out: u64 = "u8*",
        scales: u64 = "float*",
    }

    /// A product of few rows in f32. The residual may be null.
    ExactRows = "exact_rows.params" of ["exact_rows"] {
        weight: u64 = "const STORED*", pairs: Option<u64> = "const u8*" if "defined(BITS)",
        x: u64 = "const float*", experts: Option<u64> = "const u32*" if "GATHER",
        stack: Option<usize> = "u32" if "GATHER", fault: Option<u64> = "Fault*" if "GATHER",
        kernel: Option<usize> = "u32" if "GATHER", residual: u64 = "const float*", y: u64 = "float*",
    }

    /// A product of many rows in f32. The residual may be null.
    ExactTiled = "exact_tiled.params" of ["exact_tiled"] {
        weight: u64 = "const STORED*", pairs: Option<u64> = "const u8*" if "defined(BITS)",
        x: u64 = "const float*", residual: u64 = "const float*", y: u64 = "float*", rows: usize = "u32",
    }

    /// A product of 16-bit factors. `lo` is the second part of x. The residual may be null.
    LinearHalf = "linear_half.params" of ["linear_half"] {
        x: u64 = "const u16*", lo: Option<u64> = "const u16*" if "X_PARTS == 2", w: u64 = "const u16*",
        residual: u64 = "const float*", y: u64 = "float*", rows: usize = "u32",
    }

    /// A product of a quantised weight, widened on its way into the tensor cores. Only a product of whole K adds the
    /// residual, which may be null.
    LinearPanels = "linear_panels.params" of ["linear_panels"] {
        codes: u64 = "const u32*", pairs: u64 = "const u8*", x: u64 = "const f16*", rows: usize = "u32",
        residual: Option<u64> = "const float*" if "SPLITS == 1", y: u64 = "float*",
    }

    /// x for `linear_panels`.
    ToHalfPanels = "to_half_panels.params" of ["to_half_panels"] {
        x: u64 = "const float*", out: u64 = "f16*", rows: usize = "u32",
    }

    /// The sum of the parts of a product. The residual may be null.
    AddParts = "add_parts.params" of ["add_parts"] {
        parts: u64 = "const float4*", residual: u64 = "const float4*", y: u64 = "float4*",
        elements: usize = "u32",
    }

    /// A product of rows grouped by expert, with quantised weights that are widened on their way into the tensor cores.
    LinearGrouped = "linear_grouped.params" of ["linear_grouped"] {
        codes: u64 = "const u32*", pairs: u64 = "const u8*", x: u64 = "const f16*",
        row_of: u64 = "const u32*", tiles: u64 = "const uint4*", y: u64 = "float*",
    }

    /// x for `linear_grouped`, and the number of rows of each expert.
    ToHalfTiles = "to_half_tiles.params" of ["to_half_tiles"] {
        x: u64 = "const float*", out: u64 = "f16*", rows: usize = "u32", chosen: u64 = "const u32*",
        choices: usize = "u32", share: usize = "u32", counts: u64 = "u32*", fault: u64 = "Fault*",
        kernel: usize = "u32",
    }

    /// The rows of each expert.
    GroupRows = "group_rows.params" of ["group_rows"] {
        chosen: u64 = "const u32*", choices: usize = "u32", share: usize = "u32", counts: u64 = "const u32*",
        row_of: u64 = "u32*", tiles: u64 = "uint4*",
    }

    /// The sum of the arrays of several GPUs.
    AddShares = "add_shares.params" of ["add_shares"] {
        shares: u64 = "const float*", y: u64 = "float*", n: Wide = "u64", stride: Wide = "u64", count: usize = "u32",
    }

    /// The sum of small arrays of several GPUs, whose mailboxes are given by rank.
    OneShotAllReduce = "one_shot_all_reduce.params" of ["one_shot_all_reduce"] {
        x: u64 = "const float*", y: u64 = "float*", n: usize = "u32",
        mailboxes: [u64; 8] = "const __grid_constant__ Mailboxes", rank: usize = "u32",
        stop: u64 = "const u32*",
    }

    /// Rows of x on their way to `linear_rows`.
    PrepareRows = "prepare_rows.params" of ["prepare_rows"] {
        x: u64 = "const float*", norm: Option<u64> = "const float*" if "NORM || GATE == 2",
        gate: Option<u64> = "const float*" if "GATE", prepared: u64 = "u8*",
    }

    /// A product of few rows. The residual may be null.
    LinearRows = "linear_rows.params" of ["linear_rows"] {
        x_or_prepared: u64 = "const float*", weight: u64 = "const STORED*",
        pairs: Option<u64> = "const u8*" if "defined(BITS)",
        norm: Option<u64> = "const float*" if "FUSED && (NORM || GATE == 2)",
        gate: Option<u64> = "const float*" if "FUSED && GATE",
        experts: Option<u64> = "const u32*" if "GATHER", stack: Option<usize> = "u32" if "GATHER",
        fault: Option<u64> = "Fault*" if "GATHER", kernel: Option<usize> = "u32" if "GATHER",
        residual: u64 = "const float*", y: u64 = "float*",
        conv_weight: Option<u64> = "const float*" if "CONV", window: Option<u64> = "float*" if "CONV",
        row_start: Option<u64> = "const u32*" if "CONV", slot: Option<u64> = "const u32*" if "CONV",
        conv_y: Option<u64> = "float*" if "CONV",
    }

    /// The choice of experts for few tokens, and their gate and up projections.
    ChosenGateUp = "chosen_gate_up.params" of ["chosen_gate_up"] {
        codes: u64 = "const u32*", pairs: u64 = "const u8*",
        always_codes: Option<u64> = "const u32*" if "ALWAYS",
        always_pairs: Option<u64> = "const u8*" if "ALWAYS", x: u64 = "const float*",
        norm: Option<u64> = "const float*" if "NORM", logits: u64 = "const float*",
        probabilities: u64 = "float*", chosen: u64 = "u32*", y: u64 = "float*",
        always_y: Option<u64> = "float*" if "ALWAYS",
    }

    /// The down projections of chosen experts, added up. `always` is the input of the shared expert's product, or with
    /// ADDED its output.
    ChosenDown = "chosen_down.params" of ["chosen_down"] {
        codes: u64 = "const u32*", pairs: u64 = "const u8*",
        always_codes: Option<u64> = "const u32*" if "ALWAYS",
        always_pairs: Option<u64> = "const u8*" if "ALWAYS", inner: u64 = "const float*",
        always: Option<u64> = "const float*" if "ALWAYS || ADDED",
        gate: Option<u64> = "const float*" if "ALWAYS || ADDED",
        logits: Option<u64> = "const float*" if "EARLY",
        probabilities: Option<u64> = "const float*" if "!EARLY",
        chosen: Option<u64> = "const u32*" if "!EARLY", fault: Option<u64> = "Fault*" if "!EARLY",
        kernel: Option<usize> = "u32" if "!EARLY", residual: u64 = "const float*", y: u64 = "float*",
    }

    /// The choice of experts, any number of them.
    RouteTopK = "route_top_k.params" of ["route_top_k"] {
        logits: u64 = "const float*", stride: usize = "u32", weights: u64 = "float*", chosen: u64 = "u32*",
        experts: usize = "u32", k: usize = "u32", normalise: usize = "u32",
    }

    /// The choice of few experts.
    RouteFew = "route_few.params" of ["route_few"] {
        logits: u64 = "const float*", stride: usize = "u32", weights: u64 = "float*", chosen: u64 = "u32*",
        tokens: usize = "u32",
    }

    /// The sum of a mixture. Without a shared expert, `shared` and `gate` are null. The residual may be null.
    Combine = "combine.params" of ["combine"] {
        experts: u64 = "const float*", weights: u64 = "const float*", shared: u64 = "const float*",
        gate: u64 = "const float*", stride: usize = "u32", residual: u64 = "const float*", y: u64 = "float*",
        choices: usize = "u32", width: usize = "u32", with_shared: usize = "u32",
    }

    /// The first and the last candidate of a block's part of a row.
    Greatest = "greatest.params" of ["greatest"] {
        logits: u64 = "const float*", draws: u64 = "const float*", ends: u64 = "Ends*",
        boards: u64 = "Board*", width: usize = "u32",
    }

    /// The candidates of a row, and the token drawn from them.
    DrawTokens = "draw.params" of ["weigh", "draw"] {
        logits: u64 = "const float*", draws: u64 = "const float*", ends: u64 = "const Ends*",
        boards: u64 = "Board*", y: u64 = "u32*", width: usize = "u32",
    }

    /// The arrays of a batch, and the bounds that they are checked against. Pointers that an operation does not have
    /// are null.
    CheckBatch = "check_batch.params" of ["check_batch"] {
        row_start: u64 = "u32*", slot: u64 = "u32*", position: u64 = "u32*", table: u64 = "u32*",
        accepted: u64 = "u32*", sequences: usize = "u32", rows: usize = "u32", slots: usize = "u32",
        pages: usize = "u32", table_width: usize = "u32", window: usize = "u32", run: usize = "u32",
        grid: usize = "u32", records: usize = "u32", keep_open: usize = "u32", fault: u64 = "Fault*",
        kernel: usize = "u32",
    }

    /// A convolution of few rows. Without a log, `open` and `accepted` are null.
    CausalConv = "causal_conv.params" of ["causal_conv"] {
        x: u64 = "const float*", w: u64 = "const float*", window: u64 = "float*", open: u64 = "float*",
        row_start: u64 = "const u32*", slot: u64 = "const u32*", accepted: u64 = "const u32*",
        keep_open: usize = "u32", y: u64 = "float*",
    }

    /// A convolution of many rows.
    CausalConvPrefill = "causal_conv_prefill.params" of ["causal_conv_prefill"] {
        x: u64 = "const float*", w: u64 = "const float*", window: u64 = "float*",
        row_start: u64 = "const u32*", slot: u64 = "const u32*", sequences: usize = "u32", y: u64 = "float*",
    }

    /// The gated delta rule, token by token. Without a log, `records` and `accepted` are null.
    GatedDelta = "gated_delta.params" of ["gated_delta", "gated_delta_any"] {
        qkv: u64 = "const float*", a: u64 = "const float*", b: u64 = "const float*",
        a_log: u64 = "const float*", dt_bias: u64 = "const float*", state: u64 = "State*",
        row_start: u64 = "const u32*", slot: u64 = "const u32*", records: u64 = "float*",
        accepted: u64 = "const u32*", counters: u64 = "u32*", keep_open: usize = "u32", y: u64 = "float*",
    }

    /// Norms, gates, T and P of each chunk, from the chunk's own rows (see `gated_delta_chunked.cu`).
    GatedDeltaPrepare = "gated_delta_prepare.params" of ["gated_delta_prepare"] {
        qkv: u64 = "const float*", a: u64 = "const float*", b: u64 = "const float*",
        a_log: u64 = "const float*", dt_bias: u64 = "const float*", row_start: u64 = "const u32*",
        sequences: usize = "u32", chunks: usize = "u32", workspace: u64 = "void*",
    }

    /// The gated delta rule, chunk by chunk.
    GatedDeltaChunks = "gated_delta_chunks.params" of ["gated_delta_chunks"] {
        qkv: u64 = "const float*", state: u64 = "State*", row_start: u64 = "const u32*",
        slot: u64 = "const u32*", chunks: usize = "u32", workspace: u64 = "void*", y: u64 = "float*",
    }

    /// New keys and values, rotated on their way to the pages, and queries.
    AttentionPrepare = "attention_prepare.params" of ["attention_prepare", "attention_prepare_rows"] {
        q: [u64; 3] = "Heads", k: [u64; 3] = "Heads", v: [u64; 3] = "Heads", rope_q: [u64; 4] = "RopeArgs",
        rope_k: [u64; 4] = "RopeArgs", rotated: u64 = "float*", keys: u64 = "kv_t*", values: u64 = "kv_t*",
        table: u64 = "const u32*", row_start: u64 = "const u32*", position: u64 = "const u32*",
        sequences: usize = "u32", pages: usize = "u32", rows: usize = "u32",
    }

    /// New keys and values of a run of rows.
    KvWrite = "kv_write.params" of ["kv_write"] {
        k: u64 = "const float*", v: u64 = "const float*", keys: u64 = "kv_t*", values: u64 = "kv_t*",
        table: u64 = "const u32*", row_start: u64 = "const u32*", position: u64 = "const u32*",
        sequences: usize = "u32", pages: usize = "u32", run: usize = "u32",
    }

    /// Attention of a run of rows. `partial` is used if the keys are split.
    Attend = "attend.params" of [
        "attention", "attention_prefill", "attention_decode", "attention_decode_persistent", "attention_prefill_wide"
    ] {
        q: u64 = "const float*", keys: u64 = "const kv_t*", values: u64 = "const kv_t*",
        table: u64 = "const u32*", row_start: u64 = "const u32*", position: u64 = "const u32*",
        sequences: usize = "u32", pages: usize = "u32", total_rows: usize = "u32", scale: f32 = "float",
        by_position: usize = "u32", run: usize = "u32", partial: u64 = "float*", y: u64 = "float*",
        until: Option<u64> = "const u32*" if "UNTIL",
    }

    /// The sum of the partial results.
    AttentionMerge = "attention_merge.params" of ["attention_merge"] {
        partial: u64 = "float*", row_start: u64 = "const u32*", position: u64 = "const u32*",
        sequences: usize = "u32", total_rows: usize = "u32", splits: usize = "u32",
        by_position: usize = "u32", y: u64 = "float*",
    }
}
