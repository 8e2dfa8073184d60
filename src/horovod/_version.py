"""The one place where the versions stand."""

__version__ = "0.1.0"
#: Libraries compare this one, as ``horovod.__version__``, with the release of Horovod that they need.
HOROVOD_VERSION = "0.28.1"
