"""Names and their meaning: paths of classes and plans, registered plans, backends, switches, experts, parts."""

import importlib
import sys
import types
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from parity_tests.parallelizer.small_net import PLAN, Net
from torch_impl import contract
from torch_impl.parallelizer import (
    get_hf_tp_shard_plan,
    get_parallelization_strategy,
    import_classes_from_paths,
    register_parallel_strategy,
    register_tp_plan,
)
from torch_impl.parallelizer.adapters.megatron import choose_backend, has_function
from torch_impl.parallelizer.expert_validation import validate_experts
from torch_impl.parallelizer.fsdp2 import BackendKind, CheckpointingKind, PlanOrPathKind, PolicyKind, SelectiveKind
from torch_impl.parallelizer.registry import imported_plan
from torch_impl.parallelizer.tp_plan import REMOVED, styles_by_module
from torch_impl.parallelizer.tp_styles import Experts, Replicated

HERE = __name__
NET = "parity_tests.parallelizer.small_net"
OWN = {"blocks.*.up": "colwise"}
ROWWISE = {"blocks.*.up": "rowwise", "blocks.*.down": "rowwise"}


class Outer:
    class Inner:
        pass


class Registered(Net):
    pass


class Inheriting(Registered):
    pass


class Parametrised(nn.Module):
    """A model with its own plan; the registered plan replaces one entry of it."""

    _tp_plan = ROWWISE

    def __init__(self):
        super().__init__()
        self.blocks = Net().blocks


def plan_of_model(model):
    return {"class": type(model).__name__}


def plan_of_nothing():
    return OWN


def parallelize_here(model, device_mesh, **options):
    return model


# The class that a path names, or the error. One of the packages on disk imports a module that does not exist.
CLASSES = {
    "torch.nn.Linear": "Linear",
    "torch.nn.modules.linear.Linear": "Linear",
    "collections.OrderedDict": "OrderedDict",
    f"{HERE}.Outer.Inner": "Inner",
    f"{HERE}.Outer.Inne": "ValueError, nearest: 'Inner'",
    f"{HERE}.plan_of_model": "ValueError",
    "torch.nn": "ValueError",
    "torch.nn.functional": "ValueError",
    "torch.nn.Linearr": "ValueError, nearest: 'Linear'",
    "Linear": "ValueError",
    "torch..Linear": "ValueError",
    "no_such_package.Linear": "ValueError",
    "torch.nnn.Linear": "ValueError, nearest: 'nn'",
    "package_for_names.needs.Name": "ModuleNotFoundError",
    "package_for_names.Name": "Name",
}
PLANS = {
    f"{NET}:PLAN": PLAN,
    f"{NET}.PLAN": PLAN,
    f"{HERE}:OWN": OWN,
    f"{HERE}:plan_of_nothing": OWN,
    f"{HERE}.plan_of_nothing": OWN,
    f"{HERE}:plan_of_model": {"class": "Registered"},
    ".plans:PLAN": "ValueError",
    "plan": "ValueError",
    ":PLAN": "ValueError",
    f"{NET}:": "ValueError",
    f"{NET}:PLAM": "ValueError, nearest: 'PLAN'",
    "no_such_package.plans:PLAN": "ValueError",
    "parity_tests.no_such_module:PLAN": "ValueError",
    "package_for_names.needs:PLAN": "ModuleNotFoundError",
}
REGISTERED = (  # class, entries, outcome
    (Registered, {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, "registered"),
    ("Inheriting", {"blocks.*.up": Replicated, "blocks.*.down": None}, "registered"),
    (Parametrised, {"blocks.*.up": "colwise"}, "registered"),
    (3, {}, "TypeError"),
    (int, {}, "TypeError"),
    ("Rejected", ["blocks"], "TypeError"),
    ("Rejected", {"blocks": 3}, "TypeError"),
    ("Rejected", {3: "colwise"}, "TypeError"),
    ("Rejected", {"blocks": "colwize"}, "ValueError, nearest: 'colwise'"),
    ("Rejected", {"blocks": "gather"}, "ValueError"),
    ("Rejected", {"blocks": "colwise", "head": "grouped_gemm"}, "ValueError"),
)
REGISTERED_PLANS = (
    (Net, {}),
    (Registered, {"blocks.*.up": "ColwiseParallel", "blocks.*.down": "Rowwise"}),
    (Inheriting, {"blocks.*.up": "Replicated"}),
    (Parametrised, {"blocks.*.up": "ColwiseParallel", "blocks.*.down": "Rowwise"}),
)
BACKENDS = (  # backend, device, whether nvfsdp and whether megatron-fsdp are installed, and which is used
    ("auto", "cuda", True, True, "nvfsdp"),
    ("auto", "cuda", False, True, "megatron_fsdp"),
    ("auto", "cuda", False, False, "native"),
    ("auto", "cpu", True, True, "native"),
    ("native", "cuda", True, True, "native"),
    ("native", "cpu", False, False, "native"),
    ("nvfsdp", "cuda", True, False, "nvfsdp"),
    ("nvfsdp", "cuda", False, True, "ImportError"),
    ("nvfsdp", "cpu", True, True, "ValueError"),
    ("megatron_fsdp", "cuda", False, True, "megatron_fsdp"),
    ("megatron_fsdp", "cuda", True, False, "ImportError"),
    ("megatron_fsdp", "cpu", False, True, "ValueError"),
)
SWITCHES = (
    *((CheckpointingKind, value, "accepted") for value in (True, False, "full", "selective")),
    *((CheckpointingKind, value, "ValueError") for value in ("some", "")),
    *((CheckpointingKind, value, "TypeError") for value in (2, 1.0, None)),
    *((SelectiveKind, value, "accepted") for value in ("op", 1, 3, len)),
    *((SelectiveKind, value, "ValueError") for value in (0, -1)),
    *((SelectiveKind, value, "TypeError") for value in ("ops", True, False, 1.0, None)),
    *((BackendKind, value, "accepted") for value in ("inductor", "eager", "aot_eager")),
    (BackendKind, "induct", "ValueError, nearest: 'inductor'"),
    *((BackendKind, value, "TypeError") for value in (3, None)),
    (PolicyKind, MixedPrecisionPolicy(), "accepted"),
    (PolicyKind, MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64), "accepted"),
    *((PolicyKind, MixedPrecisionPolicy(output_dtype=value), "TypeError") for value in (torch.int64, "float32")),
    *((PolicyKind, value, "TypeError") for value in (torch.bfloat16, "bfloat16")),
    *((PlanOrPathKind, value, "accepted") for value in ("package:plan", {}, {"up": Replicated()})),
    *((PlanOrPathKind, value, "TypeError") for value in (["up"], {"up": "colwise"}, {3: Replicated()})),
)


