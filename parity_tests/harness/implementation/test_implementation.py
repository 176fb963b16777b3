"""The built-in schemes judge the functions of another module, and only those that it offers."""

import inspect
import json
import re
from copy import deepcopy
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardproof import CaseSpec
from shardproof.declare.discover import TABLE, find
from shardproof.implementation.offered import NotApplicable, Offered
from shardproof.implementation.public_names import PublicName, public_names_of, rebound
from shardproof.implementation.substitution import NotOffered, on_implementation
from shardproof.replays import reruns
from torch_impl import vocab_parallel as vp

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "my_functions.py"
RIGHT = EXAMPLE.read_text()
WRONG = RIGHT.replace("slope * gradient[..., None]", "slope")
LINE = 1 + RIGHT[: RIGHT.index("\ndef vocab_parallel_logprob")].count("\n") + 1
LOGPROB = PublicName("torch_impl.vocab_parallel", "vocab_parallel_logprob")
FUNCTION = PublicName("torch_impl.vocab_parallel", "DistributedLogprob")
APPLIED = """
import torch
class DistributedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, start, end, group, inference_only=False):
        return logits, group, inference_only
"""


def closing(out):
    return out.rstrip().splitlines()[-1]


def written(name, text):
    Path(name).write_text(text)
    return name


def scheme_named(name):
    (scheme,) = find([name])
    return scheme


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_right_functions_are_equal(engine, shardproof):
    file = written(f"right_on_{engine}.py", RIGHT)
    run = ("verify", "vocab_parallel_*", "logprob_with_entropy", "--implementation", file, "--json", "out.json")
    status, out, _ = shardproof(*run, "--engine", engine, "--examples", "6")
    assert status == 0, out
    assert f"judged: right_on_{engine}.vocab_parallel_logprob (right_on_{engine}.py:{LINE})" in out
    reasons = "parameter inference_only (under no_grad); parameter chunk_size (chunk_size=1, 2, 5)"
    assert f"not applicable: {reasons}" in out
    assert "not run: logprob_with_entropy: not applicable: parameter with_entropy" in out
    assert closing(out) == "4 schemes, 0 mismatches, 1 not run, 2 not offered."
    record = json.loads(Path("out.json").read_text())
    assert record["not_offered"] == {
        f"vocab_parallel_{name}": f"right_on_{engine}.py has no _compute_distributed_{name}"
        for name in ("log_softmax", "softmax")
    }
    assert record["reports"][0]["implementation"]["ours"] == []
    assert TABLE[record["reports"][0]["scheme"]].implementation is None


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_a_mismatch_names_the_function_and_its_line_and_is_replayed_on_it(engine, shardproof):
    file = written(f"wrong_on_{engine}.py", WRONG)
    run = ("verify", "vocab_parallel_logprob", "--implementation", file, "--examples", "6", "--engine", engine)
    status, out, _ = shardproof(*run)
    assert status == 1 and "MISMATCH" in out
    assert f"  judged: wrong_on_{engine}.vocab_parallel_logprob (wrong_on_{engine}.py:{LINE})" in out
    (replay,) = Path().glob("replay_*.py")
    assert f"wrong_on_{engine}.py" in replay.read_text()
    assert shardproof("replay", str(replay))[0] == 1
    case = CaseSpec.from_json(re.search("^CASE = '(.*)'$", replay.read_text(), re.MULTILINE)[1])
    mended = on_implementation(scheme_named("vocab_parallel_logprob"), written(f"mended_on_{engine}.py", RIGHT))
    (report,) = reruns(mended, case, None, 1)
    assert report.ok


def test_a_module_that_lacks_all_names_judges_nothing(shardproof):
    empty = written("lacks_all.py", "def vocab_parallel_loss():\n    pass\n")
    status, out, _ = shardproof("verify", "vocab_parallel_*", "--implementation", empty)
    assert status == 4
    assert "not offered: vocab_parallel_logprob: lacks_all.py has no vocab_parallel_logprob (it has " in out
    assert "not offered: vocab_parallel_softmax: lacks_all.py has no " in out
    assert closing(out) == "3 schemes, 0 mismatches, 0 not run, 3 not offered."


def test_many_schemes_that_are_not_offered_share_a_reason(shardproof):
    empty = written("lacks_them_all.py", "class DistributedEntropy:\n    pass\n")
    status, out, _ = shardproof("verify", "*_logprob*", "--implementation", empty)
    reason = "lacks_them_all.py has no "
    assert status == 4 and out.count("not offered: ") == 1 and out.count(reason) == 1
    assert "'shardproof list' names what each scheme verifies" in out


def test_our_own_functions_under_our_names_are_not_offered(shardproof):
    ours = written("ours.py", "from torch_impl.vocab_parallel import *\n")
    assert shardproof("verify", "vocab_parallel_logprob", "--implementation", ours)[0] == 4


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def vocab_parallel_logprobs(): ...", "has no vocab_parallel_logprob (it has vocab_parallel_logprobs)"),
        ("vocab_parallel_logprob = 3", "has a vocab_parallel_logprob that cannot be called like ours (type int)"),
        ("from torch_impl.vocab_parallel import vocab_parallel_logprob", "imports vocab_parallel_logprob from here"),
    ],
)
def test_why_a_function_is_not_offered(source, reason, shardproof):
    file = written(f"offers_{len(reason)}.py", source + "\n")
    _, out, _ = shardproof("verify", "vocab_parallel_logprob", "--implementation", file)
    assert f"not offered: vocab_parallel_logprob: {file} {reason}" in out


