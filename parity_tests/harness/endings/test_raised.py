"""Exceptions of a user's code: chains that are circles, messages that raise, and text that is not safe to print."""

import pytest

from shardproof.endings.raised import chain, first_line_of, message_of, none_if_raised, printable
from shardproof.engines.failure import raised_by_function
from shardproof.engines.processes.recorder import Recorder


class Silent(Exception):
    def __str__(self):
        raise SystemExit(0)


def from_itself():
    error = RuntimeError("failed to run forward")
    error.__cause__ = error
    return error


def circle():
    first, second = KeyError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    return first


@pytest.mark.parametrize(("error", "length"), [(from_itself(), 1), (circle(), 2), (KeyError("alone"), 1)])
def test_a_chain_has_each_exception_once(error, length):
    assert len(list(chain(error))) == length
    assert next(chain(error)) is error
    assert raised_by_function(error) is error
    assert not Recorder(None, {}).is_backends(error)


def test_a_context_is_part_of_the_chain():
    try:
        try:
            raise KeyError("inner")
        except KeyError:
            raise ValueError("outer")  # noqa: B904
    except ValueError as error:
        assert [type(each) for each in chain(error)] == [ValueError, KeyError]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\ud800", "\\ud800"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x00\x07\x7f\x85", "\\x00\\x07\\x7f\\x85"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("one\r\ntwo\rthree\tfour", "one\ntwo\\rthree\tfour"),
        ("Größe ∑ 😀 [red]", "Größe ∑ 😀 [red]"),
    ],
)
def test_unsafe_characters_are_escaped(text, shown):
    assert printable(text) == message_of(ValueError(text)) == shown
    shown.encode()


def test_a_message_that_raises_is_a_sentence():
    assert message_of(Silent()) == "<its message raises SystemExit>"
    assert (first_line_of(ValueError("one\ntwo")), first_line_of(ValueError())) == ("one", "")


def test_a_user_who_interrupts_is_no_error_of_a_case():
    assert none_if_raised(lambda: 1 / 0)() is None
    assert none_if_raised(lambda: 3)() == 3
    with pytest.raises(KeyboardInterrupt):
        none_if_raised(interrupt)()


def interrupt():
    raise KeyboardInterrupt
