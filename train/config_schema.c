/* The table of configuration keys. */
#include "train/config.h"

#include <assert.h>

#include "layers/precision.h"

#define AT(field) offsetof(mt_config, field)
#define NAMES(...)                                                                                 \
    (const char *const[])                                                                          \
    {                                                                                              \
        __VA_ARGS__, NULL                                                                          \
    }
#define SIZE_RANGE      .min = 1, .max = 1 << 24
#define COUNT_RANGE     .min = 0, .max = 0x1p53
#define SEED_RANGE      .min = 0, .max = 0x1p61
#define FRACTION_RANGE  .min = 0, .max = 1
#define POSITIVE_RANGE  .min = 0, .max = 1e30
#define MODEL(name)     "model." #name, .offset = AT(trainer.model.name), .fixed = true
#define MODEL_SIZE(key) MODEL(key), .kind = MT_KEY_INT, SIZE_RANGE

/* Names follow the enumerators, which start at 0. */
static_assert(MT_F64 == 0 && MT_F32 == 1 && MT_BF16 == 2, "order of train.dtype");
static_assert(MT_AUX_NONE == 0 && MT_AUX_SWITCH == 1 && MT_AUX_HF == 2, "order of aux_loss");
static_assert(MT_RECOMPUTE_NONE == 0 && MT_RECOMPUTE_BLOCK == 1 && MT_RECOMPUTE_ACTIVATION == 2,
              "order of memory.recompute");
static_assert(MT_MOMENTS_REAL == 0 && MT_MOMENTS_BF16 == 1 && MT_MOMENTS_FP8 == 2 &&
                  MT_MOMENTS_COUNT == 3 && sizeof(mt_moments) == sizeof(int),
              "order of optim.moments");
static_assert(MT_MASTER_REAL == 0 && MT_MASTER_SPLIT == 1 && MT_MASTER_COUNT == 2 &&
                  sizeof(mt_master) == sizeof(int),
              "order of optim.master");
static_assert(sizeof(mt_dtype) == sizeof(int) && sizeof(mt_schedule) == sizeof(int) &&
                  sizeof(mt_aux_kind) == sizeof(int) && sizeof(mt_recompute) == sizeof(int),
              "enums are read and written as int");

