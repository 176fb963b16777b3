"""Contexts of a training step: the order of their parts, and entering them again."""

from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import pytest
import torch
import torch.nn.functional as F
from torch.backends import cuda
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend

from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl.context_parallel import create_context_parallel_ctx, get_train_context
from torch_impl.context_parallel import train_context as module

STEPS = 2
WAYS = ("none", "function", "manager", "once")


def steps_by_hand(loss_parallel, compiled, way):
    """Of each of two steps, inside and after: which parts are entered, how often the context was, and was left."""
    parts, none = [loss_parallel, compiled, way != "none"], [False] * 3
    rows = []
    for step in range(1, STEPS + 1):
        if way == "none":
            rows += [[*parts, 0, 0], [*none, 0, 0]]
        elif way == "once" and step > 1:  # rejected, before and after which nothing is entered
            rows += [[*none, 1, 1], [*none, 1, 1]]
        else:
            rows += [[*parts, step, step - 1], [*none, step, step]]
    return rows


class Counted:
    """A context that counts how often it is entered and left; its step's KeyError ends there."""

    def __init__(self):
        self.entered = self.left = 0

    def __enter__(self):
        self.entered += 1

    def __exit__(self, kind, *_):
        self.left += 1
        return kind is KeyError


def contexts(counted):
    """The same context in each of the WAYS that get_train_context takes."""

    @contextmanager
    def once():
        with counted:
            yield

    return {"none": None, "function": lambda: counted, "manager": AsManager(counted), "once": once()}


class AsManager(AbstractContextManager):
    """A context by the class that says so."""

    def __init__(self, context):
        self.enter, self.leave = context.__enter__, context.__exit__

    def __enter__(self):
        return self.enter()

    def __exit__(self, *raised):
        return self.leave(*raised)


def has_loss_parallelism():
    return torch.ops.aten._log_softmax.default in DTensor._op_dispatcher._custom_op_handlers


def parts_entered(counted):
    """Which of loss parallelism, compiled autograd and the choice of fused kernels hold now; entries, and exits."""
    kernels = cuda.math_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.flash_sdp_enabled()
    assert kernels in ((True, True, True), (False, torch.cuda.is_available(), True))
    return [
        has_loss_parallelism(),
        torch._dynamo.compiled_autograd.compiled_autograd_enabled,
        not kernels[0],
        counted.entered,
        counted.left,
    ]


@contextmanager
def process_settings_restored():
    """Whatever a bug leaves entered ends here, so that the cases after it run as ever."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    before = dict(handlers)
    try:
        yield
    finally:
        handlers.clear()
        handlers.update(before)
        torch._dynamo.compiled_autograd.reset()
        for enable in (cuda.enable_math_sdp, cuda.enable_mem_efficient_sdp):
            enable(True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("loss_parallel", [False, True])
def test_steps_of_a_train_context(loss_parallel, compiled, way):
    """The parts are settings of the entire process. Every step raises inside."""
    counted, rows = Counted(), []
    with process_settings_restored():
        factory = get_train_context(loss_parallel, compiled, contexts(counted)[way])
        for _ in range(STEPS):
            with suppress(KeyError, RuntimeError), factory():
                rows.append(parts_entered(counted))
                raise KeyError
            if len(rows) % 2 == 0:
                rows.append(parts_entered(counted))
            rows.append(parts_entered(counted))
    assert rows == steps_by_hand(loss_parallel, compiled, way)


NAMES = ("loss", "compiled", "kernel", "cp")


@pytest.fixture
def recorded(monkeypatch):
    """Every part of a train context writes down when it is entered and left."""
    events = []

    def part(name):
        @contextmanager
        def entered(*args):
            events.append(f"+{name}")
            try:
                yield
            finally:
                events.append(f"-{name}")

        return entered

    monkeypatch.setattr(module, "loss_parallel", part("loss"))
    monkeypatch.setattr(torch._dynamo.utils, "maybe_enable_compiled_autograd", part("compiled"))
    monkeypatch.setattr(module, "sdpa_kernel", part("kernel"))
    return events, part("cp")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("flags", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
def test_parts_are_left_in_the_reverse_order(recorded, flags, fails):
    events, cp = recorded
    loss, compiled, parallel = flags
    on = [name for name, flag in zip(NAMES, (loss, compiled, parallel, parallel), strict=True) if flag]
    factory = get_train_context(bool(loss), bool(compiled), cp if parallel else None)
    for _ in range(2):
        events.clear()
        with pytest.raises(KeyError) if fails else nullcontext(), factory():
            events.append("step")
            if fails:
                raise KeyError
        assert events == [*(f"+{name}" for name in on), "step", *(f"-{name}" for name in reversed(on))]


def test_loss_parallelism_is_left_by_a_step_that_raises():
    """torch's own `loss_parallel` stays entered then."""
    with suppress(KeyError), get_train_context(True, False)():
        assert has_loss_parallelism()
        raise KeyError
    assert not has_loss_parallelism()


def test_a_context_that_can_be_entered_once_says_so(recorded):
    events, cp = recorded
    factory = get_train_context(False, False, cp())
    with factory():
        pass
    events.clear()
    with pytest.raises(RuntimeError) as caught, factory():
        pass
    assert str(caught.value) == (
        "context_parallel.train_context: cp_context _GeneratorContextManager can be entered only once; "
        "pass a function that makes one, or create_context_parallel_ctx(...)"
    )
    assert events == ["+kernel", "-kernel"]


def test_an_error_on_first_entry_of_a_context_is_raised():
    @contextmanager
    def broken():
        raise RuntimeError("its own")
        yield

    for context in (broken, broken()):
        with pytest.raises(RuntimeError, match=r"^its own$"), get_train_context(False, False, context)():
            pass


def test_a_train_context_is_not_entered_inside_itself(recorded):
    factory = get_train_context(False, False, nullcontext())
    with pytest.raises(RuntimeError) as caught, factory(), factory():
        pass
    assert str(caught.value) == (
        "context_parallel.train_context: cp_context nullcontext is entered already; leave it first"
    )
    with factory():
        pass


def test_the_real_parts():
    """On one rank, since the parts are settings of the entire process."""

    def body(mesh, case):
        ids, q = torch.arange(6), torch.rand(1, 1, 6, 4, requires_grad=True)
        factory = get_train_context(True, True, create_context_parallel_ctx(mesh.device_mesh["cp"], [ids], [0], set()))
        for _ in range(2):
            with factory():
                assert not torch.backends.cuda.math_sdp_enabled()
                out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
            assert torch.backends.cuda.math_sdp_enabled()
        return tuple(out.shape), SDPBackend.MATH in module.fused_backends()

    ranks = run(body, CaseSpec(scheme="train_context", mesh={"cp": 1}))
    assert ranks.results == (((1, 1, 6, 4), False),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, False), "enable_loss_parallel=1 is an int; pass True or False"),
        ((False, None), "enable_compiled_autograd=None is None; pass True or False"),
        ((False, False, 3), "cp_context is an int; pass a context manager, or a function that makes one"),
    ],
)
def test_other_kinds_are_rejected(arguments, message):
    with pytest.raises(TypeError, match=f"^context_parallel.get_train_context: {message}$"):
        get_train_context(*arguments)
