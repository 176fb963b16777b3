"""An injected bug: a text of one symbol of production that another text replaces, and how it must be caught."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = (
    "reduction",
    "group",
    "scale",
    "statistic",
    "border",
    "order",
    "sequence",
    "buffer",
    "random",
    "tied",
    "schedule",
    "precision",
)


TRAIN_VERIFY, MEGATRON = "TrainVerify", "NVIDIA/Megatron-LM #7452"  # sources of published mistakes


@dataclass(frozen=True)
class InjectedBug:
    """`old`, which occurs once in the source of the symbol `at`, becomes `new`.

    `at` is a component of torch_impl and a top-level function, class, method or assigned name of one of its files, as
    `collectives:_AllReduce.forward`; `symbols` finds the file. `expect` names the oracle and some of its words, as
    `gradient: off by the constant factor`; the oracle is value, gradient, protocol, cost, hygiene or the cause of a
    failed rank. `source` says where the mistake was made before. `equivalent` says why nothing observable changes;
    such a bug is listed, not counted. `survives` says why the drawn examples do not see a change that is there; such a
    bug is counted, as not caught. `module` is where a trace of the training run finds the first difference, as a glob;
    "" is the model itself, None a bug that says nothing of a module.
    """

    name: str
    kind: str
    at: str
    old: str
    new: str
    expect: str
    source: str | None = None
    equivalent: str | None = None
    survives: str | None = None
    module: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"injected bug {self.name!r}: kind {self.kind!r} is not one of {', '.join(KINDS)}")

    @property
    def component(self) -> str:
        """The folder of torch_impl that it stands in."""
        return self.at.partition(":")[0].partition("/")[0]
