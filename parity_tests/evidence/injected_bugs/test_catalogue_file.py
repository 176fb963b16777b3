"""Reading a file of the catalogue: every field, and the line that an error names."""

import re

import pytest

from parity_tests.evidence.injected_bugs.catalogue_file import read
from parity_tests.evidence.injected_bugs.injected_bug import InjectedBug

TWO_BUGS = """## A comment
##

# doubled [scale] value: off by the factor 2
@@ layouts:halved
source: TrainVerify
module:
-     return x / 2
-
+     y = x

+     return y
+

## Why
# left [out] of all [call] raised:
@@ layouts/order:position
survives: rare: one draw of 100
- , 0
"""


@pytest.fixture
def read_text(tmp_path):
    def write_and_read(text):
        path = tmp_path / "layouts.diff"
        path.write_text(text)
        return read(path)

    return write_and_read


def test_every_field_is_read(read_text):
    assert read_text(TWO_BUGS) == (
        InjectedBug(
            name="doubled",
            kind="scale",
            at="layouts:halved",
            old="    return x / 2\n",
            new="    y = x\n    return y\n",
            expect="value: off by the factor 2",
            source="TrainVerify",
            module="",
        ),
        InjectedBug(
            name="left [out] of all",
            kind="call",
            at="layouts/order:position",
            old=", 0",
            new="",
            expect="raised: ",
            survives="rare: one draw of 100",
        ),
    )


START = "# doubled [scale] value:\n@@ layouts:halved\n"
WRONG = {
    "- x\n": (1, "belongs to no entry"),
    "# doubled\n": (1, "'# doubled' is not '# name [kind] expect'; a comment begins with '## '"),
    "\n# doubled [scale]\n": (2, "is not '# name [kind] expect'"),
    "# doubled [size] value:\n@@ layouts:halved\n- x\n": (1, "kind 'size' is not one of"),
    "# doubled [scale] value:\n- x\n": (1, "'doubled' has no line '@@'"),
    f"{START}+ x\n": (1, "'doubled' has no line '-'"),
    f"{START}@@ layouts:order\n- x\n": (3, "'doubled' has a second '@@'"),
    f"{START}- x\n+ y\n- z\n": (5, "'- z' stands after the new text"),
    f"{START}sauce: TrainVerify\n- x\n": (3, "does not begin with one of @@, source:, equivalent:, survives:, module:"),
    f"{START}-x\n": (3, "'-x' does not begin with one of"),
    f"{START}- x\n y\n": (4, "' y' does not begin with one of"),
}


@pytest.mark.parametrize("text", WRONG)
def test_an_error_names_file_and_line(read_text, text):
    line, message = WRONG[text]
    with pytest.raises(ValueError, match=rf"layouts\.diff:{line}: .*{re.escape(message)}"):
        read_text(text)
