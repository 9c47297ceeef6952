"""Random models made by transformers: every variation that an import has to understand."""

import dataclasses

import torch
import transformers
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, Qwen3MoeConfig

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

CONFIGS = {"qwen3_moe": Qwen3MoeConfig, "olmoe": OlmoeConfig, "mixtral": MixtralConfig}


@dataclasses.dataclass
class Case:
    name: str
    model_type: str
    config: dict
    batch: tuple = (2, 24)
    storage: str = "float32"
    shard: str = "5GB"


def qwen(**more):
    base = dict(vocab_size=131, hidden_size=48, intermediate_size=80, moe_intermediate_size=24,
                num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
                max_position_embeddings=128, router_aux_loss_coef=0.02,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    return {**base, **more}


def olmoe(**more):
    base = dict(vocab_size=113, hidden_size=48, intermediate_size=24, num_hidden_layers=2,
                num_attention_heads=4, num_experts=8, num_experts_per_tok=3,
                max_position_embeddings=128, router_aux_loss_coef=0.02, pad_token_id=None,
                eos_token_id=None)
    return {**base, **more}


def mixtral(**more):
    base = dict(vocab_size=113, hidden_size=48, intermediate_size=32, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, num_local_experts=6,
                num_experts_per_tok=2, max_position_embeddings=128, router_aux_loss_coef=0.02)
    return {**base, **more}


CASES = [
    Case("qwen", "qwen3_moe", qwen()),
    Case("qwen tied", "qwen3_moe", qwen(tie_word_embeddings=True)),
    Case("qwen unnormalised", "qwen3_moe", qwen(norm_topk_prob=False, num_experts_per_tok=3)),
    Case("qwen mlp_only_layers", "qwen3_moe", qwen(num_hidden_layers=3, mlp_only_layers=[0])),
    Case("qwen decoder_sparse_step", "qwen3_moe",
         qwen(num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3])),
    Case("qwen 60 experts", "qwen3_moe", qwen(num_experts=60, num_experts_per_tok=4)),
    Case("qwen odd sizes", "qwen3_moe",
         qwen(vocab_size=101, hidden_size=37, moe_intermediate_size=13, head_dim=6,
              num_attention_heads=5, num_key_value_heads=1, num_experts=7,
              num_experts_per_tok=3), batch=(3, 17)),
    Case("qwen top_k 1", "qwen3_moe", qwen(num_experts_per_tok=1, norm_topk_prob=False)),
    Case("qwen all experts chosen", "qwen3_moe", qwen(num_experts=3, num_experts_per_tok=3)),
    Case("qwen two tokens", "qwen3_moe", qwen(), batch=(6, 2)),
    Case("qwen long", "qwen3_moe", qwen(num_hidden_layers=1), batch=(1, 128)),
    Case("qwen bf16", "qwen3_moe", qwen(), storage="bfloat16"),
    Case("qwen shards", "qwen3_moe", qwen(), shard="40KB"),
    Case("olmoe", "olmoe", olmoe()),
    Case("olmoe GQA", "olmoe", olmoe(num_key_value_heads=2)),
    Case("olmoe normalised", "olmoe", olmoe(norm_topk_prob=True)),
    Case("olmoe tied bf16 shards", "olmoe", olmoe(tie_word_embeddings=True), storage="bfloat16",
         shard="40KB"),
    Case("olmoe 60 experts", "olmoe", olmoe(num_experts=60, num_experts_per_tok=8)),
    Case("olmoe odd sizes", "olmoe",
         olmoe(vocab_size=67, hidden_size=42, num_attention_heads=3, intermediate_size=11,
               num_experts=5), batch=(1, 31)),
    Case("mixtral", "mixtral", mixtral()),
    Case("mixtral tied", "mixtral", mixtral(tie_word_embeddings=True)),
    Case("mixtral bf16", "mixtral", mixtral(), storage="bfloat16"),
    Case("mixtral odd sizes", "mixtral",
         mixtral(vocab_size=79, hidden_size=30, head_dim=14, num_attention_heads=3,
                 num_key_value_heads=3, intermediate_size=19, num_local_experts=5), batch=(2, 13)),
    Case("mixtral 60 experts", "mixtral", mixtral(num_local_experts=60)),
]


def make(case, seed):
    """A model whose norms, routing and logits all matter: fan-in scaling, norms away from 1."""
    torch.manual_seed(seed)
    config = CONFIGS[case.model_type](**case.config)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.copy_(1 + 0.3 * torch.randn_like(p))
            elif name.endswith("mlp.gate.weight"):
                p.copy_(torch.randn_like(p) * 2 / p.shape[-1] ** 0.5)
            elif name.endswith("embed_tokens.weight") and not config.tie_word_embeddings:
                p.copy_(torch.randn_like(p))
            else:
                p.copy_(torch.randn_like(p) / p.shape[-1] ** 0.5)
    return model.to(getattr(torch, case.storage))


def load(directory, dtype):
    """The saved model in the plain implementations, f32 or f64."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager")
    assert model.config._attn_implementation == "eager"
    assert model.config._experts_implementation == "eager"
    return model.to(dtype).train()
