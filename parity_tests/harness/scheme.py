"""@scheme: one declaration that says what a per-rank function means, and its methods."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from parity_tests.harness.declare import dim_formulas, discover, from_contract, validation
from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.declare.declaration_errors import DeclarationErrors
from parity_tests.harness.declare.declared import Cost, Declared
from parity_tests.harness.declare.draws import Draw, values
from parity_tests.harness.declare.failed_declaration import collects
from parity_tests.harness.declare.keywords import rejects_unknown_keywords

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from parity_tests.harness.report.report import Report


class Scheme(Declared):
    """A declared scheme. Calling it calls the function; what else it can do is loaded when used."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def case(self, *, seed: int = 0, engine: str = "lockstep", dtype: str | None = None, **fixed: Any) -> CaseSpec:
        """One CaseSpec: mesh axes, dims and options by name; what is not given is drawn from the seed."""
        from parity_tests.harness.draw.drawing import one_case

        return one_case(self, seed=seed, engine=engine, dtype=dtype, **fixed)

    def verify(
        self,
        engine: str = "lockstep",
        examples: int | None = None,
        seed: int = 0,
        dtype: str | None = None,
        inside_subgroup: bool | None = None,
        **sizes_and_options: Any,
    ) -> Report:
        """Draw cases, run each on the ranks and against the reference, and report the worst of each tensor.

        Names resolve to mesh axes, dims and options; what is not given is drawn. `examples=None` is the Hypothesis
        profile's number, and where all dims are given at least one of each dtype on each mesh that shards them; where
        mesh and options are given as well, one of each dtype. Meshes that cannot shard the sizes given are left out and
        named in the report. Errors: ValueError for an unknown name, or for sizes that no mesh can shard.
        A quarter of the cases of lockstep, and one where all sizes are given, run inside a world twice as large, with
        the scheme in each half of it, which finds a use of the default group; `inside_subgroup` is for all of
        them or for none. A mismatch is in the report, not raised; see Report.raise_if_failed.
        """
        from parity_tests.harness.verify import verify

        return verify(self, engine, examples, seed, dtype, sizes_and_options, inside_subgroup=inside_subgroup)

    def run(self, *full_arrays: Any, engine: str = "lockstep", grad: Any = None, **mesh_and_options: Any) -> Any:
        """Stitched outputs for the given full arrays, in the order of `inputs`; nothing is compared.

        With `grad`, cotangents for the outputs, returns (outputs, {input: gradient}).
        """
        from parity_tests.harness.run.run_unsharded import run_unsharded

        return run_unsharded(self, full_arrays, engine, grad, mesh_and_options)

    def draw(self, **sizes: Any) -> str:
        """Picture: the ownership strip of every sharded dim, the type of every other axis."""
        from parity_tests.harness.report.picture import scheme_picture

        return scheme_picture(self, self.case(**sizes))

    def placements(self, **mesh: int) -> dict[str, tuple[Any, ...]]:
        """DTensor placements of every input and output; ValueError where DTensor cannot express it."""
        from parity_tests.harness.declare.spec import placements

        return {arg.name: placements(arg.spec, tuple(self.mesh)) for arg in (*self.inputs, *self.outputs)}

    def _repr_html_(self) -> str:
        from parity_tests.harness.report.notebook import of_scheme

        return of_scheme(self)

    def __repr__(self) -> str:
        specs = ", ".join(f"{arg.name} '{arg.spec}'" for arg in self.inputs)
        return f"<scheme {self.name}: {specs} -> {', '.join(repr(str(a.spec)) for a in self.outputs)}>"


def _enter(declared: Scheme) -> None:
    discover.enter(declared, DeclarationErrors(declared.name))


