"""The house rules that a machine can hold: one path three times, names of files, no tolerance in a test, imports."""

import ast
import io
import subprocess
import sys
import tokenize
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TREES = ("torch_impl", "jax_ref", "parity_tests")
TOLERANCES = {"atol", "rtol", "allclose", "assert_close", "assert_allclose", "approx"}
NAMELESS = {"utils", "util", "common", "helpers", "helper", "misc"}

# Paths (glob patterns) that have no twin in some tree, and why.
WITHOUT_A_REFERENCE = {
    "contract/*": "what arguments are validated by; the reference takes whatever it is given",
    "collectives/*": "one device has no collectives; their law is the adjoint identity",
    "kernels/*": "how a function is computed; what it means is stated by the component that it serves",
    "context_parallel/attention_mask.py": "what a mask is refused for; the reference refuses nothing",
    "context_parallel/sdpa_mode.py": "an adapter for torch's attention function",
    "context_parallel/sequence_context.py": "whose memory a tensor has; what is computed inside has its own reference",
    "context_parallel/train_context.py": "contexts that are entered; they compute nothing",
    "context_parallel/slots.py": "lengths of a whole batch at once; the reference takes one sequence at a time",
    "context_parallel/te_adapter.py": "an adapter for one library",
    "layouts/kept.py": "a memo of layouts and indices, which changes no result",
    "layouts/remembered.py": "a memo of layouts, which changes no result",
    "layouts/token_index.py": "index arrays for a whole batch; the reference takes one sequence at a time",
    "*/arguments.py": "what a folder refuses; the reference takes whole arrays and refuses nothing",
    "parallelizer/*": "a plan, a style or a mesh changes no value; the reference is the decoder on whole arrays",
    "context_parallel/attention_arguments.py": "what attention refuses; the reference refuses nothing",
    "context_parallel/attention_cost.py": "bytes between ranks; one device sends none",
    "context_parallel/block.py": "rows that meet; the reference has a mask over all pairs",
    "context_parallel/blocks.py": "which kernel computes a block, and how blocks are merged",
    "context_parallel/cuda_blocks.py": "which kernel computes a block on CUDA",
    "context_parallel/exchanged.py": "attention over blocks, whose reference is one mask",
    "context_parallel/gathered.py": "one exchange of attention",
    "context_parallel/pairs.py": "rows of blocks; the reference has a mask over all pairs",
    "context_parallel/plain_block.py": "a block by itself, judged through attention",
    "context_parallel/ring.py": "one exchange of attention",
    "context_parallel/ulysses.py": "one exchange of attention, and both of usp",
    "mamba/all_to_all.py": "what ranks exchange; one device has all of it",
    "mamba/hidden_parallel.py": "the mixer over ranks, whose reference is the mixer",
    "mamba/cost.py": "bytes between ranks; one device sends none",
    "mamba/outside_kernels.py": "an adapter for two libraries",
    "mamba/segments.py": "index arrays for a whole batch; the reference has whole sequences",
    "mamba/segment_states.py": "what one segment gives to others; the reference has whole sequences",
    "mamba/shared_parameters.py": "whose parameters are read, and when",
    "mamba/five_exchanges.py": "what ranks exchange, in the words of the page; one device has all of it",
    "mamba/state_passing.py": "the mixer over ranks, whose reference is the mixer",
    "mamba/strategy.py": "what both strategies are made with; one device needs none",
    "mamba/token_order.py": "which layout a batch has; the reference has whole sequences",
    "models/gradient_norm.py": "sums over ranks; the reference has one device",
    "models/placement.py": "which ranks a model is cut over; the reference has one device",
    "models/staged.py": "the step in stages, whose reference is the step without them",
    "models/tensor_parallel.py": "which weights are cut; the reference has them whole",
    "pipelining/_torch_compat.py": "what torch does not promise",
    "pipelining/action.py": "how an action is written",
    "pipelining/anatomy.py": "where a model's parts are",
    "pipelining/functional.py": "names of other files",
    "pipelining/parallelize_fn.py": "a type",
    "pipelining/pipeline.py": "the model in stages, judged against the same model whole",
    "pipelining/shapes.py": "shapes, judged against those that running finds",
    "pipelining/split.py": "the model in stages, judged against the same model whole",
    "pipelining/stage_module.py": "a stage's shell and forward",
    "pipelining/stage_names.py": "what names of modules are refused for",
    "pipelining/ties.py": "copies of one parameter on two ranks; one device has one",
    "pipelining/executed.py": "what torch's runtime did, noted",
    "pipelining/gradient_scale.py": "one division, stated in its test",
    "pipelining/schedule.py": "judged against the same model without stages, which needs no JAX to be bitwise",
    "pipelining/module_names.py": "names; the numbers behind them have their reference in partition",
    "pipelining/rules.py": "what a schedule is refused for; the reference refuses nothing",
    "pipelining/order_check.py": "what an order is refused for",
    "pipelining/communication_check.py": "what an order that sends is refused for",
    "pipelining/csv_schedule.py": "a file format",
    "pipelining/schedule_order.py": "lists of actions, judged against torch's own and by what they cost",
    "pipelining/simulate.py": "judged by the closed forms, which the reference has in their place",
    "pipelining/timeline.py": "what a simulation found, as text",
    "pipelining/draw.py": "a picture",
    "vocab_parallel/rows.py": "the order in which memory is read, which the mathematics does not know",
    "vocab_parallel/joint.py": "one gradient for log-probability and entropy, whose references are their own",
    "vocab_parallel/asked.py": "sums of cotangents by id, one step of that gradient",
    "vocab_parallel/logits_at.py": "logits at ids, whose reference stands beside that of top-k",
    "vocab_parallel/candidates.py": "columns between two bounds; the reference sorts whole rows",
    "vocab_parallel/listed.py": "a row's end from the ranks' lists; the reference sorts whole rows",
    "vocab_parallel/gpt_patch.py": "an adapter for one library's model class",
    "vocab_parallel/linear_chunks.py": "the order in which logits are made, which the mathematics does not know",
    "vocab_parallel/linear_head.py": "what the output layer refuses; the reference refuses nothing",
    "vocab_parallel/packed_slots.py": "index arrays for a whole batch; the reference takes one sequence at a time",
    "vocab_parallel/prefix.py": "where a row's kept tokens end, which the reference sees by sorting",
    "vocab_parallel/radix.py": "a selection without a sort; the reference sorts whole rows",
    "vocab_parallel/sampling_params.py": "settings; the reference takes three numbers",
    "vocab_parallel/scoring.py": "which of the functions scores a row; the reference calls it",
    "vocab_parallel/selected.py": "a row's end by radix selection; the reference sorts whole rows",
    "vocab_parallel/vocab_range.py": "which ids a rank owns; one device owns them all",
}
WITHOUT_PRODUCTION = {
    "models/train_step.py": "the optimiser's step, which is torch's in production",
    "pipelining/accumulate.py": "the model without stages, which schedules must come to",
    "pipelining/closed_forms.py": "what the simulation must come to",
    "layouts/partition.py": "checks layouts that users write, which only the harness accepts",
    "parallelizer/*": "a whole model and its training, which production takes from transformers and torch",
}
WITHOUT_A_TEST_OF_ITS_OWN = {
    "contract/kinds.py": "every kind is tested through a contract",
    "collectives/*": "tested by law across files, not file by file",
    "context_parallel/slots.py": "tested through the streams that are made of them",
    "*/arguments.py": "each refusal is tested with the function that makes it",
    "context_parallel/block.py": "counted in the tests of pairs, tested through attention",
    "context_parallel/blocks.py": "every exchange is made of them, tested through attention",
    "context_parallel/exchanged.py": "tested through attention, for every exchange",
    "context_parallel/gathered.py": "tested as an exchange of attention",
    "context_parallel/ulysses.py": "tested as an exchange of attention",
    "layouts/contiguous.py": "tested beside striped, in one table",
    "layouts/striped.py": "tested beside contiguous, in one table",
    "mamba/segments.py": "tested through the strategy that passes states",
    "mamba/segment_states.py": "tested through the strategy that passes states",
    "mamba/five_exchanges.py": "tested through the strategy that they spell out",
    "mamba/token_order.py": "tested through the strategies that ask for it",
    "parallelizer/attention.py": "tested through the decoder",
    "parallelizer/_torch_compat.py": "tested through the meshes that are made by it",
    "parallelizer/nvfsdp_*.py": "tested through the function that they serve, and its refusals",
    "parallelizer/own_output.py": "tested through the step that returns it",
    "parallelizer/traffic.py": "tested through the dry run that counts it",
    "parallelizer/hf_plan.py": "tested through the plans of whole models",
    "parallelizer/plan_*.py": "tested through the plans that are checked",
    "parallelizer/placements.py": "tested through the plans that are checked",
    "parallelizer/local_forward.py": "tested through the styles that are made of it",
    "parallelizer/*_styles.py": "tested through the names that mean them",
    "parallelizer/rowwise.py": "tested through the name that means it",
    "parallelizer/layers.py": "tested through the decoder",
    "parallelizer/traits.py": "tested through the decoder",
    "models/attention.py": "tested through the model",
    "models/train_step.py": "tested through the training run",
    "models/layer.py": "tested through the model",
    "models/placement.py": "what it refuses is tested with the config",
    "models/tensor_parallel.py": "tested through the model",
    "pipelining/_torch_compat.py": "tested through schedules of files",
    "pipelining/action.py": "tested through files and orders",
    "pipelining/parallelize_fn.py": "tested through the names of the page",
    "pipelining/stage_module.py": "tested through models in stages",
    "pipelining/stage_names.py": "tested through models in stages",
    "pipelining/ties.py": "tested through tied models in stages",
    "pipelining/rules.py": "tested through every function that asks them",
    "pipelining/order_check.py": "tested through simulation and files",
    "pipelining/communication_check.py": "tested through files",
    "vocab_parallel/rows.py": "read by every function there, tested through them",
    "vocab_parallel/joint.py": "tested through log-probability and entropy",
    "vocab_parallel/asked.py": "tested through log-probability at several ids",
    "vocab_parallel/logits_at.py": "tested through top-k and distillation",
    "vocab_parallel/listed.py": "one of two ways to a kept set, tested through it",
    "vocab_parallel/selected.py": "one of two ways to a kept set, tested through it",
}
TESTS_OF_NO_SINGLE_FILE = {
    "parallelizer/checkpoint.py": "torch's checkpoints of what the strategies cut",
    "parallelizer/families.py": "every family of models on every kind of mesh, over several steps",
    "kernels/compilation.py": "every kernel, compiled for GPUs that are not there",
    "kernels/devices.py": "runs the tests that call a kernel, each way in a process of its own",
    "kernels/kills.py": "faults planted in any of the kernels",
    "kernels/compositions.py": "every component that is made of the core, on the kernels",
    "kernels/wiring.py": "log-probability on the kernels",
    "layouts/one_piece.py": "contiguous and striped, which refuse the same",
    "mamba/outside_oracles.py": "the scan, the convolution and the layer against two other libraries",
    "mamba/refusals.py": "what a strategy refuses, in one table",
    "pipelining/schedule_refusals.py": "what a schedule is refused for, in one table",
    "pipelining/tensor_parallel.py": "stages whose modules are cut by the parallelizer",
    "vocab_parallel/memory.py": "the live memory of every function there",
    "vocab_parallel/outside_oracles.py": "several functions against other libraries' on fixed cases",
    "vocab_parallel/real_text.py": "the log-probabilities on a text, which is input and no component",
    "vocab_parallel/refusals.py": "what several functions refuse, in one table",
}
# Folders of parity_tests that are about the harness and not about a component.
HARNESS_FOLDERS = {"cli", "harness", "faults", "benchmarks", "tracing", "training"}


