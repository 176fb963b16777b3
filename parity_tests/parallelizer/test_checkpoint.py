"""Checkpoints saved sharded load unsharded and the other way round, to the bit, under the same names."""

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from parity_tests.parallelizer.families import Chosen, arrays, batch, model_of
from parity_tests.parallelizer.training import accumulated, full_arrays, parallelized
from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl.parallelizer import to_cpu

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as it is where all is unsharded

MESHES = [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}]
CHOSEN = [Chosen("qwen3", tied=True), Chosen("llama")]


def moved(chosen):
    """A model with other values than `arrays` has."""
    model = model_of(chosen)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    return model


def equal(state, chosen, shift=0.0):
    """Whether a state dict has the values of `arrays`, moved as far, under every name of the full model."""
    names, values = list(model_of(chosen).state_dict()), arrays(chosen)
    want = {name: values.get(name, values["model.embed_tokens.weight"]) + shift for name in names}
    return list(state) == names and all(np.array_equal(state[name].numpy(), want[name]) for name in names)


def save_whole(model, folder):
    folder.mkdir()
    save_file({name: value.clone() for name, value in model.state_dict().items()}, folder / "model.safetensors")


def on_ranks(body, mesh, engine):
    return run(body, CaseSpec(scheme="checkpoint", mesh=mesh), engine).results


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("chosen", "engine"), [(CHOSEN[0], "lockstep"), (CHOSEN[1], "gloo")], ids=str)
def test_distributed_checkpoint(chosen, engine, mesh, tmp_path):
    def save_sharded(view, case):
        model = parallelized()(moved(chosen), view.device_mesh)
        dcp.save(model.state_dict(), checkpoint_id=str(tmp_path / "sharded"))

    def load_sharded(view, case):
        model = parallelized()(model_of(chosen), view.device_mesh)
        state = model.state_dict()
        dcp.load(state, checkpoint_id=str(tmp_path / "whole"))
        model.load_state_dict(state)
        return equal({name: to_cpu(value) for name, value in model.state_dict().items()}, chosen, 0.25)

    on_ranks(save_sharded, mesh, engine)
    model = model_of(chosen)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=str(tmp_path / "sharded"), no_dist=True)
    model.load_state_dict(state)
    assert equal(model.state_dict(), chosen, 0.25)
    dcp.save(moved(chosen).state_dict(), checkpoint_id=str(tmp_path / "whole"), no_dist=True)
    assert all(on_ranks(load_sharded, mesh, engine))


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("chosen", CHOSEN, ids=str)
def test_safetensors(chosen, mesh, tmp_path):
    def save_sharded(view, case):
        model = parallelized()(moved(chosen), view.device_mesh)
        state = {name: to_cpu(value) for name, value in model.state_dict().items()}
        if torch.distributed.get_rank() == 0:
            save_file({name: value.clone() for name, value in state.items()}, tmp_path / "sharded.safetensors")

    def load_sharded(view, case):
        model = parallelized()(model_of(chosen), view.device_mesh)
        state = model.state_dict()
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "whole")))
        model.load_state_dict(state)
        return equal({name: to_cpu(value) for name, value in model.state_dict().items()}, chosen, 0.25)

    on_ranks(save_sharded, mesh, "lockstep")
    model = model_of(chosen)
    model.load_state_dict(load_file(tmp_path / "sharded.safetensors"))
    assert equal(model.state_dict(), chosen, 0.25)
    save_whole(moved(chosen), tmp_path / "whole")
    assert all(on_ranks(load_sharded, mesh, "lockstep"))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_loaded_model_trains_on(mesh, tmp_path):
    """Values that are loaded after the model was sharded are those that it computes with, under both of a tied name."""
    chosen = CHOSEN[0]
    save_whole(model_of(chosen), tmp_path / "whole")

    def body(view, case):
        outcome = []
        for is_loaded in (False, True):
            model = parallelized()(moved(chosen) if is_loaded else model_of(chosen), view.device_mesh)
            if is_loaded:
                state = model.state_dict()
                dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "whole")))
                model.load_state_dict(state)
            accumulated(model, *batch(chosen, 2, 5), view.rank("dp_shard"), 2, 1)
            outcome.append(full_arrays(model, gradients=True))
        return all(np.array_equal(outcome[0][name], outcome[1][name]) for name in outcome[0])

    assert all(on_ranks(body, mesh, "lockstep"))
