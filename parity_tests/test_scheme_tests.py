"""Each mark `cases` of a scheme is one test, in the file that declares the scheme."""

import pytest

from parity_tests.evidence.injected_bugs import test_catalogue
from parity_tests.vocab_parallel import test_entropy
from parity_tests.vocab_parallel.test_entropy import chunked_distributed_entropy
from parity_tests.vocab_parallel.test_sampling_filter import filtered_by_lists


def made(request, module, scheme):
    """The tests that are made of a scheme where a module's names are collected."""
    collector = pytest.Module.from_parent(request.session, path=request.config.rootpath / module.__file__)
    return request.node.ihook.pytest_pycollect_makeitem(collector=collector, name=scheme.name, obj=scheme)


def test_the_arguments_of_each_mark_choose_the_cases(request):
    tests = made(request, test_entropy, chunked_distributed_entropy)
    assert {test.name: (test.obj.args, test.obj.keywords) for test in tests} == {
        "chunked_distributed_entropy": ((chunked_distributed_entropy,), {}),
        "chunked_distributed_entropy[engine=gloo]": ((chunked_distributed_entropy, 5), {"engine": "gloo"}),
    }


def test_a_scheme_of_another_file_is_not_tested_again(request):
    assert test_catalogue.filtered_by_lists is filtered_by_lists
    assert made(request, test_catalogue, filtered_by_lists) is None


def test_a_mark_above_the_declaration_is_an_error(request):
    makeitem, module = request.node.ihook.pytest_pycollect_makeitem, request.node.getparent(pytest.Module)
    with pytest.raises(module.CollectError, match=r"gathered: .* above @scheme; move it below"):
        makeitem(collector=module, name="gathered", obj=pytest.mark.cases(5)(chunked_distributed_entropy))