@collects(_enter)
@rejects_unknown_keywords
def scheme(
    *,
    reference: Callable[..., Any],
    mesh: Mapping[str, tuple[int, ...]],
    inputs: Mapping[str, str | Mapping[str, str]] | None = None,
    outputs: str | tuple[str, ...] | Mapping[str, str] | None = None,
    contract: Callable[..., Any] | None = None,
    draw: Mapping[str, Draw | Callable[..., Any] | SearchStrategy[Any]] | None = None,
    dims: Mapping[str, tuple[int, ...] | str] | None = None,
    layouts: Mapping[str, Callable[..., Any]] | None = None,
    options: Mapping[str, tuple[Any, ...]] | None = None,
    rank_options: Mapping[str, tuple[Any, ...]] | None = None,
    nograd: tuple[str, ...] = (),
    modifies: tuple[str, ...] = (),
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    reduction: tuple[str, ...] | None = None,
    roundings: int = 1,
    sums: str | None = None,
    inside: str | None = None,
    cost: Callable[..., Cost | Sequence[Cost]] | None = None,
    engines: tuple[str, ...] = ("lockstep", "gloo", "nccl", "torchrun"),
    replicas: str = "bitwise",
    random: bool = False,
    setup: Callable[[Any], Any] | None = None,
    around: Callable[[Any], AbstractContextManager[Any]] | None = None,
    module: str | None = None,
    assume: Callable[[CaseSpec], Any] | None = None,
    isolate: tuple[str, ...] = (),
    excluded_conditions: tuple[str, ...] | None = None,
) -> Callable[[Callable[..., Any]], Scheme]:
    """Declare that the decorated per-rank function means `reference`.

        @scheme(reference=logprob, mesh={"tp": (1, 2, 4)},
                inputs={"logits": "b s v/tp", "target": "b s"}, outputs="b s tp=I",
                draw={"target": token_below("v")})
        def vocab_parallel_logprob(mesh, logits, target): ...

    `reference` is JAX on unsharded arrays. `mesh` gives each axis the sizes to try. A nested dict in `inputs` is a
    tree of parameters. Without `inputs` or `outputs` they are those of `contract`, a public function whose signature
    states them for arguments of the same names, or else those of the decorated function's own annotations. `dims`
    narrows a dim to some sizes or ties it to dims and axes ("2*g", "3*ep"), `assume(case)` says which sizes are drawn
    together: `lambda case: case.b * case.s % case.tp == 0`. A reference with an argument `mesh` gets the sizes of the
    axes. `options` go to both sides, `rank_options` only to the ranks. `reduction` names the dims that are summed
    over, `roundings` how often a value is stored in the tested dtype on its way: 1 where sums and intermediates are in
    float32 or wider, more where a softmax, a product or a norm is stored in bfloat16 and used again. `sums="float32"`
    promises that nothing but inputs and results is rounded to a narrower tested dtype: a sum that is kept in bfloat16
    is then a mismatch, which the default budget forgives. `inside="bfloat16"` says that intermediates are in a dtype
    that is narrower than the tested one, as in an iteration that always runs in it. `modifies` names
    inputs that the function overwrites, whose new value the reference returns after the outputs. `module` names the
    tree of parameters of a module that the function runs backward itself and returns last. `random=True` says that the
    function draws random numbers. `setup(mesh)` runs once per rank and mesh before the function, on every engine;
    `around(mesh)` returns a context manager, which each rank enters for forward and backward. `isolate` names further
    modules and packages whose globals each rank of lockstep has for itself, as those of the scheme's file and of what
    it imports are. `excluded_conditions` names the calling conditions that the function does not promise; by default
    `inference_mode` and `overwritten`.

    Errors: ValueError at declaration, `scheme '<name>': ...`, for whatever can be known to be wrong.
    TypeError for a keyword that there is not, with the nearest.
    """

    def declare(fn: Callable[..., Any]) -> Scheme:
        name = getattr(fn, "__name__", "?")
        errors = DeclarationErrors(name)
        # 1. What every later check reads: an error here ends the declaration.
        signature = validation.function_names(fn, errors)
        validation.check_mesh(mesh, errors)
        custom, choices = dict(layouts or {}), (dict(options or {}), dict(rank_options or {}))
        in_specs, out_specs = from_contract.specs(fn, signature, contract, inputs, outputs, errors)
        # 2. Each tensor, and the other arguments.
        user_draws = validation.user_draws(fn, draw or {}, errors)
        leaves = validation.input_arguments(fn, signature, in_specs, mesh, custom, user_draws, nograd, errors)
        results = validation.output_arguments(fn, out_specs, mesh, custom, errors)
        all_read = not errors.texts
        errors.of(validation.check_arguments, fn, signature, in_specs, choices, reference)
        errors.of(validation.check_surroundings, setup, around, assume, isolate, cost, in_specs)
        excluded = errors.of(validation.excluded_conditions, fn.__module__ or "", excluded_conditions) or ()
        # 3. What refers to dims and tensors, if all of them could be read.
        if all_read:
            results += errors.of(validation.modified_arguments, modifies, leaves, results) or ()
            errors.of(validation.check_axes_used, mesh, leaves, results)
            errors.of(validation.check_module, module, in_specs, results, out_specs)
            validation.check_draws(leaves, user_draws, dims or {}, errors)
            errors.of(dim_formulas.check_dims, leaves, results, dims or {}, mesh, user_draws)
        reduced = reduction if all_read else ()
        validation.check_choices(dtypes, engines, replicas, reduced, roundings, leaves, results, errors)
        errors.of(validation.check_precision, sums, inside, roundings)
        errors.raise_all()
        return Scheme(
            name=name,
            fn=fn,
            reference=reference,
            mesh={axis: tuple(sizes) for axis, sizes in mesh.items()},
            inputs=leaves,
            outputs=results,
            output_form="dict" if isinstance(out_specs, Mapping) else "one" if isinstance(out_specs, str) else "tuple",
            draws={arg.name: user_draws.get(arg.name, values()) for arg in leaves},
            dims={**dim_formulas.groups((*leaves, *results)), **(dims or {})},
            layouts=custom,
            options=choices[0],
            rank_options=choices[1],
            dtypes=tuple(dtypes),
            reduction=reduction,
            roundings=roundings,
            sums=sums,
            inside=inside,
            cost=cost,
            engines=tuple(engines),
            replicas=replicas,
            random=random,
            setup=setup,
            around=around,
            module=module,
            assume=assume,
            isolate=tuple(isolate),
            excluded_conditions=excluded,
            file=fn.__code__.co_filename,
            line=fn.__code__.co_firstlineno,
            of_module=_is_being_executed(fn.__module__),
        )

    return declare


def _is_being_executed(module: str) -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False