def python_files(tree: str) -> list[str]:
    """Paths relative to the tree, without packages' own files."""
    found = sorted(path.relative_to(ROOT / tree).as_posix() for path in (ROOT / tree).rglob("*.py"))
    return [path for path in found if not path.endswith("__init__.py")]


def components(tree: str) -> set[str]:
    """Component paths of a tree: `layouts/striped.py`, for a test file that of what it tests."""
    if tree != "parity_tests":
        return set(python_files(tree))
    tests = [Path(path) for path in python_files(tree) if Path(path).name.startswith("test_")]
    tested = [path.with_name(path.name.removeprefix("test_")).as_posix() for path in tests]
    return {path for path in tested if "/" in path and path.split("/")[0] not in HARNESS_FOLDERS}


def excused(path: str, reasons: dict[str, str]) -> bool:
    return any(fnmatch(path, pattern) for pattern in reasons)


def test_production_has_a_reference_at_the_same_path():
    alone = components("torch_impl") - components("jax_ref")
    assert sorted(path for path in alone if not excused(path, WITHOUT_A_REFERENCE)) == []


def test_a_reference_has_production_at_the_same_path():
    alone = components("jax_ref") - components("torch_impl")
    assert sorted(path for path in alone if not excused(path, WITHOUT_PRODUCTION)) == []


