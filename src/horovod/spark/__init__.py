"""Horovod on Apache Spark: ranks in the tasks of a Spark application; loads PySpark when it is used."""

from horovod.spark.elastic import run_elastic
from horovod.spark.runner import run

__all__ = ["run", "run_elastic"]
