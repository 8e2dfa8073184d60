"""The house rules of the source: docstrings, exports, units in names, and who may read the environment."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
from collections.abc import Iterator

import pytest
from harness import run_ranks
from sources import Module, all_modules

import horovod.errors
from horovod.bindings.collectives import Collectives

# Modules that a training script imports; all parameters of all of their functions are explained.
PUBLIC = (
    "horovod", "horovod.torch", "horovod.tensorflow", "horovod.numpy", "horovod.jax", "horovod.keras",
    "horovod.tensorflow.keras", "horovod.popart",
)  # fmt: skip
READS_SETTINGS = (
    "horovod.config", "horovod.world", "popdist.environment", "poptorch.options",
    "khorovod_ipu.tensorflow.cluster", "khorovod_ipu.tensorflow.software",  # TensorFlow's own variables
    "horovod.rendezvous.mpi",  # mpi4py's own variable
    "horovod.tensorflow.unsafe",  # one of TensorFlow's, which horovodrun sets
    "horovod.transports.torch_dist",  # torch's own variable
)  # fmt: skip
# They hand their environment on to ranks that they start.
PASSES_ENVIRONMENT_ON = (
    "horovod.launch", "horovod.bench", "horovod.bindings.hosted", "horovod.common.util", "horovod.notebook",
    "horovod.ray", "horovod.spark.task", "poprun",
)  # fmt: skip

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = Function | ast.ClassDef


def exported(module: Module) -> list[str]:
    """The names in ``__all__``; those of another module's list, where that one is added, included."""
    names: list[str] = []
    for node in module.tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if not (isinstance(target, ast.Name) and target.id == "__all__"):
            continue
        if isinstance(node, ast.AugAssign):
            names += exported(_star_source(module, node.value))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            assert isinstance(node.value, ast.List | ast.Tuple), f"{module.place}: __all__ is not a plain list"
            names += [ast.literal_eval(element) for element in node.value.elts]
    return names


def _star_source(module: Module, added: ast.expr) -> Module:
    """The module whose list is added to ``__all__``: all of its names must have been imported."""
    name = ast.unparse(added).removesuffix(".__all__")
    stars = [n.module or "" for n in module.tree.body if isinstance(n, ast.ImportFrom) and n.names[0].name == "*"]
    sources = [star for star in stars if star.endswith(f".{name}")]
    assert sources, f"{module.place}: __all__ has the names of {name}, which are not imported"
    return all_modules()[sources[0]]


def functions() -> Iterator[tuple[Module, Function]]:
    """All functions and methods, with the module that has them."""
    for module in all_modules().values():
        yield from ((module, node) for node in ast.walk(module.tree) if isinstance(node, Function))


def public_definitions(module: Module) -> Iterator[tuple[str, Documented]]:
    """Exported functions and classes that are defined here, and the public methods of the classes."""
    names = exported(module)
    for node in module.tree.body:
        if isinstance(node, Documented) and node.name in names:
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                yield from (
                    (f"{node.name}.{method.name}", method)
                    for method in node.body
                    if isinstance(method, Function) and not method.name.startswith("_")
                )


def section(docstring: str, title: str) -> list[str]:
    """The first words of the entries of a Google section, such as ``Args``; empty when there is none."""
    found = re.search(rf"^( *){title}:\n((?:\1 +.*\n|\s*\n)+)", inspect.cleandoc(docstring) + "\n", re.MULTILINE)
    if not found:
        return []
    indent = re.match(r" *", found[2])
    assert indent
    entries = re.findall(rf"^{indent[0]}(\S.*?):(?:\s|$)", found[2], re.MULTILINE)
    return [name.strip() for entry in entries for name in re.sub(r"\(.*?\)", "", entry).split(",")]


def summary_is_a_sentence(docstring: str) -> bool:
    """Whether the first paragraph ends like a sentence, or leads over to a list."""
    first = inspect.cleandoc(docstring).split("\n\n")[0].rstrip()
    return first.endswith((".", ":", "?"))