def test_both_sides_have_a_test_at_the_same_path():
    alone = (components("torch_impl") | components("jax_ref")) - components("parity_tests")
    assert sorted(path for path in alone if not excused(path, WITHOUT_A_TEST_OF_ITS_OWN)) == []


def test_a_test_is_of_something():
    alone = components("parity_tests") - components("torch_impl") - components("jax_ref")
    reasons = WITHOUT_A_TEST_OF_ITS_OWN | TESTS_OF_NO_SINGLE_FILE
    assert sorted(path for path in alone if not excused(path, reasons)) == []


@pytest.mark.parametrize(
    ("trees", "reasons"),
    [
        (["torch_impl"], WITHOUT_A_REFERENCE),
        (["jax_ref"], WITHOUT_PRODUCTION),
        (["torch_impl", "jax_ref"], WITHOUT_A_TEST_OF_ITS_OWN),
    ],
)
def test_every_exception_is_of_a_path_that_exists(trees, reasons):
    assert [pattern for pattern in reasons if not any(any((ROOT / tree).glob(pattern)) for tree in trees)] == []


@pytest.mark.parametrize("tree", TREES)
def test_every_file_has_a_name_of_its_own(tree):
    assert [path for path in python_files(tree) if NAMELESS & set(Path(path).with_suffix("").parts)] == []