class Stacks(nn.Module):
    """Experts in stacks, as `routed_experts` needs them; the arguments make stacks that it rejects."""

    def __init__(self, columns=6, down=(4, 2, 3), leaves=("gate_up_proj", "down_proj"), activation=nn.SiLU, others=()):
        super().__init__()
        shapes = {"gate_up_proj": (4, columns, 2), "down_proj": down, "bias": (2,)}
        for name in (*leaves, *others):
            self.register_parameter(name, nn.Parameter(torch.empty(shapes[name])))
        self.act_fn = activation()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states


class OtherArguments(Stacks):
    def forward(self, hidden_states):
        return hidden_states


EXPERTS = (  # module, ranks of ep, and the modules of experts that they share
    (Stacks, None, []),
    *((Stacks, ep, ["experts"]) for ep in (1, 2, 4)),
    (Stacks, 3, "ValueError"),
    *((lambda leaf=leaf: Stacks(leaves=(leaf,)), 1, []) for leaf in ("gate_up_proj", "down_proj")),
    (lambda: Stacks(leaves=("down_proj",)), 2, "ValueError"),
    (lambda: Stacks(columns=5), 2, "ValueError"),
    (lambda: Stacks(down=(4, 3, 2)), 2, "ValueError"),
    (lambda: Stacks(activation=nn.GELU), 2, "ValueError"),
    (lambda: Stacks(others=("bias",)), 2, "ValueError"),
    (OtherArguments, 2, "ValueError"),
)
KEYS = (  # key of a plan, and the outcome for a part of a model that lacks layers.0.mlp
    *((key, []) for key in ("layers.*", "layers.*.mlp", "layers.0.mlp.up", "layers.*.mlp.*")),
    *((key, "ValueError") for key in ("layers.1", "layer.*", "layers.*.attention", "mlp")),
)


def shared_experts(make, ep):
    model = nn.Module()
    model.experts = make()
    return list(validate_experts(model, ep))


def plan_keys_of_part(key):
    model = nn.Module()
    setattr(model, REMOVED, ("layers.0.mlp",))
    return list(styles_by_module(model, {key: Replicated()}))


def unchanged(*arguments):
    """The arguments without a gradient that the style of experts passes on."""
    return Experts().before_forward(nn.Module(), None, arguments, {"mask": None})


def kind(outcome):
    """The outcome; for an error, its type without the nearest name."""
    return outcome.partition(",")[0] if isinstance(outcome, str) else outcome