# One test looks at all modules: a test for each of them costs more than looking does.


def test_modules_have_a_docstring() -> None:
    docstrings = {module.place: ast.get_docstring(module.tree) for module in all_modules().values()}
    assert not [place for place, docstring in docstrings.items() if not docstring], "they do not say what they are for"
    assert not [place for place, docstring in docstrings.items() if not summary_is_a_sentence(docstring or "")]


def _not_there(module: str, names: list[str]) -> list[str]:
    return [name for name in names if not hasattr(importlib.import_module(module), name)]


def test_exports_exist_and_are_complete() -> None:
    for module in all_modules().values():
        names = exported(module)
        assert len(names) == len(set(names)), f"{module.place}: twice in __all__"
        missing = set(names) - set(_bound(module.tree))
        if missing and any(isinstance(node, Function) and node.name == "__getattr__" for node in module.tree.body):
            # In a process of its own: the vendor's names of TensorFlow choose Keras 2.
            missing = set(run_ranks(1, _not_there, module.name, sorted(missing), init=False)[0])
        assert not missing, f"{module.place}: in __all__ but not there: {missing}"
        public = [n.name for n in module.tree.body if isinstance(n, Documented) and not n.name.startswith("_")]
        is_command = module.name.endswith("__main__") or ".examples." in module.name
        assert names or not public or is_command, f"{module.place} defines {public} and has no __all__"


def test_bound_methods_are_exported_under_their_own_names() -> None:
    """As in ``rank = comm.rank``: what is bound to be exported is, and it is what it is called."""
    wrong = []
    for module in all_modules().values():
        names = exported(module)
        for node in module.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
                target, value = ast.unparse(node.targets[0]), node.value
                if ast.unparse(value.value).lstrip("_") in ("comm", "collectives") and not target.startswith("_"):
                    wrong += [f"{module.place}: {target}"] if target != value.attr or target not in names else []
    assert not wrong


def test_numpy_has_every_collective() -> None:
    public = {name for name in dir(Collectives) if not name.startswith("_")}
    for_bindings = {"allgather_into_async"}
    assert public - set(importlib.import_module("horovod.numpy").__all__) == for_bindings


def test_errors_about_arguments_name_the_function_alone() -> None:
    hvd = importlib.import_module("horovod.numpy")
    for name in ("rank", "barrier", "synchronize"):
        with pytest.raises(TypeError, match=rf"^{name}\(\) takes"):
            getattr(hvd, name)(*range(9))


def test_public_definitions_are_documented() -> None:
    wrong = []
    for module in all_modules().values():
        for label, node in public_definitions(module):
            docstring = ast.get_docstring(node) or ""
            inherited = "." in label and not docstring and _overrides(module, label)
            if not inherited and not (docstring and summary_is_a_sentence(docstring)):
                wrong.append(f"{module.place}:{node.lineno} {label}: {docstring.splitlines()[:1] or 'no docstring'}")
    assert not wrong


def test_argument_sections_fit_the_signature() -> None:
    wrong = []
    for module, node in functions():
        if documented := section(ast.get_docstring(node) or "", "Args"):
            known = [n for n in _parameters(node) if n not in ("self", "cls")]
            if [n.lstrip("*") for n in documented] != known:
                wrong.append(f"{module.place}:{node.lineno} {node.name}: documents {documented}, takes {known}")
    assert not wrong


def test_raises_sections_name_real_exceptions() -> None:
    known = set(horovod.errors.__all__) | set(vars(builtins))
    wrong = []
    for module, node in functions():
        if unknown := set(section(ast.get_docstring(node) or "", "Raises")) - known:
            unknown -= {one.name for one in ast.walk(module.tree) if isinstance(one, ast.ClassDef)}
            of_package = all_modules().get(f"{module.name.partition('.')[0]}.errors")
            unknown -= set(exported(of_package) if of_package else ())
            wrong += [f"{module.place}:{node.lineno} {node.name}: {one}" for one in sorted(unknown)]
    assert not wrong


