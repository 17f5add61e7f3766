"""Runs a toolkit's own test suite against its drop-in: redirects the imports of an upstream checkout.

    python -m pytest -p tests.upstream_plugin --ggda=captum [--ggda-singletons] path/to/checkout/tests

Modules of the toolkit are replaced in `sys.modules` by copies in which every class that has a drop-in is the
drop-in. The toolkit's own modules stay as they are, because their classes refer to each other by name.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest


@dataclass(frozen=True)
class Toolkit:
    """How the tests of one toolkit are redirected.

    Attributes:
        drop_in: the package whose public classes replace those of the same name.
        modules: the toolkit's modules that its tests import those classes from.
        with_singletons: a drop-in class → a class of the same name that is always given groups of one.
    """

    drop_in: str
    modules: tuple[str, ...]
    with_singletons: Callable[[type], type]


def _captum_singletons(cls: type) -> type:
    from torch.utils.data import DataLoader

    signature = inspect.signature(cls.__mro__[_first_upstream(cls, "captum")])

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        data = signature.bind(*args, **kwargs).arguments["train_dataset"]
        points = data.dataset if isinstance(data, DataLoader) else data
        cls.__init__(self, *args, groups=range(len(points)), **kwargs)  # type: ignore[misc]

    return type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__})


def _dattri_singletons(cls: type) -> type:
    from ggda_ext import Groups

    def given_groups(method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(method)

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(self, *args, **kwargs).arguments
            loader = arguments.get("full_train_dataloader", arguments.get("train_dataloader"))
            if loader is not None:  # only here are the training points known
                self._drop_in.groups = Groups.singletons(len(loader.sampler))
            return method(self, *args, **kwargs)

        return wrapped

    methods = {name: given_groups(getattr(cls, name)) for name in ("cache", "attribute", "self_attribute")}
    return type(cls.__name__, (cls,), methods | {"__module__": cls.__module__})


def _trak_singletons(cls: type) -> type:
    signature = inspect.signature(cls.__mro__[_first_upstream(cls, "trak")])

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        n = signature.bind(*args, **kwargs).arguments["train_set_size"]
        cls.__init__(self, *args, groups=range(n), **kwargs)  # type: ignore[misc]

    return type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__})


TOOLKITS = {
    "captum": Toolkit(
        drop_in="ggda_captum",
        modules=(
            "captum.influence",
            "captum.influence._core.tracincp",
            "captum.influence._core.tracincp_fast_rand_proj",
            "captum.influence._core.influence_function",
            "captum.influence._core.arnoldi_influence_function",
        ),
        with_singletons=_captum_singletons,
    ),
    "dattri": Toolkit(
        drop_in="ggda_dattri",
        modules=(
            "dattri.algorithm",
            "dattri.algorithm.influence_function",
            "dattri.algorithm.tracin",
            "dattri.algorithm.trak",
        ),
        with_singletons=_dattri_singletons,
    ),
    "trak": Toolkit(drop_in="ggda_trak", modules=("trak", "trak.traker"), with_singletons=_trak_singletons),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ggda", "drop-ins of ggda-ext")
    group.addoption("--ggda", choices=sorted(TOOLKITS), help="the toolkit whose tests run against the drop-in")
    group.addoption("--ggda-singletons", action="store_true", help="give every instance groups of one")


def pytest_configure(config: pytest.Config) -> None:
    sys.modules.pop("tests", None)  # a checkout may have a package `tests` of its own
    name = config.getoption("--ggda")
    if name is not None:
        redirect(TOOLKITS[name], singletons=config.getoption("--ggda-singletons"))
        config.stash[_REDIRECTED] = name + (" with groups of one" if config.getoption("--ggda-singletons") else "")


_REDIRECTED = pytest.StashKey[str]()


def pytest_report_header(config: pytest.Config) -> str | None:
    name = config.stash.get(_REDIRECTED, None)
    return None if name is None else f"ggda: redirected {name}"


def redirect(toolkit: Toolkit, *, singletons: bool) -> dict[str, list[str]]:
    """Replace the toolkit's modules; returns the names of the classes replaced in each.

    Raises:
        RuntimeError: if a class of the drop-in has replaced nothing, so that a run would prove nothing.
    """
    drop_in = importlib.import_module(toolkit.drop_in)
    upstream = [importlib.import_module(name) for name in toolkit.modules]
    classes = {name: getattr(drop_in, name) for name in drop_in.__all__}
    adapted = {
        name: toolkit.with_singletons(cls) if singletons else cls
        for name, cls in classes.items()
        if inspect.isclass(cls) and _is_ours(cls, toolkit) and _stands_for(cls, name, upstream)
    }
    replaced = {module.__name__: _replace(module, adapted) for module in upstream}
    missed = set(adapted) - {name for names in replaced.values() for name in names}
    if missed or not adapted:
        raise RuntimeError(f"{toolkit.drop_in}: nothing was redirected to {sorted(missed) or 'it'}.")
    return replaced


def _is_ours(cls: type, toolkit: Toolkit) -> bool:
    return cls.__module__.split(".")[0] == toolkit.drop_in


def _stands_for(cls: type, name: str, upstream: list[ModuleType]) -> bool:
    return any(_is_drop_in(cls, getattr(module, name, None)) for module in upstream)


def _is_drop_in(cls: type, original: Any) -> bool:
    return inspect.isclass(original) and original is not cls and issubclass(cls, original)


def _replace(module: ModuleType, adapted: dict[str, type]) -> list[str]:
    names = [name for name, cls in adapted.items() if _is_drop_in(cls, vars(module).get(name))]
    copy = ModuleType(module.__name__, module.__doc__)
    vars(copy).update(vars(module))
    vars(copy).update({name: adapted[name] for name in names})
    sys.modules[module.__name__] = copy
    parent, _, child = module.__name__.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, copy)  # `import a.b as c` looks here first
    return names


def _first_upstream(cls: type, package: str) -> int:
    return next(i for i, base in enumerate(cls.__mro__) if base.__module__.split(".")[0] == package)
