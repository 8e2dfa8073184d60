"""Manifests of docs/clusters: core kinds against Kubernetes' schemas, operators' kinds against lists of their fields.

The operators' schemas are not on PyPI. Their pod templates are core kinds and are validated as such. Of the rest,
fields are compared with lists made from the operators' published API references, so types are not checked there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install 'khorovod[clusters]'")

FOLDER = Path(__file__).parents[2] / "docs" / "clusters"
DOCUMENTS = [
    (path.name, document) for path in sorted(FOLDER.glob("*.yaml")) for document in yaml.safe_load_all(path.read_text())
]
CORE = ("v1", "batch/v1")
#: kind -> group and version, and the fields that may stand under each path of its spec.
OPERATORS: dict[str, tuple[str, dict[str, set[str]]]] = {
    "JobSet": (
        "jobset.x-k8s.io/v1alpha2",
        {
            "": {"replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy", "suspend"},
            "failurePolicy": {"maxRestarts", "rules", "restartStrategy"},
            "network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
        },
    ),
    "TrainJob": (
        "trainer.kubeflow.org/v1alpha1",
        {
            "": {"runtimeRef", "trainer", "initializer", "labels", "annotations", "suspend", "managedBy"},
            "runtimeRef": {"name", "apiGroup", "kind"},
            "trainer": {"image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"},
        },
    ),
    "PyTorchJob": (
        "kubeflow.org/v1",
        {
            "": {"runPolicy", "elasticPolicy", "pytorchReplicaSpecs", "nprocPerNode"},
            "pytorchReplicaSpecs": {"Master", "Worker"},
        },
    ),
    "MPIJob": (
        "kubeflow.org/v2beta1",
        {
            "": {
                "slotsPerWorker", "runLauncherAsWorker", "sshAuthMountPath", "launcherCreationPolicy",
                "mpiImplementation", "mpiReplicaSpecs", "runPolicy",
            },
            "runPolicy": {
                "cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "suspend",
                "managedBy", "schedulingPolicy",
            },
            "mpiReplicaSpecs": {"Launcher", "Worker"},
        },
    ),
}  # fmt: skip


def validate(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def pods_of(value: Any) -> list[dict[str, Any]]:
    """The specifications of pods anywhere in a manifest."""
    if isinstance(value, list):
        return [pod for item in value for pod in pods_of(item)]
    if not isinstance(value, dict):
        return []
    return [value] if "containers" in value else [pod for item in value.values() for pod in pods_of(item)]


@pytest.mark.parametrize(("name", "document"), [d for d in DOCUMENTS if d[1]["apiVersion"] in CORE], ids=lambda d: "")
def test_core_kinds_fit_their_schemas(name: str, document: dict[str, Any]) -> None:
    validate(document)
    broken = {**document, "spec": {**document["spec"], "completionsMode": "Indexed"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(broken)


@pytest.mark.parametrize("kind", OPERATORS)
def test_kinds_of_operators_have_only_known_fields_and_valid_pods(kind: str) -> None:
    (document,) = [document for _, document in DOCUMENTS if document["kind"] == kind]
    version, fields = OPERATORS[kind]
    assert document["apiVersion"] == version
    for path, known in fields.items():
        here = document["spec"][path] if path else document["spec"]
        assert set(here) <= known, f"{path}: {set(here) - known}"
    pods = pods_of(document)
    for pod in pods:
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod})
    assert pods or kind == "TrainJob"  # whose pods are the runtime's
    for job in document["spec"].get("replicatedJobs", []):
        validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job["template"]["spec"]})


def test_the_indexed_job_says_three_things_that_belong_together() -> None:
    service, job = [document for name, document in DOCUMENTS if name == "indexed-job.yaml"]
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    environ = {entry["name"]: entry for entry in pod["containers"][0]["env"]}
    assert environ["HOROVOD_SIZE"]["value"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert environ["HOROVOD_SECRET_KEY"]["valueFrom"]["secretKeyRef"]["name"] == "train-key"