const mt_config_key mt_config_keys[] = {
    /* model: first its type, which sets the other defaults */
    { "model.model_type", MT_KEY_ARCHITECTURE, AT(trainer.model.architecture), .value = "qwen3_moe",
      .fixed = true, .help = "architecture: qwen3_moe, olmoe or mixtral" },
    { MODEL_SIZE(vocab_size), .required = true,
      .help = "tokens; above every token of the corpora" },
    { MODEL_SIZE(hidden_size), .required = true, .help = "width D of the residual stream" },
    { MODEL_SIZE(num_hidden_layers), .required = true, .help = "blocks, at most 128" },
    { MODEL_SIZE(num_attention_heads), .required = true, .help = "query heads" },
    { MODEL(num_key_value_heads), .kind = MT_KEY_INT, COUNT_RANGE,
      .help = "key and value heads, dividing the query heads; 0: as many" },
    { MODEL(head_dim), .kind = MT_KEY_INT, COUNT_RANGE,
      .help = "width of a head, even; 0: hidden_size / num_attention_heads" },
    { MODEL(moe_intermediate_size), .kind = MT_KEY_INT, COUNT_RANGE, .required_of_experts = true,
      .help = "width F of an expert" },
    { MODEL(intermediate_size), .kind = MT_KEY_INT, COUNT_RANGE,
      .help = "width of dense layers; of experts in a mixtral or olmoe" },
    { MODEL(num_experts), .kind = MT_KEY_INT, COUNT_RANGE, .required = true,
      .help = "experts E of a MoE layer; 0: every layer is dense" },
    { "model.num_local_experts", MT_KEY_INT, AT(trainer.model.num_experts), COUNT_RANGE,
      .alias_of = "model.num_experts", .help = "the same as num_experts" },
    { MODEL(num_experts_per_tok), .kind = MT_KEY_INT, COUNT_RANGE, .required = true,
      .help = "top-k: experts of a token" },
    { MODEL_SIZE(decoder_sparse_step), .help = "every n-th layer has experts (qwen3_moe)" },
    { "model.mlp_only_layers", MT_KEY_LAYERS, AT(trainer.model), .fixed = true,
      .help = "layers without experts, from 0 (qwen3_moe)" },
    { MODEL(max_position_embeddings), .kind = MT_KEY_INT, COUNT_RANGE, .value = "0",
      .help = "longest sequence; 0: data.sequence_length" },
    { MODEL(norm_topk_prob), .kind = MT_KEY_BOOL,
      .help = "chosen probabilities divided by their sum" },
    { MODEL(tie_word_embeddings), .kind = MT_KEY_BOOL, .help = "the head is the embedding" },
    { "model.router_aux_loss_coef", MT_KEY_REAL, AT(trainer.model.router_aux_loss_coef),
      POSITIVE_RANGE, .help = "factor of the balancing loss" },
    { MODEL(rms_norm_eps), .kind = MT_KEY_REAL, POSITIVE_RANGE, .help = "epsilon of RMSNorm" },
    { MODEL(rope_theta), .kind = MT_KEY_REAL, POSITIVE_RANGE, .help = "base of the rotary angles" },
    { "model.aux_loss", MT_KEY_ENUM, AT(trainer.model.aux_loss),
      .names = NAMES("none", "switch", "hf"), .value = "switch",
      .help = "balancing loss: switch (per layer) or hf (layers pooled)" },
    { "model.z_loss_coef", MT_KEY_REAL, AT(trainer.model.z_loss_coef), POSITIVE_RANGE, .value = "0",
      .help = "factor of mean logsumexp(router logits)^2" },
    { "model.router_bias_update_rate", MT_KEY_REAL, AT(trainer.model.router_bias_update_rate),
      POSITIVE_RANGE, .value = "0", .help = "aux-loss-free balancing: step of the selection bias" },
    { "model.capacity_factor", MT_KEY_REAL, AT(trainer.model.capacity_factor), POSITIVE_RANGE,
      .value = "0", .help = "rows an expert keeps, in mean loads; 0: dropless" },

    { "data.train", MT_KEY_TEXT, AT(train_corpus), .required = true,
      .help = "corpus to train on (mixtape data pack)" },
    { "data.valid", MT_KEY_TEXT, AT(valid_corpus), .help = "corpus to validate on" },
    { "data.sequence_length", MT_KEY_INT, AT(trainer.sequence_length), SIZE_RANGE, .value = "256",
      .fixed = true, .help = "tokens of a window" },

    { "train.steps", MT_KEY_INT, AT(trainer.steps), COUNT_RANGE, .value = "1000",
      .help = "optimizer steps" },
    { "train.batch_size", MT_KEY_INT, AT(trainer.batch_size), SIZE_RANGE, .value = "8",
      .fixed = true, .help = "sequences of a step, over all ranks" },
    { "train.micro_batch_size", MT_KEY_INT, AT(trainer.micro_batch_size), COUNT_RANGE, .value = "0",
      .help = "sequences at once, dividing batch_size; 0: all" },
    { "train.dtype", MT_KEY_ENUM, AT(trainer.dtype), .names = NAMES("f64", "f32", "bf16"),
      .value = "f32", .fixed = true, .help = "compute type" },
    { "train.grad_dtype", MT_KEY_ENUM, AT(trainer.grad_dtype), .names = NAMES("f64", "f32", "bf16"),
      .value = "f32",
      .help = "type that gradients of GEMM weights are stored in: f32 (f64 under "
              "dtype f64), or, under dtype bf16, bf16" },
    { "train.reduce_dtype", MT_KEY_BOOL, AT(trainer.reduce_bf16), .names = NAMES("f32", "bf16"),
      .value = "f32", .help = "type of gradients on the wire (f32: f64 under dtype f64)" },
    { "train.seed", MT_KEY_INT, AT(trainer.seed), SEED_RANGE, .value = "0", .fixed = true,
      .help = "of weights and data order" },
    { "train.eval_every", MT_KEY_INT, AT(eval_every), COUNT_RANGE, .value = "0", .neutral = true,
      .help = "steps between evaluations; 0: only at the end" },
    { "train.eval_batches", MT_KEY_INT, AT(eval_batches), COUNT_RANGE, .value = "0",
      .neutral = true, .help = "batches of an evaluation on the way; 0: the whole validation set" },
    { "train.eager", MT_KEY_BOOL, AT(trainer.eager), .value = "false", .neutral = true,
      .help = "launch every step's work anew, where it could be recorded once (CUDA graph)" },
    { "train.log_every", MT_KEY_INT, AT(log_every), SIZE_RANGE, .value = "10", .neutral = true,
      .help = "steps between lines of metrics.jsonl" },
    { "train.init_std", MT_KEY_REAL, AT(trainer.model.init_std), POSITIVE_RANGE, .value = "0",
      .help = "of initial weights; 0: by fan-in, residual outputs over sqrt(2 layers)" },
    { "train.embed_init_std", MT_KEY_REAL, AT(trainer.model.embed_init_std), POSITIVE_RANGE,
      .value = "0", .help = "of initial embeddings; 0: as init_std, or 0.3 where that is 0, too" },
    { "train.init_from", MT_KEY_TEXT, AT(init_from), .fixed = true,
      .help = "checkpoint (mixtape import makes one) or run whose weights the run begins with; "
              "\"\": they are drawn" },

    { "optim.lr", MT_KEY_REAL, AT(trainer.optim.lr), POSITIVE_RANGE, .help = "peak learning rate" },
    { "optim.min_lr", MT_KEY_REAL, AT(trainer.optim.min_lr), POSITIVE_RANGE,
      .help = "learning rate at the last step, but of the constant schedule" },
    { "optim.schedule", MT_KEY_ENUM, AT(trainer.optim.schedule), .names = mt_schedule_names,
      .help = "from lr to min_lr; wsd: in the last fifth after warm-up" },
    { "optim.warmup_steps", MT_KEY_INT, AT(trainer.optim.warmup_steps), COUNT_RANGE,
      .help = "steps of linear warm-up" },
    { "optim.weight_decay", MT_KEY_REAL, AT(trainer.optim.weight_decay), POSITIVE_RANGE,
      .help = "decoupled; none on norms, biases, embeddings" },
    { "optim.beta1", MT_KEY_REAL, AT(trainer.optim.beta1), FRACTION_RANGE,
      .help = "decay of the first moment" },
    { "optim.beta2", MT_KEY_REAL, AT(trainer.optim.beta2), FRACTION_RANGE,
      .help = "decay of the second moment" },
    { "optim.eps", MT_KEY_REAL, AT(trainer.optim.eps), POSITIVE_RANGE, .help = "epsilon of Adam" },
    { "optim.grad_clip", MT_KEY_REAL, AT(trainer.optim.grad_clip), POSITIVE_RANGE,
      .help = "largest global gradient norm; 0: none" },
    { "optim.moments", MT_KEY_ENUM, AT(trainer.optim.moments), .names = NAMES("f32", "bf16", "fp8"),
      .fixed = true, .help = "storage of Adam's moments: f32, bf16, fp8 (E4M3, a scale per 128)" },
    { "optim.moments_sr", MT_KEY_BOOL, AT(trainer.optim.moments_sr), .fixed = true,
      .help = "stochastic rounding of bf16 moments" },
    { "optim.master", MT_KEY_ENUM, AT(trainer.optim.master), .names = NAMES("f32", "bf16+i16"),
      .fixed = true,
      .help =
          "storage of GEMM weights: f32, or a bf16 and an i16 that hold the same; a tie between "
          "two bf16 then goes away from zero, of f32 to the even one" },
    { "optim.offload", MT_KEY_BOOL, AT(trainer.optim.offload), .value = "false", .neutral = true,
      .help = "masters and moments wait in the host's memory: slower updates, the same bits" },

    { "recipe.use", MT_KEY_TEXT, AT(trainer.recipe), .value = "none", .fixed = true,
      .help =
          "number formats of the three GEMMs: a preset (bf16, fp8_current, fp8_delayed, "
          "fp8_block, mxfp8, nvfp4), fprop=W/X dgrad=W/dY wgrad=X/dY, clauses "
          "layers=GLOB steps=A..B RECIPE joined by ';', or a list of {layers, steps: A-B, use}; "
          "steps count from 0, B is not among them; none, also of a rule: train.dtype (also "
          "written recipe: ...); any recipe goes with any train.dtype, in which products are "
          "summed and what is not quantized is kept" },
    { "recipe.delayed.history", MT_KEY_INT, AT(trainer.delayed_history), .min = 2,
      .max = MT_HISTORY_MAX, .value = "1024", .fixed = true,
      .help = "amax history of delayed scaling, in steps" },
    { "recipe.delayed.margin", MT_KEY_INT, AT(trainer.delayed_margin), .min = 0,
      .max = MT_MARGIN_MAX, .value = "0", .fixed = true,
      .help = "powers of two kept free above the amax" },
    { "recipe.delayed.algorithm", MT_KEY_BOOL, AT(trainer.delayed_most_recent), .fixed = true,
      .names = NAMES("max", "most_recent"), .value = "max", .help = "which amax of the history" },
    { "recipe.quantized_init", MT_KEY_BOOL, AT(trainer.quantized_init), .value = "false",
      .fixed = true, .help = "masters begin as the values that their quantized copies hold" },
    { "recipe.save_original_input", MT_KEY_BOOL, AT(trainer.save_original_input), .value = "false",
      .help = "keep linear inputs unquantized for wgrad" },
    { "recipe.save_expert_output", MT_KEY_BOOL, AT(trainer.save_expert_output), .value = "false",
      .fixed = true,
      .help = "keep what experts put out for the routing weights' gradient, instead of making it, "
              "where fprop and dgrad are quantized, of the gradient of their activations" },

    { "statistics.layers", MT_KEY_TEXT, AT(statistics_layers), .neutral = true,
      .help = "linear layers to measure, a name pattern; none: all" },
    { "statistics.tensors", MT_KEY_TEXTS, AT(statistics_tensors), .neutral = true,
      .help = "operands to measure: W, X, dY, or W_row, W_col, ...; none: all" },
    { "statistics.every", MT_KEY_INT, AT(statistics_every), COUNT_RANGE, .value = "0",
      .neutral = true,
      .help = "steps between measurements of the first micro-batch (of a head under "
              "memory.loss_chunk, of one part of it); 0: none" },
    { "statistics.what_if", MT_KEY_TEXTS, AT(statistics_what_if), .neutral = true,
      .help = "formats to measure beside the one in use (fp8_delayed in the scales of the "
              "layer's recipe, or 1 where that has none)" },

    { "memory.recompute", MT_KEY_ENUM, AT(trainer.recompute),
      .names = NAMES("none", "block", "activation"), .value = "none", .neutral = true,
      .help = "what backward computes again instead of keeping" },
    { "memory.offload", MT_KEY_BOOL, AT(trainer.offload), .names = NAMES("none", "saved"),
      .value = "none", .neutral = true, .help = "saved values wait for backward in host memory" },
    { "memory.defer_wgrad", MT_KEY_BOOL, AT(trainer.defer_wgrad), .value = "false", .neutral = true,
      .help =
          "weight gradients after the rest of backward; what they are of stays until then, also "
          "what recompute, offload and loss_chunk would let go" },
    { "memory.loss_chunk", MT_KEY_INT, AT(trainer.loss_chunk), COUNT_RANGE, .value = "0",
      .help = "tokens that have logits at a time, which backward makes again; 0: a micro-batch's" },

    { "checkpoint.every", MT_KEY_INT, AT(checkpoint_every), COUNT_RANGE, .value = "1000",
      .neutral = true, .help = "steps between checkpoints; 0: only at the end" },
    { "checkpoint.keep_last", MT_KEY_INT, AT(keep_last), SIZE_RANGE, .value = "2", .neutral = true,
      .help = "newest checkpoints that stay" },
    { "checkpoint.keep_every", MT_KEY_INT, AT(keep_every), COUNT_RANGE, .value = "0",
      .neutral = true, .help = "checkpoints at multiples of this step stay for good; 0: none" },

    { "parallel.expert", MT_KEY_INT, AT(trainer.expert_parallel), SIZE_RANGE, .value = "1",
      .help = "ranks that share a layer's experts; the rest is data-parallel" },
    { "parallel.keep_gathered", MT_KEY_BOOL, AT(trainer.keep_gathered), .value = "false",
      .neutral = true,
      .help = "gathered weights stay until they change: more memory, fewer bytes moved" },
    { "parallel.timeout", MT_KEY_REAL, AT(rank_timeout), .min = 1, .max = 1e6, .value = "300",
      .neutral = true, .help = "seconds that a rank waits for the others before the run is ended" },
    { "parallel.expert_capacity", MT_KEY_REAL, AT(trainer.expert_capacity), POSITIVE_RANGE,
      .value = "2", .neutral = true,
      .help = "room of exchanged blocks at first, in mean loads (they grow where it is too small, "
              "and the step is made again); 0: for any routing" },

    { "device", MT_KEY_TEXT, AT(device), .value = "auto", .help = "auto, cpu, cuda or cuda:N" },
};

const int mt_config_key_count = sizeof mt_config_keys / sizeof mt_config_keys[0];
