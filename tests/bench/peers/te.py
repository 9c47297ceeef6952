"""TransformerEngine 2.20 as its peers use it: recipes by the names that mixtape has for the same thing, and the two ways
of its GroupedLinear: `loop` (row counts on the host, a GEMM for each expert), `grouped` (one weight, row counts on the
device, cuBLASLt's grouped GEMM: cuBLAS 13.4 and later, such as pack.sh cublas brings; preload its libraries)."""

import os

os.environ["NVTE_GROUPED_LINEAR_SINGLE_PARAM"] = "1"

import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe

RECIPES = {"none": None, "fp8_tensor": recipe.Float8CurrentScaling, "fp8_block": recipe.Float8BlockScaling}
WAYS = ("loop", "grouped")


def context(name):
    enabled = RECIPES[name] is not None
    return te.autocast(enabled=enabled, recipe=RECIPES[name]() if enabled else None)


def linear(experts, k, n, way):
    grouped = dict(single_grouped_weight=True, use_grouped_tensor=True) if way == "grouped" else {}
    init = lambda w: torch.nn.init.normal_(w, 0, 0.02)
    return te.GroupedLinear(experts, k, n, bias=False, params_dtype=torch.bfloat16, init_method=init, **grouped)