@pytest.mark.parametrize("target", ["some.txt", "folder/module"])
def test_a_target_must_be_a_python_file(target, shardproof):
    Path("some.txt").write_text("text")
    status, _, err = shardproof("verify", "vocab_parallel_logprob", "--implementation", target)
    assert status == 2 and f"{target} is not a Python file" in err


def test_a_file_of_expected_failures_is_text(shardproof):
    Path("expected.bin").write_bytes(b"\xff\xfe\x00")
    run = ("verify", "vocab_parallel_logprob", "--implementation", written("right_one.py", RIGHT))
    status, _, err = shardproof(*run, "--expected-failures", "expected.bin")
    assert status == 2 and "expected.bin: no text" in err


def test_a_module_is_found_in_the_working_folder_by_its_name(shardproof):
    written("named_module.py", RIGHT)
    run = ("verify", "vocab_parallel_logprob", "--examples", "2", "--implementation")
    assert shardproof(*run, "named_module")[0] == 0
    status, _, err = shardproof(*run, "no_such_module")
    assert status == 2 and "cannot import no_such_module" in err


def test_a_rank_that_raises_names_the_line_of_the_module(shardproof):
    file = written(
        "raising_module.py", RIGHT.replace("        rows = ", "        raise KeyError('w')\n        rows = ")
    )
    status, out, _ = shardproof("verify", "vocab_parallel_logprob", "--implementation", file, "--examples", "2")
    line = 1 + Path(file).read_text().splitlines().index("        raise KeyError('w')")
    assert status == 3 and f'raising_module.py", line {line}, in forward' in out


# Expected failures


@pytest.mark.slow
def test_an_expected_failure_is_listed_and_does_not_count(shardproof):
    file = written("wrong_as_expected.py", WRONG)
    written("expected.txt", "# known\nvocab_parallel_logprob  mismatch  # the slope\nvocab_topk mismatch\n")
    run = ("verify", "vocab_parallel_*", "--implementation", file, "--expected-failures", "expected.txt")
    status, out, _ = shardproof(*run, "--examples", "6", "--json", "out.json", "--junit", "out.xml")
    assert status == 0
    assert "expected: vocab_parallel_logprob: mismatch (the slope)" in out
    assert closing(out) == "3 schemes, 0 mismatches, 1 expected failure, 0 not run, 2 not offered."
    assert json.loads(Path("out.json").read_text())["reports"][0]["expected"]["reason"] == "the slope"
    suite = ElementTree.parse("out.xml").getroot()
    assert [suite.get(name) for name in ("tests", "failures", "skipped")] == ["3", "0", "3"]


def test_an_unexpected_pass_fails(shardproof):
    written("expected.txt", "vocab_parallel_logprob mismatch # the slope\n")
    file = written("right_unexpectedly.py", RIGHT)
    run = ("verify", "vocab_parallel_logprob", "--implementation", file, "--expected-failures", "expected.txt")
    status, out, _ = shardproof(*run, "--examples", "2", "--junit", "out.xml")
    assert status == 1
    assert "unexpected: vocab_parallel_logprob: passes, where mismatch is expected (the slope)" in out
    assert "1 unexpected pass" in closing(out)
    assert ElementTree.parse("out.xml").getroot().get("failures") == "1"


