"""Small models of many families, each trained for three micro-batches on a mesh and in one process, then clipped.

    python -m parity_tests.parallelizer.configurations            compare every configuration on every mesh
    python -m parity_tests.parallelizer.configurations gpt2 phi3  only these families

The run in one process uses only code of transformers and torch. transformers computes norms, rotary angles and routers
in float32 whatever the model's dtype; here they compute in float64 (`families.Float64Throughout`), without dropout.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from parity_tests.parallelizer.families import IGNORED, Chosen, batch, model_of
from parity_tests.parallelizer.training import Step, broken_steps, full_arrays, summed_loss
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl.collectives.mesh import MeshView
from torch_impl.optimizers import clip_grad_norm_
from torch_impl.parallelizer import fsdp2_strategy_parallelize, get_hf_tp_shard_plan
from torch_impl.parallelizer.mesh_axes import mesh_axes

MESHES: dict[str, dict[str, int]] = {
    "tp": {"tp": 2},
    "fsdp": {"dp_shard": 2},
    "tp x fsdp": {"dp_shard": 2, "tp": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
}
WIDE_TP = {"tp": 4}  # more ranks than heads of keys and values
FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma", "phi3"),
    *("gpt2", "apertus", "arcee", "cohere", "cohere2", "doge", "ernie4_5", "exaone4", "gemma2", "gemma3_text", "glm"),
    *("glm4", "gpt_neox", "granite", "hyperclovax", "jais2", "ministral", "ministral3", "nanochat", "nemotron", "olmo"),
    *("olmo2", "olmo3", "phi", "seed_oss", "smollm3", "starcoder2", "vaultgemma"),
)
TIED = ("gpt2", "qwen3", "gemma", "olmo2")
FEW_HEADS = {"llama": 1, "qwen2": 2, "qwen3": 2, "gemma3_text": 1, "mistral": 2}  # heads of keys and values over tp=4
MICROBATCHES, ROWS, LENGTH = 3, 12, 5
MAX_NORM = 0.05  # below every norm here, so that gradients are scaled


def configuration(family: str, tied: bool = False, kv_heads: int | None = None) -> Chosen:
    return Chosen(family, tied, () if kv_heads is None else (("num_key_value_heads", kv_heads),))


def cases() -> list[tuple[Chosen, str, Mapping[str, int]]]:
    """Every configuration on every mesh, and models with few heads of keys and values on more ranks than such heads."""
    chosen = [configuration(family) for family in FAMILIES] + [configuration(family, tied=True) for family in TIED]
    everywhere = [(each, name, mesh) for each in chosen for name, mesh in MESHES.items()]
    few = [configuration(family, kv_heads=heads) for family, heads in FEW_HEADS.items()]
    return everywhere + [(each, f"tp={WIDE_TP['tp']}", WIDE_TP) for each in few]


@cache
def alone(chosen: Chosen, length: int = LENGTH) -> Step:
    """The step of the unsharded model, over all three micro-batches."""
    return _step(model_of(chosen), chosen, slice(None), 1, length)


def on_rank(
    view: MeshView, chosen: Chosen, length: int = LENGTH, own_names: Mapping[str, str] | None = None, **switches: Any
) -> Step:
    """This rank's step of the sharded model, with the rank's own rows of every micro-batch."""
    axes, model = mesh_axes(view.device_mesh, own_names), model_of(chosen)
    plan: Any = None if axes.tp_mesh is None else get_hf_tp_shard_plan(model)
    model = fsdp2_strategy_parallelize(model, view.device_mesh, tp_shard_plan=plan, **switches)
    rows = slice(axes.loss_mesh.get_local_rank(), None, axes.data_size)
    return _step(model, chosen, rows, axes.data_size, length)


def _step(model: Any, chosen: Chosen, rows: slice, ranks: int, length: int) -> Step:
    ids, targets = (torch.from_numpy(x) for x in batch(chosen, ROWS, length))
    tokens, total = int((targets != IGNORED).sum()), 0.0
    for number, (x, y) in enumerate(zip(ids.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(number == MICROBATCHES - 1)
        loss = summed_loss(model(input_ids=x[rows]).logits, y[rows]) / tokens
        (ranks * loss).backward()
        total += loss.item()
    gradients = full_arrays(model, gradients=True)
    clip = clip_grad_norm_ if hasattr(model, "set_requires_gradient_sync") else torch.nn.utils.clip_grad_norm_
    norm = clip(list(model.parameters()), MAX_NORM)
    return Step(total, norm.item(), gradients, full_arrays(model, gradients=True))


def mistakes(chosen: Chosen, mesh: Mapping[str, int], ranks: Sequence[Step], length: int = LENGTH) -> list[str]:
    """One sentence for each difference from the run in one process."""
    return broken_steps(alone(chosen, length), mesh, ranks)


def judged(chosen: Chosen, mesh: Mapping[str, int], length: int = LENGTH, **switches: Any) -> list[str]:
    """Run a configuration on a mesh, and return its `mistakes`."""

    def body(view: MeshView, case: CaseSpec) -> Step:
        return on_rank(view, chosen, length, **switches)

    ranks = run(body, CaseSpec(scheme="configurations", mesh=dict(mesh), dtype="float64"), "lockstep")
    return mistakes(chosen, mesh, ranks.results, length)


def main(families: Sequence[str]) -> int:
    warnings.simplefilter("ignore")
    wrong, done = 0, []
    for chosen, name, mesh in cases():
        if families and chosen.family not in families:
            continue
        sentences = judged(chosen, mesh)
        done.append(chosen)
        wrong += bool(sentences)
        label = f"{chosen.family}{' tied' if chosen.tied else ''}{chosen.changes or ''}"
        print(f"{label:60} {name:10} {'; '.join(sentences[:3]) or 'equal'}", flush=True)
    print(f"{len(set(done))} configurations, {len(done)} runs, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