def tolerances_in(source: str) -> set[str]:
    """Names and keyword arguments that are a tolerance; words in comments and strings are not."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME} & TOLERANCES


def test_no_tolerance_in_a_test():
    found = {path: tolerances_in((ROOT / "parity_tests" / path).read_text()) for path in python_files("parity_tests")}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_tolerance_would_be_found():
    word = "".join(["a", "tol"])
    assert tolerances_in(f"check(x, {word}=1)  # rtol") == {word}
    assert tolerances_in("f(x)  # allclose\n'approx'") == set()


def imported(path: Path) -> set[str]:
    """The top-level packages a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize(
    ("tree", "others"),
    [
        ("torch_impl", {"jax", "flax", "jax_ref", "parity_tests"}),
        ("jax_ref", {"torch", "torch_impl", "parity_tests"}),
    ],
)
def test_imports_run_one_way(tree, others):
    crossing = {path: imported(ROOT / tree / path) & others for path in python_files(tree)}
    assert {path: names for path, names in crossing.items() if names} == {}


def test_the_layouts_that_the_harness_trusts_are_numpy_alone():
    files = (ROOT / "jax_ref" / "layouts").glob("*.py")
    assert set().union(*map(imported, files)) <= {"numpy", "collections", "itertools", "jax_ref"}
    assert (ROOT / "jax_ref" / "__init__.py").read_text().strip() == ""


def test_what_a_rank_needs_loads_no_jax():
    needed = ["jax_ref.layouts", "parity_tests.harness.spec", "parity_tests.harness.case"]
    needed += ["parity_tests.harness.engines.run", "parity_tests.harness.inputs"]
    program = f"import sys, {', '.join(needed)}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
