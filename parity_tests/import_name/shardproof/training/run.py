"""The settings of one training run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardproof.training.ring_and_heads import smallest_factor
from shardproof.training.schedule_name import rule_by_name
from torch_impl.pipelining.named_schedules import RULES, Rule, microbatches_problem

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
DTYPES = ("float64", "float32", "bfloat16")
MAMBA = ("hidden", "state")
ATTENTION = ("ring", "all_gather", "ulysses", "usp")
OPTIMIZERS = ("adamw", "muon")  # with muon, AdamW steps vectors and embeddings
SCHEDULES = tuple(name.lower() for name in RULES)
# Every document is padded to a multiple of this, so that the same batch can be sharded over 1, 2, 3 and 4 ranks of cp.
BLOCK = 24
# Sizes that 1, 2, 3 and 4 ranks of cp share, with tp up to 2; layers for four stages.
SIZES = {
    "hidden_size": 16,
    "layers": ("attention", "mamba", "attention", "mamba"),
    "num_attention_heads": 24,
    "num_key_value_heads": 12,
    "head_dim": 4,
    "intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "balance_coefficient": 0.01,
    "z_coefficient": 0.001,
    "mamba_heads": 12,
    "mamba_head_dim": 2,
    "mamba_groups": 1,
    "state_size": 4,
    "conv_width": 4,
    "chunk_size": 16,
}


@dataclass(frozen=True)
class Run:
    """The settings of a run. The mesh, `mamba`, `attention` and `schedule` change its numbers by rounding only.

    The global batch of a step has `streams` streams of `length` tokens.
    """

    mesh: Mapping[str, int]
    steps: int = 20
    seed: int = 0
    streams: int = 4
    length: int = 96
    is_tied: bool = False

    has_experts: bool = False  # experts replace the MLP of the last attention layer
    sizes: Mapping[str, Any] = field(default_factory=lambda: dict(SIZES))
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    optimizer: str = "adamw"
    clip: float | None = None  # gradients are scaled down to this norm
    dtype: str = "float64"
    mamba: str = "hidden"
    attention: str = "ring"
    schedule: str = "1f1b"
    checkpoint: str | None = None
    every: int = 5
    resume: bool = False
    overwrite: bool = False  # replace the checkpoints of an earlier run

    def __post_init__(self) -> None:
        unknown = [axis for axis in self.mesh if axis not in AXES]
        if unknown:
            raise ValueError(f"--mesh {unknown[0]}: no such axis; the axes are {', '.join(AXES)}, and dp for dp_shard")
        for axis, size in self.mesh.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"--mesh {axis}={size}: sizes are integers >= 1; leave out an unused axis")
        for flag, choices in {"dtype": DTYPES, "mamba": MAMBA, "attention": ATTENTION, "optimizer": OPTIMIZERS}.items():
            if getattr(self, flag) not in choices:
                raise ValueError(f"--{flag} {getattr(self, flag)!r} is not one of {', '.join(choices)}")
        if self.steps < 1:
            raise ValueError(f"--steps {self.steps} must be at least 1")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(
                f"--clip {self.clip:g} must be positive and finite; leave it out to keep gradients unscaled"
            )
        self._check_experts()
        if self.streams % self.dp:
            able = ", ".join(str(n) for n in range(1, self.streams + 1) if self.streams % n == 0)
            axes = f"dp={self.dp}" if self.size("ep") == 1 else f"dp={self.dp // self.size('ep')},ep={self.size('ep')}"
            raise ValueError(f"--mesh {axes}: cannot share the {self.streams} streams of a step; use one of {able}")
        if BLOCK % (2 * self.size("cp")):
            raise ValueError(f"--mesh cp={self.size('cp')}: documents are padded for 1, 2, 3, 4, 6 or 12 ranks of cp")
        self._check_heads()
        self._check_stages()
        for flag, is_set in {"resume": self.resume, "overwrite": self.overwrite}.items():
            if is_set and self.checkpoint is None:
                raise ValueError(f"--{flag} needs --checkpoint DIR, the folder of the saved state")
        if self.resume and self.overwrite:
            raise ValueError("--resume goes on from the checkpoints, --overwrite replaces them; give one of the two")

    def _check_experts(self) -> None:
        """Reject ep without experts, or with a number of experts that it does not divide."""
        ep, experts = self.size("ep"), self.sizes["num_experts"]
        if ep > 1 and not self.has_experts:
            raise ValueError(f"--mesh ep={ep}: the model has no experts; add --experts, or use dp in place of ep")
        if experts % ep:
            able = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
            raise ValueError(f"--mesh ep={ep}: cannot share the {experts} experts; use one of {able}")

    def _check_heads(self) -> None:
        """Reject a tp that does not divide the heads, or a heads exchange that cannot divide the heads of a tp rank."""
        heads, kv_heads = self.sizes["num_attention_heads"], self.sizes["num_key_value_heads"]
        shared, tp = math.gcd(heads, kv_heads), self.size("tp")
        if shared % tp:
            able = ", ".join(str(n) for n in range(1, shared + 1) if shared % n == 0)
            raise ValueError(f"--mesh tp={tp}: cannot share the heads of attention; use one of {able}")
        head_ranks = {"ulysses": self.size("cp"), "usp": smallest_factor(self.size("cp"))}.get(self.attention, 1)
        heads, kv_heads = heads // tp, kv_heads // tp
        if heads % head_ranks or (kv_heads % head_ranks and head_ranks % kv_heads):
            raise ValueError(
                f"--attention {self.attention}: cannot shard the {heads} query heads and {kv_heads} KV heads of each "
                f"rank of tp={tp} over {head_ranks} ranks; use ring or all_gather, or another --mesh"
            )

    def _check_stages(self) -> None:
        """Reject more stages than layers, and a number of micro-batches that the schedule does not support."""
        rule, pp, layers = self.rule, self.size("pp"), len(self.sizes["layers"])
        stages = pp * (rule.stages or 2)
        if stages > layers:
            raise ValueError(
                f"--schedule {rule.name} over pp={pp} has {stages} stages, but the model has {layers} layers; "
                "use fewer ranks of pp, or a schedule with fewer stages on each"
            )
        problem = microbatches_problem(rule, self.streams // self.dp, pp)
        if problem:
            raise ValueError(
                f"--mesh pp={pp}: {self.streams // self.dp} micro-batches on each rank of dp={self.dp} "
                f"{problem.partition(';')[0]}; use fewer ranks of dp or pp, or another schedule"
            )

    @classmethod
    def on(cls, mesh: Mapping[str, int], **settings: Any) -> Run:
        """A run on a mesh that may name dp_shard `dp`. Errors: ValueError for a mesh with both names."""
        if {"dp", "dp_shard"} <= set(mesh):
            both = f"dp={mesh['dp']},dp_shard={mesh['dp_shard']}"
            raise ValueError(f"--mesh {both}: dp means dp_shard; give one of them, or dp_replicate and dp_shard")
        return cls(mesh={{"dp": "dp_shard"}.get(axis, axis): size for axis, size in mesh.items()}, **settings)

    def size(self, axis: str) -> int:
        return self.mesh.get(axis, 1)

    @property
    def dp(self) -> int:
        """The number of ranks with different streams, ranks of ep included."""
        return self.size("dp_replicate") * self.size("dp_shard") * self.size("ep")

    @property
    def layers(self) -> tuple[str, ...]:
        """The kind of each layer."""
        kinds = list(self.sizes["layers"])
        if self.has_experts:
            last = len(kinds) - 1 - kinds[::-1].index("attention")
            kinds[last] = "moe"
        return tuple(kinds)

    @property
    def rule(self) -> Rule:
        """The pipeline schedule, which applies to one rank of pp too."""
        return rule_by_name(self.schedule, "--schedule")

    @property
    def is_staged(self) -> bool:
        """Whether the model has several stages."""
        return self.size("pp") * (self.rule.stages or 2) > 1

    @property
    def full_mesh(self) -> dict[str, int]:
        """The size of every axis, 1 for an axis that `mesh` does not have."""
        return {axis: self.size(axis) for axis in AXES}

    @property
    def config(self) -> dict[str, Any]:
        """The arguments of the model's config, in PyTorch and in JAX."""
        return {
            **self.sizes,
            "layers": self.layers,
            "vocab_size": 256,
            "rope_base": 1000.0,
            "norm_eps": 1e-5,
            "is_tied": self.is_tied,
        }

    @property
    def numbers(self) -> Run:
        """The settings that decide the numbers. Runs with equal settings have the same reference."""
        plain = {
            "mamba": "hidden",
            "attention": "ring",
            "schedule": "1f1b",
            "checkpoint": None,
            "resume": False,
            "overwrite": False,
        }
        return self.replace(mesh={}, steps=1, every=1, **plain)

    def options(self, **more: Any) -> dict[str, Any]:
        """The case's options, which are sent to the ranks."""
        return {"run": asdict(self), **more}

    def replace(self, **changes: Any) -> Run:
        return replace(self, **changes)
