"""PopRun in software: starts the instances of a program, and assigns replicas of the job to each instance."""

from khorovod_ipu.guard import refuse_beside_the_sdk

refuse_beside_the_sdk()
