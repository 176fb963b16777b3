"""The cases of a seed are the same, whatever modules the process has imported."""

import pytest
from hypothesis import given, settings
from hypothesis import seed as hypothesis_seed

from parity_tests import warm_python
from parity_tests.specimens.drawn_schemes import sequences
from shardproof import every_case
from shardproof.draw.profiles import profile
from shardproof.draw.reproducible import reproducible_draws

CONSTANTS = "NUMBERS = [" + ", ".join(str(number) for number in range(100, 1000)) + "]\n"
SEARCH = """
from shardproof.draw import profiles
from parity_tests.harness.draw import test_reproducible
from hypothesis import settings
profiles.register_profiles()
settings.load_profile({profile!r})
print(*test_reproducible.drawn(), sep="\\n")
"""


def drawn():
    """The cases of seed 0, as text."""
    texts = []

    @hypothesis_seed(0)
    @settings(max_examples=60, database=None)
    @given(every_case(sequences))
    def example(case):
        texts.append(case.json)

    with reproducible_draws():
        example()
    return texts


def in_a_process(folder, program):
    done = warm_python.run("-c", program.format(profile=profile()), folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_imported_constants_change_no_draw(tmp_path):
    """Hypothesis alone reads the 900 numbers of the module and draws some of them."""
    (tmp_path / "constants.py").write_text(CONSTANTS)
    plain = in_a_process(tmp_path, SEARCH)
    assert plain == in_a_process(tmp_path, "import constants\n" + SEARCH) == drawn()
    assert len(set(plain)) > 30


EXAMPLES = """
from hypothesis import strategies as st
from shardproof.draw.choosers import even_chooser, simplest
numbers = st.lists(st.floats(0.5, 2.0), min_size=1, max_size=8)
simplest(numbers), [even_chooser(number)(numbers) for number in range(4)]
"""


@pytest.mark.slow
def test_examples_of_a_strategy_leave_no_folder(tmp_path):
    in_a_process(tmp_path, EXAMPLES)
    assert list(tmp_path.iterdir()) == []
