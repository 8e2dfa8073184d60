"""Add parts to TensorFlow that scripts of the SDK expect and TensorFlow no longer has.

Nothing happens unless a program imports ``tensorflow.python.ipu``; existing parts of TensorFlow stay, except that
functions are not compiled.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.tools import module_util

from khorovod_ipu.tensorflow import sessions

__all__ = ["prepare"]


def prepare() -> None:
    """Add the missing parts to TensorFlow; may be called repeatedly.

    ``tf.estimator`` becomes the names that an IPUEstimator needs. ``tf.keras`` becomes Keras 2 if ``tf_keras`` is
    installed, no Keras was used before, and TF_USE_LEGACY_KERAS does not forbid it. Optimizers of TensorFlow 1
    take variables of Keras 3. ``tf.function`` does not compile.
    """
    _choose_keras()
    _compile_nothing()
    sessions.prepare()
    from khorovod_ipu.tensorflow import estimator

    for module in (tf, *_first_versions(), tf.compat.v2):
        if not hasattr(module, "estimator"):
            module.estimator = estimator
    _unwrap_variables()


def _first_versions() -> list[Any]:
    """Return all ``tf.compat.v1`` modules: ``import tensorflow.compat.v1`` makes another one and replaces the first."""
    importlib.import_module("tensorflow.compat.v1")
    return [
        sys.modules[name] for name in ("tensorflow.compat.v1", "tensorflow._api.v2.compat.v1") if name in sys.modules
    ]


def _choose_keras() -> None:
    """Make ``tf.keras`` and ``import tensorflow.keras`` the same Keras 2, if neither was used before."""
    modules = (tf, *_first_versions())
    used = any(vars(module.__dict__.get("keras")).get("_tfll_initialized", False) for module in modules)
    used = used or any(f"{module.__name__}.keras" in sys.modules for module in modules)
    if used or importlib.util.find_spec("tf_keras") is None:
        return
    if os.environ.setdefault("TF_USE_LEGACY_KERAS", "1").lower() in ("1", "true"):
        for module in modules:
            version = "_v2" if module is tf else "_v1"
            module.__path__ = [module_util.get_parent_dir_for_name(f"tf_keras.api.{version}.keras"), *module.__path__]


def _compile_nothing() -> None:
    """Make TensorFlow ignore ``jit_compile=True``.

    Scripts of the SDK set it so that the device compiles. The software device has no compiler, and TensorFlow's
    compiler for processors supports neither iterators of datasets nor reductions over workers.
    """
    base = polymorphic_function.Function
    if hasattr(base, "_khorovod_plain"):
        return
    base._khorovod_plain = plain = base.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, jit_compile: bool | None = None, **kwargs: Any) -> None:
        plain(self, *args, jit_compile=None if jit_compile else jit_compile, **kwargs)

    base.__init__ = init


def _inner(variable: Any) -> Any:
    if isinstance(variable, (tf.Variable, tf.Tensor)):
        return variable
    value = getattr(variable, "value", None)  # a Keras 3 variable, which also claims to be a tensor
    return value if isinstance(value, tf.Variable) else variable


def _unwrap_variables() -> None:
    """Make optimizers of TensorFlow 1 use the variables inside Keras 3 variables."""
    base = tf.compat.v1.train.Optimizer
    if hasattr(base, "_khorovod_plain"):
        return
    base._khorovod_plain = compute, apply = base.compute_gradients, base.apply_gradients

    def compute_gradients(self: Any, loss: Any, var_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        if var_list is not None:
            var_list = tf.nest.map_structure(_inner, list(var_list))
        return compute(self, loss, var_list, *args, **kwargs)

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(self, [(grad, _inner(variable)) for grad, variable in grads_and_vars], *args, **kwargs)

    base.compute_gradients, base.apply_gradients = compute_gradients, apply_gradients