@pytest.mark.slow
def test_another_failure_than_the_expected_fails(shardproof):
    written("expected.txt", "vocab_parallel_logprob raised\n")
    file = written("wrong_otherwise.py", WRONG)
    run = ("verify", "vocab_parallel_logprob", "--implementation", file, "--expected-failures", "expected.txt")
    status, out, _ = shardproof(*run, "--examples", "6")
    assert status == 1 and "unexpected: vocab_parallel_logprob: mismatch, where raised is expected" in out


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("vocab_topkk mismatch", "no scheme is called 'vocab_topkk'; did you mean vocab_topk?"),
        ("vocab_topk wrong", "'wrong' is not the verdict of a failure"),
        ("vocab_topk mismatch\nvocab_topk raised", "vocab_topk stands in the file a second time"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_line(line, sentence, shardproof):
    written("expected.txt", line)
    status, out, err = shardproof("verify", "vocab_topk", "--expected-failures", "expected.txt")
    assert (status, out) == (2, "") and sentence in err and f"expected.txt:{1 + line.count(chr(10))}" in err


@pytest.mark.parametrize("option", ["--junit", "--html"])
def test_a_file_that_is_read_is_not_replaced(option, shardproof):
    text = written("known.html", "vocab_topk mismatch\n")
    status, _, err = shardproof("verify", "vocab_topk", "--expected-failures", text, option, "./known.html")
    assert (status, Path(text).read_text()) == (2, "vocab_topk mismatch\n")
    assert f"{option} and --expected-failures are both ./known.html" in err


def test_the_mark_of_an_encoding_is_no_part_of_a_line(shardproof):
    Path("expected.txt").write_text("vocab_topk mismatch\n", encoding="utf-8-sig")
    run = ("verify", "vocab_topk", "--examples", "1", "--expected-failures", "expected.txt")
    assert "unexpected: vocab_topk: passes" in shardproof(*run)[1]


# The parts: which names a scheme calls, and a copy that calls others


def test_names_are_found_through_modules_and_helper_functions():
    assert public_names_of(scheme_named("vocab_parallel_logprob").fn) == [LOGPROB]
    assert PublicName("torch_impl.layouts", "TokenLayout") in public_names_of(
        scheme_named("packed_attention_by_keys").fn
    )
    assert PublicName("torch_impl.context_parallel", "context_parallel_attention") in public_names_of(
        scheme_named("packed_attention_by_keys").fn
    )


def test_a_copy_calls_the_others_and_the_original_ours():
    scheme = scheme_named("vocab_parallel_logprob")
    copy = rebound(scheme.fn, {LOGPROB: "another"})
    assert copy.__globals__["vp"].vocab_parallel_logprob == "another"
    assert copy.__globals__["vp"].DistributedLogprob is vp.DistributedLogprob
    assert scheme.fn.__globals__["vp"] is vp


def test_a_scheme_of_parts_that_are_not_public_is_not_offered():
    with pytest.raises(NotOffered, match="not public"):
        on_implementation(scheme_named("rotary"), written("any_names.py", RIGHT))


def test_arguments_of_an_applied_function_that_it_lacks():
    offered = Offered(written("applied.py", APPLIED), FUNCTION)
    parameters = inspect.signature(vp.DistributedLogprob.forward).parameters
    assert list(parameters)[-1] == "temperature"
    with pytest.raises(NotApplicable, match="parameter temperature"):
        offered.apply(1, 2, 0, 4, "tp", False, 2.0)


def test_a_parameter_that_ours_lacks():
    text = "def vocab_parallel_logprob(logits, target, tp_group, *, scale, **others):\n    pass\n"
    with pytest.raises(NotApplicable, match="parameter scale, which ours lacks"):
        Offered(written("another_parameter.py", text), LOGPROB)(1, 2, 3, vocab_start_index=0, vocab_end_index=1)


SHARES_ONLY_THE_EXCHANGES = """
from torch_impl import mamba

class MambaContextParallel:
    def __init__(self, cp_group, num_heads, head_dim, n_groups, d_state, mixer):
        self._ours = mamba.MambaContextParallel(cp_group, num_heads, head_dim, n_groups, d_state, mixer)
        self.num_heads_local, self.n_groups_local = self._ours.num_heads_local, self._ours.n_groups_local
        for name in ("conv1d_weight", "conv1d_bias", "dt_bias", "A_log", "D"):
            setattr(self, f"get_{name}", getattr(self._ours, f"get_{name}"))

    def pre_conv_ssm(self, projected_states, cu_seqlens=None):
        return self._ours.pre_conv_ssm(projected_states, cu_seqlens)

    def post_conv_ssm(self, output, cu_seqlens=None):
        return FACTOR * self._ours.post_conv_ssm(output, cu_seqlens)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "verdict"), [("1", 0), ("2", 1)])
def test_a_class_with_fewer_methods_runs_on_what_both_share(factor, verdict, shardproof):
    text = SHARES_ONLY_THE_EXCHANGES.replace("FACTOR", factor)
    file = written(f"fewer_methods_{factor}.py", text)
    run = (
        "verify",
        "hidden_parallel",
        "--implementation",
        file,
        "--examples",
        "2",
        "--mesh",
        "cp=2",
        "--json",
        "out.json",
    )
    status, out, err = shardproof(*run)
    assert status == verdict, out + err
    (report,) = json.loads(Path("out.json").read_text())["reports"]
    options = report["case"]["options"]
    assert (options["fused"], options["way"]) == (True, "by shared protocol")
    assert "attribute mix" in report["implementation"]["not_applicable"]


STRATEGY = PublicName("torch_impl.mamba", "MambaContextParallel")


def test_a_method_that_their_object_lacks_is_not_applicable():
    text = "class MambaContextParallel:\n    def __init__(self, *given):\n        pass\n"
    text += "    def pre_conv_ssm(self, projected_states):\n        return projected_states\n"
    made = Offered(written("one_method.py", text), STRATEGY)(None, 4, 2, 2, 3, None)
    assert made.pre_conv_ssm(7, None) == 7  # None is our default
    for call, reason in (
        (lambda: made.mix, "attribute mix"),
        (lambda: made.pre_conv_ssm(7, [0, 4]), "parameter cu_seqlens"),
        (lambda: deepcopy(made), "method __deepcopy__"),
    ):
        with pytest.raises(NotApplicable, match=reason):
            call()
    assert not hasattr(made, "layout") and not Offered("one_method.py", STRATEGY).has_our_parameters