@pytest.mark.parametrize(
    "name",
    # In this process, which loads TensorFlow, JAX and Keras for it.
    [pytest.param(name, marks=pytest.mark.slow if ".tensorflow" in name or name.endswith(("jax", "keras")) else ())
     for name in PUBLIC],
)  # fmt: skip
def test_every_parameter_of_the_public_functions_is_explained(name: str) -> None:
    module = importlib.import_module(name)
    wrong = []
    for label in module.__all__:
        value = getattr(module, label)
        if inspect.isfunction(value) or inspect.ismethod(value):
            documented = {n.lstrip("*") for page in _with_references(module, value) for n in section(page, "Args")}
            documented |= {f"{n}s" for n in documented}  # the grouped form takes several of what the plain one takes
            if unexplained := sorted(set(inspect.signature(value).parameters) - documented):
                wrong.append(f"{name}.{label}: {', '.join(unexplained)}")
    assert not wrong


def test_times_carry_their_unit() -> None:
    unitless = [
        f"{module.place}:{node.lineno} {parameter}"
        for module, node in functions()
        for parameter in _parameters(node)
        if parameter in ("timeout", "delay", "interval", "period")
    ]
    assert not unitless, "say timeout_s, or whatever the unit is"


def test_settings_are_read_in_one_place() -> None:
    wrong = [
        f"{module.place}:{node.lineno} {ast.unparse(node)}"
        for module in all_modules().values()
        if module.name not in READS_SETTINGS
        for node in ast.walk(module.tree)
        if (_is_environment(node) and not module.name.startswith(PASSES_ENVIRONMENT_ON)) or _reads_setting(node)
    ]
    assert not wrong, "take it from horovod.config"


def _bound(tree: ast.Module) -> Iterator[str]:
    """Names that exist in the module after its import; also those that only some branch binds."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, Documented):
            yield node.name
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            yield from exported(all_modules()[node.module or ""])
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        else:
            todo.extend(ast.iter_child_nodes(node))


def _is_environment(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in ("environ", "environb", "getenv")
        and ast.unparse(node.value) == "os"
    )


def _reads_setting(node: ast.AST) -> bool:
    """``os.environ["HOROVOD_X"]``, ``environ.get("HOROVOD_X")``, ``os.getenv("HOROVOD_X")``."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        holder, keys = ast.unparse(node.value), [node.slice]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        holder, keys = ast.unparse(node.func), node.args[:1]
    else:
        return False
    named = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return any(word in holder for word in ("environ", "getenv")) and any(n.startswith("HOROVOD_") for n in named)


def _parameters(node: Function) -> list[str]:
    arguments = node.args
    star = [arguments.vararg] if arguments.vararg else []
    double = [arguments.kwarg] if arguments.kwarg else []
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *star, *arguments.kwonlyargs, *double)]


def _with_references(module: object, function: object) -> list[str]:
    """Its docstring, and those it refers to: a variant says "See ``allreduce``"."""
    pages, todo = [], [function]
    while todo:
        page = todo.pop().__doc__ or ""
        pages.append(page)
        names = re.findall(r"\bSee ``(\w+)``", page)
        todo += [getattr(module, n) for n in names if hasattr(module, n)]
    return pages


def _overrides(module: Module, label: str) -> bool:
    """Whether the method is documented where it is declared: in a base class or in a protocol of this module."""
    owner, method = label.split(".")
    try:
        if inspect.getdoc(getattr(getattr(importlib.import_module(module.name), owner), method)):
            return True
    except ModuleNotFoundError:
        return True  # the system that it serves is not installed here
    protocols = [n for n in module.tree.body if isinstance(n, ast.ClassDef) and "Protocol" in map(ast.unparse, n.bases)]
    methods = [m for protocol in protocols for m in protocol.body if isinstance(m, Function) and m.name == method]
    return any(ast.get_docstring(m) for m in methods)
