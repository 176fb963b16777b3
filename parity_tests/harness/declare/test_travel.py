"""A function keeps its name and origin when it is sent to other processes."""

import importlib
import pickle
import threading

import pytest
import torch

from shardproof.declare import travel


def outer(x):
    def inner(y):
        return [z + x for z in y]

    return inner


def test_code_keeps_the_name_of_its_file_and_its_lines():
    for function in (outer, outer(1)):
        sent = pickle.loads(travel.dumps(function))
        for here, there in ((function.__code__, sent.__code__), (_nested(function), _nested(sent))):
            assert (there.co_filename, there.co_firstlineno) == (here.co_filename, here.co_firstlineno)
    assert pickle.loads(travel.dumps(outer))(2)([1, 2]) == [3, 4]


def test_an_unpicklable_object_is_rejected_with_the_schemes_name():
    lock = threading.Lock()

    def locked(x):
        with lock:
            return x

    rejected = r"scheme 'locked': the function cannot be sent to other processes: cannot pickle '_thread.lock' object"
    with pytest.raises(travel.CannotTravel, match=rejected):
        travel.dumps(locked)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, at its first import
def test_a_setting_of_torchs_compiler_travels():
    """torch's modules of settings have a class of their own."""

    def without_compiler(x):
        torch._dynamo.config.suppress_errors = torch._dynamo.config.suppress_errors
        return x

    importlib.import_module("torch._dynamo")
    assert pickle.loads(travel.dumps(without_compiler))(2) == 2


def _nested(function):
    return next((const for const in function.__code__.co_consts if hasattr(const, "co_filename")), function.__code__)
