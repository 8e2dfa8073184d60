"""Errors and warnings about wrong use: the action, the user's line, the rank, and what to do instead."""

from __future__ import annotations

import warnings

from horovod import context
from horovod.engine import callsite
from horovod.errors import OptimizerUseError, RequestError

__all__ = ["changed_gradient", "not_installed", "out_of_turn", "warn_deprecated", "wrong_argument"]


def wrong_argument(text: str) -> RequestError:
    """Return the error for an argument that does not fit; the caller's line is added."""
    place = callsite.here()
    return RequestError(f"{text} ({place})" if place else text)


def out_of_turn(what: str, instead: str) -> OptimizerUseError:
    """Return the error for gradients that were touched at the wrong moment.

    Args:
        what: what was done; rank and line are added.
        instead: what to do next, as a sentence.
    """
    where = ", ".join(filter(None, (f"rank {context.world().rank}", callsite.here())))
    return OptimizerUseError(f"{what} ({where}). {instead}")


def changed_gradient(name: str, instead: str) -> OptimizerUseError:
    """Return the error for a gradient that was changed while it was not the caller's."""
    return out_of_turn(f"the gradient of {name} was changed after backward() had handed it to the other ranks", instead)


def warn_deprecated(text: str) -> None:
    """Warn at the user's line, however many of our own lie between: Python shows it where that is in the script."""
    frame = callsite.user_frame()
    module = frame.f_globals.get("__name__", "")
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, DeprecationWarning, frame.f_code.co_filename, frame.f_lineno, module, registry)


def not_installed(error: ModuleNotFoundError, package: str, extra: str) -> ModuleNotFoundError:
    """Return what to raise when a framework could not be imported; something else that is missing speaks for itself.

    Args:
        error: of the import.
        package: what the framework's top-level package is called.
        extra: the extra of khorovod that installs it.
    """
    if error.name != package:
        return error
    text = f"horovod.{extra} needs {package}, which is not installed here: pip install 'khorovod[{extra}]'"
    return ModuleNotFoundError(text, name=package)
