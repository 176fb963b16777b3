"""@scheme declares the meaning of a per-rank function; the scheme it returns verifies, runs and draws it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from shardproof.declare import declared_dtypes, dim_formulas, discover, from_contract, validation
from shardproof.declare.case import CaseSpec, SizesAndOptions
from shardproof.declare.declaration_errors import DeclarationErrors
from shardproof.declare.declared import Cost, Declared
from shardproof.declare.draws import Draw
from shardproof.declare.failed_declaration import collects
from shardproof.declare.keywords import rejects_unknown_keywords
from shardproof.draw import unread_rows

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from shardproof.report.report import Report


class Scheme(Declared):
    """A declared scheme. Calling it calls the function; its methods load the rest of the harness on use."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def case(self, *, seed: int = 0, engine: str = "lockstep", dtype: str | None = None, **fixed: Any) -> CaseSpec:
        """One CaseSpec: mesh axes, dims and options by name; the rest is drawn from the seed."""
        from shardproof.draw.drawing import one_case

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

        Names resolve to mesh axes, dims and options; the rest is drawn. `examples=None` takes the number of the
        Hypothesis profile; if all dims are given, at least one of each dtype on each mesh that can shard them; if mesh
        and options are given as well, one of each dtype. Meshes that cannot shard the given sizes are left out, and the
        report names them. Errors: ValueError for an unknown name, or if no mesh can shard the given sizes. On lockstep
        a quarter of the drawn cases and, if all sizes are given, one more case run in a world twice as large, with the
        scheme in each half, to find a use of the default group; `inside_subgroup` forces this for all cases or for
        none. A mismatch is reported, not raised; see Report.raise_if_failed.
        """
        from shardproof.verification import verify

        return verify(self, engine, examples, seed, dtype, sizes_and_options, inside_subgroup=inside_subgroup)

    def run(self, *full_arrays: Any, engine: str = "lockstep", grad: Any = None, **mesh_and_options: Any) -> Any:
        """Stitched outputs for the given full arrays, in the order of `inputs`; nothing is compared.

        With `grad`, the cotangents of the outputs, it returns (outputs, {input: gradient}).
        """
        from shardproof.engines.run_unsharded import run_unsharded

        return run_unsharded(self, full_arrays, engine, grad, mesh_and_options)

    def draw(self, **sizes: Any) -> str:
        """A picture: the owners along every sharded dim, and the type of every other axis."""
        from shardproof.report.picture import scheme_picture

        return scheme_picture(self, self.case(**sizes))

    def placements(self, **mesh: int) -> dict[str, tuple[Any, ...]]:
        """DTensor placements of every input and output; ValueError if DTensor cannot express one."""
        from shardproof.declare.spec import placements

        return {arg.name: placements(arg.spec, tuple(self.mesh)) for arg in (*self.inputs, *self.outputs)}

    def _repr_html_(self) -> str:
        from shardproof.report.notebook import of_scheme

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
    wide: bool | tuple[str, ...] | None = None,
    wider_inputs: tuple[str, ...] = (),
    inside: str | None = None,
    ties: str | None = None,
    cost: Callable[..., Cost | Sequence[Cost]] | None = None,
    engines: tuple[str, ...] = ("lockstep", "gloo", "nccl", "torchrun"),
    replicas: str = "bitwise",
    random: bool = False,
    setup: Callable[[Any], Any] | None = None,
    around: Callable[[Any], AbstractContextManager[Any]] | None = None,
    module: str | None = None,
    assume: Callable[[SizesAndOptions], Any] | None = None,
    isolate: tuple[str, ...] = (),
    excluded_conditions: tuple[str, ...] | None = None,
    nan_cotangents: Mapping[str, Callable[..., Any]] | None = None,
) -> Callable[[Callable[..., Any]], Scheme]:
    """Declare that the decorated per-rank function computes `reference`.

        @scheme(reference=logprob, mesh={"tp": (1, 2, 4)},
                inputs={"logits": "b s v/tp", "target": "b s"}, outputs="b s tp=I",
                draw={"target": token_below("v")})
        def vocab_parallel_logprob(mesh, logits, target): ...

    `reference` is a JAX function of unsharded arrays. `mesh` lists the sizes to try for each axis. A nested dict in
    `inputs` is a tree of parameters. Missing `inputs` or `outputs` come from `contract`, a public function whose
    annotations state specs for arguments of the same names, or else from the decorated function's own annotations.
    Specs that are given together with `contract` must be an instance of its specs.
    `dims` restricts a dim to some sizes or ties it to dims and axes ("2*g", "3*ep"); `assume(case)` decides which sizes
    are drawn together: `lambda case: case.b * case.s % case.tp == 0`. A reference with an argument `mesh` gets the
    sizes of the axes. `options` go to both sides, `rank_options` only to the ranks. `reduction` names the dims that are
    summed over; `roundings` counts how often a value is stored in the tested dtype on its way: 1 if sums and
    intermediates are in float32 or wider, more if a softmax, a product or a norm is stored in bfloat16 and used again.
    `sums="float32"` promises that only inputs and results are rounded to a narrower tested dtype: a sum in bfloat16,
    which the default budget allows, is then a mismatch, and `roundings` counts values stored in float32.
    Intermediates that the reference marks by `shardproof.stored` are rounded too, as their gradients are.
    `wide` names the outputs that are float32 or wider in every tested dtype, True for all; the others then have the
    tested dtype. By default no dtype of an output is checked, unless the file or its package has WIDE_OUTPUTS, True or
    False for all its schemes. `wider_inputs` names inputs that may be float32 if the tested dtype has 16 bits; in half
    of these cases they are.
    `inside="bfloat16"` says that intermediates are narrower than the tested dtype, as in an iteration that always runs
    in bfloat16.
    `ties="ordered"` promises the order of equal inputs, as in a stable sort: another order is then a mismatch; by
    default it is undecided.
    `modifies` names inputs that the function overwrites; the reference returns their new values after the outputs.
    `module` names the tree of parameters of a module; the function runs its backward itself and returns the module
    last. `random=True` says that the function draws random numbers. `setup(mesh)` runs once per rank and mesh before
    the function, on every engine; `around(mesh)` returns a context manager, which each rank enters for forward and
    backward. `isolate` names further modules and packages with separate globals for each rank of lockstep, like the
    scheme's own file and its imports. `excluded_conditions` names the calling conditions that the function does not
    support; by default `inference_mode`, `overwritten`, `int32`, `autocast`, `recomputed` and `second_derivative`.
    `nan_cotangents` names outputs with rows that no gradient depends on, such as padding: the cotangents of these rows
    are NaN in half of the cases. Each output has a function `(case, inputs)` of the sizes and options of a case and its
    full inputs by name, which returns bools over leading dims of the output, True for these rows.

    Errors: ValueError, `scheme '<name>': ...`, for every mistake that the declaration shows. TypeError for an unknown
    keyword, with the nearest known one.
    """

    def declare(fn: Callable[..., Any]) -> Scheme:
        errors = DeclarationErrors(name := getattr(fn, "__name__", "?"))
        # 1. Input of every later check: an error here ends the declaration.
        signature = validation.function_names(fn, errors)
        validation.check_mesh(mesh, errors)
        custom, choices = dict(layouts or {}), (dict(options or {}), dict(rank_options or {}))
        in_specs, out_specs = from_contract.specs(fn, signature, tuple(mesh), contract, inputs, outputs, errors)
        # 2. Each tensor.
        user_draws = validation.user_draws(fn, draw or {}, errors)
        leaves = validation.input_arguments(fn, signature, in_specs, mesh, custom, user_draws, nograd, errors)
        results = validation.output_arguments(fn, out_specs, mesh, custom, errors)
        # 3. References to dims and tensors, if all of them could be read.
        if all_read := not errors.texts:
            results += errors.of(validation.modified_arguments, modifies, leaves, results) or ()
            errors.of(validation.check_axes_used, mesh, leaves, results)
            errors.of(dim_formulas.check_names, mesh, leaves, results, choices)
            errors.of(validation.check_module, module, in_specs, results, out_specs)
            validation.check_draws(leaves, user_draws, dims or {}, errors)
            errors.of(dim_formulas.check_dims, leaves, results, dims or {}, mesh, user_draws)
        errors.of(validation.check_arguments, fn, signature, in_specs, choices, reference)
        errors.of(validation.check_surroundings, setup, around, assume, isolate, cost, in_specs)
        excluded = errors.of(validation.excluded_conditions, fn.__module__ or "", excluded_conditions) or ()
        validation.check_choices(dtypes, engines, replicas, reduction if all_read else (), leaves, results, errors)
        errors.of(validation.check_promises, roundings, sums, inside, ties, nan_cotangents or {}, results)
        dtypes_of = declared_dtypes.checked(fn.__module__ or "", wide, wider_inputs, leaves, results, errors)
        errors.raise_all()
        return Scheme(
            name=name,
            fn=fn,
            reference=reference,
            mesh={axis: tuple(sizes) for axis, sizes in mesh.items()},
            inputs=leaves,
            outputs=results,
            output_form="dict" if isinstance(out_specs, Mapping) else "one" if isinstance(out_specs, str) else "tuple",
            **unread_rows.bound(nan_cotangents or {}, leaves, user_draws),
            dims={**dim_formulas.groups((*leaves, *results)), **(dims or {})},
            layouts=custom,
            options=choices[0],
            rank_options=choices[1],
            dtypes=tuple(dtypes),
            reduction=reduction,
            roundings=roundings,
            sums=sums,
            **dtypes_of,
            inside=inside,
            ties=ties,
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
            **_place(fn),
        )

    return declare


def _place(fn: Callable[..., Any]) -> dict[str, Any]:
    """The lines of a function, and the module whose import declares it."""
    code = fn.__code__
    return {"file": code.co_filename, "line": code.co_firstlineno, "declared_by": _module_being_imported()}


def _module_being_imported() -> str | None:
    """The module that is being imported; None in a function that is called after its import."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    name = "" if frame is None else frame.f_globals.get("__name__", "")
    return name if name != "__main__" and getattr(sys.modules.get(name), "__spec__", None) is not None else None
