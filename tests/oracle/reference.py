"""What transformers says about a batch: logits, losses, gradients under the exported names."""

import contextlib

import torch
from torch.overrides import TorchFunctionMode


class Lift(TorchFunctionMode):
    """Runs what transformers computes in f32 whatever the model's dtype (RMSNorm, softmax, RoPE
    angles, losses) in f64 instead: every f32 that a torch function is asked for becomes f64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        wider = lambda x: torch.float64 if x is torch.float32 else x
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*map(wider, args), **{k: wider(v) for k, v in (kwargs or {}).items()})


def lifted(model):
    """The context to run `model` in; an f64 model also gets f64 RoPE frequencies."""
    if next(model.parameters()).dtype != torch.float64:
        return contextlib.nullcontext()
    config, rotary = model.config, model.model.rotary_emb
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    at = torch.arange(0, dim, 2, dtype=torch.float64)
    rotary.inv_freq = 1.0 / config.rope_parameters["rope_theta"] ** (at / dim)
    return Lift()


EXPERTS = {"qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
           "olmoe": ("mlp", "gate_proj", "up_proj", "down_proj"),
           "mixtral": ("block_sparse_moe", "w1", "w3", "w2")}


def exported(model_type, name, tensor):
    """(name, tensor) as the tensor is saved: one per expert, gate rows before up rows."""
    block, gate, up, down = EXPERTS[model_type]
    prefix, _, rest = name.rpartition(".mlp.")
    if rest == "experts.gate_up_proj":
        half = tensor.shape[1] // 2
        for e in range(tensor.shape[0]):
            yield f"{prefix}.{block}.experts.{e}.{gate}.weight", tensor[e, :half]
            yield f"{prefix}.{block}.experts.{e}.{up}.weight", tensor[e, half:]
    elif rest == "experts.down_proj":
        for e in range(tensor.shape[0]):
            yield f"{prefix}.{block}.experts.{e}.{down}.weight", tensor[e]
    elif rest == "gate.weight":
        yield f"{prefix}.{block}.gate.weight", tensor
    else:
        yield name, tensor


def switch_loss(router_logits, top_k):
    """Per layer E * sum_e f_e P_e, f_e the share of choices that fell on e, summed over layers."""
    total = 0
    for logits in router_logits:
        probs = logits.softmax(-1)
        chosen = probs.topk(top_k, dim=-1).indices.flatten()
        share = torch.bincount(chosen, minlength=probs.shape[-1]).to(probs.dtype) / len(chosen)
        total = total + probs.shape[-1] * (share * probs.mean(0)).sum()
    return total


def forward(model, tokens, targets, switch=False):
    """Output (its aux_loss in the wanted definition), cross-entropy, and the sum that is trained."""
    out = model(input_ids=tokens, output_router_logits=True)
    if switch:
        out.aux_loss = switch_loss(out.router_logits, model.config.num_experts_per_tok)
    vocab = out.logits.shape[-1]
    loss = torch.nn.functional.cross_entropy(out.logits.reshape(-1, vocab), targets.reshape(-1),
                                             ignore_index=-100)
    return out, loss, loss + model.config.router_aux_loss_coef * out.aux_loss


def decisive(model, tokens):
    """The least gap between the last chosen and the first unchosen probability of any router: far
    above rounding, or two correct programs may route a token differently."""
    with torch.no_grad(), lifted(model):
        out = model(input_ids=tokens, output_router_logits=True)
    k, least = model.config.num_experts_per_tok, float("inf")
    for logits in out.router_logits:
        if logits is None or logits.shape[-1] == k:
            continue
        p = logits.softmax(-1).sort(-1, descending=True).values
        least = min(least, (p[:, k - 1] - p[:, k]).min().item())
    return least


def evaluate(model, tokens, targets, switch=False):
    """All that `trace --targets --grads` writes, as numpy arrays by dataset path."""
    model.zero_grad(set_to_none=True)
    with lifted(model):
        out, loss, total = forward(model, tokens, targets, switch)
        total.backward()
    result = {"logits": out.logits, "loss": loss, "aux_loss": out.aux_loss, "total_loss": total}
    for name, p in model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        for out_name, g in exported(model.config.model_type, name, grad):
            result["grads/" + out_name] = g
    return {name: (x.float() if x.dtype == torch.bfloat16 else x).detach().numpy()
            for name, x in result.items()}
