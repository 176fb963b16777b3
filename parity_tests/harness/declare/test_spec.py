"""Spec strings: which are read, which are rejected, and the messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.declare.spec import Dim, Sharding, Spec, parse

AXES = ("cp", "tp")
LAYOUTS = ("contiguous", "dual_chunk_swap", "packed", "ragged", "striped")


def rejection(text, axes=AXES, **kwargs):
    with pytest.raises(ValueError) as caught:
        parse(text, axes, **kwargs)
    return str(caught.value)


def test_axes_layouts_and_types():
    assert parse("b s/cp:dual_chunk_swap v/tp", AXES) == Spec(
        (Dim("b", ()), Dim("s", (Sharding("cp", "dual_chunk_swap"),)), Dim("v", (Sharding("tp", "contiguous"),))), ()
    )
    assert parse("b s tp=I cp=R", AXES) == Spec((Dim("b", ()), Dim("s", ())), (("tp", "I"), ("cp", "R")))
    assert parse("h/cp/tp", AXES) == Spec((Dim("h", (Sharding("cp"), Sharding("tp"))),), ())
    assert parse("tp=P cp=I", AXES) == Spec((), (("tp", "P"), ("cp", "I")))
    assert parse("b 1 v/tp cp=I", AXES).dim_names == ("b", "1", "v")


def test_untyped_where_no_gradient_is_needed():
    bare = Spec((Dim("b", ()), Dim("s", ())), ())
    assert parse("b s", AXES, differentiable=False) == bare
    assert parse("b s", AXES, typeless_ok=True) == bare
    assert parse("b s", ()) == bare
    assert parse("", AXES, differentiable=False) == Spec((), ())
    assert parse("b s tp=P", AXES, typeless_ok=True).types == (("tp", "P"),)


def test_questions_to_a_spec():
    spec = parse("h/dp/tp s/cp:striped pp=R ep=P", ("dp", "tp", "cp", "pp", "ep", "x"), typeless_ok=True)
    assert spec.axes == ("dp", "tp", "cp")
    assert [spec.type_of(axis) for axis in ("dp", "tp", "cp", "pp", "ep", "x")] == [
        "V",
        "V",
        "V",
        "R",
        "P",
        "I",
    ]
    assert spec.dim_names == ("h", "s")


def test_a_spec_is_hashable_and_contiguous_may_be_written():
    short, long = parse("v/tp cp=I", AXES), parse("v/tp:contiguous cp=I", AXES)
    assert short == long and hash(short) == hash(long)
    assert (str(short), str(long)) == ("v/tp cp=I", "v/tp:contiguous cp=I")


def test_blanks_of_any_kind_separate():
    assert str(parse("\t b \n\n s/cp\r\n\x0b tp=R ", AXES)) == "b s/cp tp=R"


def test_size_one_may_stand_twice_and_be_sharded():
    assert str(parse("1 1 v/tp 1/cp:ragged", AXES)) == "1 1 v/tp 1/cp:ragged"


def test_custom_layouts():
    assert parse("s/cp:mine tp=I", AXES, ("mine",)).dims[0].shardings == (Sharding("cp", "mine"),)
    assert rejection("s/cp:yours tp=I", layouts=("mine", "alpha")).endswith(
        "layout 'yours' is not known (alpha, mine); pass layouts={'yours': f}"
    )


@pytest.mark.slow
def test_thousands_of_dims():
    names = [f"d{i}" for i in range(3000)]
    assert parse(" ".join(names), AXES, typeless_ok=True).dim_names == tuple(names)
    long = "a" * 100_000
    assert parse(long, (), LAYOUTS).dim_names == (long,)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("b s/cp!", "unexpected '!' at column 7; a spec is dims, then axis=TYPE, separated by blanks"),
        ("b, s", "unexpected ',' at column 2; a spec is dims, then axis=TYPE, separated by blanks"),
        ("02 s", "unexpected '0' at column 1; a spec is dims, then axis=TYPE, separated by blanks"),
        ("b 010", "unexpected '0' at column 3; a spec is dims, then axis=TYPE, separated by blanks"),
        ("b _s", "unexpected '_' at column 3; a spec is dims, then axis=TYPE, separated by blanks"),
        ("b /tp", "unexpected '/' at column 3; a spec is dims, then axis=TYPE, separated by blanks"),
        ("b v//tp", "unexpected '/' at column 5; a spec is dims, then axis=TYPE, separated by blanks"),
        ("v/ s", "unexpected ' ' at column 3; a spec is dims, then axis=TYPE, separated by blanks"),
        ("s:striped", "unexpected ':' at column 2; a spec is dims, then axis=TYPE, separated by blanks"),
        ("v/tp=I", "unexpected '=' at column 5; a spec is dims, then axis=TYPE, separated by blanks"),
        ("1=R", "unexpected '=' at column 2; a spec is dims, then axis=TYPE, separated by blanks"),
        ("b tp=I/cp", "unexpected '/' at column 7; a spec is dims, then axis=TYPE, separated by blanks"),
        ("b tp= s", "unexpected ' ' at column 6; a spec is dims, then axis=TYPE, separated by blanks"),
        ("b\t\té", "unexpected 'é' at column 4; a spec is dims, then axis=TYPE, separated by blanks"),
        ("sé", "unexpected 'é' at column 2; a spec is dims, then axis=TYPE, separated by blanks"),
        ("É", "unexpected 'É' at column 1; a spec is dims, then axis=TYPE, separated by blanks"),
        ("b s²", "unexpected '²' at column 4; a spec is dims, then axis=TYPE, separated by blanks"),
        ("b s٣", "unexpected '٣' at column 4; a spec is dims, then axis=TYPE, separated by blanks"),
        ("b\x00", "unexpected '\\x00' at column 2; a spec is dims, then axis=TYPE, separated by blanks"),
        ("v/", "ends after 'v/'; an axis must follow"),
        ("b v/cp/ \n", "ends after 'v/cp/'; an axis must follow"),
        ("b s/cp:", "ends after 's/cp:'; a layout must follow"),
        ("b tp=", "ends after 'tp='; a type must follow"),
        ("B s", "'B' at column 1: names are lower case"),
        ("b sEq", "'E' at column 4: names are lower case"),
        ("b s/Cp", "'C' at column 5: names are lower case"),
        ("b tP=R", "'P' at column 4: names are lower case"),
        ("b s/cp:Striped", "'S' at column 8: names are lower case"),
        ("b tp=I v", "dim 'v' follows tp=I; dims come first"),
        ("b tp=I cp=R v/tp", "dim 'v' follows cp=R; dims come first"),
        ("b s s", "dim 's' occurs twice; give the second its own letter and the same size, dims={'letter': 's'}"),
        ("b s/xp", "axis 'xp' is not in mesh (cp, tp); did you mean 'cp'?"),
        ("b s xtp=R", "axis 'xtp' is not in mesh (cp, tp); did you mean 'tp'?"),
        ("b s/stage", "axis 'stage' is not in mesh (cp, tp)"),
        (
            "s/cp:zigzag",
            "layout 'zigzag' is not known (contiguous, dual_chunk_swap, packed, ragged, striped); "
            "pass layouts={'zigzag': f}",
        ),
        ("h/tp v/tp", "axis 'tp' shards both h and v; an axis shards one dim of a tensor"),
        ("h/tp/tp", "axis 'tp' shards h twice; an axis shards a dim once"),
        ("h/tp:ragged/tp", "axis 'tp' shards h twice; an axis shards a dim once"),
        ("v/tp tp=I", "axis 'tp' shards v and is typed tp=I; a sharding axis is Varying, drop tp=I"),
        ("v tp=I tp=R", "axis 'tp' is typed twice (tp=I, tp=R)"),
        ("v tp=I tp=I", "axis 'tp' is typed twice (tp=I, tp=I)"),
        ("v tp=X", "tp=X: a type is R, I or P"),
        ("v tp=RR", "tp=RR: a type is R, I or P"),
        ("v tp=i", "tp=i: a type is R, I or P"),
        ("v tp=V", "tp=V: Varying is written by sharding a dim, as in v/tp"),
        (
            "b s cp=R",
            "axis 'tp' shards no dim and has no type; write tp=R (gradients add up), tp=I (same gradient) "
            "or tp=P (values add up)",
        ),
        (
            "",
            "axis 'cp' shards no dim and has no type; write cp=R (gradients add up), cp=I (same gradient) "
            "or cp=P (values add up)",
        ),
        ("t/cp:packed/tp", "packed must be the only sharding of dim t"),
        ("t/cp/tp:packed", "packed must be the only sharding of dim t"),
    ],
)
def test_mistakes(text, sentence):
    assert rejection(text) == f"spec '{text}' (input 'x'): {sentence}"


def test_the_first_mistake_is_reported():
    assert rejection("b s/xp s!").endswith("axis 'xp' is not in mesh (cp, tp); did you mean 'cp'?")
    assert rejection("b! s/xp").startswith("spec 'b! s/xp' (input 'x'): unexpected '!' at column 2;")


def test_an_empty_mesh_has_no_axis_to_suggest():
    assert rejection("v/tp", ()) == "spec 'v/tp' (input 'x'): axis 'tp' is not in mesh ()"


def test_type_on_integer():
    assert (
        rejection("b s tp=R", name="target", differentiable=False)
        == "spec 'b s tp=R' (input 'target'): 'target' is an integer and has no gradient; drop tp=R"
    )


def test_outputs_are_named_as_outputs():
    assert (
        rejection("b v/", role="output", name="out")
        == "spec 'b v/' (output 'out'): ends after 'v/'; an axis must follow"
    )


@pytest.mark.parametrize(
    ("thing", "kind"), [(["b", "s"], "a list"), (3, "an int"), (None, "a NoneType"), (b"b", "a bytes")]
)
def test_not_a_string(thing, kind):
    with pytest.raises(TypeError) as caught:
        parse(thing, AXES)
    assert str(caught.value) == f"spec of input 'x' is {kind}; a spec is a string"


names = st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True)
blanks = st.text(" \t\n", min_size=1, max_size=3)


@st.composite
def specs(draw):
    """A right spec string, with blanks of all kinds, and the axes of its mesh."""
    axes = draw(st.lists(names, unique=True, max_size=4))
    free = list(axes)
    words = []
    for name in draw(st.lists(names, unique=True, max_size=4)):
        word = name
        for _ in range(draw(st.integers(0, min(2, len(free))))):
            layout = draw(st.sampled_from(["", ":contiguous", ":ragged", ":striped", ":dual_chunk_swap"]))
            word += f"/{free.pop()}{layout}"
        words.append(word)
    words += [f"{axis}={draw(st.sampled_from('RIP'))}" for axis in draw(st.permutations(free))]
    return draw(st.just("") | blanks) + draw(blanks).join(words), tuple(axes)


@given(specs())
def test_round_trip(spec_and_axes):
    text, axes = spec_and_axes
    spec = parse(text, axes)
    assert str(spec) == " ".join(text.split())
    assert parse(str(spec), axes) == spec
    written = dict(word.split("=") for word in text.split() if "=" in word)
    assert {axis: spec.type_of(axis) for axis in axes} == written | dict.fromkeys(spec.axes, "V")


@given(st.text() | st.text("bstp1/:=RIPVX !", max_size=12), st.booleans(), st.booleans())
def test_any_text_is_read_or_rejected_with_the_prefix(text, differentiable, typeless_ok):
    try:
        spec = parse(text, AXES, differentiable=differentiable, typeless_ok=typeless_ok)
    except ValueError as rejected:
        assert str(rejected).startswith(f"spec '{text}' (input 'x'): ")
    else:
        assert str(spec) == " ".join(text.split())
