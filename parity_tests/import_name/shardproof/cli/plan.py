"""`shardproof plan`: what sharding a model over a mesh of any size would do; its weights take no memory."""

from __future__ import annotations

import importlib
import json as json_module
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from shardproof.declare.discover import UnusableTarget, module_of_file, nearest
from shardproof.report.out_path import check_writable, write_text
from shardproof.report.sentence import is_broken

FORMS = (
    "a model type such as qwen3, a config class such as transformers.LlamaConfig, a folder with config.json, "
    "or a factory as file.py:function"
)
TENSOR = ("tp", "tensor_parallel")
NOT_PLANNED = {  # mesh axes that a dry run does not count
    "pp": "pp divides the model into stages; leave it out, or plan one stage, as a factory in file.py:function",
    "ep_shard": "ep_shard is an axis of another mesh; write dp_shard, which shards the experts beside ep",
}


def show(
    target: str, mesh: Mapping[str, int], tokens: int, changes: Mapping[str, Any], json: str | None = None
) -> None:
    """Print the dry run. Errors: UnusableTarget, ValueError."""
    from torch_impl.parallelizer.dry_run import dry_run

    check_writable({"the model": target}, json=json)
    _check_axes(mesh)
    # `dp` is short for data parallelism, unless the mesh has both names.
    sizes = {"dp_shard" if axis == "dp" and "dp_shard" not in mesh else axis: size for axis, size in mesh.items()}
    model = model_of(target, changes)
    if max(sizes.get(axis, 1) for axis in TENSOR) > 1:
        _check_has_plan(target, model)
    result = dry_run(model, sizes or {"dp_shard": 1}, tokens=tokens)
    if json:
        write_text(json, json_module.dumps({**asdict(result), "local_bytes": result.local_bytes}, indent=1))
    if json != "-":
        console = Console()
        print(result.text(console.width if is_broken(console) else None))


def _check_axes(mesh: Mapping[str, int]) -> None:
    from torch_impl.parallelizer.mesh_axes import AXIS_NAMES, NEWER

    axes = [axis for axis in dict.fromkeys([*NEWER.values(), *AXIS_NAMES]) if axis not in NOT_PLANNED]
    for axis, size in mesh.items():
        if size > 1 and axis in NOT_PLANNED:
            raise ValueError(f"--mesh {axis}={size} is not planned: {NOT_PLANNED[axis]}")
        if axis not in (*axes, *NOT_PLANNED, "dp"):
            names = ", ".join(["dp (short for dp_shard)", *axes])
            raise ValueError(f"--mesh {axis}={size}: plan knows the axes {names}")


def _check_has_plan(target: str, model: torch.nn.Module) -> None:
    from torch_impl.parallelizer.hf_plan import get_hf_tp_shard_plan

    with warnings.catch_warnings(action="ignore", category=UserWarning):  # reported below
        plan = get_hf_tp_shard_plan(model)
    if not plan:
        raise UnusableTarget(
            f"{target}: {type(model).__name__} has no tensor-parallel plan; use a mesh without tp, "
            "or dry_run(model, mesh, tp_shard_plan=...) in Python"
        )


def model_of(target: str, changes: Mapping[str, Any]) -> torch.nn.Module:
    """The model that a target names, on the meta device; nothing is downloaded."""
    file, colon, factory = target.rpartition(":")
    with torch.device("meta"):
        if colon and file.endswith(".py"):
            model = _factory(Path(file), factory)(**changes)
        elif target.endswith(".py"):
            raise UnusableTarget(f"{target}: which function in it makes the model? Write {target}:make_model")
        else:
            model = _configured_model(target, changes)
    if not isinstance(model, torch.nn.Module):
        raise UnusableTarget(f"{target}: gives a {type(model).__name__}; it must give a torch.nn.Module")
    return model


def _configured_model(target: str, changes: Mapping[str, Any]) -> Any:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError as error:
        raise UnusableTarget(f"{target}: needs transformers; pip install -e '.[hf]' in the clone") from error
    if (Path(target) / "config.json").is_file():
        config = AutoConfig.from_pretrained(target, local_files_only=True)
        for name, value in changes.items():
            setattr(config, name, value)
    elif os.sep in target:
        raise UnusableTarget(f"{target}: {_folder(target)}; give {FORMS}")
    elif "." in target:
        config = _attribute(target)(**changes)
    else:
        try:
            config = AutoConfig.for_model(target, **changes)
        except ValueError as error:
            if Path(target).is_dir():
                raise UnusableTarget(f"{target}: {_folder(target)}; give {FORMS}") from error
            hint = nearest(target, sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)).removeprefix("; ")
            hint_text = f" ({hint})" if hint else ""
            raise UnusableTarget(f"{target} is not a known model{hint_text}; give {FORMS}") from error
    _check_fields(type(config)(), changes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _folder(target: str) -> str:
    """Why a path is not a model's folder."""
    if Path(target).is_dir():
        return "is a folder without config.json"
    return "is not a local folder, and nothing is downloaded"


def _check_fields(default: Any, changes: Mapping[str, Any]) -> None:
    """Reject unknown fields, because a configuration accepts any keyword and a misspelt name would change nothing."""
    for name in changes:
        if not hasattr(default, name):
            hint = nearest(name, sorted(vars(default)))
            raise UnusableTarget(f"--option {name!r} is not a field of {type(default).__name__}{hint}")


def _attribute(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnusableTarget(f"{path}: {error}; give {FORMS}") from error


def _factory(file: Path, name: str) -> Callable[..., Any]:
    module = module_of_file(str(file))
    if not callable(getattr(module, name, None)):
        raise UnusableTarget(f"{file} has no function {name!r}")
    return getattr(module, name)