def answer(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:  # whichever it is: its type is the answer, with the nearest name if it has one
        _, nearest, name = str(error).partition("nearest: ")
        return type(error).__name__ + (f", {nearest}{name}" if nearest else "")


def style_names(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a model that has no plan
        return {key: type(style).__name__ for key, style in get_hf_tp_shard_plan(make()).items()}


def strategies():
    """Strategies of a registered class, of its subclass and of another class; and the errors of wrong registrations."""
    register_parallel_strategy(name="Registered")(parallelize_here)
    names = [get_parallelization_strategy(make()).__name__ for make in (Registered, Inheriting, Net)]
    rejected = [answer(register_parallel_strategy, 3), answer(register_parallel_strategy("Rejected"), 3)]
    return [*names, *rejected, get_parallelization_strategy(type("Rejected", (nn.Module,), {})()).__name__]


EVERYWHERE = "fsdp2_strategy_parallelize"
STRATEGIES = [*["parallelize_here"] * 2, EVERYWHERE, "TypeError", "TypeError", EVERYWHERE]


def check_switch(kind, value):
    try:
        contract.check(kind, "switch", value)
    except contract.Rejected as rejected:
        raise rejected.error(str(rejected)) from None


def chosen_backend(backend, device, has_nvfsdp, has_megatron):
    library = types.ModuleType("megatron_fsdp")
    library.fully_shard_model = print
    outer = sys.modules.get("megatron_fsdp")
    sys.modules["megatron_fsdp"] = library if has_megatron else None
    try:
        return choose_backend(backend, device, has_nvfsdp)
    finally:
        del sys.modules["megatron_fsdp"]
        if outer is not None:
            sys.modules["megatron_fsdp"] = outer


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A package on disk with a class, and with a module that imports a module that does not exist."""
    folder = tmp_path_factory.mktemp("packages")
    package = folder / "package_for_names"
    package.mkdir()
    (package / "__init__.py").write_text("class Name:\n    pass\n")
    (package / "needs.py").write_text("import a_module_that_does_not_exist\n")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.startswith("package_for_names")]:
        del sys.modules[name]


@pytest.mark.parametrize(("path", "expected"), CLASSES.items())
def test_class_of_a_path(path, expected, package):
    assert answer(lambda: import_classes_from_paths([path])[0].__name__) == expected


@pytest.mark.parametrize(("path", "expected"), PLANS.items())
def test_plan_of_a_path(path, expected, package):
    assert answer(imported_plan, path, nn.Module.__new__(Registered)) == expected


@pytest.fixture(scope="module")
def registered():
    """The outcome for each plan that is registered, in this order."""
    return [answer(register_tp_plan, model_class, entries) or "registered" for model_class, entries, _ in REGISTERED]


@pytest.mark.parametrize("number", range(len(REGISTERED)), ids=lambda number: str(REGISTERED[number][:2]))
def test_registered_plan(number, registered):
    assert registered[number] == REGISTERED[number][-1]


@pytest.mark.parametrize(("make", "plan"), REGISTERED_PLANS)
def test_plan_of_a_class_with_registered_entries(make, plan, registered):
    with torch.device("meta"):
        assert style_names(make) == plan


def test_registered_strategies():
    with torch.device("meta"):
        assert strategies() == STRATEGIES


@pytest.mark.parametrize(("make", "ep", "expected"), EXPERTS)
def test_experts_that_ranks_share(make, ep, expected):
    with torch.device("meta"):
        assert kind(answer(shared_experts, make, ep)) == expected


@pytest.mark.parametrize(("key", "expected"), KEYS)
def test_keys_of_a_part_without_a_module(key, expected):
    assert kind(answer(plan_keys_of_part, key)) == expected


def test_arguments_without_a_gradient_are_passed_on():
    assert answer(unchanged, None, 3) == ((None, 3), {"mask": None})


@pytest.mark.parametrize(("backend", "device", "has_nvfsdp", "has_megatron", "expected"), BACKENDS)
def test_backend(backend, device, has_nvfsdp, has_megatron, expected):
    assert answer(chosen_backend, backend, device, has_nvfsdp, has_megatron) == expected


@pytest.mark.parametrize(
    ("package_name", "name", "expected"),
    [("collections", "OrderedDict", True), ("collections", "fully_shard", False), ("no_such_package", "x", False)],
)
def test_installed_packages_that_have_a_name(package_name, name, expected):
    assert has_function(package_name, name) is expected


@pytest.mark.parametrize(("switch", "value", "expected"), SWITCHES)
def test_value_of_a_switch(switch, value, expected):
    assert (answer(check_switch, switch(), value) or "accepted") == expected
