"""Files and functions stay short; those that do not are on a list, with the reason beside each."""

import ast
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("torch_impl", "jax_ref", "parity_tests", "docs", "notebooks")
LONGEST = 450  # lines of a file
LONGEST_FUNCTION = 60  # lines of a function, with signature and docstring

# Functions whose arguments, one to a line and explained, are most of their lines; the code alone is short enough.
OF_MANY_ARGUMENTS = {
    "torch_impl/context_parallel/attention.py context_parallel_attention": "14 arguments",
    "torch_impl/mamba/delta_rule.py gated_delta_rule": "13 arguments, of which tensors of six shapes",
    "torch_impl/vocab_parallel/distillation.py get_distillation_topk_logprobs_from_logits": "8 arguments",
    "torch_impl/vocab_parallel/linear_logprob.py from_parallel_hidden_states_to_logprobs": "14 arguments",
    "torch_impl/vocab_parallel/packed.py from_parallel_logits_to_logprobs_packed_sequences": "14 arguments",
    "torch_impl/parallelizer/adapters/nvfsdp.py nvfsdp_strategy_parallelize": "19 arguments, each explained",
    "torch_impl/parallelizer/adapters/megatron_fsdp.py megatron_fsdp_strategy_parallelize": "19 arguments",
    "torch_impl/parallelizer/fsdp2.py fsdp2_strategy_parallelize": "18 arguments, each explained",
    "torch_impl/pipelining/pipeline.py pipeline_model": "25 arguments of the pages",
    "parity_tests/import_name/shardproof/cli/verify.py verify": "21 options, each with its help",
    "parity_tests/import_name/shardproof/verification.py verify": "15 arguments, each explained",
    "parity_tests/import_name/shardproof/declaration.py scheme": "all that can be declared, each explained",
}


def python_files(folders: Sequence[str]) -> dict[str, str]:
    """The source of every Python file below these folders, packages' own files included."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if "_build" not in path.parts]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def function_lines(source: str) -> dict[str, tuple[int, int]]:
    """Of each function its lines, and those without its signature and docstring."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    lengths = {}
    for node in functions:
        first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
        lengths[node.name] = (node.end_lineno - node.lineno + 1, node.end_lineno - first.lineno + 1)
    return lengths


def test_no_file_is_longer_than_one_idea():
    lines = {path: len(source.splitlines()) for path, source in python_files(FOLDERS).items()}
    assert {path: count for path, count in lines.items() if count > LONGEST} == {}


def test_no_function_is_longer_than_a_screen():
    long = {}
    for path, source in python_files(FOLDERS).items():
        of_file = function_lines(source)
        long |= {f"{path} {name}": lines for name, lines in of_file.items() if lines[0] > LONGEST_FUNCTION}
    assert sorted(long) == sorted(OF_MANY_ARGUMENTS)
    assert {name: code for name, (_, code) in long.items() if code > LONGEST_FUNCTION} == {}


def test_a_long_function_would_be_detected():
    body = "\n".join(f"    x{i} = {i}" for i in range(LONGEST_FUNCTION))
    assert function_lines(f'def f(a):\n    """One\n    two."""\n{body}') == {"f": (63, 60)}
