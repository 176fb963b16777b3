"""Two schemes of which only the drawing is looked at, by the tests of it: one of token ids, one of packed sequences."""

from shardproof import ids, integers, lengths, mask, offsets, scheme, token_below
from shardproof.draw import inputs
from shardproof.draw.choosers import seeded_chooser
from shardproof.draw.drawing import draw_case


@scheme(
    reference=lambda logits, target, label, keep, level, temperature: logits,
    mesh={"tp": (1, 2, 4)},
    inputs={"logits": "b s v/tp:ragged", "target": "b s", "label": "b s", "keep": "b s", "level": "b"},
    outputs="b s v/tp:ragged",
    draw={
        "target": token_below("v"),
        "label": ids("v", ignore=-100),
        "keep": mask("s"),
        "level": integers(-2, 2),
    },
    options={"temperature": (1.0, 2.0)},
    rank_options={"chunk": (None, 3)},
    dtypes=("float32", "bfloat16", "float16", "float64"),
)
def tokens(mesh, logits, target, label, keep, level, temperature, chunk):
    return logits


@scheme(
    reference=lambda x, cu, cu_padded, n: x,
    mesh={"cp": (1, 2, 4)},
    inputs={"x": "t/cp:packed", "cu": "m", "cu_padded": "m", "n": "k"},
    outputs="t/cp:packed",
    draw={"cu": offsets("t"), "cu_padded": offsets("t", padded=True), "n": lengths("t")},
    dims={"k": "m-1"},
)
def sequences(mesh, x, cu, cu_padded, n):
    return x


def cases(scheme, count, **fixed):
    return [draw_case(scheme, seeded_chooser(seed), fixed, seed=seed) for seed in range(count)]


def array(scheme, case, name):
    arg = next(arg for arg in scheme.inputs if arg.name == name)
    return inputs.full_array(arg, scheme.draws[name], case)
